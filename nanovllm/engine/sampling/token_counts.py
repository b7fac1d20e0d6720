"""TokenCounts: which tokens each penalized request holds, kept on the device from step to step."""

import torch

from nanovllm.layers.penalties import IN_PROMPT

_FEWEST_ROWS = 8


class TokenCounts:
    """The states that `layers.penalties.apply_penalties` reads, a row for each sequence of a step.

    A sequence keeps its row from step to step as long as no other one needs it, and where it was lost it is written
    anew from the host's tokens. So nothing has to say when a sequence ends, and there are never more rows than a
    step has sequences.

    Attributes:
        state: int32 [rows, vocab_size]; another tensor after `assign` has made room.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device):
        self.state = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._max_rows = max_rows
        self._free: list[int] = []
        self._rows: dict[int, tuple[int, int]] = {}  # owner -> (row, tokens in it), least recently used first

    def assign(self, lengths: dict[int, int]) -> tuple[list[int], list[bool]]:
        """Give each owner of a step a row, in order, and count its newest token as being in it.

        Args:
            lengths: {owner: how many tokens it holds}, max_rows of them at most.

        Returns:
            The rows, and whether each holds all of the owner's tokens but the newest: then `advance` brings it up
            to date, and else `write`.
        """
        known = {owner: self._rows.pop(owner) for owner in lengths if owner in self._rows}
        self._make_room(len(lengths), len(lengths) - len(known))
        rows, is_current = [], []
        for owner, length in lengths.items():
            row, num_counted = known[owner] if owner in known else (self._free.pop(), -1)
            rows.append(row)
            is_current.append(num_counted == length - 1)
            self._rows[owner] = row, length
        return rows, is_current

    def _make_room(self, num_owners: int, num_new: int) -> None:
        """Have num_new rows free: by growth where the step has more owners than there are rows, and else from those
        who are not in it."""
        size, vocab_size = self.state.shape
        if num_owners > size:
            grown = min(self._max_rows, max(_FEWEST_ROWS, 1 << (num_owners - 1).bit_length()))
            state = self.state.new_zeros(grown, vocab_size)
            state[:size] = self.state
            self.state = state
            self._free += range(size, grown)
        while len(self._free) < num_new:
            row, _ = self._rows.pop(next(iter(self._rows)))
            self._free.append(row)

    def write(self, rows: torch.Tensor, prompt: torch.Tensor, completion: torch.Tensor) -> None:
        """Fill rows anew. prompt, completion: int64, row * vocab_size + token for each token of theirs."""
        self.state.index_fill_(0, rows, 0)
        state = self.state.view(-1)
        state.index_fill_(0, prompt, IN_PROMPT)
        state.index_add_(0, completion, torch.ones_like(completion, dtype=torch.int32))

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one token in each of these rows, which are distinct. Both int64 [owners]."""
        at = rows * self.state.shape[1] + tokens
        self.state.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
