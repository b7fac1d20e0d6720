"""The forms in which prompts and their sampling parameters are accepted."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat, zip_longest
from numbers import Number
from operator import index
from typing import Any

import numpy as np

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import quoted

# A text, token ids, {"prompt": text}, {"prompt_token_ids": token ids}, or a tokenizer's output for one text.
Prompt = str | Sequence[int] | Mapping[str, Any]

Params = SamplingParams | Iterable[SamplingParams] | None  # one for all, one each, or the defaults

# What a tokenizer's output may hold beside input_ids. Anything else, such as pixel_values, would be lost.
_ENCODING_KEYS = {
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "offset_mapping"),
    *("length", "overflowing_tokens", "num_truncated_tokens", "overflow_to_sample_mapping"),
}
_FORMS = (
    "must be a string, a list of integer token ids, {'prompt': a string}, {'prompt_token_ids': token ids}, "
    "{'prompt': a string or token ids, 'images': a list} or a tokenizer's whole output with its attention_mask"
)


NO_IMAGES = "is an image, and this model reads no images"


def as_prompts(prompts: Any, name: str = "prompts", tokenizer: object = None) -> Iterable[Prompt]:
    """The prompts in a caller's argument, called `name`.

    One prompt becomes a batch of one. A tokenizer's output and an array of two dimensions become a batch of their rows;
    rows with the tokenizer's padding token at an end are refused. Any other iterable is returned unread.

    Raises TypeError or ValueError unless it is a prompt or an iterable. The prompts themselves are not checked.
    """
    if isinstance(prompts, str):
        return [prompts]
    if type(prompts) is list and prompts and type(prompts[0]) in (str, list):  # what most callers pass
        return prompts
    if isinstance(prompts, Mapping) or has_images(prompts):
        try:
            return _batch_of(prompts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    values = _plain(prompts)
    if isinstance(values, str):  # an array without a dimension
        return [values]
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: {_FORMS}, or a list of these, not {_describe(prompts)}")
    if getattr(prompts, "ndim", 1) == 2 and len(prompts) > 1:
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is not None and any(pad in (row[0], row[-1]) for row in values if row):
            given = f"an array with the padding token {pad} at an end of a row"
            raise ValueError(f"{name}: {_FORMS}, or a list of these, not {given}")
    return [values] if isinstance(values, Sequence) and _is_flat(values) else values


def _batch_of(prompt: Any) -> list[Any]:
    """A batch of one prompt, or a tokenizer's output for several."""
    if has_images(prompt):
        return [prompt]
    return _encoded_rows(prompt) if "input_ids" in prompt else [read_prompt(prompt)]


def has_images(prompt: Any) -> bool:
    """Whether it is a prompt with images: {"prompt": ..., "images": [...]}, or an `engine.images.ImagePrompt`."""
    return (prompt.get("images") if isinstance(prompt, Mapping) else getattr(prompt, "images", None)) is not None


def read_prompt(prompt: Any) -> str | list[int]:
    """A prompt's text or token ids. The items of the list are not checked. Raises TypeError or ValueError, also for one
    with images, which `ImagePrompts` reads."""
    if isinstance(prompt, str | list):
        return prompt
    if isinstance(prompt, Exception):  # of one that could not be made
        raise prompt
    if has_images(prompt):
        raise TypeError("has images: only completions can be asked for, by generate and its like")
    if isinstance(prompt, Mapping):
        if "input_ids" in prompt:
            rows = _encoded_rows(prompt)
            if len(rows) != 1:
                raise ValueError(f"a tokenizer's output for {len(rows)} texts; pass it alone, or one for each prompt")
            return rows[0]
        given = {key: value for key, value in prompt.items() if value is not None}
        has_ids = "prompt_token_ids" in given
        value = given.get("prompt_token_ids" if has_ids else "prompt")
        is_right = not isinstance(value, str | Mapping) if has_ids else isinstance(value, str)
        if not is_right or given.keys() - {"prompt", "prompt_token_ids"}:
            raise wrong_form(prompt)
        return read_prompt(value)
    token_ids = _plain(prompt)
    if not isinstance(token_ids, Iterable):
        raise wrong_form(prompt)
    if getattr(prompt, "ndim", 1) == 2 and len(prompt) == 1:  # a tokenizer's return_tensors for one text
        (token_ids,) = token_ids
    return list(token_ids)


def wrong_form(prompt: object) -> TypeError:
    """That this is no prompt."""
    return TypeError(f"{_FORMS}, not {_describe(prompt)}")


def _encoded_rows(encoding: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of each text in a tokenizer's output, without the padding that its attention_mask marks."""
    rows, masks = (_plain(encoding.get(key)) for key in ("input_ids", "attention_mask"))
    if not isinstance(rows, list | tuple) or not encoding.keys() <= _ENCODING_KEYS:
        raise wrong_form(encoding)
    if not rows or _is_number(rows[0]):
        rows, masks = [rows], None if masks is None else [masks]
    rows = [_plain(row) for row in rows]
    if encoding.get("attention_mask") is None:
        return rows
    masks = [_plain(mask) for mask in masks or ()]
    lengths = [[len(row) if isinstance(row, list | tuple) else None for row in each] for each in (rows, masks)]
    if None in lengths[0] or lengths[0] != lengths[1]:
        raise ValueError("'input_ids' and 'attention_mask' differ in shape")
    return [list(compress(row, mask)) for row, mask in zip(rows, masks, strict=True)]


def _describe(given: object) -> str:
    if not isinstance(given, Mapping):
        return type(given).__name__
    return f"{{{', '.join(f'{quoted(key)}: {type(given[key]).__name__}' for key in list(given)[:5])}}}"


def _plain(values: object) -> Any:
    """An array's, tensor's or column's elements as a list, which is far faster to iterate; others as they are. None for
    what can be iterated, but holds no prompts or token ids in an order: tables, sets and bytes."""
    if isinstance(values, set | frozenset | bytes | bytearray | memoryview) or hasattr(values, "columns"):
        return None
    return values.tolist() if hasattr(values, "tolist") else values


def _is_flat(values: Sequence[object]) -> bool:
    """Whether these are one or more numbers. If the first is not, the others are not read."""
    if not len(values) or not _is_number(values[0]):
        return False
    return all(issubclass(kind, Number) or kind is type(values[0]) for kind in set(map(type, values)))


def _is_number(value: object) -> bool:
    return isinstance(value, Number) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str | bytes))


class TextTokens(list):
    """Token ids that are all text, also the one that stands for an image: a model may have sampled it."""


def as_array(token_ids: list[int], vocab_size: int) -> array:
    """int32 token ids. Raises TypeError or ValueError unless all are in the vocabulary: any other would end the
    process's CUDA context."""
    if not token_ids:
        raise ValueError("is empty: it must hold at least one token")
    # Without a loop over ids in Python: the device waits while the prompts of a batch are checked.
    try:
        tokens = array("I", token_ids)  # Unsigned integers convert in a third of the time; a negative one overflows.
        values = np.frombuffer(tokens, np.uint32)
        # To an array, a bool is an integer too: 0 or 1.
        is_right = np.maximum.reduce(values) < vocab_size
        if is_right and (np.minimum.reduce(values) > 1 or bool not in set(map(type, token_ids))):
            return array("i", tokens.tobytes())
    except (TypeError, OverflowError):
        pass
    odd = [type(i).__name__ for i in token_ids if isinstance(i, bool) or not hasattr(i, "__index__")]
    try:
        ids = [] if odd else list(map(index, token_ids))
    except TypeError:
        ids = []
    if not ids:
        found = f"; this list holds a {odd[0]}" if odd else ""
        raise TypeError(f"must be a string or a list of integer token ids{found}")
    bad = min(ids) if min(ids) < 0 else max(ids)
    raise ValueError(f"token id {quoted(bad)} is outside the vocabulary, 0..{vocab_size - 1}")


def params_per_prompt(params: Params, num_prompts: int) -> list[SamplingParams]:
    """A list with one for each prompt. params: one for all, a list (whose items are not checked), or None: defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    params = list(_check_iterable(params))
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params: {len(params)} of them for {num_prompts} prompts; pass one for all, or one each"
        )
    return params


def pair_lazily(prompts: Iterable[Prompt], params: Params) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Prompts with their SamplingParams, given as to params_per_prompt; both may be long iterables. Raises ValueError
    when one of them ends before the other."""
    if params is None or isinstance(params, SamplingParams):
        return zip(prompts, repeat(params or SamplingParams()), strict=False)
    return _pair_strictly(prompts, _check_iterable(params))


def _pair_strictly(
    prompts: Iterable[Prompt], params: Iterable[SamplingParams]
) -> Iterator[tuple[Prompt, SamplingParams]]:
    missing: Any = object()
    for i, (prompt, p) in enumerate(zip_longest(prompts, params, fillvalue=missing)):
        if prompt is missing or p is missing:
            shorter, longer = ("prompts", "sampling_params") if prompt is missing else ("sampling_params", "prompts")
            raise ValueError(
                f"sampling_params: {shorter} ended after {i}, {longer} did not; pass one for all, or one each"
            )
        yield prompt, p


def _check_iterable(params: object) -> Iterable[SamplingParams]:
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"sampling_params: must be a SamplingParams or a list of them, not {type(params).__name__}")
    return params
