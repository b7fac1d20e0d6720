"""TokenCounts: the tokens of each penalized request, counted on the device from step to step."""

import torch

from nanovllm.layers.penalties import IN_PROMPT

_FEWEST_ROWS = 8


class TokenCounts:
    """The state for `layers.penalties.apply_penalties`: int32 [rows, vocab_size], a row for each penalized sequence.

    A sequence keeps its row from step to step until another one needs it. A lost row is written anew from the host's
    tokens. So nobody needs to say when a sequence ends, and there are never more rows than a step has sequences.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device):
        self.state = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._max_rows = max_rows
        self._free: list[int] = []
        self._rows: dict[int, tuple[int, int]] = {}  # owner -> (row, tokens in it), least recently used first

    def assign(self, lengths: dict[int, int]) -> tuple[list[int], list[bool]]:
        """Give each owner of a step a row, in order, and count its newest token as being in it. lengths: {owner: its
        number of tokens}. Returns the rows, and for each whether the newest token is all that it lacks: then call
        `advance`, else `write`."""
        known = {owner: self._rows.pop(owner) for owner in lengths if owner in self._rows}
        size, vocab_size = self.state.shape
        if len(lengths) > size:
            grown = min(self._max_rows, max(_FEWEST_ROWS, 1 << (len(lengths) - 1).bit_length()))
            self.state = torch.cat((self.state, self.state.new_zeros(grown - size, vocab_size)))
            self._free += range(size, grown)
        while len(self._free) < len(lengths) - len(known):
            row, _ = self._rows.pop(next(iter(self._rows)))
            self._free.append(row)
        rows, is_current = [], []
        for owner, length in lengths.items():
            row, num_counted = known[owner] if owner in known else (self._free.pop(), -1)
            rows.append(row)
            is_current.append(num_counted == length - 1)
            self._rows[owner] = row, length
        return rows, is_current

    def write(self, rows: torch.Tensor, prompt: torch.Tensor, completion: torch.Tensor) -> None:
        """Write rows anew. prompt, completion: int64, row * vocab_size + token for each of their tokens."""
        self.state.index_fill_(0, rows, 0)
        state = self.state.view(-1)
        state.index_fill_(0, prompt, IN_PROMPT)
        state.index_add_(0, completion, torch.ones_like(completion, dtype=torch.int32))

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one token in each of these distinct rows. Both int64 [owners]."""
        at = rows * self.state.shape[1] + tokens
        self.state.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
