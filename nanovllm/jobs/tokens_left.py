"""TokensLeft: how many tokens a job will still generate, told from the answers so far."""

from typing import NamedTuple

import numpy as np

_MAX_UNKNOWN = 0.1  # An estimate of which a larger share comes from the limit is a bound.


class Left(NamedTuple):
    num_tokens: float
    is_most: bool  # a bound: too few of the finished answers are as long as those under way


class TokensLeft:
    """Estimates from the lengths of answers, in tokens.

    Short answers finish first, so their mean would be too low at the beginning. The estimate is that of Kaplan and
    Meier (1958), which also counts what answers under way have reached.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(64, np.int64)  # of finished answers, by their lengths
        self._longest = -1
        self.num_finished = 0
        self.num_tokens = 0  # of finished answers

    def add(self, length: int) -> None:
        """An answer is finished. One that has failed counts with the tokens that were generated for it."""
        if length >= len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(length, np.int64)])
        self._counts[length] += 1
        self._longest = max(self._longest, length)
        self.num_finished += 1
        self.num_tokens += length

    def estimate(self, num_begun: float, num_tokens_begun: float, num_waiting: float, limit: int) -> Left:
        """What is left of answers under way and of those that have not begun.

        Args:
            num_begun, num_tokens_begun: answers under way, and the tokens that they have together.
            limit: of an answer's tokens.
        """
        reached = int(num_tokens_begun / num_begun) if num_begun else 0
        counts = self._counts[: self._longest + 1]
        # Only the mean of those under way is known. They count as if they were spread evenly from 0 to twice that. As
        # long as few are finished, some of the others have come as far as these.
        farthest = max(2 * reached, self._longest) if self.num_finished < num_begun else 2 * reached
        under_way = num_begun * np.clip(1 - np.arange(len(counts)) / (farthest + 1), 0, 1)
        longer = np.cumprod(1 - counts / (counts[::-1].cumsum()[::-1] + under_way))  # the share longer than a length
        beyond = float(longer[-1]) if len(longer) else 1.0  # the share of which nothing is known but the limit
        of_limit = beyond * max(0, limit - len(longer))
        known, unknown = num_waiting * float(longer.sum()), num_waiting * of_limit
        if reached < len(longer) and longer[reached] > 0:
            known += num_begun * float(longer[reached:].sum() / longer[reached])
            unknown += num_begun * of_limit / float(longer[reached])
        else:
            unknown += num_begun * max(1, limit - reached)
        return Left(known + unknown, unknown > _MAX_UNKNOWN * (known + unknown))
