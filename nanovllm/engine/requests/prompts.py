"""The forms in which prompts are accepted. Each becomes a text or a list of token ids."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from numbers import Number
from typing import Any

# A text, token ids, {"prompt": text}, {"prompt_token_ids": token ids}, or a tokenizer's output for one text.
Prompt = str | Sequence[int] | Mapping[str, Any]

# What a tokenizer's output may hold beside input_ids. Anything else, such as pixel_values, would be lost.
_ENCODING_KEYS = {
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "offset_mapping"),
    *("length", "overflowing_tokens", "num_truncated_tokens", "overflow_to_sample_mapping"),
}
_KEYS = {"prompt", "prompt_token_ids"}
_BYTES = bytes | bytearray | memoryview
_FORMS = "a string, a list of token ids, {'prompt': ...}, {'prompt_token_ids': ...}, a tokenizer's output"


def as_prompts(prompts: Any, name: str = "prompts", tokenizer: Any = None) -> Iterable[Prompt]:
    """The prompts in a caller's argument, called `name`.

    One prompt becomes a batch of one. A tokenizer's output and an array of two dimensions become a batch of their rows;
    rows with the tokenizer's padding token at an end are refused. Any other iterable is returned unread.

    Raises TypeError or ValueError unless it is a prompt or an iterable. The prompts themselves are not checked.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        if "input_ids" in prompts:
            return _encoded_rows(prompts, f"{name}: ")
        if _KEYS.isdisjoint(prompts):
            raise TypeError(f"{name}: {_describe_keys(prompts)}")
        return [prompts]
    if hasattr(prompts, "columns"):
        raise TypeError(f"{name}: a {_name(prompts)} is a table, not prompts; pass one column, such as df['prompt']")
    if isinstance(prompts, set | frozenset):
        raise TypeError(f"{name}: a {_name(prompts)} has no order to give the results in; pass a list")
    values = _plain(prompts)
    if isinstance(prompts, _BYTES) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: must be {_FORMS}, or an iterable of these, not {_name(prompts)}")
    if getattr(prompts, "ndim", 1) == 2 and len(prompts) > 1:
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is not None and any(pad in (row[0], row[-1]) for row in values if row):
            raise ValueError(
                f"{name}: an array with the padding token {pad} at an end of a row; pass the tokenizer's whole output, "
                "whose attention_mask tells padding from text, or a list of rows without padding"
            )
    return [values] if isinstance(values, Sequence) and _is_flat(values) else values


def read_prompt(prompt: Any) -> str | list[int]:
    """A prompt's text or token ids. The items of the list are not checked. Raises TypeError or ValueError."""
    if isinstance(prompt, str | list):
        return prompt
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt)
    is_other = isinstance(prompt, set | frozenset | _BYTES) or hasattr(prompt, "columns")
    token_ids = prompt if is_other else _plain(prompt)
    if is_other or not isinstance(token_ids, Iterable):
        raise TypeError(f"must be a string or a list of integer token ids, not {_name(prompt)}")
    if getattr(prompt, "ndim", 1) == 2 and len(prompt) == 1:  # a tokenizer's return_tensors for one text
        (token_ids,) = token_ids
    return list(token_ids)


def _read_mapping(prompt: Mapping[str, Any]) -> str | list[int]:
    if "input_ids" in prompt:
        rows = _encoded_rows(prompt)
        if len(rows) != 1:
            raise ValueError(f"a tokenizer's output for {len(rows)} texts; pass it alone, or one for each prompt")
        return rows[0]
    given = {key: value for key, value in prompt.items() if value is not None}
    if _KEYS.isdisjoint(given):
        raise TypeError(_describe_keys(prompt))
    unknown = ", ".join(sorted(map(repr, given.keys() - _KEYS)))
    if unknown:
        raise ValueError(f"{unknown} cannot be used; a prompt has 'prompt' or 'prompt_token_ids' alone")
    if "prompt_token_ids" in given:
        token_ids = given["prompt_token_ids"]
        if isinstance(token_ids, str | Mapping):
            raise TypeError(f"'prompt_token_ids' must be a list of integer token ids, not {_name(token_ids)}")
        return read_prompt(token_ids)
    text = given["prompt"]
    if not isinstance(text, str):
        raise TypeError(f"'prompt' must be a string, not {_name(text)}; token ids go into 'prompt_token_ids'")
    return text


def _describe_keys(prompt: Mapping[str, Any]) -> str:
    keys = ", ".join(repr(key) for key in list(prompt)[:5]) or "no key"
    return f"a {_name(prompt)} must have 'prompt', 'prompt_token_ids' or a tokenizer's 'input_ids'; this has {keys}"


def _encoded_rows(encoding: Mapping[str, Any], where: str = "") -> list[list[int]]:
    """Token ids of each text in a tokenizer's output, without the padding that its attention_mask marks."""
    unknown = ", ".join(sorted(repr(key) for key in encoding if key not in _ENCODING_KEYS))
    if unknown:
        raise ValueError(f"{where}{unknown} cannot be used with 'input_ids'; leave it out")
    rows, masks = (_plain(encoding.get(key)) for key in ("input_ids", "attention_mask"))
    if not isinstance(rows, list | tuple):
        raise TypeError(f"{where}'input_ids' must be a list of integer token ids, or of such lists, not {_name(rows)}")
    if not rows or _is_number(rows[0]):
        rows, masks = [rows], None if masks is None else [masks]
    rows = [_plain(row) for row in rows]
    if masks is None:
        return rows
    masks = [_plain(mask) for mask in masks]
    lengths = [[len(row) if isinstance(row, list | tuple) else None for row in each] for each in (rows, masks)]
    if None in lengths[0] or lengths[0] != lengths[1]:
        raise ValueError(f"{where}'input_ids' and 'attention_mask' differ in shape")
    return [list(compress(row, mask)) for row, mask in zip(rows, masks, strict=True)]


def _plain(values: Any) -> Any:
    """An array's, tensor's or column's elements as a list, which is far faster to iterate; others as they are."""
    return values.tolist() if hasattr(values, "tolist") and not isinstance(values, _BYTES) else values


def _is_flat(values: Sequence[Any]) -> bool:
    """Whether these are one or more numbers. If the first is not, the others are not read."""
    if not len(values) or not _is_number(values[0]):
        return False
    return all(issubclass(kind, Number) or kind is type(values[0]) for kind in set(map(type, values)))


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str | bytes))


def _name(value: object) -> str:
    return type(value).__name__
