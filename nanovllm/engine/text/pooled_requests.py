"""PooledRequests: from PoolingParams to requests that this engine's model can serve."""

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.config import Config
from nanovllm.engine.features.pooling.pooled_sequence import Pool, PooledRequest
from nanovllm.engine.text.rank_prompts import RankPrompts
from nanovllm.models.heads import head_of, labels_of
from nanovllm.models.sentence_files import SentenceFacts, read_sentence_facts
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Resolved(NamedTuple):
    task: str
    pool: Pool


class PooledRequests:
    """Checks what requests ask for against the model.

    Attributes:
        rank_prompts: the prompts of pairs of a query and a document.
        labels: of a classification head, in order; empty without one.
        default_task: what a request is for that does not say it.
    """

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase | None"):
        """tokenizer: None accepts token ids only."""
        self._config = config
        self._head = head_of(config.hf_config)
        self.labels = labels_of(config.hf_config) if self._head == "classes" else ()
        self.default_task = "classify" if self._head == "classes" else "embed"
        self.rank_prompts = RankPrompts(tokenizer, self._head == "classes", config.hf_config.model_type)
        self._known: dict[PoolingParams, _Resolved] = {}

    @cached_property
    def sentence_facts(self) -> SentenceFacts:
        """What the checkpoint's files say of its embeddings. Raises ValueError, naming the file, for what we lack."""
        return read_sentence_facts(self._config.model)

    def make(self, params: object, where: str) -> PooledRequest:
        """The request. Raises ValueError or TypeError, beginning with `where`, for what the model cannot do."""
        if isinstance(params, SamplingParams):
            able = ", ".join(f"{task}()" for task in self._able())
            raise ValueError(
                f"this LLM does not generate, because its task is {self._config.task!r}: it can {able}"
                + ("; LLM(model, task='generate') generates" if self._generates else "")
            )
        if not isinstance(params, PoolingParams):
            raise TypeError(f"{where}must be a SamplingParams or a PoolingParams, not {type(params).__name__}")
        if params not in self._known:
            try:
                self._known[params] = self._resolve(params)
            except ValueError as error:
                raise ValueError(f"{where}{error}") from error
        task, pool = self._known[params]
        return PooledRequest(pooling=params, task=task, pool=pool, labels=self.labels)

    @property
    def _generates(self) -> bool:
        """Whether the checkpoint, with its head, could."""
        name = (getattr(self._config.hf_config, "architectures", None) or [""])[0]
        return not name.endswith("Model") and self._head != "classes"

    def _able(self) -> list[str]:
        """What an engine with this model and head can be asked for."""
        if self._head == "classes":
            return ["classify", "rerank"] if len(self.labels) == 1 else ["classify"]
        able = ["embed"] if self._head == "none" else ["embed", "rerank"]
        return ["generate", *able] if self._config.task == "generate" else able

    def _resolve(self, params: PoolingParams) -> _Resolved:
        task = self.default_task if params.task == "auto" else params.task
        if task not in self._able():
            raise ValueError(self._refusal(task))
        if task != "embed":
            if params.pooling not in ("auto", "last"):
                raise ValueError(f"pooling={params.pooling!r}: must be 'auto' or 'last' to {task}")
            if params.dimensions is not None:
                raise ValueError(f"dimensions={params.dimensions}: must be None to {task}: it is of embeddings")
            token_ids = self.rank_prompts.answers if self._head == "vocabulary" else ()
            return _Resolved(task, Pool("last", token_ids))
        size = self._config.hf_config.hidden_size
        if params.dimensions is not None and params.dimensions > size:
            raise ValueError(f"dimensions={params.dimensions}: must be in 1..{size}, the model's hidden_size, or None")
        pooling = params.pooling if params.pooling != "auto" else self.sentence_facts.pooling or "last"
        return _Resolved(task, Pool(pooling))

    def _refusal(self, task: str) -> str:
        name = (getattr(self._config.hf_config, "architectures", None) or ["the model"])[0]
        has = {
            "classes": f"a classification head with {len(self.labels)} labels",
            "none": "no head",
            "vocabulary": "a head that generates, and none that classifies",
        }[self._head]
        able = ", ".join(f"{each}()" for each in self._able())
        remedy = ""
        if self._head == "none" and task == "rerank" and self._generates:
            remedy = "; LLM(model, task='rerank') keeps the head"
        return f"task={quoted(task)}: {name} has {has} here: it can {able}{remedy}"
