"""Messages between ranks: two 16-bit floats and the number of their sum, in one 8-byte store, which arrives whole.

The reader of an inbox waits until it finds the number. This needs no synchronization before it and no fence after it.
NCCL's LL protocol does the same.
"""

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
    """The words of the messages with this number, once all are there. After an abort they mean nothing."""
    message = tl.load(places, mask=mask, other=0, volatile=True)
    missing = tl.sum(((message >> 32).to(tl.int32) != number) & mask, axis=0)
    while (missing > 0) & (tl.load(abort, volatile=True) == 0):
        message = tl.load(places, mask=mask, other=0, volatile=True)
        missing = tl.sum(((message >> 32).to(tl.int32) != number) & mask, axis=0)
    return message.to(tl.int32)
