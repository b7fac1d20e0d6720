"""Copies a decode step's inputs to the device and its tokens back to the host, by kernels.

A copy engine costs about ten microseconds between two kernels, and a step has a copy each way. A kernel reads and
writes the host's page-locked memory directly.
"""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import tl, triton

_BLOCK = 256  # words of 8 bytes; two a thread


@triton.jit(do_not_specialize=["num_rows"])
def _receive_kernel(
    host_words, device_words, tokens, pending_rows, sampled, input_ids, num_words, num_rows, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(host_words + at, mask=at < num_words)
    token = tl.load(tokens + at, mask=at < num_rows)
    pending = tl.load(pending_rows + at, mask=at < num_rows, other=-1)
    # NON_FINITE of the sampler must not reach the embedding. Its sequence ends before this step is read.
    last = tl.maximum(tl.load(sampled + pending, mask=pending >= 0), 0)
    tl.store(device_words + at, words, mask=at < num_words)
    tl.store(input_ids + at, tl.where(pending >= 0, last, token), mask=at < num_rows)


@triton.jit(do_not_specialize=["num_words"])
def _return_kernel(source, target, num_words, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < num_words), mask=at < num_words)


@kernel_or_twin
def receive_step(
    input_ids: Tensor, host_words: Tensor, device_words: Tensor, tokens: Tensor, pending_rows: Tensor, sampled: Tensor
) -> None:
    """Copy the inputs, and find the token that each row feeds. The tensors on the host must not change until the stream
    has executed this, and beside a GPU they must be page-locked.

    Args:
        input_ids: int64 `[num_rows]`: becomes the token of each row.
        host_words: int64 `[num_words]`, on the host. On a CPU it may be device_words itself.
        device_words: int64 `[num_words]`: becomes a copy of host_words.
        tokens: int64 `[num_rows or more]`, on the host.
        pending_rows: int32, like tokens: the row of `sampled` that a row feeds, or -1 if it feeds its token.
        sampled: int64: the tokens that the last step sampled; 0 replaces a negative one.
    """
    if host_words.data_ptr() != device_words.data_ptr():
        device_words.copy_(host_words, non_blocking=True)
    num_rows, device = len(input_ids), input_ids.device
    token, pending = (x[:num_rows].to(device, non_blocking=True) for x in (tokens, pending_rows))
    last = sampled[pending.clamp(min=0)].clamp_(min=0)
    torch.where(pending < 0, token, last, out=input_ids)


@kernel_or_twin
def return_tokens(tokens: Tensor, host: Tensor) -> None:
    """Copy int64 `tokens` to memory of the host, in stream order. Beside a GPU it must be page-locked."""
    host.copy_(tokens, non_blocking=True)


@kernel_of(receive_step)
def _launch_receive_step(input_ids, host_words, device_words, tokens, pending_rows, sampled):
    num_words, num_rows = len(host_words), len(input_ids)
    grid = (triton.cdiv(max(num_words, num_rows), _BLOCK),)
    arrays = (host_words, device_words, tokens, pending_rows, sampled, input_ids)
    launcher(_receive_kernel, grid)(*arrays, num_words, num_rows, BLOCK=_BLOCK, num_warps=4)


@kernel_of(return_tokens)
def _launch_return_tokens(tokens, host):
    grid = (triton.cdiv(len(tokens), _BLOCK),)
    launcher(_return_kernel, grid)(tokens, host, len(tokens), BLOCK=_BLOCK, num_warps=4)
