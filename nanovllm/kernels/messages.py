"""What ranks write into each other's inboxes: two 16-bit floats next to the number of the sum that they belong to, in
one 8-byte store that arrives whole. Who reads an inbox waits until it finds the number: there is no meeting before and
no fence after (NCCL's LL protocol does the same)."""

import triton
import triton.language as tl


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
    """The words of messages of this number, once they are all there, or anything once aborted."""
    message = tl.load(places, mask=mask, other=0, volatile=True)
    missing = tl.sum(((message >> 32).to(tl.int32) != number) & mask, axis=0)
    while (missing > 0) & (tl.load(abort, volatile=True) == 0):
        message = tl.load(places, mask=mask, other=0, volatile=True)
        missing = tl.sum(((message >> 32).to(tl.int32) != number) & mask, axis=0)
    return message.to(tl.int32)
