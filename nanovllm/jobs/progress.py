"""How far a job is: a bar in a terminal, and elsewhere a line every half minute."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tqdm import tqdm
from typing_extensions import Self

from nanovllm import LLM
from nanovllm.jobs.arguments import line_bar
from nanovllm.jobs.time_and_price import time_in_words
from nanovllm.jobs.tokens_left import Left, TokensLeft

SECONDS_BETWEEN_LINES = 30.0
_REDRAW_SECONDS = 0.5
_RATE_SECONDS = 10.0  # The speed is that of this time.


class Generated(NamedTuple):
    """An engine's counters, or those of several engines together."""

    num_tokens: int = 0  # so far
    num_running: int = 0  # sequences now


def generated(llm: LLM, counter: str) -> Generated:
    """counter: a task's."""
    stats = llm.stats()
    return Generated(stats[counter], stats["running"])  # type: ignore[literal-required]


class Progress:
    """Counts lines, errors and tokens, and shows them on standard error. A context manager.

    A thread draws. The thread of the engine only counts.

    Attributes:
        has_begun: whether an engine has started.
    """

    def __init__(
        self,
        total: int,
        num_done: int,
        num_failed: int,
        is_wanted: bool,
        max_len: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """num_done: of an earlier call, num_failed of them without an answer. max_len: tokens of the longest sequence,
        if it is known."""
        self._total, self._before, self._num_failed = total, num_done, num_failed
        self._max_len, self._clock = max_len, clock
        self._answers = TokensLeft()
        self._num_begun = self._num_sequences = self._limit = 0
        self._bar = line_bar("Answering", is_wanted, total, num_done)
        self.has_begun = False
        self._start = clock()
        self._read: Callable[[], Generated] = Generated
        self._first = 0
        self._ticks = deque[tuple[float, int]]()  # times, and the tokens generated until then
        self._num_images = 0  # of lines that have an outcome
        self._image_ticks = deque[tuple[float, int]]()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        if is_wanted and sys.stderr is not None:
            self._thread = threading.Thread(target=self._show, name="nanovllm-jobs-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def begin(self, read: Callable[[], Generated]) -> float:
        """Start the clock; returns its time. What an engine needs to start is not part of the speed.

        read: the counters of all engines. Called by a thread.
        """
        self._read, self._first = read, read().num_tokens
        self._start = self._clock()
        self.has_begun = True
        return self._start

    def __exit__(self, *exc_info: object) -> None:
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()
        if not self._bar.disable:
            self._ticks.clear()  # The last speed is that of all of the call.
            self._image_ticks.clear()
            self._draw()
        self._bar.close()

    # -- counting ------------------------------------------------------------------------------------------------------

    def hand_out(self, line: Any) -> None:
        """An engine gets this line, which is a Line or another task's."""
        self._num_begun += 1
        self._num_sequences += line.num_sequences
        self._limit = max(self._limit, line.most_tokens(self._max_len))

    def add(self, num_tokens: int, is_failed: bool, line: Any = None) -> None:
        """A line has an outcome. num_tokens: of all its samples. line: as in `hand_out`; None if no engine got it."""
        self._num_failed += is_failed
        self._num_images += 0 if is_failed else getattr(line, "num_images", 0)
        self._answers.add(num_tokens)

    # -- showing -------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        next_line = self._clock() + SECONDS_BETWEEN_LINES
        while not self._has_ended.wait(_REDRAW_SECONDS):
            if not self._bar.disable:
                self._draw()
            elif not sys.stderr.isatty() and self._clock() >= next_line:
                next_line += SECONDS_BETWEEN_LINES
                print(f"nanovllm: {self.describe()}", file=sys.stderr, flush=True)
            else:
                self._rate(self._read().num_tokens)

    def _draw(self) -> None:
        share, text = self._share_and_text()
        seconds = tqdm.format_interval(self._clock() - self._start)
        errors = f"{self._num_failed} errors, " if self._num_failed else ""
        done = f"{self._num_done}/{self._total} [{seconds}, {errors}{text}]"  # It must fit 80 columns.
        # The bar is that of the tokens: lines are many at once, and the first one may be finished near the end.
        self._bar.total, self._bar.n = 1.0, share
        self._bar.bar_format = "{l_bar}{bar}| " + done
        self._bar.refresh()

    def describe(self) -> str:
        """Such as "1,200 of 10,000 lines, 3 errors, 5120 tok/s, 4 min left"."""
        return f"{self._num_done:,} of {self._total:,} lines, {self._num_failed} errors, {self._share_and_text()[1]}"

    @property
    def num_generated(self) -> int:
        """Tokens since the clock has started."""
        return self._read().num_tokens - self._first

    @property
    def _num_done(self) -> int:
        return self._before + self._answers.num_finished

    def _share_and_text(self) -> tuple[float, str]:
        """How much of the job's tokens is generated, and the rest of the line."""
        done = self._num_done
        of_lines = done / self._total if self._total else 1.0
        if not self.has_begun:
            return of_lines, "the engine starts"
        num_tokens, num_running = self._read()
        rate = self._rate(num_tokens)
        text = f"{rate:.0f} tok/s{self._image_rate()}"
        left = self._left(num_tokens, num_running)
        if not rate or left is None:
            return of_lines, text
        text = f"{text}, {'at most ' if left.is_most else ''}{time_in_words(left.num_tokens / rate)} left"
        # Lines of an earlier call count as long as those of this one.
        here = (self._total - self._before) / self._total
        num_new = num_tokens - self._first
        return 1 - here + here * num_new / (num_new + left.num_tokens), text

    def _left(self, num_tokens: int, num_running: int) -> Left | None:
        """None if nothing can be told, or nothing is left."""
        num_left = self._total - self._num_done
        if not self._limit or num_left <= 0:
            return None
        num_begun = min(num_running * self._num_begun / self._num_sequences, num_left)
        in_progress = max(0, num_tokens - self._first - self._answers.num_tokens)
        return self._answers.estimate(num_begun, in_progress, num_left - num_begun, self._limit)

    def _image_rate(self) -> str:
        """Images a second of lines that were answered lately, in words; empty if none had any."""
        if not self._num_images:
            return ""
        now, ticks = self._clock(), self._image_ticks
        ticks.append((now, self._num_images))
        while len(ticks) > 1 and ticks[1][0] <= now - _RATE_SECONDS:
            ticks.popleft()
        since, before = ticks[0]
        if self._num_images == before:
            since, before = self._start, 0
        return f", {(self._num_images - before) / max(now - since, 1e-9):.1f} images/s"

    def _rate(self, num_tokens: int) -> float:
        """Tokens a second of the last seconds; if there were none, of the whole call."""
        now = self._clock()
        self._ticks.append((now, num_tokens))
        while len(self._ticks) > 1 and self._ticks[1][0] <= now - _RATE_SECONDS:
            self._ticks.popleft()
        since, before = self._ticks[0]
        if since <= self._start or num_tokens <= before:
            since, before = self._start, self._first
        return max(0, num_tokens - before) / (now - since) if now > since else 0.0
