"""Each back end reads the blocks that a sequence has in the layers with a window, and no others."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from backends import prepare

from nanovllm.engine.features.windows.window_blocks import WindowTable
from nanovllm.engine.features.windows.window_columns import WindowColumns
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Rows, Step, StepKind
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.fixed_order_torch import FixedOrderTorchBackend
from nanovllm.layers.backends.torch_backend import TorchBackend, prefill_attention_torch
from nanovllm.layers.backends.triton_backend import TritonBackend
from nanovllm.layers.stores.windowed_kv_cache import WindowedKVCache
from nanovllm.utils.context import Context, step_context

HEADS, KV_HEADS, HEAD_DIM, SIZE, WINDOW, MAX_BLOCKS = 4, 2, 16, 16, 37, 20
LENS = 200, 64, 65, 5


class Sequences:
    """Sequences with random keys and values, which lie in blocks that only they have. All other blocks hold NaN."""

    def __init__(self, num_new: int, device: str):
        """num_new: of each sequence's last tokens, which a step computes; the others are cached."""
        generator = np.random.default_rng(0)
        self.keys_values = [torch.randn(2, n, KV_HEADS, HEAD_DIM, device=device) for n in LENS]
        self.queries = [torch.randn(min(num_new, n), HEADS, HEAD_DIM, device=device) for n in LENS]
        self.cache = torch.full((2, 60, SIZE, KV_HEADS, HEAD_DIM), float("nan"), device=device)
        free = iter(generator.permutation(60).tolist())
        self.seqs = []
        for n, values, queries in zip(LENS, self.keys_values, self.queries, strict=True):
            seq = Sequence([1] * n)
            seq.block_size = SIZE
            seq.block_table = list(range(seq.num_blocks))  # the other layers'
            seq.num_cached_tokens, seq.num_scheduled_tokens = n - len(queries), len(queries)
            passed = max(0, seq.num_cached_tokens + 1 - WINDOW) // SIZE
            held = [next(free) for _ in range(passed, seq.num_blocks)]
            seq.cell = WindowTable([held[0]] * passed + held, passed)
            flat = self.cache.flatten(1, 2)
            flat[:, [block * SIZE + offset for block in held for offset in range(SIZE)]] = 0.0  # what is not read yet
            for position in range(passed * SIZE, n):
                flat[:, held[position // SIZE - passed] * SIZE + position % SIZE] = values[:, position]
            self.seqs.append(seq)

    def expected(self) -> torch.Tensor:
        """Attention of the new tokens to all keys of their own sequence."""
        starts = torch.tensor([0, *np.cumsum([len(queries) for queries in self.queries])])
        ends = torch.tensor([0, *np.cumsum(LENS)])
        keys, values = (torch.cat([x[i] for x in self.keys_values]) for i in (0, 1))
        none = torch.empty(0)
        lengths = starts, ends, 0, None
        return prefill_attention_torch(
            torch.cat(self.queries), keys, values, none, none, *lengths, HEAD_DIM**-0.5, WINDOW
        )

    def layer(self, backend) -> Attention:
        layer = Attention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, backend, WINDOW)
        shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, SIZE, torch.float32, self.cache.device)
        prepare(backend, shape, [WINDOW], 16, max_group_rows=4)
        WindowedKVCache([layer], [shape], split=None).use([self.cache.unsqueeze(1)])
        return layer


every_back_end = pytest.mark.parametrize("backend", [TorchBackend, FixedOrderTorchBackend, TritonBackend])


def make(backend, device):
    """The back end, or none where the device does not have it."""
    if backend is FixedOrderTorchBackend and device != "cpu":
        pytest.skip("of a CPU")
    return backend()


@every_back_end
def test_a_prefill_behind_cached_tokens(backend, device):
    sequences = Sequences(30, device)
    layer = sequences.layer(make(backend, device))
    columns, seqs = WindowColumns(layer.backend, MAX_BLOCKS, SIZE), sequences.seqs
    step = Step(seqs, True, len(seqs))
    arrays = columns.prefill(step, Rows.of(step))
    fields = columns.prefill_context({name: torch.from_numpy(x).to(device) for name, x in arrays.items()}, step)
    lens_q = [len(queries) for queries in sequences.queries]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device=device) for x in (lens_q, LENS))
    others = torch.full((len(seqs), MAX_BLOCKS), -1, dtype=torch.int32, device=device)
    context = Context(True, cu_q, cu_k, max(lens_q), max(LENS), block_tables=others, **fields)
    q = torch.cat(sequences.queries)
    k, v = (torch.cat([x[i, -n:] for x, n in zip(sequences.keys_values, lens_q, strict=True)]) for i in (0, 1))
    with step_context(context):
        found = layer.attend(q, k, v, layer.get_context())
        slots = layer.get_context().slot_mapping.tolist()
    torch.testing.assert_close(found, sequences.expected(), atol=1e-5, rtol=1e-5)
    flat = sequences.cache[0].flatten(0, 1)
    torch.testing.assert_close(flat[slots], k, msg="a token's slot holds its keys")


@every_back_end
@pytest.mark.parametrize("num_rows", [1, 3], ids=["decode", "speculative"])
def test_a_decode_step(backend, num_rows, device):
    sequences = Sequences(num_rows, device)
    layer = sequences.layer(make(backend, device))
    columns, seqs = WindowColumns(layer.backend, MAX_BLOCKS, SIZE), sequences.seqs
    for seq in seqs:
        seq.is_prefill = False
        seq.num_tokens -= num_rows - 1
    kind = StepKind(shares_reads=num_rows > 1 and layer.backend.shares_reads)
    step = Step(seqs, False, proposed=[[1] * (num_rows - 1)] * len(seqs) if num_rows > 1 else [], kind=kind)
    step.buffer, rows, most = 0, Rows.of(step), 16
    layout = columns.layout(most) | {"context_lens": ((most,), np.int32)}
    layout["block_tables"] = (most, MAX_BLOCKS), np.int32  # the other layers'
    host = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
    host["context_lens"][: len(rows.positions)] = rows.positions + 1
    columns.write(step, rows, host, most)
    arrays = {name: torch.from_numpy(x).to(device) for name, x in host.items()}
    others = torch.full((most, MAX_BLOCKS), -1, dtype=torch.int32, device=device)
    context = Context(context_lens=arrays["context_lens"], block_tables=others, **columns.context(arrays, most, kind))
    q = torch.zeros(most, HEADS, HEAD_DIM, device=device)
    q[: len(rows.positions)] = torch.cat(sequences.queries)
    with step_context(context):
        found = layer.attend(q, q[:, :KV_HEADS], q[:, :KV_HEADS], layer.get_context())
    torch.testing.assert_close(found[: len(rows.positions)], sequences.expected(), atol=1e-5, rtol=1e-5)
    assert not found[len(rows.positions) :].any(), "padding"


def test_a_row_of_a_table_is_written_when_it_changes():
    """In the buffer whose turn it is."""
    columns, rows_of = WindowColumns(TorchBackend(), MAX_BLOCKS, SIZE), Rows.of
    layout = columns.layout(4) | dict.fromkeys(("block_tables", "context_lens"), ((4, MAX_BLOCKS), np.int32))
    hosts = [{name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()} for _ in range(2)]
    seqs = Sequences(1, "cpu").seqs[:3]
    for seq in seqs:
        seq.is_prefill = False

    def write(buffer: int, seqs: list[Sequence]) -> None:
        step = Step(seqs, False)
        step.buffer = buffer
        columns.write(step, rows_of(step), hosts[buffer], 4)
        for row, seq in enumerate(seqs):
            assert hosts[buffer]["window_tables"][row, : len(seq.cell.blocks)].tolist() == seq.cell.blocks

    for buffer in (0, 1, 0, 1):
        write(buffer, seqs)
    seqs[0].cell.blocks.append(7)
    seqs[1].cell = WindowTable([9, 9, *seqs[1].cell.blocks[2:]], 2)
    for buffer in (0, 1):
        write(buffer, seqs)
    write(0, seqs[1:])
    write(0, seqs)
