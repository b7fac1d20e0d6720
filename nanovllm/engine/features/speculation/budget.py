"""How many tokens a step proposes: as many as make it the fastest way to the next tokens."""

from bisect import bisect_left
from itertools import chain
from typing import NamedTuple

import numpy as np

from nanovllm.engine.features.speculation.suffix_index import MAX_MATCH, Proposal

# A step with proposals must promise this many times a plain step's tokens a second: its promise is only an estimate.
_MIN_GAIN = 1.05
_FORGET = 0.9  # weight of what a sequence has accepted before, after each step
_PRIOR_TRIES = 4.0  # proposals of its own after which a sequence counts as much as all others
_NEW = 0.1  # weight of the newest duration of a step


class StepTimes(NamedTuple):
    """How long the device takes for decode steps of few keys, measured at the engine's start."""

    rows: list[int]  # increasing; a step runs at the next of these sizes
    seconds: list[float]


class Record:
    """How many of the tokens that were proposed for one sequence it has accepted, the newest counting most.

    Attributes:
        guess: the number of its tokens at some time, and what was likely to follow, which no step has tried.
    """

    def __init__(self) -> None:
        self.tried = self.accepted = 0.0
        self.guess: tuple[int, Proposal] | None = None

    def add(self, tried: int, accepted: int) -> None:
        self.tried = self.tried * _FORGET + tried
        self.accepted = self.accepted * _FORGET + accepted


class Acceptance:
    """How likely a proposed token is the next one, learned from all sequences: from how many tokens before it have
    occurred before, and whether what followed there agrees."""

    def __init__(self) -> None:
        # As if each length had been tried before, with chances that rise with it.
        chances = [0.5 + 0.4 * match / MAX_MATCH for match in range(MAX_MATCH + 1)]
        self._accepted = [[4 * chance for chance in chances] for _ in range(3)]
        self._tried = [[4.0 for _ in chances] for _ in range(3)]

    def chances(self, proposal: Proposal, record: Record) -> list[float]:
        """Of each proposed token, that it and all before it are accepted."""
        accepted, tried = self._accepted[proposal.agreement], self._tried[proposal.agreement]
        own_accepted, own_tried = record.accepted, record.tried + _PRIOR_TRIES
        chance, found = 1.0, []
        for i in range(len(proposal.tokens)):
            match = min(proposal.match + i, MAX_MATCH)
            chance *= (own_accepted + _PRIOR_TRIES * accepted[match] / tried[match]) / own_tried
            found.append(chance)
        return found

    def learn(self, proposal: Proposal, record: Record, num_accepted: int, num_tried: int) -> None:
        """The first num_accepted tokens were right, and of num_tried it is known."""
        for i in range(num_tried):
            match = min(proposal.match + i, MAX_MATCH)
            self._tried[proposal.agreement][match] += 1
            self._accepted[proposal.agreement][match] += i < num_accepted
        record.add(num_tried, num_accepted)


class Pace:
    """How long steps take: what was measured at the start, and what the host and long contexts add to it, which is
    learned from the steps."""

    def __init__(self, times: StepTimes):
        self._times = times
        self._added = {False: 0.0, True: 2e-4}  # is it speculative? -> seconds

    def learn(self, num_rows: int, is_speculative: bool, seconds: float) -> None:
        """A step of so many rows took so long, up to the next one."""
        added = seconds - self._measured(num_rows)
        known = self._added[is_speculative]
        added = min(added, 4 * known + 1e-3)  # A pause says nothing of other steps.
        self._added[is_speculative] += _NEW * (max(added, 0.0) - known)

    def seconds(self, num_rows: int, is_speculative: bool) -> float:
        return self._measured(num_rows) + self._added[is_speculative]

    def sizes(self, num_rows: int) -> list[int]:
        """Numbers of rows from num_rows on that steps are run with."""
        return self._times.rows[bisect_left(self._times.rows, num_rows) :]

    def _measured(self, num_rows: int) -> float:
        rows, seconds = self._times
        i = bisect_left(rows, num_rows)
        return seconds[i] if i < len(rows) else seconds[-1] * num_rows / rows[-1]


def choose_counts(chances: list[list[float]], num_seqs: int, pace: Pace) -> list[int]:
    """How many of each sequence's proposed tokens a step should try: the likeliest of all, as many as give the most
    tokens a second. All zero if no number pays.

    Args:
        chances: of some sequences, as `Acceptance.chances` returns them.
        num_seqs: of the step, each of which gets a token anyway.
    """
    flat = np.array([*chain.from_iterable(chances)])
    if not len(flat):
        return [0] * len(chances)
    # Of equal chances the first one: a sequence's earlier tokens are tried before its later ones.
    likeliest = np.argsort(-flat, kind="stable")
    gains = np.append(0.0, flat[likeliest].cumsum())
    best, most = _MIN_GAIN * num_seqs / pace.seconds(num_seqs, False), 0
    for size in pace.sizes(num_seqs + 1):
        tried = min(size - num_seqs, len(flat))
        speed = (num_seqs + gains[tried]) / pace.seconds(size, True)
        if speed > best:
            best, most = speed, tried
        if tried == len(flat):
            break
    owners = np.repeat(np.arange(len(chances)), [len(each) for each in chances])
    return np.bincount(owners[likeliest[:most]], minlength=len(chances)).tolist()
