"""verify_batch: answer lines of a deterministic job again, and demand the same bits."""

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm import LLM
from nanovllm.jobs.bits import BITS, ENGINE, bits_depend_on, differences, machine_facts
from nanovllm.jobs.folder import JobFolder, json_rows
from nanovllm.jobs.lines import Row
from nanovllm.jobs.receipts import RECEIPT, params_of, samples_of
from nanovllm.utils.checks import is_int, require
from nanovllm.utils.text_json import parse_json


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
    model: LLM | None = None,
    use_tqdm: bool = True,
) -> Verified:
    """Answer lines of a job again, and compare tokens and log-probabilities bit by bit.

    Args:
        output: the job's folder or file.
        sample: how many lines, drawn with the seed; None for all.
        alone: answer them one by one; False: in each other's company, which is not that of the job.
        model: an engine with the options of the job's; None makes one.

    Raises:
        ValueError: the job is not deterministic, or its bits depend on something that is another one here; the message
            says what differs.
    """
    require("sample", sample, sample is None or is_int(sample, 1, 2**63), "a positive integer, or None for all lines")
    folder = JobFolder(output)
    manifest = folder.read_manifest()
    if manifest is None:
        raise folder.refusal("no job has begun here")
    if BITS not in manifest or ENGINE not in manifest:
        raise folder.refusal("the job was not deterministic, so no bits are promised: run it with deterministic=True")
    known: Row = manifest[BITS]
    facts = machine_facts()
    _refuse_others(folder, {name: known.get(name) for name in facts}, facts)
    if model is not None:
        return _verify(folder, model, known, sample, seed, alone, use_tqdm)
    with LLM(**manifest[ENGINE], deterministic=True, use_tqdm=use_tqdm) as llm:
        return _verify(folder, llm, known, sample, seed, alone, use_tqdm)


def _refuse_others(folder: JobFolder, known: Row, now: Row) -> None:
    if what := differences(known, now):
        raise folder.refusal(f"cannot be verified here, where bits may be others: {what}")


def _verify(
    folder: JobFolder, llm: LLM, known: Row, sample: int | None, seed: int, alone: bool, use_tqdm: bool
) -> Verified:
    require("model", "LLM", llm.config.deterministic, "an LLM with deterministic=True")
    _refuse_others(folder, known, bits_depend_on(llm))
    num_lines = sum(1 for _ in _receipts(folder))
    chosen = range(num_lines)
    if sample is not None and sample < num_lines:
        chosen = random.Random(seed).sample(chosen, sample)  # type: ignore[assignment]
    wanted = set(chosen)
    rows = [row for index, row in enumerate(_receipts(folder)) if index in wanted]
    prompts, params = [row[1]["prompt_token_ids"] for row in rows], [params_of(row[1]) for row in rows]
    outputs: Iterable[Any]
    if alone:
        outputs = (
            llm.generate([prompt], [each], use_tqdm=False)[0] for prompt, each in zip(prompts, params, strict=True)
        )
    else:
        outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    for number, ((line_id, receipt), again) in enumerate(zip(rows, outputs, strict=True), 1):
        if (difference := _first_difference(receipt["samples"], samples_of(again))) is not None:
            return Verified(number, num_lines, f"line {line_id!r}: {difference}")
    return Verified(len(rows), num_lines, None)


def _receipts(folder: JobFolder) -> Iterator[tuple[Any, Row]]:
    """The id and the receipt of each answer in complete parts."""
    for part in folder.parts():
        rows = _parquet_rows(part) if part.suffix == ".parquet" else (row for _, row in json_rows(part))
        for row in rows:
            receipt = row.get(RECEIPT)
            if isinstance(receipt, str):
                receipt = parse_json(receipt)
            if not isinstance(receipt, dict):
                raise ValueError(f"{part}: has an answer without a receipt")
            yield row.get("id", row.get("custom_id")), receipt


def _parquet_rows(part: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with open(part, "rb") as file, ParquetFile(file) as rows:
        for batch in rows.iter_batches(columns=["id", RECEIPT]):
            yield from batch.to_pylist()


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
