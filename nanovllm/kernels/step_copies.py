"""A decode step's inputs from the host's memory, and its tokens back to it, by kernels.

A copy engine takes about ten microseconds between two kernels, and a step has a copy each way. A kernel reads the
host's page-locked memory, and writes to it, over the same bus, when its turn comes.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launcher

_BLOCK = 256  # words of 8 bytes; two a thread


@triton.jit(do_not_specialize=["num_rows"])
def _receive_kernel(
    host_words, device_words, tokens, pending_rows, sampled, input_ids, num_words, num_rows, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(host_words + at, mask=at < num_words)
    token = tl.load(tokens + at, mask=at < num_rows)
    pending = tl.load(pending_rows + at, mask=at < num_rows, other=-1)
    # layers.sampler.NON_FINITE must not reach the embedding; its sequence ends before this step is read.
    drawn = tl.maximum(tl.load(sampled + pending, mask=pending >= 0), 0)
    tl.store(device_words + at, words, mask=at < num_words)
    tl.store(input_ids + at, tl.where(pending >= 0, drawn, token), mask=at < num_rows)


@triton.jit(do_not_specialize=["num_words"])
def _return_kernel(source, target, num_words, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < num_words), mask=at < num_words)


def receive_step(
    host_words: Tensor,
    device_words: Tensor,
    tokens: Tensor,
    pending_rows: Tensor,
    sampled: Tensor,
    input_ids: Tensor,
) -> None:
    """Copy the inputs, and resolve which tokens they feed; twin of `DecodeInputs`' copy and `where`.

    The host's tensors must be page-locked, and stay as they are until the stream has got here.

    Args:
        host_words: int64 `[num_words]`, on the host.
        device_words: int64 `[num_words]`: becomes a copy of them.
        tokens: int64 `[num_rows or more]`, on the host.
        pending_rows: int32, likewise: the row of `sampled` that a row feeds, -1 for its token.
        sampled: int64: what the last step drew; 0 is fed for a negative one.
        input_ids: int64 `[num_rows]`: becomes what each row feeds.
    """
    num_words, num_rows = len(host_words), len(input_ids)
    grid = (triton.cdiv(max(num_words, num_rows), _BLOCK),)
    arrays = (host_words, device_words, tokens, pending_rows, sampled, input_ids)
    launcher(_receive_kernel, grid)(*arrays, num_words, num_rows, BLOCK=_BLOCK, num_warps=4)


def return_tokens(tokens: Tensor, host: Tensor) -> None:
    """Copy int64 `tokens` to page-locked memory of the host, which has them once the stream has got here."""
    grid = (triton.cdiv(len(tokens), _BLOCK),)
    launcher(_return_kernel, grid)(tokens, host, len(tokens), BLOCK=_BLOCK, num_warps=4)
