"""What rank 0 tells the workers about a step: what they cannot know from the steps before it.

Both sides remember the same: the last decode step's batch, the sequences prefilled since, and of each its block table
and length. So a sequence is described once, when it is first computed; a chunk of a prompt brings its tokens and
nothing else; and a decode step of the same batch as the one before it, which is the usual one, brings the blocks that
were opened since. Everything else follows from two rules: a step advances each of its sequences by the tokens that it
computes plus the one that it samples, and a sequence's last token is what the step before sampled for it.

A sequence whose memory the scheduler took away, or that is in no batch any more, is forgotten on both sides. Whether
that is so is read off the sequences: an exception, Ctrl-C or an abort between two steps needs no message of its own.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.engine.sequence import PLACEHOLDER, Sequence


class PrefillMessage(NamedTuple):
    """seqs: for each sequence all of it, or (seq_id, num_scheduled_tokens, the chunk's tokens as int32 bytes).
    forgotten: seq_ids that will not be spoken of again."""

    seqs: list[Sequence | tuple[int, int, bytes]]
    forgotten: list[int]


class DecodeMessage(NamedTuple):
    """What sets the batch off from the last decode step's.

    removed: rows of that one that are left out.
    added: for each row behind those that stay, all of a sequence, or the seq_id of one that was prefilled since.
    new_blocks: (row, blocks) where a block table has grown.
    pending_rows: int32 bytes, one a row; None where each takes its token from the row that it had in the last step;
        empty where no token is pending.
    tokens: int32 bytes: the last tokens of the rows where none is pending.
    """

    removed: list[int]
    added: list[Sequence | int]
    new_blocks: list[tuple[int, list[int]]]
    pending_rows: bytes | None
    tokens: bytes


class _Known:
    """What the workers know of a sequence."""

    __slots__ = ("block_table", "num_blocks", "row", "seq", "step")

    def __init__(self, seq: Sequence):
        self.seq = seq
        # The list itself: a sequence whose blocks are taken away gets another one.
        self.block_table = seq.block_table
        self.num_blocks = len(seq.block_table)
        self.step = self.row = -1  # the last step that sampled for it, and its row there


class StepEncoder:
    """Rank 0's side."""

    def __init__(self):
        self._step = 0
        self._known: dict[int, _Known] = {}
        self._batch: list[_Known] = []  # of the last decode step

    def encode(self, seqs: list[Sequence], is_prefill: bool) -> PrefillMessage | DecodeMessage:
        """The message about a step that is going to be launched, each of them once and in order."""
        self._step += 1
        return self._prefill(seqs) if is_prefill else self._decode(seqs)

    def _prefill(self, seqs: list[Sequence]) -> PrefillMessage:
        forgotten = [
            seq_id
            for seq_id, known in self._known.items()
            if known.seq.is_finished or known.seq.block_table is not known.block_table
        ]
        for seq_id in forgotten:
            del self._known[seq_id]
        described = []
        for row, seq in enumerate(seqs):
            known = self._known.get(seq.seq_id)
            end = seq.num_cached_tokens + seq.num_scheduled_tokens
            if known is None:
                known = self._known[seq.seq_id] = _Known(seq)
                described.append(seq)
            else:
                chunk = seq.tokens[seq.num_cached_tokens : end].tobytes()
                described.append((seq.seq_id, seq.num_scheduled_tokens, chunk))
            if end == seq.num_tokens:
                known.step, known.row = self._step, row
        return PrefillMessage(described, forgotten)

    def _decode(self, seqs: list[Sequence]) -> DecodeMessage:
        removed, added = [], []
        batch = [self._known.get(seq.seq_id) for seq in seqs]
        if batch != self._batch:
            removed, added = self._change_batch(seqs, batch)
        new_blocks, tokens = [], []
        predicted, pending = [], []
        for row, (seq, known) in enumerate(zip(seqs, self._batch, strict=True)):
            table = seq.block_table
            if len(table) != known.num_blocks:
                new_blocks.append((row, table[known.num_blocks :]))
                known.num_blocks = len(table)
            predicted.append(known.row if known.step == self._step - 1 else -1)
            pending.append(seq.pending_row)
            if seq.pending_row < 0:
                tokens.append(seq.last_token)
            known.step, known.row = self._step, row
        rows = None
        if pending != predicted:
            rows = b"" if len(tokens) == len(seqs) else np.array(pending, np.int32).tobytes()
        return DecodeMessage(removed, added, new_blocks, rows, np.array(tokens, np.int32).tobytes())

    def _change_batch(self, seqs: list[Sequence], batch: list[_Known | None]) -> tuple[list[int], list[Sequence | int]]:
        wanted = set(batch)
        removed = [row for row, known in enumerate(self._batch) if known not in wanted]
        staying = [known for known in self._batch if known in wanted]
        if batch[: len(staying)] != staying:  # In another order: all of them again, by their ids.
            removed, staying = list(range(len(self._batch))), []
        added = []
        for row in range(len(staying), len(seqs)):
            if batch[row] is None:
                batch[row] = _Known(seqs[row])
                added.append(seqs[row])
            else:
                added.append(seqs[row].seq_id)
        self._batch = batch
        self._known = {known.seq.seq_id: known for known in batch}
        return removed, added


class StepDecoder:
    """A worker's side: makes sequences of the messages, as far as a model runner looks at them."""

    def __init__(self):
        self._seqs: dict[int, Sequence] = {}
        self._batch: list[Sequence] = []
        self._last_step: dict[int, int] = {}  # seq_id: row, of those for which the last step sampled

    def decode(self, message: PrefillMessage | DecodeMessage) -> tuple[list[Sequence], bool]:
        """(sequences, is_prefill) of the step. They are valid until the next call."""
        for seq_id in self._last_step:
            if seq_id in self._seqs:
                _advance(self._seqs[seq_id])
        is_prefill = isinstance(message, PrefillMessage)
        seqs = self._prefill(message) if is_prefill else self._decode(message)
        sampled = (row for row, seq in enumerate(seqs) if not is_prefill or _ends_prefill(seq))
        self._last_step = {seqs[row].seq_id: row for row in sampled}
        return seqs, is_prefill

    def _prefill(self, message: PrefillMessage) -> list[Sequence]:
        for seq_id in message.forgotten:
            del self._seqs[seq_id]
        seqs = []
        for item in message.seqs:
            if isinstance(item, Sequence):
                seq = self._seqs[item.seq_id] = item
            else:
                seq_id, num_tokens, chunk = item
                seq = self._seqs[seq_id]
                seq.num_cached_tokens += seq.num_scheduled_tokens
                seq.num_scheduled_tokens = num_tokens
                seq.set_scheduled_tokens(chunk)
            seqs.append(seq)
        return seqs

    def _decode(self, message: DecodeMessage) -> list[Sequence]:
        if message.removed or message.added:
            removed = set(message.removed)
            seqs = [seq for row, seq in enumerate(self._batch) if row not in removed]
            for item in message.added:
                if isinstance(item, Sequence):
                    self._last_step.pop(item.seq_id, None)
                seqs.append(item if isinstance(item, Sequence) else self._seqs[item])
            self._batch, self._seqs = seqs, {seq.seq_id: seq for seq in seqs}
        seqs = self._batch
        for row, blocks in message.new_blocks:
            seqs[row].block_table.extend(blocks)
        if message.pending_rows is None:
            pending = [self._last_step.get(seq.seq_id, -1) for seq in seqs]
        else:
            pending = np.frombuffer(message.pending_rows, np.int32).tolist() or [-1] * len(seqs)
        tokens = iter(np.frombuffer(message.tokens, np.int32).tolist())
        for seq, row in zip(seqs, pending, strict=True):
            seq.pending_row = row
            seq.last_token = PLACEHOLDER if row >= 0 else next(tokens)
        return list(seqs)


def _ends_prefill(seq: Sequence) -> bool:
    return seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens


def _advance(seq: Sequence) -> None:
    """Past a step that sampled for it."""
    seq.num_cached_tokens = seq.num_tokens
    seq.num_tokens += 1
    seq.num_scheduled_tokens = 1
    if seq.is_prefilling:
        seq.is_prefilling = False
        seq.tokens = seq.tokens[:0]
