"""Receipts: what a job with `deterministic=True` keeps of each answer, so that `nanovllm verify` can ask for it again.

A row's `receipt` is all that its request was, in token ids, and each token with its log-probability. What these depend
on beside the request is in the manifest (`bits`).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from xxhash import xxh3_64_intdigest

from nanovllm import SamplingParams
from nanovllm.jobs.lines import Line, LineFormat, LineId, Row, Split, answer_row, id_bytes
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.openai_format.request_names import make_params

RECEIPT, IMAGES, SPLIT = "receipt", "images", "split"  # keys of a row, and of its receipt


@dataclass(frozen=True)
class ReceiptFormat(LineFormat):
    """Lines of a job that keeps receipts: each has a seed, and log-probabilities are computed for all."""

    @property
    def json_keys(self) -> tuple[str, ...]:
        return (*super().json_keys, RECEIPT)

    def read(self, row: Row, line_id: LineId, lacks_places: Callable[[str], bool] = lambda text: False) -> Line:
        line = super().read(row, line_id, lacks_places)
        asked = line.params
        if asked.seed is None:
            asked = replace(asked, seed=xxh3_64_intdigest(id_bytes(line_id)) >> 1)
        params = asked if asked.logprobs is not None else replace(asked, logprobs=0)
        return line._replace(params=params, asked=asked)


def receipt_of(line: Line, output: Mapping[str, Any]) -> Row:
    """What a row keeps. line: of a `ReceiptFormat`, its prompt token ids. output: the RequestOutput."""
    defaults = SamplingParams()
    names = [field.name for field in fields(SamplingParams)]
    params = {name: getattr(line.params, name) for name in names}
    params = {name: value for name, value in params.items() if value != getattr(defaults, name)}
    if "structured_outputs" in params:
        params["structured_outputs"] = asdict(params["structured_outputs"])
    for name in ("logit_bias", "extra_args"):
        if name in params:
            params[name] = dict(params[name])
    samples = [_kept(sample) for sample in output.get("samples") or [output]]
    receipt: Row = {"prompt_token_ids": list(line.prompt), "params": params, "samples": samples}
    if line.split is not None:  # With the tools, since the types of their arguments are those of the schemas.
        receipt[SPLIT] = line.split._asdict()
    return receipt | {IMAGES: list(line.kept_images)} if line.kept_images else receipt


def _kept(sample: Mapping[str, Any]) -> Row:
    token_ids = list(sample["token_ids"])
    logprobs = [entry[token] for entry, token in zip(sample["logprobs"], token_ids, strict=True)]
    return {"token_ids": token_ids, "logprobs": logprobs}


def row_with_receipt(line_id: LineId, line: Line, output: Mapping[str, Any], responder: Responder) -> Row:
    """`answer_row`, with a receipt if the job keeps them."""
    if line.asked is None:
        return answer_row(line_id, line, output, responder)
    shown = output if line.asked.logprobs is not None else without_logprobs(output)
    return answer_row(line_id, line._replace(params=line.asked), shown, responder) | {RECEIPT: receipt_of(line, output)}


def params_of(receipt: Row) -> SamplingParams:
    return make_params(receipt["params"])


def without_logprobs(output: Mapping[str, Any]) -> Row:
    """The RequestOutput of a line that did not ask for them."""
    plain = {**output, "logprobs": None}
    if output.get("samples"):
        plain["samples"] = [{**sample, "logprobs": None} for sample in output["samples"]]
    return plain


def samples_of(output: Mapping[str, Any]) -> list[Row]:
    """What a receipt keeps of the samples of a RequestOutput."""
    return [_kept(sample) for sample in output.get("samples") or [output]]


def check_receipt(receipt: Any) -> None:
    """Raises ValueError or TypeError, with what follows "it", if a receipt of any task does not have what `verify` asks
    again with."""
    if not isinstance(receipt, dict):
        raise ValueError(f"must be an object, not {type(receipt).__name__}")
    is_pooled = "inputs" in receipt
    requests, images, split = receipt.get("inputs", [receipt]), receipt.get(IMAGES, []), receipt.get(SPLIT)
    samples: Any = [] if is_pooled else receipt.get("samples")
    has_lists = _are_objects(samples, "token_ids", "logprobs") and all(
        _is_list_of(int, each["token_ids"]) and _is_list_of(float | int | None, each["logprobs"]) for each in samples
    )
    are_right = {
        "params": isinstance(receipt.get("params"), dict),
        "prompt_token_ids": _are_objects(requests, "prompt_token_ids")
        and all(_is_list_of(int, each["prompt_token_ids"]) for each in requests),
        "samples": has_lists,
        IMAGES: _are_objects(images, "source", "sha256"),
        SPLIT: split is None or (isinstance(split, dict) and split.keys() == set(Split._fields)),
    }
    if wrong := [name for name, is_right in are_right.items() if not is_right]:
        raise ValueError(f"lacks {wrong[0]!r}, or has a wrong one")
    try:
        if is_pooled:
            from nanovllm import PoolingParams  # The reading process has no torch.

            PoolingParams(**receipt["params"])
        else:
            params_of(receipt)
    except (TypeError, ValueError) as error:
        raise ValueError(f"has wrong params: {error}") from None


def _is_list_of(kind: Any, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _are_objects(value: Any, *names: str) -> bool:
    return _is_list_of(dict, value) and all({*names} <= each.keys() for each in value)
