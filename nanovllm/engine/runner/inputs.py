"""A step's inputs: numpy arrays that rank 0 writes on the host and sends to the device in one copy."""

from array import array
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.runner.cuda_graphs import PLAIN_STEP, StepKind
from nanovllm.engine.runner.packed_arrays import PackedArrays, packed_size, send_arrays
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.kernels.step_copies import receive_step
from nanovllm.layers.backends.backend import AttentionBackend, Layout
from nanovllm.utils.context import Context


class ModelInputs(NamedTuple):
    """What the model and the sampler get of a step, on the device. The sampler draws a token for each temperature, from
    the first hidden states. Further rows are padding, or tokens of a mixed step's prompts."""

    input_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows]
    context: Context
    temperatures: torch.Tensor  # float32 [num_sampled]
    seeds: torch.Tensor  # int64 [num_sampled]
    sample_positions: torch.Tensor  # int64 [num_sampled]: of the tokens that are sampled from: they decide the noise


class DecodeInputs:
    """The inputs of decode and mixed steps: fixed device memory, which CUDA graphs read, and two host buffers.

    While the device computes a step, the host writes the next step's inputs to the other buffer. Sampled tokens stay on
    the device, where the next step takes them before the host has them.

    Each sequence has a row, for its last scheduled token. The other tokens of a mixed step's prompts are in the rows
    after those; nothing is sampled from them. In a speculative step, a sequence's proposed tokens have the rows after
    its own, and all are sampled from.

    Attributes:
        rows: {name: device tensor [max_rows, ...]}. pending_rows: the row of `sampled` that holds the input token, or
            -1 if the host knew the token. The others are named as in Context and the sampler, or are the back end's.
        input_ids: int64 [max_rows].
        sampled: int64 [max_rows], the tokens of the last step; NON_FINITE for a row that had none.
    """

    def __init__(
        self,
        max_sampled: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        backend: AttentionBackend,
        mixed_step_rows: int = 0,
        has_slots: bool = False,
    ):
        """
        Args:
            max_sampled: the most tokens that a step samples.
            backend: prepared for as many rows as there can be. It may have arrays of its own.
            mixed_step_rows: of the largest mixed step.
            has_slots: whether there are stores beside the KV cache, in which each sequence has a slot.
        """
        n = self.max_rows = max(max_sampled, mixed_step_rows)
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
        if has_slots:
            layout |= {"slots": ((n,), np.int32), "row_order": ((n,), np.int64)}
        self._names = tuple(layout)
        own = backend.layout()
        self._has_own_arrays = bool(own)
        layout |= own
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

    def for_model(self, num_sampled: int, num_rows: int, kind: StepKind = PLAIN_STEP) -> ModelInputs:
        """The first rows of a step of this kind, of which num_sampled are sampled from."""
        rows = self.rows
        context = Context(
            slot_mapping=rows["slot_mapping"][:num_rows],
            context_lens=rows["context_lens"][:num_rows],
            block_tables=rows["block_tables"][:num_rows],
            attention=self._backend.arguments(rows, num_rows, kind.shares_reads),
            num_sampled=num_sampled if kind.is_mixed else None,
            slots=rows["slots"][:num_rows] if "slots" in rows else None,
            row_order=rows["row_order"][:num_rows] if kind.is_mixed and "slots" in rows else None,
        )
        positions, sampling = rows["positions"], (rows["temperatures"][:num_sampled], rows["seeds"][:num_sampled])
        return ModelInputs(self.input_ids[:num_rows], positions[:num_rows], context, *sampling, positions[:num_sampled])

    def pad(self, num_rows: int, shares_reads: bool = False) -> None:
        """Send a step of padding alone. The buffers' turns stay as they were: a capture may come between a real step's
        `write` and `send`, and the next `write` must not take that step's buffer."""
        last = self._last_buffer
        step = Step([], is_prefill=False, kind=StepKind(shares_reads=shares_reads))
        self.write(step, num_rows)
        self.send(step)
        self._last_buffer = last

    def write(self, step: Step, num_rows: int) -> None:
        """Give a decode or mixed step its arrays, padded to num_rows."""
        seqs: list[Any] = step.rows or step.seqs
        n, block_size = len(seqs), self.block_size
        step.buffer = self._last_buffer = (self._last_buffer + 1) % len(self._buffers)
        step.num_sampled, step.num_rows = n, num_rows
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
        lens = [seq.num_tokens for seq in seqs]
        tokens = [seq.last_token for seq in seqs]
        owners = np.zeros(0, np.int64)
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
        host["temperatures"][:n] = [seq.temperature for seq in seqs]
        host["seeds"][:n] = [seq.seed for seq in seqs]
        host["tokens"][:num_tokens] = tokens
        host["pending_rows"][:n] = [seq.pending_row for seq in seqs]
        host["pending_rows"][n:num_rows] = -1
        # Padding writes nothing and reads nothing.
        host["slot_mapping"][num_tokens:num_rows] = -1
        host["context_lens"][num_tokens:num_rows] = 0
        step.arrays = {name: host[name][:num_rows] for name in self._names}
        if "slots" in host:
            slots = host["slots"]
            slots[:n] = [seq.place.slot for seq in seqs]
            slots[n:num_tokens] = slots[owners]
            slots[num_tokens:num_rows] = -1
            if step.num_prefilled:  # The row of a prompt's last token is before those of the others.
                sequence_of_row = np.concatenate((np.arange(n), owners, np.arange(num_tokens, num_rows)))
                host["row_order"][:num_rows] = np.lexsort((host["positions"][:num_rows], sequence_of_row))
        if self._has_own_arrays:
            arrays = host | {"group_rows": _group_rows(step, num_rows)} if step.kind.shares_reads else host
            step.arrays |= self._backend.host_arrays(arrays, num_rows)

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


def _group_rows(step: Step, num_rows: int) -> np.ndarray:
    """Of a speculative step's rows, int32 [num_rows]: how many rows the sequence has whose own row this is. 0 for rows
    of proposed tokens and for padding."""
    num_rows_of = [1 if proposal is None else 1 + len(proposal.tokens) for proposal in step.proposals]
    groups = np.zeros(num_rows, np.int32)
    groups[np.cumsum([0, *num_rows_of])[:-1]] = num_rows_of
    return groups


def _append_prompts(seqs: list[Sequence], context_lens: list[int], tokens: list[int]) -> np.ndarray:
    """The last of seqs are the mixed step's prompts. Set the row of each to its last scheduled token, and append rows
    for its other scheduled tokens. Returns the index in seqs of each appended row's sequence."""
    owners, num_others = [], []
    for row in range(len(seqs) - 1, -1, -1):
        seq = seqs[row]
        if not seq.is_prefill:
            break
        start, last = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens - 1
        context_lens[row], tokens[row] = last + 1, seq.token_ids[last]
        context_lens.extend(range(start + 1, last + 1))
        tokens.extend(seq.token_ids[start:last])
        owners.append(row)
        num_others.append(last - start)
    return np.repeat(owners, num_others)


def write_prefill(step: Step, block_size: int) -> None:
    """Give a prefill its arrays: the flat batch of the sequences' scheduled tokens."""
    seqs = step.seqs
    cached = np.array([seq.num_cached_tokens for seq in seqs])
    num_new = np.array([seq.num_scheduled_tokens for seq in seqs])
    num_keys = cached + num_new
    # No Python loop over tokens or blocks, because the device waits for the first step of a batch.
    tokens = array("i")
    for seq in seqs:
        tokens += seq.token_ids[seq.num_cached_tokens : seq.num_cached_tokens + seq.num_scheduled_tokens]
    ends = np.cumsum(num_new)
    positions = np.arange(len(tokens)) + np.repeat(num_keys - ends, num_new)
    tables = padded_block_tables(seqs)
    blocks = positions // block_size  # index in the sequence's table
    # Of each token's table in the flat tables.
    first_blocks = np.repeat(np.arange(len(seqs)) * tables.shape[1], num_new)
    # block * block_size + positions % block_size
    slots = (tables.ravel().take(first_blocks + blocks) - blocks) * block_size + positions
    step.num_sampled, step.num_rows = len(seqs), len(tokens)
    step.max_seqlen_q, step.max_seqlen_k = int(num_new.max()), int(num_keys.max())
    step.reads_cache = bool(cached.any())
    step.arrays = {
        "input_ids": np.frombuffer(tokens, np.int32).astype(np.int64),
        "positions": positions,
        "seeds": np.array([seq.seed for seq in seqs]),
        "sample_positions": num_keys - 1,
        "last_tokens": ends - 1,
        "temperatures": np.array([seq.temperature for seq in seqs], np.float32),
        "slot_mapping": slots.astype(np.int32),
        "cu_seqlens_q": np.concatenate(([0], ends)).astype(np.int32),
        "cu_seqlens_k": np.concatenate(([0], np.cumsum(num_keys))).astype(np.int32),
        "block_tables": tables,
    }
    if seqs[0].place is not None:
        places = [seq.place.slots_of_step(seq.num_cached_tokens) for seq in seqs]
        step.arrays["slots"] = np.ascontiguousarray(np.array(places, np.int32).T)


def padded_block_tables(seqs: list[Sequence]) -> np.ndarray:
    """The sequences' block tables, int32 [num_seqs, max_blocks], right-padded with -1."""
    lens = np.array([len(seq.block_table) for seq in seqs])
    tables = np.full((len(seqs), lens.max()), -1, np.int32)
    in_table = np.arange(lens.max()) < lens[:, None]
    tables[in_table] = list(chain.from_iterable([seq.block_table for seq in seqs]))
    return tables


def send_prefill(step: Step, device: torch.device) -> ModelInputs:
    """A prefill's inputs, from its arrays."""
    if device.type == "cuda":
        tensors = send_arrays(step.arrays, device)
    else:
        tensors = {name: torch.from_numpy(values) for name, values in step.arrays.items()}
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
        slots=tensors.get("slots"),
    )
    names = ("temperatures", "seeds", "sample_positions")
    return ModelInputs(tensors["input_ids"], tensors["positions"], context, *map(tensors.__getitem__, names))
