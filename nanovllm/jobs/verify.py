"""verify_batch: answer lines of a deterministic job again, and demand the same bits."""

import os
import random
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nanovllm import LLM
from nanovllm.jobs.arguments import answer_format
from nanovllm.jobs.bits import BITS, ENGINE, bits_depend_on, differences, machine_facts
from nanovllm.jobs.folder import JobFolder
from nanovllm.jobs.lines import Row
from nanovllm.jobs.pooled_receipts import pooled_again, pooled_difference
from nanovllm.jobs.receipt_images import IMAGE_RULES, ImagesAgain, answered_again
from nanovllm.jobs.receipt_rows import id_of, num_rows, rows_with_receipts
from nanovllm.jobs.receipts import IMAGES, params_of, samples_of
from nanovllm.jobs.shown_rows import ShownRows
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.utils.checks import is_int, require


class Verified(NamedTuple):
    """What a job's receipts are worth."""

    num_checked: int  # lines that were answered again, as far as the first difference
    num_lines: int  # answers that the job has
    difference: str | None  # the first one, in words; None: the bits are the same

    def __str__(self) -> str:
        if self.difference is not None:
            return self.difference
        return f"{self.num_checked} of {self.num_checked} lines, the same bits"


def verify_batch(
    output: str | os.PathLike[str],
    sample: int | None = 100,
    seed: int = 0,
    alone: bool = False,
    model: LLM | str | os.PathLike[str] | None = None,
    use_tqdm: bool = True,
    image_root: str | os.PathLike[str] | None = None,
) -> Verified:
    """Answer lines of a job again, and compare bit by bit: tokens and log-probabilities; or vectors, classes and
    scores. Also what rows show of the answers, and their number with the manifest's.

    Args:
        output: the job's folder or file.
        sample: how many lines, drawn with the seed; None for all.
        alone: answer them one by one; False: in each other's company, which is not that of the job.
        model: where the job's model is now, if it has moved; or an engine with the options of the job's. None makes
            one of the model where it was.
        image_root: where the job's folder of images is now, if it has moved. Images are read again by the job's rules.

    Raises:
        ValueError: the job is not deterministic, or its bits depend on something that is another one here; the message
            says what differs. Or it has no answers yet, or one without a receipt, or with a damaged one.
        FileNotFoundError: the model is no longer where it was.
    """
    require("sample", sample, sample is None or is_int(sample, 1, 2**63), "a positive integer, or None for all lines")
    folder = JobFolder(output)
    if folder.file is not None and not folder.path.exists():
        raise folder.refusal("is not what a job has written into one file; give the job's folder, or that file")
    manifest = folder.read_manifest()
    if manifest is None:
        raise folder.refusal("no job has begun here")
    if BITS not in manifest or ENGINE not in manifest:
        reason = "the job was not deterministic, so no bits are promised: run it with deterministic=True"
        raise folder.refusal(f"{reason} (--deterministic)")
    facts = machine_facts()
    _refuse_others(folder, {name: manifest[BITS].get(name) for name in facts}, facts)
    if (difference := _difference_of_counts(folder, manifest)) is not None:
        return Verified(0, folder.read().answered, difference)
    if isinstance(model, LLM):
        return _verify(folder, model, manifest, sample, seed, alone, use_tqdm, image_root)
    with _engine(manifest[ENGINE], model, use_tqdm) as llm:
        return _verify(folder, llm, manifest, sample, seed, alone, use_tqdm, image_root)


def _difference_of_counts(folder: JobFolder, manifest: Row) -> str | None:
    """Whether rows are gone, or twice there, in words. There may be more than the manifest says: a call that was killed
    could not count its own."""
    hashes = bytearray()
    counts = folder.read(hashes.extend)
    if (num_rows := counts.answered + counts.failed) > len(np.unique(np.frombuffer(hashes, "S16"))):
        return f"some of its {num_rows} answers and errors are of the same line"
    said = manifest["progress"].get("answered", 0)
    if counts.answered < said and (num_answered := folder.read_all().answered) < said:
        return f"{said - num_answered} answers are gone: it had {said} and has {num_answered}"
    if num_rows > manifest["num_lines"]:
        return f"it has {num_rows} answers and errors of {manifest['num_lines']} lines"
    return None


def _engine(options: Row, model: str | os.PathLike[str] | None, use_tqdm: bool) -> LLM:
    """An engine as the job's. model: where it is now; None: where it was."""
    if model is not None:
        options = options | {"model": os.fspath(model), "revision": None}
    try:
        return LLM(**options, deterministic=True, use_tqdm=use_tqdm)
    except FileNotFoundError as error:
        if model is not None:
            raise
        raise FileNotFoundError(f"{error}; if it has moved, model (--model) says where it is") from error


def _refuse_others(folder: JobFolder, known: Row, now: Row) -> None:
    if what := differences(known, now):
        raise folder.refusal(f"cannot be verified here, where bits may be others: {what}")


def _verify(
    folder: JobFolder,
    llm: LLM,
    manifest: Row,
    sample: int | None,
    seed: int,
    alone: bool,
    use_tqdm: bool,
    image_root: str | os.PathLike[str] | None,
) -> Verified:
    require("model", "LLM", llm.config.deterministic, "an LLM with deterministic=True")
    _refuse_others(folder, manifest[BITS], bits_depend_on(llm))
    counts = {part: num_rows(part) for part in folder.parts()}
    num_lines = sum(counts.values())
    if not num_lines:
        raise folder.refusal("holds no complete part of answers yet; the job's own command goes on with it")
    chosen = range(num_lines)
    if sample is not None and sample < num_lines:
        chosen = sorted(random.Random(seed).sample(chosen, sample))  # type: ignore[assignment]
    rows = list(rows_with_receipts(counts, set(chosen)))
    receipts = [receipt for _, receipt in rows]
    job = manifest["job"]
    outputs: Iterable[Any]
    if job.get("task", "generate") == "generate":
        images = None
        if IMAGE_RULES in manifest and any(IMAGES in receipt for receipt in receipts):
            images = ImagesAgain(llm, manifest[IMAGE_RULES], image_root)
        outputs = _generated_again(llm, receipts, images, alone, use_tqdm)
        differs = partial(_generated_difference, shown=ShownRows(job, _responder(llm, job)))
    else:
        outputs = pooled_again(llm, receipts, alone)
        differs = partial(pooled_difference, dtype=job.get("embedding_dtype", "float32"))
    for number, ((row, receipt), again) in enumerate(zip(rows, outputs, strict=True), 1):
        if (difference := differs(row, receipt, again)) is not None:
            return Verified(number, num_lines, f"line {id_of(row)!r}: {difference}")
    return Verified(len(rows), num_lines, None)


def _generated_again(
    llm: LLM, receipts: list[Row], images: ImagesAgain | None, alone: bool, use_tqdm: bool
) -> Iterable[Any]:
    """images: None if no receipt has some."""
    prompts, params = [each["prompt_token_ids"] for each in receipts], [params_of(each) for each in receipts]
    if images is not None:
        return answered_again(llm, receipts, params, images, alone)
    if not alone:
        return llm.generate(prompts, params, use_tqdm=use_tqdm)
    pairs = zip(prompts, params, strict=True)
    return (llm.generate([prompt], [each], use_tqdm=False)[0] for prompt, each in pairs)


def _responder(llm: LLM, job: Row) -> Responder:
    """As that of the job."""
    name = job.get("chat_format", llm.config.chat_format)
    return Responder(
        llm.config.model, llm.get_tokenizer, partial(answer_format, template=job.get("chat_template"), name=name)
    )


def _generated_difference(row: Row, receipt: Row, again: Any, shown: ShownRows) -> str | None:
    if isinstance(again, str):
        return again
    return _first_difference(receipt["samples"], samples_of(again)) or shown.difference(row, receipt, again)


def _first_difference(before: list[Row], now: list[Row]) -> str | None:
    if len(before) != len(now):
        return f"it had {len(before)} samples and has {len(now)}"
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        where = f"sample {index}, " if len(before) > 1 else ""
        tokens = zip(old["token_ids"], old["logprobs"], new["token_ids"], new["logprobs"], strict=False)
        for place, (old_token, old_logprob, new_token, new_logprob) in enumerate(tokens):
            if old_token != new_token:
                return f"{where}token {place} was {old_token} and is {new_token}"
            if old_logprob != new_logprob:
                return f"{where}the log-probability of token {place} was {old_logprob!r} and is {new_logprob!r}"
        if len(old["token_ids"]) != len(new["token_ids"]):
            return f"{where}it had {len(old['token_ids'])} tokens and has {len(new['token_ids'])}"
    return None
