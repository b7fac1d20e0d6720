"""check_batch: what would fail, and how long the rest would take, before anything is written."""

import os
import random
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, cast

from nanovllm import RequestChecker
from nanovllm.jobs.arguments import Arguments, Model, line_bar
from nanovllm.jobs.first_lines import check_first_lines, error_of_call
from nanovllm.jobs.image_options import ask_images, folder_of, image_rules
from nanovllm.jobs.inputs import Inputs, find_files, scan
from nanovllm.jobs.lines import Row
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.progress import Progress, generated
from nanovllm.jobs.reader import read
from nanovllm.jobs.time_and_price import check_price, price_of
from nanovllm.jobs.writer import error_row
from nanovllm.utils.checks import is_int, require

_MAX_ERRORS = 1000


class Sample(NamedTuple):
    """Lines that were answered to learn the length of answers and the speed."""

    num_lines: int
    num_completion_tokens: int
    seconds: float  # without the start of the engine
    max_num_seqs: int  # of the engine: with fewer lines it is slower than with the whole job

    @property
    def tokens_per_second(self) -> float:
        return self.num_completion_tokens / self.seconds


class Estimate(NamedTuple):
    """The whole job, as a sample says."""

    sample: Sample
    num_completion_tokens: float
    seconds: float
    price: float | None  # with price_per_hour


class Check(NamedTuple):
    """What a look at the whole input has found."""

    num_lines: int
    num_failed: int  # lines that cannot be served
    num_prompt_tokens: int  # of the others
    max_completion_tokens: int  # that they may generate together
    errors: list[Row]  # the first 1,000, as rows of _errors.jsonl
    parameters: list[str]  # columns that are parameters of their lines
    data: list[str]  # other columns, which answers repeat
    estimate: Estimate | None  # with a sample, unless none of its lines could be answered
    task: str = "generate"
    num_images: int = 0  # of the lines that can be served


def check_batch(
    input: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None,
    model: Model,
    *,
    task: str = "generate",
    prompt_column: str | None = None,
    id_column: str = "id",
    template: str | None = None,
    system: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Row | None = None,
    line_parameters: bool = True,
    split_reasoning: bool = False,
    split_tool_calls: bool = False,
    pooling: str = "auto",
    normalize: bool = True,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    embedding_dtype: str = "float32",
    instruction: str | None = None,
    image_column: str | None = None,
    images: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    prompt: str | None = None,
    image_root: str | os.PathLike[str] | None = None,
    allow_remote: bool = False,
    max_image_mib: float | None = None,
    max_image_megapixels: float | None = None,
    max_images: int | None = None,
    sample: int | None = None,
    replicas: int | None = None,
    price_per_hour: float | None = None,
    use_tqdm: bool = True,
    **options: Any,
) -> Check:
    """Check every line of the input: its form, its id, its parameters, and its length by the tokenizer. Writes nothing.
    Without a sample it needs no GPU and reads no weights.

    The other arguments and the errors are those of run_batch. A KV cache that is smaller than max_model_len is known
    with a sample only.

    Args:
        sample: answer this many random lines, by an engine in this process, to estimate the whole job.
        replicas: of the job, which share its lines. The sample is answered by one.
    """
    require("sample", sample, sample is None or is_int(sample, 1), "a positive integer")
    require("replicas", replicas, replicas is None or is_int(replicas, 1), "a positive integer")
    check_price(price_per_hour)
    arguments = Arguments(
        model,
        options,
        task,
        prompt_column=prompt_column,
        id_column=id_column,
        template=template,
        system=system,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs or {},
        line_parameters=line_parameters,
        split_reasoning=split_reasoning,
        split_tool_calls=split_tool_calls,
        pooling=pooling,
        normalize=normalize,
        dimensions=dimensions,
        prompt_name=prompt_name,
        embedding_dtype=embedding_dtype,
        instruction=instruction,
        image_column=image_column,
    )
    limits = image_root, allow_remote, max_image_mib, max_image_megapixels, max_images
    if images is None and prompt is None:
        inputs = Inputs(find_files(input), id_column=id_column)  # type: ignore[arg-type]
        arguments.image_rules = image_rules(*limits, folder=folder_of(inputs.paths))
    else:
        inputs, arguments.image_rules = ask_images(input, images, prompt, limits, arguments.task)
    with line_bar("Checking ids", use_tqdm) as bar:
        found = scan(inputs, bar.update)
    num_lines = found.num_lines
    if found.columns:
        arguments.line_format.check_columns(found.columns, found.first_openai is not None)
    checker = cast(RequestChecker, arguments.checker())
    check_first_lines(arguments, inputs, checker, all_may_fail=True)
    num_good = num_failed = num_prompt_tokens = max_completion_tokens = num_images = 0
    errors: list[Row] = []
    chosen: list[tuple[Prepared, int]] = []  # with their prompt tokens
    rng = random.Random(0)

    def refuse(prepared: Prepared, error: str) -> None:
        nonlocal num_failed
        num_failed += 1
        if len(errors) < _MAX_ERRORS:
            errors.append(error_row(prepared, error))

    with line_bar("Checking prompts", use_tqdm, num_lines) as bar:
        for batch in read(arguments.read_plan(inputs)):
            lines = [each.line for each in batch if each.line is not None]
            checked = iter(arguments.task.check(checker, lines))
            for prepared in batch:
                line = prepared.line
                outcome = prepared.error if line is None else next(checked)
                if isinstance(outcome, ImportError):
                    raise error_of_call(outcome)
                if isinstance(outcome, int):
                    num_prompt_tokens += outcome
                    max_completion_tokens += line.most_completion_tokens(checker.max_seq_len)
                    num_images += getattr(line, "num_images", 0)
                    if sample is not None:
                        _choose(chosen, (prepared, outcome), sample, num_good, rng)
                    num_good += 1
                else:
                    refuse(prepared, str(outcome))
            bar.update(len(batch))
    estimate = None
    if chosen:
        lines = [prepared for prepared, _ in sorted(chosen, key=lambda pair: pair[0].position)]
        answered, wrong = _answer(arguments, lines, use_tqdm)
        num_tokens = {prepared.position: num for prepared, num in chosen}
        for prepared, text in wrong:
            refuse(prepared, text)
            num_prompt_tokens -= num_tokens[prepared.position]
            max_completion_tokens -= prepared.line.most_completion_tokens(checker.max_seq_len)
            num_images -= getattr(prepared.line, "num_images", 0)
        if answered.num_lines:
            estimate = _estimate(answered, num_good - len(wrong), replicas or 1, price_per_hour)
    parameters = arguments.line_format.parameter_columns(found.columns)
    data = [name for name in found.columns if name not in parameters and arguments.line_format.copies(name)]
    counts = num_lines, num_failed, num_prompt_tokens, max_completion_tokens
    return Check(*counts, errors, parameters, data, estimate, task, num_images)


def _choose(chosen: list[Any], line: Any, num: int, num_before: int, rng: random.Random) -> None:
    """Keep each of all lines with the same probability (Vitter's algorithm R)."""
    if len(chosen) < num:
        chosen.append(line)
    elif (place := rng.randrange(num_before + 1)) < num:
        chosen[place] = line


def _answer(arguments: Arguments, lines: list[Prepared], use_tqdm: bool) -> tuple[Sample, list[tuple[Prepared, str]]]:
    """The sample, and lines that this engine cannot answer."""
    good = [each for each in lines if each.line is not None]
    task = arguments.task
    wrong: list[tuple[Prepared, str]] = []
    num_tokens = 0
    progress = Progress(len(good), 0, 0, use_tqdm, arguments.max_len)
    with arguments.engine() as llm, progress:
        start = progress.begin(partial(generated, llm, task.counter))
        for each in good:
            progress.hand_out(each.line)
        for prepared, output in task.answer(llm, iter(good)):
            if "error" in output:
                wrong.append((prepared, output["error"]))
            num_tokens += task.num_tokens(output)
            progress.add(task.num_tokens(output), "error" in output, prepared.line)
        seconds = time.perf_counter() - start
        max_num_seqs = llm.config.max_num_seqs
    return Sample(len(good) - len(wrong), num_tokens, seconds, max_num_seqs), wrong


def _estimate(sample: Sample, num_lines: int, num_engines: int, price_per_hour: float | None) -> Estimate:
    """num_lines: of the job that can be answered."""
    num_tokens = sample.num_completion_tokens * num_lines / sample.num_lines
    seconds = sample.seconds * num_lines / sample.num_lines / num_engines
    return Estimate(sample, num_tokens, seconds, None if price_per_hour is None else price_of(seconds, price_per_hour))
