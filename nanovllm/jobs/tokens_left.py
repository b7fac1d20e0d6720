"""TokensLeft: how many tokens a job will still generate, told from the answers so far."""

from typing import NamedTuple

import numpy as np


class Left(NamedTuple):
    num_tokens: float
    is_most: bool  # a bound: no answer is finished that is as long as those under way


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
        at_risk = counts[::-1].cumsum()[::-1] + num_begun * (np.arange(len(counts)) <= reached)
        longer = np.cumprod(1 - counts / at_risk)  # by a length: the share of answers that is longer
        # Of these nothing is known but the limit.
        beyond = float(longer[-1]) if len(longer) else 1.0
        rest = max(0, limit - len(longer))
        each = float(longer.sum()) + beyond * rest
        if reached < len(longer) and longer[reached] > 0:
            each_begun = (float(longer[reached:].sum()) + beyond * rest) / float(longer[reached])
        else:
            each_begun = float(max(1, limit - reached))
        is_most = beyond > 0 and num_begun + num_waiting > 0
        return Left(num_begun * each_begun + num_waiting * each, is_most)
