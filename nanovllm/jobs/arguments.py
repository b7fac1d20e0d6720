"""What a caller of a job hands in beside the files: the model, and options of lines and of the engine."""

import logging
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nanovllm import (
    LLM,
    AnswerFormat,
    Config,
    ImageRules,
    PromptEncoder,
    RequestChecker,
    check_options,
    find_format,
    find_tokenizer,
    reads_images,
)
from nanovllm.jobs.columns import Columns
from nanovllm.jobs.given_paths import check_path
from nanovllm.jobs.inputs import Inputs
from nanovllm.jobs.prepared import NO_IMAGES
from nanovllm.jobs.reader import ImagePlan, ReadPlan
from nanovllm.jobs.tasks.all_tasks import make_task
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.openai_format.request_names import SAMPLING_OPTIONS, Row
from nanovllm.utils.checks import require
from nanovllm.utils.option_hints import HINTS, unknown_option
from nanovllm.utils.progress_bar import tqdm

logger = logging.getLogger(__name__)

Model = str | os.PathLike[str] | LLM

# A job may go on with other values of these.
_OF_SPEED = {field.name for field in fields(Config) if field.metadata.get("is_for_speed")}
_NOT_OF_JOBS = {"model", "seed", "skip_tokenizer_init", "task"}
# For a check that loads no weights, and downloads none.
_WITHOUT_WEIGHTS: Row = {"load_format": "dummy", "lora": None}


class Cluster(NamedTuple):
    """Where a job runs on Ray."""

    replicas: int | None  # engines; None: one for each tensor_parallel_size GPUs
    address: str | None  # of a Ray cluster; None: this machine


class Arguments:
    """Checked options.

    Attributes:
        task: what is done with lines, with its options.
        MAY_KEEP_RECEIPTS: whether jobs of this kind keep them.
        keeps_receipts: whether this one does, because its engine is deterministic.
        model, engine_options: what `engine` makes an LLM of.
        model_name: the model's directory or hub id.
        tokenizer: a directory or a hub id.
        block_size: tokens of a KV cache block.
        max_len: tokens of the longest sequence, at most; None if only the model's files say it.
        chat_format: the name of the format of answers to chats; None: found.
        image_rules: which images lines may name; by default those that they hold themselves, as data: URLs.
    """

    MAY_KEEP_RECEIPTS: ClassVar[bool] = True

    def __init__(self, model: Model, options: Row, task: str = "generate", **of_lines: Any):
        """options: of SamplingParams and of the engine. task, of_lines: of `make_task`. Raises ValueError or
        TypeError."""
        sampling = {name: value for name, value in options.items() if name in SAMPLING_OPTIONS}
        if not isinstance(model, LLM):
            check_path("model", model)
        self.model = model
        self.image_rules = ImageRules()
        self.engine_options = {name: value for name, value in options.items() if name not in sampling}
        of_engine = vars(model.config) if isinstance(model, LLM) else self.engine_options
        self.keeps_receipts = self.MAY_KEEP_RECEIPTS and bool(of_engine.get("deterministic"))
        self.task = make_task(task, sampling, of_lines, self.keeps_receipts)
        known = {field.name for field in fields(Config)} - _NOT_OF_JOBS
        for name in self.engine_options:
            if name not in known:
                raise unknown_option(name, [*known, *SAMPLING_OPTIONS], HINTS["Config"])
        if not isinstance(model, LLM):
            self.engine_options |= self.task.engine_options()
        if isinstance(model, LLM):
            if self.engine_options:
                raise TypeError(f"{next(iter(self.engine_options))!r}: model is an LLM, which has its options already")
            model.get_tokenizer()  # Raises if there is none.
            self.model_name, self.tokenizer = model.config.model, model.config.tokenizer
            self.block_size = model.config.kvcache_block_size
            self.chat_format: str | None = model.config.chat_format
            self.max_len: int | None = model.scheduler.length_limit.max_seq_len
        else:
            self.model_name = os.fspath(model)
            self.tokenizer = os.fspath(self.engine_options.get("tokenizer") or model)
            self.chat_format = self.engine_options.get("chat_format")
            self.block_size = self.engine_options.get("kvcache_block_size", Config.kvcache_block_size)
            self.max_len = self.engine_options.get("max_model_len", Config.max_model_len)
        self._dtype: str | None = None  # torch's name of the model's, when it is known

    @property
    def line_format(self) -> Columns:
        """The task's, with the options of lines."""
        return self.task.line_format

    def read_plan(self, inputs: Inputs, is_done: np.ndarray | None = None) -> ReadPlan:
        """is_done: as in `Inputs.lines`."""
        revision = self.engine_options.get("revision")
        return ReadPlan(
            inputs.paths,
            self.task,
            self.tokenizer,
            revision,
            is_done,
            self.block_size,
            self.max_len,
            inputs.names,
            self.chat_format,
            self._image_plan,
            inputs.image_prompt,
        )

    @cached_property
    def _image_plan(self) -> ImagePlan | str:
        """As ReadPlan's."""
        if self.task.name != "generate":
            return NO_IMAGES
        of_engine = vars(self.model.config) if isinstance(self.model, LLM) else self.engine_options
        if of_engine.get("text_only"):
            return "with text_only=True the model has no vision tower"
        try:
            if not reads_images(self.model_name, self.engine_options.get("revision")):
                return NO_IMAGES
        except FileNotFoundError:
            return f"this machine, which would read them, does not have the files of {self.model_name}"
        dtype = str(self.model.config.dtype) if isinstance(self.model, LLM) else self._dtype
        return ImagePlan(self.model_name, self.image_rules, dtype and dtype.removeprefix("torch."))

    def check_engine(self, is_elsewhere: bool) -> None:
        """Raises what `engine` would for a wrong option or model, without loading weights. is_elsewhere: on other
        machines, which alone may have the model and the GPUs."""
        if isinstance(self.model, LLM):
            return
        model = os.fspath(self.model)
        if not is_elsewhere:
            check_options(model, **self.engine_options)
            return
        with suppress(FileNotFoundError):
            Config(model, **{"tokenizer": self.tokenizer} | self.engine_options | {"device": "cpu"} | _WITHOUT_WEIGHTS)

    def checker(self, is_elsewhere: bool = False) -> RequestChecker | None:
        """Of requests; needs no GPU and no weights. None if only other machines have the model. From here on the task
        has what it needs to know of the model. is_elsewhere: as in check_engine."""
        checker = self._checker(is_elsewhere)
        if checker is not None:
            self.task = self.task.of_model(checker)
            self._dtype = str(checker.dtype)
        return checker

    def _checker(self, is_elsewhere: bool) -> RequestChecker | None:
        if isinstance(self.model, LLM):
            return RequestChecker(self.model.config, self.model.scheduler.length_limit.num_blocks)
        options = {"tokenizer": self.tokenizer} | self.engine_options | _WITHOUT_WEIGHTS
        if not is_elsewhere:
            return RequestChecker(Config(os.fspath(self.model), **options))
        with suppress(FileNotFoundError):
            return RequestChecker(Config(os.fspath(self.model), **options | {"device": "cpu"}))
        return None

    def tell_parameters(self, columns: list[str]) -> None:
        """Say in the log which columns of the input are parameters of their lines."""
        if names := self.line_format.parameter_columns(columns):
            logger.warning(
                "Columns that are parameters of their lines: %s (line_parameters=False, or --no-line-parameters, makes "
                "them data)",
                ", ".join(names),
            )

    def responder(self) -> Responder:
        load: Any = partial(find_tokenizer, self.tokenizer, self.engine_options.get("revision"))
        if isinstance(self.model, LLM):
            load = self.model.get_tokenizer
        template = getattr(self.task.line_format, "chat_template", None)
        return Responder(self.model_name, load, partial(answer_format, template=template, name=self.chat_format))

    def engine(self) -> AbstractContextManager[LLM]:
        """The caller's, or a new one for the block."""
        return nullcontext(self.model) if isinstance(self.model, LLM) else LLM(self.model, **self.engine_options)

    def describe(self) -> Row:
        """All that answers depend on."""
        path = os.path.expanduser(self.model_name)
        options: Row = {name: value for name, value in self.engine_options.items() if name not in _OF_SPEED}
        options |= self.task.describe()
        options |= {"deterministic": True} if self.keeps_receipts else {}  # also of an LLM
        return {"model": os.path.realpath(path) if os.path.isdir(path) else path} | options


def check_one_engine(options: Row) -> None:
    """Raises ValueError if each of Ray's replicas would be several engines."""
    number = options.get("data_parallel_size", 1)
    require("data_parallel_size", number, number == 1, "1 on Ray, where replicas says how many engines there are")


def answer_format(tokenizer: Any, template: str | None, name: str | None, log: bool = True) -> AnswerFormat:
    """How answers to chats are written. template: as LLM.chat takes it. name, log: find_format's."""
    text = PromptEncoder(tokenizer).template_text(template)
    return AnswerFormat(tokenizer, find_format(tokenizer, text, name, log))


def line_bar(title: str, use_tqdm: bool, total: int | None = None, initial: int = 0) -> tqdm:
    """A progress bar of lines, in a terminal only."""
    disable = None if use_tqdm else True
    return tqdm(desc=title, total=total, initial=initial, unit=" lines", dynamic_ncols=True, disable=disable)
