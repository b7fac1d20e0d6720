"""The tensors of prefill, decode and mixed steps, against what the design says of each."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from backends import planning_backend
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.features.columns import AttentionColumns
from nanovllm.engine.inputs import DecodeInputs, send_prefill, write_prefill
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Rows, Step, StepKind
from nanovllm.utils.context import Context


@st.composite
def scheduled(draw):
    """Sequences with chunks of their tokens scheduled, over block tables of their own, and the block size."""
    block_size = draw(st.integers(1, 5))
    free = draw(st.permutations(range(60)))
    seqs = []
    for i in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12))
        seq = Sequence(tokens, SamplingParams(temperature=draw(st.sampled_from([0, 0.5]))), seed=2**62 + i)
        seq.block_size = block_size
        seq.num_cached_tokens = draw(st.integers(0, len(tokens) - 1))
        seq.num_scheduled_tokens = draw(st.integers(1, len(tokens) - seq.num_cached_tokens))
        seq.block_table, free = free[: seq.num_blocks], free[seq.num_blocks :]
        seqs.append(seq)
    return seqs, block_size


def four_tokens() -> Sequence:
    seq = Sequence([7] * 4, seed=0)
    seq.block_size = 4
    return seq


def prefill(seqs: list[Sequence], block_size: int) -> Step:
    step = Step(seqs, True, len(seqs))
    write_prefill(step, Rows.of(step), block_size)
    return step


def decode(inputs: DecodeInputs, seqs: list[Sequence], num_rows: int) -> Step:
    step = Step(seqs, False, sum(seq.is_prefill for seq in seqs))
    inputs.write(step, Rows.of(step), num_rows)
    return step


@given(scheduled())
def test_prefill_inputs(drawn):
    seqs, block_size = drawn
    inputs = send_prefill(prefill(seqs, block_size), torch.device("cpu"))
    context = inputs.context
    input_ids, positions, _, temperatures, seeds, sample_positions = (
        each if isinstance(each, Context) else each.tolist() for each in inputs[:6]
    )
    spans = [range(seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens) for seq in seqs]
    computed = [(seq, p) for seq, span in zip(seqs, spans, strict=True) for p in span]
    assert input_ids == [seq.token_ids[p] for seq, p in computed]
    assert positions == [p for _, p in computed]
    slots = [seq.block_table[p // block_size] * block_size + p % block_size for seq, p in computed]
    assert context.slot_mapping.tolist() == slots
    assert temperatures == [seq.request.params.temperature for seq in seqs]
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


@given(scheduled())
def test_a_worker_has_the_same_tensors_of_a_pickled_prefill(drawn):
    step = prefill(*drawn)
    received = pickle.loads(pickle.dumps(step))
    assert received.seqs == []
    for ours, theirs in zip(
        *(_flat(send_prefill(each, torch.device("cpu"))) for each in (step, received)), strict=True
    ):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@given(steps=st.lists(st.tuples(scheduled(), st.integers(0, 3)), min_size=1, max_size=4))
def test_a_worker_has_the_same_tensors_of_pickled_decode_steps(steps):
    """Also those that it takes from its own last step, and after a step of its own that rank 0 has not written."""
    backend = planning_backend(4, 2, [None, 3])
    ours, theirs = (DecodeInputs(4, 12, 4, torch.device("cpu"), [AttentionColumns(backend)]) for _ in range(2))
    for inputs in (ours, theirs):
        inputs.sampled.copy_(torch.arange(100, 100 + len(inputs.sampled)))
    theirs.pad(3)
    for (seqs, _), num_padding in steps:
        for row, seq in enumerate(seqs):
            seq.is_prefill, seq.pending_row = False, (row - 1) % 3 - 1
            seq.block_table = [12 * row + i for i in range(12)]
        num_rows = min(len(seqs) + num_padding, 4)
        step = decode(ours, seqs, num_rows)
        ours.send(step)
        theirs.send(pickle.loads(pickle.dumps(step)))
        for one, other in zip(
            *(_flat(inputs.for_model(len(seqs), num_rows)) for inputs in (ours, theirs)), strict=True
        ):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_what_a_worker_gets_of_a_decode_step_does_not_grow_with_the_tokens_of_its_sequences():
    inputs, sizes = DecodeInputs(512, 200, 256, torch.device("cpu"), [AttentionColumns(planning_backend(512, 8))]), []
    for num_tokens in (300, 30_000):
        seq = Sequence([7] * num_tokens)
        seq.block_table, seq.is_prefill = list(range(seq.num_blocks)), False
        sizes.append(len(pickle.dumps(decode(inputs, [seq], 1), pickle.HIGHEST_PROTOCOL)))
    assert sizes[0] == sizes[1] < 20_000


def _flat(inputs) -> list:
    values = []
    for each in inputs[:6]:
        fields_of = [getattr(each, f.name) for f in fields(each)] if isinstance(each, Context) else [each]
        for value in fields_of:
            values += value.values() if isinstance(value, dict) else [value]
    return values


@given(
    steps=st.lists(st.tuples(scheduled(), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=3),
    windows=st.sampled_from([[], [None], [5, None], [1, 7]]),
)
def test_mixed_inputs(steps, windows):
    """Several steps, as a row may have had another sequence's table before, or the same; all of one block size."""
    tables = [[16 * row + i for i in range(12)] for row in range(4)]
    inputs = DecodeInputs(
        4, 12, 4, torch.device("cpu"), [AttentionColumns(planning_backend(60, 2, windows))], mixed_step_rows=60
    )
    for (seqs, _), num_running, num_padding in steps:
        for row, seq in enumerate(seqs):
            seq.is_prefill = row >= num_running
            if not seq.is_prefill:
                seq.num_cached_tokens, seq.num_scheduled_tokens = seq.num_tokens - 1, 1
            seq.block_table = tables[row]
        spans = [range(seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens) for seq in seqs]
        num_tokens = sum(map(len, spans))
        inputs.send(decode(inputs, seqs, num_tokens + num_padding))
        input_ids, positions, context = inputs.for_model(len(seqs), num_tokens + num_padding, StepKind(is_mixed=True))[
            :3
        ]
        computed = list(zip(input_ids.tolist(), positions.tolist(), context.slot_mapping.tolist(), strict=True))
        # Tokens are drawn from the first rows, one a sequence.
        assert computed[: len(seqs)] == [_row(seq, span[-1]) for seq, span in zip(seqs, spans, strict=True)]
        assert inputs.rows["temperatures"][: len(seqs)].tolist() == [seq.request.params.temperature for seq in seqs]
        assert inputs.rows["seeds"][: len(seqs)].tolist() == [seq.seed for seq in seqs]
        every = [_row(seq, p) for seq, span in zip(seqs, spans, strict=True) for p in span]
        assert sorted(computed[:num_tokens]) == sorted(every)
        context_lens = [position + 1 for _, position, _ in computed[:num_tokens]]
        assert context.context_lens.tolist() == context_lens + [0] * num_padding
        assert context.slot_mapping[num_tokens:].tolist() == [-1] * num_padding
        for (_, position, slot), table in zip(computed[:num_tokens], context.block_tables.tolist(), strict=False):
            assert slot == table[position // 4] * 4 + position % 4
            (owner,) = (seq for row, seq in enumerate(seqs) if slot // 64 == row)
            assert table == owner.block_table
        assert context.num_sampled == len(seqs)
        assert list(context.attention) == windows
        for window, plan in context.attention.items():
            check_plan(plan.numpy(), context, window)


def check_plan(plan: np.ndarray, context: Context, window: int | None) -> None:
    """Every row has the keys of its window, each once."""
    keys = [set() for _ in context.context_lens]
    for row, _, _, first, end in plan[plan[:, 0] >= 0].tolist():
        own = set(range(first, end))
        assert not own & keys[row]
        keys[row] |= own
    lens = context.context_lens.tolist()
    assert keys == [set(range(context_len)[-(window or context_len) :]) for context_len in lens]


def _row(seq: Sequence, position: int) -> tuple[int, int, int]:
    """Token id, position and slot."""
    return seq.token_ids[position], position, seq.block_table[position // 4] * 4 + position % 4


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 40, 200])
def test_plans_of_every_batch_size(max_num_seqs, num_kv_heads):
    """They fit the inputs' memory and the workspace, and every row has its keys in them."""
    backend = planning_backend(max_num_seqs, num_kv_heads)
    inputs = DecodeInputs(max_num_seqs, 20, 256, torch.device("cpu"), [AttentionColumns(backend)])
    seqs = []
    for i in range(max_num_seqs):
        seq = Sequence([0] * (1 + 977 * i % 5000), seed=i)
        seq.block_table, seq.is_prefill = list(range(seq.num_blocks)), False
        seqs.append(seq)
    for batch_size in {1, (max_num_seqs + 1) // 2, max_num_seqs}:
        for num_seqs in {1, batch_size}:
            inputs.send(decode(inputs, seqs[:num_seqs], batch_size))
            plan = inputs.for_model(num_seqs, batch_size).context.attention[None]
            backend.workspace.check_room(batch_size, 16, num_kv_heads, 16, len(plan))
            row, _, _, first, end, *_ = plan[plan[:, 0] >= 0].T.numpy()
            keys = np.bincount(row, weights=end - first, minlength=batch_size)
            expected = [seq.num_tokens for seq in seqs[:num_seqs]] + [0] * (batch_size - num_seqs)
            assert keys.tolist() == expected


def test_padding_rows_read_and_write_nothing():
    """Those that make up a captured batch."""
    inputs = DecodeInputs(8, 20, 256, torch.device("cpu"), [AttentionColumns(planning_backend(8, 2))])
    seqs = []
    for i in range(5):
        seq = Sequence(list(range(10 * i + 1)), seed=i)
        seq.block_table, seq.is_prefill = [i], False
        seqs.append(seq)
    for num_seqs, num_rows in ((5, 8), (3, 8), (3, 4), (1, 4)):
        inputs.send(decode(inputs, seqs[:num_seqs], num_rows))
        input_ids, positions, context = inputs.for_model(num_seqs, num_rows)[:3]
        assert len(input_ids) == len(positions) == len(context.block_tables) == num_rows
        assert input_ids[:num_seqs].tolist() == [10 * i for i in range(num_seqs)]
        assert positions[:num_seqs].tolist() == [10 * i for i in range(num_seqs)]
        padding = num_rows - num_seqs
        assert context.context_lens.tolist() == [10 * i + 1 for i in range(num_seqs)] + [0] * padding
        assert context.slot_mapping.tolist() == [266 * i for i in range(num_seqs)] + [-1] * padding
        plan = context.attention[None]
        row, _, _, first, end, *_ = plan[plan[:, 0] >= 0].T.numpy()
        assert np.bincount(row, weights=end - first, minlength=num_rows).tolist() == context.context_lens.tolist()
    assert len(inputs.sampled) == 8


def test_a_row_has_its_sequences_blocks_as_their_table_grows_and_is_replaced():
    inputs = DecodeInputs(2, 4, 4, torch.device("cpu"), [AttentionColumns(planning_backend(2, 2))])
    seq, other = (four_tokens() for i in range(2))
    seq.is_prefill = other.is_prefill = False
    seq.block_table, other.block_table = [5], [9]

    def check(*rows: Sequence) -> None:
        inputs.send(decode(inputs, list(rows), len(rows)))
        context = inputs.for_model(len(rows), len(rows)).context
        for row, owner in enumerate(rows):
            table, last = owner.block_table, owner.num_tokens - 1
            assert context.block_tables[row, : len(table)].tolist() == table
            assert context.slot_mapping[row] == table[last // 4] * 4 + last % 4

    check(seq, other)
    seq.append_token(8)
    seq.block_table.append(3)
    check(seq, other)
    check(other, seq)
    seq.block_table = [2, 6]  # After a preemption.
    check(other, seq)
    seq.token_ids, seq.num_tokens, seq.last_token = seq.token_ids[:3], 3, 7
    seq.block_table = [1]
    check(seq)


def test_a_row_of_a_prompt_is_another_sequences_in_the_next_step():
    """It had the prompt's blocks, not those of the sequence that had this row before."""
    inputs = DecodeInputs(3, 4, 4, torch.device("cpu"), [AttentionColumns(planning_backend(6, 2))], mixed_step_rows=6)
    seqs = [four_tokens() for i in range(3)]
    for i, seq in enumerate(seqs):
        seq.is_prefill, seq.block_table, seq.num_cached_tokens, seq.num_scheduled_tokens = False, [i], 3, 1
    decode(inputs, seqs, 3)
    seqs[1].is_prefill, seqs[1].num_cached_tokens, seqs[1].num_scheduled_tokens = True, 0, 4
    decode(inputs, seqs[:2], 5)  # The prompt's other tokens have rows from the third on.
    seqs[1].is_prefill = False
    inputs.send(decode(inputs, seqs, 3))
    assert inputs.for_model(3, 3).context.block_tables[:, 0].tolist() == [0, 1, 2]


def test_rows_feed_what_the_last_step_drew_where_the_host_has_not_read_it():
    inputs = DecodeInputs(6, 4, 256, torch.device("cpu"), [AttentionColumns(planning_backend(6, 2))])
    inputs.sampled.copy_(torch.arange(100, 106))
    seqs = []
    for i, pending_row in enumerate([3, -1, 0, 5, -1]):
        seq = Sequence([10 + i, 20 + i], seed=i)
        seq.block_table, seq.is_prefill, seq.pending_row = [i], False, pending_row
        seqs.append(seq)
    inputs.send(decode(inputs, seqs, 6))
    assert inputs.for_model(6, 6).input_ids[:5].tolist() == [103, 21, 100, 105, 24]
    seqs[3].pending_row = -1
    inputs.send(decode(inputs, seqs[2:4], 4))
    assert inputs.for_model(4, 4).input_ids[:2].tolist() == [100, 23]


def test_tokens_have_memory_of_their_own_until_the_step_after_next():
    """Also where inputs are written in between that no step draws from, as for a capture."""
    inputs = DecodeInputs(6, 4, 256, torch.device("cpu"), [AttentionColumns(planning_backend(6, 2))])
    first = inputs.tokens_on_host(5).fill_(1)
    inputs.pad(2)
    second = inputs.tokens_on_host(6).fill_(2)
    assert first.tolist() == [1] * 5
    inputs.pad(2)
    inputs.tokens_on_host(6).fill_(3)
    assert second.tolist() == [2] * 6


@pytest.mark.gpu
def test_a_capture_before_a_step_is_sent_leaves_its_host_buffer_alone():
    inputs = DecodeInputs(4, 4, 256, torch.device("cuda"), [AttentionColumns(planning_backend(4, 2))])
    seqs = [Sequence([10 + i], seed=i) for i in range(2)]
    for seq in seqs:
        seq.block_table, seq.is_prefill = [0], False
    step = decode(inputs, seqs[:1], 1)
    inputs.pad(2)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)  # The device is behind: the host writes the next step before this one is received.
    inputs.send(step)
    decode(inputs, seqs[1:], 1)
    assert inputs.for_model(1, 1).input_ids.tolist() == [10]
