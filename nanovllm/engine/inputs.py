"""A step's inputs: numpy arrays that rank 0 writes on the host and sends to the device in one copy."""

from collections.abc import Sequence as AbstractSequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.features.columns import Columns, ContextFields
from nanovllm.engine.runner.packed_arrays import PackedArrays, packed_size, send_arrays
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import PLAIN_STEP, Rows, Step, StepKind
from nanovllm.kernels.step_copies import receive_step
from nanovllm.layers.backends.backend import Layout
from nanovllm.utils.context import Context

_NOTHING: tuple[list[int], int] = [], 0


class ModelInputs(NamedTuple):
    """What the model and the sampler get of a step, on the device. The sampler draws a token for each temperature, from
    the first hidden states. Further rows are padding, or tokens of a mixed step's prompts."""

    input_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows]
    context: Context
    temperatures: torch.Tensor  # float32 [num_sampled]
    seeds: torch.Tensor  # int64 [num_sampled]
    sample_positions: torch.Tensor  # int64 [num_sampled]: of the tokens that are sampled from: they decide the noise
    columns: dict[str, torch.Tensor]  # all of them, by name


class DecodeInputs:
    """The inputs of all steps but prefills: fixed device memory, which CUDA graphs read, and two host buffers.

    While the device computes a step, the host writes the next step's inputs to the other buffer. Sampled tokens stay on
    the device, where the next step takes them before the host has them.

    Attributes:
        rows: {name: device tensor [max_rows, ...]}. pending_rows: the row of `sampled` that holds the input token, or
            -1 if the host knew the token. The others are named as in Context and the sampler, or are a feature's.
        input_ids: int64 [max_rows].
        sampled: int64 [max_rows], the tokens of the last step; NON_FINITE for a row that had none.
        columns: those of the back end and of features.
    """

    def __init__(
        self,
        max_sampled: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        columns: AbstractSequence[Columns] = (),
        mixed_step_rows: int = 0,
    ):
        """
        Args:
            max_sampled: the most tokens that a step samples.
            mixed_step_rows: of the largest mixed step.
        """
        n = self.max_rows = max(max_sampled, mixed_step_rows)
        self.columns, self.block_size = columns, block_size
        layout: Layout = {
            "tokens": ((n,), np.int64),
            "pending_rows": ((n,), np.int32),
            "positions": ((n,), np.int64),
            "seeds": ((n,), np.int64),
            "temperatures": ((n,), np.float32),
            "slot_mapping": ((n,), np.int32),
            "context_lens": ((n,), np.int32),
            "block_tables": ((n, max_blocks), np.int32),
        }
        self._names = tuple(layout)
        for each in columns:
            layout |= each.layout(n)
        memory = torch.zeros(packed_size(layout), dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        self._buffers = [PackedArrays(layout, device, memory) for _ in range(2 if on_gpu else 1)]
        self._last_buffer = 0
        # The block table that is in each row of a buffer, and its length. A sequence's table is appended to, or
        # replaced by a new list: the same list with the same length needs not be written again.
        self._written = [[_NOTHING] * n for _ in self._buffers]
        self.rows = self._buffers[0].device
        self.input_ids, self.sampled = torch.zeros(2, n, dtype=torch.int64, device=device)
        self._receive_arguments = [
            (
                buffer.host_bytes.view(torch.int64),
                buffer.device_bytes.view(torch.int64),
                torch.from_numpy(buffer.host["tokens"]),
                torch.from_numpy(buffer.host["pending_rows"]),
            )
            for buffer in self._buffers
        ]
        self._host_tokens = torch.zeros(2, n, dtype=torch.int64, pin_memory=on_gpu)
        self._last_host_tokens = 0

    def for_model(self, num_sampled: int, num_rows: int, kind: StepKind = PLAIN_STEP) -> ModelInputs:
        """The first rows of a step of this kind, of which num_sampled are sampled from."""
        rows, more = self.rows, ContextFields()
        for columns in self.columns:
            more |= columns.context(rows, num_rows, kind)
        context = Context(
            slot_mapping=rows["slot_mapping"][:num_rows],
            context_lens=rows["context_lens"][:num_rows],
            block_tables=rows["block_tables"][:num_rows],
            num_sampled=num_sampled if kind.is_mixed else None,
            **more,
        )
        positions, sampling = rows["positions"], (rows["temperatures"][:num_sampled], rows["seeds"][:num_sampled])
        of_rows = self.input_ids[:num_rows], positions[:num_rows]
        return ModelInputs(*of_rows, context, *sampling, positions[:num_sampled], rows)

    def pad(self, num_rows: int, shares_reads: bool = False) -> None:
        """Send a step of padding alone. The buffers' turns stay as they were: a capture may come between a real step's
        `write` and `send`, and the next `write` must not take that step's buffer."""
        last = self._last_buffer
        step = Step([], is_prefill=False, kind=StepKind(shares_reads=shares_reads))
        self.write(step, Rows.of(step), num_rows)
        self.send(step)
        self._last_buffer = last

    def write(self, step: Step, rows: Rows, num_rows: int) -> None:
        """Give a step that is no prefill its arrays, padded to num_rows."""
        seqs, block_size = step.seqs, self.block_size
        n, num_tokens = rows.num_sampled, len(rows.positions)
        step.buffer = self._last_buffer = (self._last_buffer + 1) % len(self._buffers)
        step.num_sampled, step.num_rows = n, num_rows
        host, written = self._buffers[step.buffer].host, self._written[step.buffer]
        tables = host["block_tables"]
        has_one_each = num_tokens == len(seqs)  # Row i is the only one of sequence i.
        for row, seq in enumerate(seqs) if has_one_each else zip(rows.heads.tolist(), seqs, strict=True):
            table, (known, length) = seq.block_table, written[row]
            if table is not known:
                tables[row, : len(table)] = table
                tables[row, len(table) :] = -1
            elif length != len(table):
                tables[row, length : len(table)] = table[length:]
            else:
                continue
            written[row] = table, len(table)
        if not has_one_each:
            others = np.setdiff1d(np.arange(num_tokens), rows.heads)
            tables[others] = tables[rows.heads[rows.owners[others]]]
            for row in others.tolist():
                written[row] = _NOTHING
        positions = rows.positions
        host["tokens"][:num_tokens] = rows.tokens
        host["positions"][:num_tokens] = positions
        host["context_lens"][:num_tokens] = positions + 1
        blocks = tables[np.arange(num_tokens), positions // block_size]
        host["slot_mapping"][:num_tokens] = blocks * block_size + positions % block_size
        temperatures, seeds = [seq.temperature for seq in seqs], [seq.seed for seq in seqs]
        host["temperatures"][:n] = temperatures if has_one_each else rows.of_sequences(temperatures)
        host["seeds"][:n] = seeds if has_one_each else rows.of_sequences(seeds)
        if not has_one_each:
            host["pending_rows"][:num_tokens] = -1
        host["pending_rows"][rows.heads] = [seq.pending_row for seq in seqs]
        # Padding writes nothing and reads nothing.
        host["pending_rows"][num_tokens:num_rows] = -1
        host["slot_mapping"][num_tokens:num_rows] = -1
        host["context_lens"][num_tokens:num_rows] = 0
        step.arrays = {name: host[name][:num_rows] for name in self._names}
        for columns in self.columns:
            if columns.is_used(step):
                step.arrays |= columns.write(step, rows, host, num_rows)

    def send(self, step: Step) -> None:
        """Copy a step's arrays to the device, in stream order, and fill input_ids."""
        if step.buffer < 0:  # A worker's arrays come from rank 0.
            step.buffer = self._last_buffer = (self._last_buffer + 1) % len(self._buffers)
            for name, values in step.arrays.items():
                self._buffers[step.buffer].host[name][tuple(map(slice, values.shape))] = values
        num_rows = step.num_rows
        input_ids = self.input_ids[:num_rows]
        if input_ids.is_cuda:
            receive_step(input_ids, *self._receive_arguments[step.buffer], self.sampled)
            return
        # A CPU has the arrays already. NON_FINITE must not reach the embedding.
        pending = self.rows["pending_rows"][:num_rows]
        last = self.sampled[pending.clamp(min=0)].clamp_(min=0)
        torch.where(pending < 0, self.rows["tokens"][:num_rows], last, out=input_ids)

    def tokens_on_host(self, num_sampled: int) -> torch.Tensor:
        """Page-locked memory for a step's tokens. Two steps take turns, because the tokens of the one before may not
        have been read yet."""
        self._last_host_tokens ^= 1
        return self._host_tokens[self._last_host_tokens, :num_sampled]


def write_prefill(step: Step, rows: Rows, block_size: int, columns: AbstractSequence[Columns] = ()) -> None:
    """Give a prefill its arrays: the flat batch of the sequences' scheduled tokens."""
    seqs, positions = step.seqs, rows.positions
    ends = rows.heads + 1
    num_keys = positions[rows.heads] + 1
    tables = padded_block_tables(seqs)
    blocks = positions // block_size  # index in the sequence's table
    # block * block_size + positions % block_size; the owner's table begins at owner * its width in the flat tables
    slots = (tables.ravel().take(rows.owners * tables.shape[1] + blocks) - blocks) * block_size + positions
    step.num_sampled, step.num_rows = len(seqs), len(positions)
    step.arrays = {
        "input_ids": rows.tokens,
        "positions": positions,
        "seeds": np.array([seq.seed for seq in seqs]),
        "sample_positions": num_keys - 1,
        "last_tokens": rows.heads,
        "temperatures": np.array([seq.temperature for seq in seqs], np.float32),
        "slot_mapping": slots.astype(np.int32),
        "cu_seqlens_q": np.concatenate(([0], ends)).astype(np.int32),
        "cu_seqlens_k": np.concatenate(([0], np.cumsum(num_keys))).astype(np.int32),
        "block_tables": tables,
    }
    for each in columns:
        if each.is_used(step):
            step.arrays |= each.prefill(step, rows)


def padded_block_tables(seqs: list[Sequence]) -> np.ndarray:
    """The sequences' block tables, int32 [num_seqs, max_blocks], right-padded with -1."""
    lens = np.array([len(seq.block_table) for seq in seqs])
    tables = np.full((len(seqs), lens.max()), -1, np.int32)
    in_table = np.arange(lens.max()) < lens[:, None]
    tables[in_table] = list(chain.from_iterable([seq.block_table for seq in seqs]))
    return tables


def send_prefill(step: Step, device: torch.device, columns: AbstractSequence[Columns] = ()) -> ModelInputs:
    """A prefill's inputs, from its arrays."""
    if device.type == "cuda":
        tensors = send_arrays(step.arrays, device)
    else:
        tensors = {name: torch.from_numpy(values) for name, values in step.arrays.items()}
    ends, ends_of_keys = (step.arrays[name] for name in ("cu_seqlens_q", "cu_seqlens_k"))
    more = ContextFields()
    for each in columns:
        more |= each.prefill_context(tensors, step)
    context = Context(
        is_prefill=True,
        cu_seqlens_q=tensors["cu_seqlens_q"],
        cu_seqlens_k=tensors["cu_seqlens_k"],
        max_seqlen_q=int(np.diff(ends).max()),
        max_seqlen_k=int(np.diff(ends_of_keys).max()),
        slot_mapping=tensors["slot_mapping"],
        # Without a cached prefix, all keys and values are in the batch itself.
        block_tables=tensors["block_tables"] if ends_of_keys[-1] > ends[-1] else None,
        last_tokens=tensors["last_tokens"],
        **more,
    )
    temperatures, seeds, sample_positions = (tensors[name] for name in ("temperatures", "seeds", "sample_positions"))
    of_tokens = tensors["input_ids"], tensors["positions"]
    return ModelInputs(*of_tokens, context, temperatures, seeds, sample_positions, tensors)
