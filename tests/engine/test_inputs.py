"""A prefill step's tensors, against what the design says of each."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.inputs import DecodeInputs, prefill_inputs
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.decode_workspace import DecodeWorkspace


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


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 40, 200])
def test_plans_of_every_batch_size(max_num_seqs, num_kv_heads):
    """They fit the inputs' memory and the workspace, and every row has its keys in them."""
    inputs = DecodeInputs(max_num_seqs, 20, 256, torch.device("cpu"), num_kv_heads)
    workspace = DecodeWorkspace(max_num_seqs, 16, num_kv_heads, 16, "cpu")
    seqs = []
    for i in range(max_num_seqs):
        seq = Sequence(i, [0] * (1 + 977 * i % 5000), SamplingParams(), 256, seed=i)
        seq.block_table = list(range(seq.num_blocks))
        seqs.append(seq)
    for batch_size in {1, (max_num_seqs + 1) // 2, max_num_seqs}:
        for num_seqs in {1, batch_size}:
            inputs.write(seqs[:num_seqs], batch_size)
            plan = inputs.plan(batch_size)
            workspace.check_room(batch_size, 16, num_kv_heads, 16, len(plan))
            row, _, _, first, end = plan[plan[:, 0] >= 0].T.numpy()
            keys = np.bincount(row, weights=end - first, minlength=batch_size)
            expected = [seq.num_tokens for seq in seqs[:num_seqs]] + [0] * (batch_size - num_seqs)
            assert keys.tolist() == expected


def test_padding_rows_read_and_write_nothing():
    """Those that make up a captured batch, and those that the layers want besides."""
    inputs = DecodeInputs(5, 20, 256, torch.device("cpu"), 2, padded=[0, 4, 4, 4, 4, 8])
    seqs = []
    for i in range(5):
        seq = Sequence(i, list(range(10 * i + 1)), SamplingParams(), 256, seed=i)
        seq.block_table = [i]
        seqs.append(seq)
    for num_seqs, batch_size, num_rows in ((5, 5, 8), (3, 5, 8), (3, 4, 4), (1, 1, 4)):
        inputs.write(seqs[:num_seqs], batch_size)
        input_ids, positions, context = inputs.for_layers(batch_size)
        assert len(input_ids) == len(positions) == len(context.block_tables) == num_rows
        assert input_ids[:num_seqs].tolist() == [10 * i for i in range(num_seqs)]
        assert positions[:num_seqs].tolist() == [10 * i for i in range(num_seqs)]
        padding = num_rows - num_seqs
        assert context.context_lens.tolist() == [10 * i + 1 for i in range(num_seqs)] + [0] * padding
        assert context.slot_mapping.tolist() == [266 * i for i in range(num_seqs)] + [-1] * padding
        row, _, _, first, end = context.decode_plan[context.decode_plan[:, 0] >= 0].T.numpy()
        assert np.bincount(row, weights=end - first, minlength=num_rows).tolist() == context.context_lens.tolist()
    assert len(inputs.sampled) == 8
