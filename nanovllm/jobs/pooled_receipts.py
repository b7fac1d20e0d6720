"""Receipts of vectors, classes and ranks: what a row keeps of its request, and how its bits are compared.

A receipt has the token ids of each input and the exact bits of its answer: of a vector the SHA-256 of its numbers in
float32, since the row may hold rounded ones. What the row itself shows is compared too.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.jobs.lines import Row
from nanovllm.openai_format.pooled_calls import ranked
from nanovllm.utils.checks import require
from nanovllm.utils.vector_json import as_floats

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, PoolingParams

Output = Mapping[str, Any]  # an EmbeddingOutput, ClassOutput or RankOutput

# What a row shows of an input, the most telling first. A request of OpenAI's is not answered with logits.
_SHOWN = {"embed": ("embedding",), "classify": ("label", "probs", "logits"), "rerank": ("relevance_score",)}
_NOT_OF_REQUESTS = "logits"


def pooled_receipt(params: "PoolingParams", prompts: Sequence[Sequence[int]], outputs: Sequence[Output]) -> Row:
    """What a row keeps. params: of the line. prompts: token ids of its inputs. outputs: theirs, as the params ask."""
    asked = {field.name: getattr(params, field.name) for field in fields(params)}
    asked = {name: value for name, value in asked.items() if value != getattr(type(params), name)}
    kept = ({"prompt_token_ids": list(prompt)} | _kept(output) for prompt, output in zip(prompts, outputs, strict=True))
    return {"params": asked, "inputs": list(kept)}


def _kept(output: Output) -> Row:
    """The exact bits of an answer, as JSON."""
    if "embedding" in output:
        return {"sha256": sha256(output["embedding"].astype("<f4").tobytes()).hexdigest()}
    if "logits" in output:
        return {"logits": as_floats(np.asarray(output["logits"], np.float32))}
    return {"relevance_score": output["relevance_score"]}


# -- verify ------------------------------------------------------------------------------------------------------------


def pooled_again(llm: "LLM", receipts: Sequence[Row], alone: bool) -> Iterator[list[Output]]:
    """The outputs of each receipt's inputs. alone: each input by itself; False: all together. Raises ValueError while
    the engine has other requests."""
    from nanovllm import PoolingParams

    require("model", "LLM", llm.is_finished(), "an LLM without requests under way")
    asked = [(each["prompt_token_ids"], PoolingParams(**own["params"])) for own in receipts for each in own["inputs"]]
    batches = [[each] for each in asked] if alone else [asked]
    found = chain.from_iterable(_answered(llm, batch) for batch in batches)
    for own in receipts:
        yield list(islice(found, len(own["inputs"])))


def _answered(llm: "LLM", requests: Sequence[tuple[list[int], "PoolingParams"]]) -> list[Output]:
    ids = [llm.add_request(prompt, params) for prompt, params in requests]
    found: dict[int, Any] = {}
    while not llm.is_finished():
        found |= {each["request_id"]: each["output"] for each in llm.step_deltas() if each.get("output")}
    return [found[each] for each in ids]


def pooled_difference(row: Row, receipt: Row, now: Sequence[Output], dtype: str) -> str | None:
    """The first difference of a row and its receipt from outputs of now, in words. dtype: of a row's embedding."""
    if failed := next((output["error"] for output in now if "error" in output), None):
        return f"it had an answer and now has none: {failed}"
    try:
        return _of_row(row, receipt, now, np.dtype(dtype)) or _of_receipt(receipt, now)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"its row is damaged: {error!r}"


def _of_row(row: Row, receipt: Row, now: Sequence[Output], dtype: np.dtype) -> str | None:
    task = receipt["params"]["task"]
    names, tokens = _SHOWN[task], sum(output["num_prompt_tokens"] for output in now)
    if "num_prompt_tokens" in row:
        before = row["num_prompt_tokens"]
        shown = [row | {"index": 0}] if row.get("results") is None or task != "rerank" else row["results"]
    else:  # a request of OpenAI's
        body = row["response"]["body"]
        before, shown = body["usage"]["prompt_tokens"], body["results" if task == "rerank" else "data"]
        names, dtype = tuple(name for name in names if name not in _NOT_OF_REQUESTS), np.dtype(np.float32)
    if before != tokens:
        return f"it had {before} prompt tokens and has {tokens}"
    order = [index for index, _ in ranked(now)][: len(shown)] if task == "rerank" else list(range(len(now)))
    if (indices := [each["index"] for each in shown]) != order:
        return f"its answers were of inputs {indices} and are of {order}"
    for each in shown:
        index = each["index"]
        for name in names:
            if difference := _of_value(name, each[name], now[index][name], dtype):
                return _of_input(index, now, difference)
    return None


def _of_value(name: str, before: Any, now: Any, dtype: np.dtype) -> str | None:
    """before: as a row has it."""
    if not isinstance(now, np.ndarray):
        return None if before == now else f"its {name} was {before!r} and is {now!r}"
    with np.errstate(over="ignore"):  # What is too large is another number.
        now = now.astype(dtype)
        is_packed = isinstance(before, str)
        before = np.frombuffer(b64decode(before), "<f4") if is_packed else np.array(before, np.float64).astype(dtype)
    if len(before) != len(now):
        return f"its {name} had {len(before)} numbers and has {len(now)}"
    if before.tobytes() == now.astype(before.dtype).tobytes():
        return None
    bits = f"u{dtype.itemsize}"
    place = int(np.flatnonzero(before.astype(dtype).view(bits) != now.view(bits))[0])
    (old,), (new,) = as_floats(before[place : place + 1]), as_floats(now[place : place + 1])
    return f"number {place} of its {name} was {old!r} and is {new!r}"


def _of_receipt(receipt: Row, now: Sequence[Output]) -> str | None:
    """Of what a row shows rounded, or not at all."""
    for index, (own, output) in enumerate(zip(receipt["inputs"], now, strict=True)):
        for name, value in _kept(output).items():
            if own[name] != value:
                what = "SHA-256 of its vector in float32" if name == "sha256" else name
                return _of_input(index, now, f"the receipt's {what} was {own[name]!r} and is {value!r}")
    return None


def _of_input(index: int, now: Sequence[Output], difference: str) -> str:
    return f"input {index}, {difference}" if len(now) > 1 else difference
