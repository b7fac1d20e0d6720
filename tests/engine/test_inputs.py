"""A prefill step's tensors, against what the design says of each."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.inputs import prefill_inputs
from nanovllm.engine.sequence import Sequence


@st.composite
def scheduled(draw):
    """Sequences with chunks of their tokens scheduled, over block tables of their own, and the block size."""
    block_size = draw(st.integers(1, 5))
    free = draw(st.permutations(range(60)))
    seqs = []
    for i in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12))
        seq = Sequence(
            i, tokens, SamplingParams(temperature=draw(st.sampled_from([0, 0.5]))), block_size, seed=2**62 + i
        )
        seq.num_cached_tokens = draw(st.integers(0, len(tokens) - 1))
        seq.num_scheduled_tokens = draw(st.integers(1, len(tokens) - seq.num_cached_tokens))
        seq.block_table, free = free[: seq.num_blocks], free[seq.num_blocks :]
        seqs.append(seq)
    return seqs, block_size


@given(scheduled())
def test_prefill_inputs(drawn):
    seqs, block_size = drawn
    inputs, context = prefill_inputs(seqs, block_size, torch.device("cpu"))
    input_ids, positions, temperatures, seeds, sample_positions = (tensor.tolist() for tensor in inputs)
    spans = [range(seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens) for seq in seqs]
    computed = [(seq, p) for seq, span in zip(seqs, spans, strict=True) for p in span]
    assert input_ids == [seq.token_ids[p] for seq, p in computed]
    assert positions == [p for _, p in computed]
    slots = [seq.block_table[p // block_size] * block_size + p % block_size for seq, p in computed]
    assert context.slot_mapping.tolist() == slots
    assert temperatures == [seq.temperature for seq in seqs]
    assert seeds == [seq.seed for seq in seqs]
    assert sample_positions == [span[-1] for span in spans]
    queries, keys = [0], [0]
    for span in spans:
        queries.append(queries[-1] + len(span))
        keys.append(keys[-1] + span[-1] + 1)
    assert (context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()) == (queries, keys)
    assert (context.max_seqlen_q, context.max_seqlen_k) == (max(map(len, spans)), max(span[-1] + 1 for span in spans))
    assert context.last_tokens.tolist() == [end - 1 for end in queries[1:]]
    if not any(seq.num_cached_tokens for seq in seqs):
        assert context.block_tables is None
        return
    width = max(seq.num_blocks for seq in seqs)
    assert context.block_tables.tolist() == [seq.block_table + [-1] * (width - seq.num_blocks) for seq in seqs]
