"""What a caller hands in, checked before any work: token ids, sampling parameters, a model's tokenizer."""

from collections.abc import Iterable

from nanovllm.sampling_params import SamplingParams


def check_token_ids(token_ids, vocab_size: int, where: str) -> None:
    """Raise TypeError or ValueError, its message beginning with `where`, unless these are token ids, one at least.

    An id outside the vocabulary must never reach a GPU: it would end the process's CUDA context.
    """
    try:
        token_ids = list(token_ids)
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        all_ints = all(type(token) is int for token in token_ids) or not any(
            isinstance(token, bool) or not hasattr(token, "__index__") for token in token_ids
        )
    except TypeError:
        all_ints = False
    if not all_ints:
        raise TypeError(f"{where}must be a string or a list of integer token ids")
    if not token_ids:
        raise ValueError(f"{where}is empty: it must hold at least one token")
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"{where}token id {bad} is outside the vocabulary, 0..{vocab_size - 1}")


def params_per_prompt(params, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, from one for all, a list with one each, or None for the defaults. Raises TypeError
    or ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"sampling_params: must be a SamplingParams or a list of them, not {type(params).__name__}")
    params = list(params)
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params: {len(params)} of them for {num_prompts} prompts; pass one for all, or one each"
        )
    for i, p in enumerate(params):
        check_params(p, f"sampling_params[{i}]")
    return params


def check_params(params, where: str = "sampling_params") -> SamplingParams:
    """`params` itself, or TypeError."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{where}: must be a SamplingParams, not {type(params).__name__}")
    return params


def load_tokenizer(model: str):
    """The transformers tokenizer of a model directory. Raises ValueError, naming the way to do without one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, use_fast=True)
        # Without tokenizer files transformers 5 makes up an empty one.
        if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
            raise ValueError("it has no vocabulary: are its files there?")
        return tokenizer
    except Exception as error:
        raise ValueError(
            f"model={model!r}: its tokenizer cannot be loaded ({error}); skip_tokenizer_init=True does without"
        ) from error
