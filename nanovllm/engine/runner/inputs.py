"""A step's inputs: numpy arrays that rank 0 writes on the host and sends to the device in one copy."""

from array import array
from itertools import chain

import numpy as np
import torch

from nanovllm.engine.runner.packed_arrays import PackedArrays, packed_size, send_arrays
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.kernels.step_copies import receive_step
from nanovllm.layers.attention.attention import AttentionBackend, Layout
from nanovllm.utils.context import Context


class DecodeInputs:
    """The inputs of decode and mixed steps: fixed device memory, which CUDA graphs read, and two host buffers.

    While the device computes a step, the host writes the next step's inputs to the other buffer. Sampled tokens stay on
    the device, where the next step takes them before the host has them.

    Each sequence has a row, for its last scheduled token. The other tokens of a mixed step's prompts are in the rows
    after those; nothing is sampled from them.

    Attributes:
        padded: number of rows of a decode step for each number of sequences, 0 to max_num_seqs.
        rows: {name: device tensor [max_rows, ...]}. pending_rows: the row of `sampled` that holds the input token, or
            -1 if the host knew the token. The others are named as in Context and the sampler, or are the back end's.
        input_ids: int64 [max_rows].
        sampled: int64 [max_rows], the tokens of the last step; NON_FINITE for a row that had none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        backend: AttentionBackend,
        padded: list[int] | None = None,
        mixed_step_rows: int = 0,
    ):
        """
        Args:
            backend: prepared for as many rows as there can be. It may have arrays of its own.
            padded: as above; None pads nothing.
            mixed_step_rows: of the largest mixed step.
        """
        self.padded = padded or list(range(max_num_seqs + 1))
        n = self.max_rows = max(self.padded[max_num_seqs], mixed_step_rows)
        self._backend = backend
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
        layout |= backend.layout()
        self.block_size = block_size
        memory = torch.zeros(packed_size(layout), dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        self._buffers = [PackedArrays(layout, device, memory) for _ in range(2 if on_gpu else 1)]
        self._last_buffer = 0
        # The block table that is in each row of a buffer, and its length. A sequence's table is appended to, or
        # replaced by a new list: the same list with the same length needs not be written again.
        self._written: list[list[tuple[list[int], int]]] = [[([], 0)] * n for _ in self._buffers]
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

    def for_layers(self, num_rows: int, num_sampled: int | None = None) -> tuple[torch.Tensor, torch.Tensor, Context]:
        """Token ids and positions [num_rows], and the context. num_sampled: as in Context."""
        context = Context(
            slot_mapping=self.rows["slot_mapping"][:num_rows],
            context_lens=self.rows["context_lens"][:num_rows],
            block_tables=self.rows["block_tables"][:num_rows],
            attention=self._backend.arguments(self.rows, num_rows),
            num_sampled=num_sampled,
        )
        return self.input_ids[:num_rows], self.rows["positions"][:num_rows], context

    def pad(self, num_rows: int) -> None:
        """Send a step of padding alone. The buffers' turns stay as they were: a capture may come between a real step's
        `write` and `send`, and the next `write` must not take that step's buffer."""
        last = self._last_buffer
        step = Step([], is_prefill=False)
        self.write(step, num_rows)
        self.send(step)
        self._last_buffer = last

    def write(self, step: Step, num_rows: int) -> None:
        """Give a decode or mixed step its arrays, padded to num_rows."""
        seqs, n, block_size = step.seqs, len(step.seqs), self.block_size
        step.buffer = self._last_buffer = (self._last_buffer + 1) % len(self._buffers)
        step.num_seqs, step.num_rows = n, num_rows
        host, written = self._buffers[step.buffer].host, self._written[step.buffer]
        tables = host["block_tables"]
        for row, seq in enumerate(seqs):
            table, (known, length) = seq.block_table, written[row]
            if table is not known:
                tables[row, : len(table)] = table
                tables[row, len(table) :] = -1
            elif length != len(table):
                tables[row, length : len(table)] = table[length:]
            else:
                continue
            written[row] = table, len(table)
        lens = [len(seq.tokens) for seq in seqs]
        tokens = [seq.tokens[-1] for seq in seqs]
        if step.num_prefilled:
            owners = _append_prompts(seqs, lens, tokens)
            tables[n : len(tokens)] = tables[owners]
            written[n : len(tokens)] = [([], 0)] * len(owners)
        num_tokens = len(tokens)
        context_lens = np.array(lens, np.int64)
        positions = context_lens - 1
        host["positions"][:num_tokens] = positions
        host["context_lens"][:num_tokens] = context_lens
        blocks = tables[np.arange(num_tokens), positions // block_size]
        host["slot_mapping"][:num_tokens] = blocks * block_size + positions % block_size
        host["temperatures"][:n] = [seq.params.temperature for seq in seqs]
        host["seeds"][:n] = [seq.seed for seq in seqs]
        host["tokens"][:num_tokens] = tokens
        host["pending_rows"][:n] = [seq.pending_row for seq in seqs]
        host["pending_rows"][n:num_rows] = -1
        # Padding writes nothing and reads nothing.
        host["slot_mapping"][num_tokens:num_rows] = -1
        host["context_lens"][num_tokens:num_rows] = 0
        step.arrays = {name: host[name][:num_rows] for name in self._names}
        step.arrays |= self._backend.host_arrays(host, num_rows)

    def send(self, step: Step) -> None:
        """Copy a step's arrays to the device, in stream order, and fill input_ids."""
        if step.buffer < 0:  # A worker's arrays come from rank 0.
            step.buffer = self._last_buffer = (self._last_buffer + 1) % len(self._buffers)
            for name, values in step.arrays.items():
                self._buffers[step.buffer].host[name][tuple(map(slice, values.shape))] = values
        receive_step(*self._receive_arguments[step.buffer], self.sampled, self.input_ids[: step.num_rows])

    def tokens_on_host(self, num_seqs: int) -> torch.Tensor:
        """Page-locked memory for a step's tokens. Two steps take turns, because the tokens of the one before may not
        have been read yet."""
        self._last_host_tokens ^= 1
        return self._host_tokens[self._last_host_tokens, :num_seqs]


def _append_prompts(seqs: list[Sequence], context_lens: list[int], tokens: list[int]) -> np.ndarray:
    """The last of seqs are the mixed step's prompts. Set the row of each to its last scheduled token, and append rows
    for its other scheduled tokens. Returns the index in seqs of each appended row's sequence."""
    owners, num_others = [], []
    for row in range(len(seqs) - 1, -1, -1):
        seq = seqs[row]
        if not seq.is_prefilling:
            break
        start, last = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens - 1
        context_lens[row], tokens[row] = last + 1, seq.tokens[last]
        context_lens.extend(range(start + 1, last + 1))
        tokens.extend(seq.tokens[start:last])
        owners.append(row)
        num_others.append(last - start)
    return np.repeat(owners, num_others)


def prefill_batch(step: Step, block_size: int) -> None:
    """Give a prefill its arrays: the flat batch of the sequences' scheduled tokens."""
    seqs = step.seqs
    cached = np.array([seq.num_cached_tokens for seq in seqs])
    num_new = np.array([seq.num_scheduled_tokens for seq in seqs])
    num_keys = cached + num_new
    # No Python loop over tokens or blocks, because the device waits for the first step of a batch.
    tokens = array("i")
    for seq in seqs:
        tokens += seq.tokens[seq.num_cached_tokens : seq.num_cached_tokens + seq.num_scheduled_tokens]
    ends = np.cumsum(num_new)
    positions = np.arange(len(tokens)) + np.repeat(num_keys - ends, num_new)
    tables = prepare_block_tables(seqs)
    blocks = positions // block_size  # index in the sequence's table
    # Of each token's table in the flat tables.
    first_blocks = np.repeat(np.arange(len(seqs)) * tables.shape[1], num_new)
    # block * block_size + positions % block_size
    slots = (tables.ravel().take(first_blocks + blocks) - blocks) * block_size + positions
    step.num_seqs, step.num_rows = len(seqs), len(tokens)
    step.max_seqlen_q, step.max_seqlen_k = int(num_new.max()), int(num_keys.max())
    step.reads_cache = bool(cached.any())
    step.arrays = {
        "input_ids": np.frombuffer(tokens, np.int32).astype(np.int64),
        "positions": positions,
        "seeds": np.array([seq.seed for seq in seqs]),
        "sample_positions": num_keys - 1,
        "last_tokens": ends - 1,
        "temperatures": np.array([seq.params.temperature for seq in seqs], np.float32),
        "slot_mapping": slots.astype(np.int32),
        "cu_seqlens_q": np.concatenate(([0], ends)).astype(np.int32),
        "cu_seqlens_k": np.concatenate(([0], np.cumsum(num_keys))).astype(np.int32),
        "block_tables": tables,
    }


def prepare_block_tables(seqs: list[Sequence]) -> np.ndarray:
    """The sequences' block tables, int32 [num_seqs, max_blocks], right-padded with -1."""
    lens = np.array([len(seq.block_table) for seq in seqs])
    tables = np.full((len(seqs), lens.max()), -1, np.int32)
    tables[np.arange(lens.max()) < lens[:, None]] = list(chain.from_iterable(seq.block_table for seq in seqs))
    return tables


def send_prefill(step: Step, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Context]:
    """A prefill's (input_ids, positions, temperatures, seeds, sample positions) on the device, and its context."""
    tensors = send_arrays(step.arrays, device)
    context = Context(
        is_prefill=True,
        cu_seqlens_q=tensors["cu_seqlens_q"],
        cu_seqlens_k=tensors["cu_seqlens_k"],
        max_seqlen_q=step.max_seqlen_q,
        max_seqlen_k=step.max_seqlen_k,
        slot_mapping=tensors["slot_mapping"],
        # Without a cached prefix, all keys and values are in the batch itself.
        block_tables=tensors["block_tables"] if step.reads_cache else None,
        last_tokens=tensors["last_tokens"],
    )
    names = ("input_ids", "positions", "temperatures", "seeds", "sample_positions")
    return tuple(tensors[name] for name in names), context
