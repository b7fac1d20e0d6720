"""What a job shows while it works: its speed and the time that is left, by tokens and not by finished lines."""

import io
import random
import re
import sys
import threading

import pytest
from job_files import prompts

from nanovllm.jobs import progress, run
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.progress import Generated, Progress


class Batch:
    """A job on an engine that gives each of its sequences a token in each step. A step takes a second."""

    def __init__(self, lengths, num_slots, limit):
        self.now, self.num_tokens, self.limit = 0.0, 0, limit
        self.waiting, self.running, self.num_slots = list(lengths), [], num_slots
        self.progress = Progress(len(lengths), 0, 0, is_wanted=False, clock=lambda: self.now)
        self.progress.begin(lambda: Generated(self.num_tokens, len(self.running)))
        self.line = LineFormat({"max_tokens": limit}).read({"prompt": [1]}, 0)

    @property
    def num_left(self):
        """Tokens, which nobody knows before the end."""
        return sum(self.waiting) + sum(left for _, left in self.running)

    def steps(self, num):
        for _ in range(num):
            while self.waiting and len(self.running) < self.num_slots:
                length = self.waiting.pop(0)
                self.running.append((length, length))
                self.progress.hand_out(self.line)
            self.now += 1
            self.num_tokens += len(self.running)
            self.running = [(length, left - 1) for length, left in self.running]
            for length, left in self.running:
                if not left:
                    self.progress.add(length, is_failed=False)
            self.running = [each for each in self.running if each[1]]
            self.progress.describe()

    @property
    def seconds_left(self):
        number, unit = re.search(r"([\d.]+) (s|min|h) left", self.progress.describe()).groups()
        return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


def test_few_finished_lines_do_not_mislead():
    """Most lines are near their end when the first are finished."""
    batch = Batch([480] * 38 + [512] * 362, num_slots=400, limit=512)
    batch.steps(500)
    assert batch.progress.describe() == "38 of 400 lines, 0 errors, 362 tok/s, at most 12 s left"
    batch.steps(11)
    assert batch.progress.describe() == "38 of 400 lines, 0 errors, 362 tok/s, at most 1 s left"
    batch.steps(1)
    assert batch.progress.describe().startswith("400 of 400 lines, 0 errors")
    assert "left" not in batch.progress.describe()


def test_before_any_answer_the_limit_is_the_bound():
    batch = Batch([300] * 100, num_slots=10, limit=400)
    assert batch.progress.describe() == "0 of 100 lines, 0 errors, 0 tok/s"
    batch.steps(100)
    assert batch.progress.describe() == "0 of 100 lines, 0 errors, 10 tok/s, at most 65 min left"
    batch.steps(201)
    assert batch.progress.describe() == "10 of 100 lines, 0 errors, 10 tok/s, 45 min left"


@pytest.mark.parametrize("longest", [30, 1000])
def test_the_time_left_is_near_the_truth(longest):
    """With answers of all lengths, of which the short ones finish first."""
    rng = random.Random(0)
    lengths = [min(400, 1 + int(rng.expovariate(8 / longest))) for _ in range(3000)]
    batch = Batch(lengths, num_slots=100, limit=1000)
    batch.steps(longest // 3)
    while len(batch.waiting) > 100:
        assert batch.seconds_left == pytest.approx(batch.num_left / 100, rel=0.15, abs=60)
        batch.steps(20)


def test_one_early_answer_does_not_mislead():
    """Most of those under way have just begun."""
    batch = Batch([4] + [200] * 399, num_slots=10, limit=200)
    batch.steps(4)
    batch.num_slots = 250
    batch.steps(1)
    assert batch.progress.describe().startswith("1 of 400 lines, 0 errors, 70 tok/s, at most ")
    assert batch.seconds_left > 0.5 * batch.num_left / 250


def test_the_first_answers_are_the_shortest():
    batch = Batch([60 + i % 200 for i in range(400)], num_slots=128, limit=259)
    batch.steps(60)
    while batch.num_left > 20_000:
        assert batch.seconds_left > 0.5 * batch.num_left / 128
        batch.steps(10)


def test_the_speed_is_that_of_the_last_seconds():
    batch = Batch([1000] * 20, num_slots=2, limit=1000)
    batch.steps(50)
    batch.num_slots = 8
    batch.steps(11)
    assert ", 8 tok/s" in batch.progress.describe()
    batch.now += 60
    assert ", 2 tok/s" in batch.progress.describe(), "of the whole call, because none came lately"


def test_failed_lines_make_the_rest_shorter():
    batch = Batch([100] * 400, num_slots=50, limit=100)
    for _ in range(200):
        batch.waiting.pop()
        batch.progress.add(0, is_failed=True)
    batch.steps(101)
    assert batch.progress.describe().startswith("250 of 400 lines, 200 errors, ")
    assert 120 <= batch.seconds_left <= 180, "of five lines one is answered, and 50 are under way"


class Terminal(io.StringIO):
    def __init__(self):
        super().__init__()
        self.has_run = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        if "[00:09" in text:
            self.has_run.set()
        return super().write(text)


def test_the_clock_never_freezes(monkeypatch):
    """Although no line is finished."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, "81")  # tqdm leaves one free.
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.001)
    now = [0.0]

    def clock():
        now[0] += 0.1
        return now[0]

    with Progress(4000, 0, 0, is_wanted=True, clock=clock) as shown:
        shown.hand_out(LineFormat({"max_tokens": 50}).read({"prompt": [1]}, 0))
        shown.begin(lambda: Generated(int(now[0] * 10_000), 1))
        assert terminal.has_run.wait(30)
    assert re.search(r"Answering: +\d+%\|.*\| 0/4000 \[00:09, 10000 tok/s, at most \d+ s left\]", terminal.getvalue())
    assert max(map(len, re.split(r"[\r\n]", terminal.getvalue()))) <= 80


@pytest.fixture
def shown(monkeypatch):
    """The Progress of a job, once it has ended."""
    seen = []

    class Seen(Progress):
        def __exit__(self, *exc_info):
            super().__exit__(*exc_info)
            seen.append(self)

    monkeypatch.setattr(run, "Progress", Seen)
    return seen


def test_a_job_counts_the_tokens_of_all_samples(job, shown):
    rows = [*prompts(5), "{", {"prompt": "a block", "n": 3, "temperature": 1}]
    summary = job(rows, ignore_eos=True)
    assert shown[0].describe().startswith("7 of 7 lines, 1 errors, ")
    assert shown[0]._answers.num_tokens == summary.num_completion_tokens == 8 * 8
    assert shown[0]._read().num_tokens - shown[0]._first == 8 * 8
