"""Sums of a few tokens over tensor-parallel GPUs, by messages.

A message is two 16-bit floats and the number of their sum, in one 8-byte store, which arrives whole. The reader of an
inbox waits until it finds the number. This needs no synchronization before it and no fence after it. NCCL's LL protocol
does the same.

There are two ways. The programs of `gemv` write their results straight into every rank's inbox, and `collect` adds them
up. `collect` is a dependent launch: it starts before the product has ended, and waits for messages instead of for
launches. So the sum costs about the time of one store over NVLink. After any other product, `push_add_norm` sends this
rank's part, adds all parts up, and computes the norm.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.triton_stub import tl, triton

MAX_TOKENS = 64  # of a sum; a message is twice as large as its content
_MAX_TOKENS = tl.constexpr(MAX_TOKENS)


class Inboxes(NamedTuple):
    """Where the ranks' messages go, as seen by this rank. The tensors are on its device."""

    own: Tensor  # int64 [2, size, MAX_TOKENS, hidden / 2], zero at first; two inboxes take turns
    addresses: Tensor  # int64 [size], of all ranks' `own`
    # int32 [1]: sum `index` has the number `step + index`. No number may be 0, or come again before 2^31 others.
    step: Tensor
    abort: Tensor  # int32 [1]; a value other than 0 ends all waiting, and the results mean nothing
    rank: int


@triton.jit
def low_half(words, DTYPE: tl.constexpr):
    """The 16-bit floats in the lower halves of int32 words, as float32."""
    return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high_half(words, DTYPE: tl.constexpr):
    return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def to_words(low, high, DTYPE: tl.constexpr):
    """Float32 pairs, rounded, in int32 words."""
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def to_messages(words, number):
    return (words.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)


@triton.jit
def await_messages(places, number, abort, mask):
    """The words of the messages with this number, once all are there. After an abort they mean nothing."""
    message = tl.load(places, mask=mask, other=0, volatile=True)
    missing = tl.sum(((message >> 32).to(tl.int32) != number) & mask, axis=0)
    while (missing > 0) & (tl.load(abort, volatile=True) == 0):
        message = tl.load(places, mask=mask, other=0, volatile=True)
        missing = tl.sum(((message >> 32).to(tl.int32) != number) & mask, axis=0)
    return message.to(tl.int32)


@triton.jit
def post(
    result, program, addresses, number, index, num_words, M, N,
    PADDED_M: tl.constexpr, OUTPUTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Part of a product's kernel: write a program's part [PADDED_M, OUTPUTS] of the result [M, N] into the inboxes of
    all ranks. addresses: a block of a power of two, padded with 0. num_words: N / 2, or 0 to write nothing."""
    low, high = tl.split(tl.reshape(result, (PADDED_M, OUTPUTS // 2, 2)))
    messages = to_messages(to_words(low, high, DTYPE), number)[:, :, None]
    token = tl.arange(0, PADDED_M)[:, None, None]
    word = (program * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2))[None, :, None]
    place = (((index & 1) * SIZE + RANK) * _MAX_TOKENS + token) * (N // 2) + word
    inboxes = addresses[None, None, :]
    inside = (token < M) & (word < num_words) & (inboxes != 0)
    tl.store(inboxes.to(tl.pointer_type(tl.int64)) + place, messages, mask=inside)


@triton.jit(do_not_specialize=["index"])
def _collect_kernel(
    inbox, addresses, step, abort, index, partial, residual, weight, y, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """residual += the sum of the ranks' parts; y = its norm. With partial, that is this rank's part, and is sent to the
    others; else the product has sent it to all. Without a weight there is no norm."""
    token = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    mask = word < WORDS
    row = token * WORDS + word
    if PDL:
        gdc_launch_dependents()
    if weight is not None:
        if weight.dtype.element_ty == tl.float32:
            low_scale = tl.load(weight + 2 * word, mask=mask, other=0.0)
            high_scale = tl.load(weight + 2 * word + 1, mask=mask, other=0.0)
        else:
            scale = tl.load(weight + word, mask=mask, other=0)
            low_scale, high_scale = low_half(scale, DTYPE), high_half(scale, DTYPE)
    if PDL and partial is not None:
        gdc_wait()
    number = tl.load(step) + index
    # Two inboxes take turns. A rank writes to one again only after it has received the reader's message of the sum
    # between, and the reader sent that after it had read this inbox.
    place = ((index & 1) * SIZE * _MAX_TOKENS + token) * WORDS + word
    # Without partial this rank's own messages come through its inbox too. Their sender waited for all earlier launches,
    # and so for the last reader of this inbox.
    OWN: tl.constexpr = RANK if partial is not None else -1
    if partial is not None:
        part = tl.load(partial + row, mask=mask, other=0)
        messages = to_messages(part, number)
        # After an abort the other ranks' memory may be gone.
        reachable = word < tl.where(tl.load(abort, volatile=True) == 0, WORDS, 0)
        for i in tl.static_range(1, SIZE):
            theirs = tl.load(addresses + (RANK + i) % SIZE).to(tl.pointer_type(tl.int64))
            theirs = tl.multiple_of(theirs, 16)
            tl.store(theirs + RANK * _MAX_TOKENS * WORDS + place, messages, mask=reachable)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        arrived = inbox + rank * _MAX_TOKENS * WORDS + place
        words = part if rank == OWN else await_messages(arrived, number, abort, mask)
        low += low_half(words, DTYPE)
        high += high_half(words, DTYPE)
    if PDL and partial is None:
        gdc_wait()
    before = tl.load(residual + row, mask=mask, other=0)
    after = to_words(low_half(before, DTYPE) + low, high_half(before, DTYPE) + high, DTYPE)
    tl.store(residual + row, after, mask=mask)
    if weight is not None:
        low, high = low_half(after, DTYPE), high_half(after, DTYPE)
        inverse_rms = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / (2 * WORDS) + eps)
        low, high = low * inverse_rms * low_scale, high * inverse_rms * high_scale
        tl.store(y + row, to_words(low, high, DTYPE), mask=mask)


def collect(inboxes: Inboxes, index: int, residual: Tensor, pdl: bool = False) -> Tensor:
    """`residual += sum of the ranks' posted results`, in float32 and in the order of ranks, rounded once: the same bits
    on every rank. All ranks must post and collect the same sums: they wait for each other.

    Args:
        inboxes: this rank's.
        index: number of the sum within its forward pass, the same as the product's. One sum has an even one, the next
            an odd one, and so on, also from pass to pass.
        residual: `[num_tokens, hidden]`, contiguous, bfloat16 or float16, 1..MAX_TOKENS tokens. Overwritten, returned.
        pdl: programmatic dependent launch. Nothing may be launched between the product and this call.
    """
    _launch(inboxes, index, residual, pdl)
    return residual


def push_add_norm(
    inboxes: Inboxes, index: int, partial: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """`residual += sum of the ranks' partial` as `collect` does, and the RMS norm of residual: `residual /
    sqrt(mean(residual^2) + eps) * weight`, rounded once.

    Args:
        inboxes, index, residual: as of `collect`.
        partial: this rank's part, like residual.
        weight, eps: `[hidden]`, of residual's dtype or float32; and what is added to the mean square.
    """
    y = torch.empty_like(residual)
    _launch(inboxes, index, residual, True, partial, weight, y, eps)
    return y


def collect_torch(partials: list[Tensor], residual: Tensor) -> Tensor:
    """The twin of `collect`, for partial sums in this process."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for partial in partials:
        total = total + partial.float()
    return residual.copy_(residual.float() + total)


def push_add_norm_torch(partials: list[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin of `push_add_norm`."""
    return rms_norm.twin(collect_torch(partials, residual), weight, eps)


def _launch(
    inboxes: Inboxes,
    index: int,
    residual: Tensor,
    pdl: bool,
    partial: Tensor | None = None,
    weight: Tensor | None = None,
    y: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    num_tokens, hidden = residual.shape
    block = triton.next_power_of_2(hidden // 2)
    # A weight in float32 is no words of two.
    is_wide = weight is not None and weight.dtype == torch.float32
    words = [None if x is None else x.view(torch.int32) for x in (partial, residual, None if is_wide else weight, y)]
    if is_wide:
        words[2] = weight
    launcher(_collect_kernel, (num_tokens,), pdl and has_pdl(residual.device))(
        inboxes.own, inboxes.addresses, inboxes.step, inboxes.abort, index, *words, eps,
        RANK=inboxes.rank, SIZE=len(inboxes.addresses), WORDS=hidden // 2, BLOCK=block,
        DTYPE=tl.bfloat16 if residual.dtype == torch.bfloat16 else tl.float16,
        num_warps=min(max(block // 128, 1), 16),
    )  # fmt: skip
