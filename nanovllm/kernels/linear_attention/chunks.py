"""How a prefill's sequences are cut into chunks, and how a program finds its own.

A sequence's chunks begin at its first new token. They are numbered so that a kernel needs no table: those of sequence s
begin at `cu_seqlens[s] // CHUNK + s`. A few numbers belong to no chunk, at most one for each sequence.
"""

from nanovllm.kernels.triton_stub import tl, triton

CHUNK = 64  # tokens
_CHUNK = tl.constexpr(CHUNK)
_SEQS = tl.constexpr(256)  # that a program compares at a time


def count_chunks(num_tokens: int, num_seqs: int) -> int:
    """How many numbers there are."""
    return num_tokens // CHUNK + num_seqs


@triton.jit
def find_chunk(cu_seqlens, chunk, num_seqs):
    """(sequence, its first token, its number of tokens, the chunk's first token in the sequence) of a number. If the
    last two are equal or the last one is larger, the number belongs to no chunk."""
    seq = -1
    for first_seq in range(0, num_seqs, _SEQS):
        seqs = first_seq + tl.arange(0, _SEQS)
        first_chunks = tl.load(cu_seqlens + seqs, mask=seqs < num_seqs, other=0) // _CHUNK + seqs
        seq += tl.sum(((first_chunks <= chunk) & (seqs < num_seqs)).to(tl.int32), axis=0)
    start = tl.load(cu_seqlens + seq)
    length = tl.load(cu_seqlens + seq + 1) - start
    return seq, start, length, (chunk - start // _CHUNK - seq) * _CHUNK
