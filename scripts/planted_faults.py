"""Plant faults in a copy of the repository, one at a time, and see whether the tests notice them.

    python scripts/planted_faults.py                         all faults
    python scripts/planted_faults.py NAME ...                some
    python scripts/planted_faults.py --sample 10 --seed 1    ten at random; --quick: of those that take a few seconds
    python scripts/planted_faults.py --list

The faults are in planted_faults.txt. Each changes a line or two of the package as a refactor could by mistake. Tests of
its subject must fail with it. If all of them pass, a test is missing.

A fault has three outcomes. It is noticed if a test fails. It survives if all tests pass. Anything else is an error of
the list: the text to replace is not in the file exactly once, tests are not found, or tests hang where the list does
not say so. Before faults are planted, the tests must pass without one.
"""

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".txt")
_WARM_PYTEST = Path(__file__).with_name("warm_pytest.py")

# What tests of the package read. Copied by name, because a checkout may hold large folders of its owner.
_COPIED = ("assets", "benchmarks", "docs", "examples", "nanovllm", "scripts", "tests", "pyproject.toml", "*.md", "*.py")
_NOT_COPIED = ("__pycache__", "*.pyc", ".*")

# The profile (tests/conftest.py): with random examples that are always the same.
_PYTEST = ("-x", "-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-profile=planted_faults")
# What tests import that a fault cannot change: two thirds of the time of most of them.
IMPORTED = (
    *("torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
    *("transformers.models.auto.tokenization_auto", "safetensors.torch", "tokenizers", "triton", "triton.language"),
    *("hypothesis", "huggingface_hub", "xxhash"),
)
_PASSED, _FAILED = 0, 1  # pytest's exit codes
_KEYS = ("file", "tests", "hangs", "slow")
_SUBJECT = re.compile(r"# -- (.+?) -+")

T = TypeVar("T")
R = TypeVar("R")


class FaultListError(ValueError):
    """The list does not fit the code; the message names the fault."""


@dataclass(frozen=True)
class Fault:
    """A change that tests must notice.

    Attributes:
        name: of the fault.
        file: what it changes, relative to the repository.
        old, new: the text that is replaced, and what replaces it.
        tests: pytest's targets that should notice it: files, or single tests.
        subject: the heading above it.
        hangs: whether tests notice it by waiting for ever.
        is_slow: whether that takes more than about ten seconds.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    subject: str = ""
    hangs: bool = False
    is_slow: bool = False

    def planted(self, root: Path) -> str:
        """The file's text with the fault. Raises FaultListError if the fault does not fit the file."""
        path = root / self.file
        if not path.is_file():
            raise FaultListError(f"{self.name}: there is no file {self.file}")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise FaultListError(f"{self.name}: must be in {self.file} once, but is there {count} times: {self.old!r}")
        return text.replace(self.old, self.new)

    def check(self, root: Path) -> None:
        """Raises FaultListError if the fault does not fit the file, or its tests are not there."""
        try:
            compile(self.planted(root), self.file, "exec")
        except SyntaxError as error:
            raise FaultListError(f"{self.name}: is no Python: {error}") from error
        for target in self.tests:
            file, *names = target.split("::")
            if not (root / file).is_file():
                raise FaultListError(f"{self.name}: there is no file {file}")
            text = (root / file).read_text(encoding="utf-8")
            for name in names:
                if not re.search(rf"\b(def|class) {re.escape(name.partition('[')[0])}\b", text):
                    raise FaultListError(f"{self.name}: {file} has no {name}")


def read_faults(path: Path) -> list[Fault]:
    """The faults of a list. Raises FaultListError for one that is not as planted_faults.txt says."""
    faults: dict[str, Fault] = {}
    for subject, name, lines in _sections(path):
        values: dict[str, str] = {}
        parts: dict[str, list[str]] = {"-": [], "+": []}
        for line in lines:
            if line[0] in parts:
                parts[line[0]].append(line[2:])
                continue
            key, _, value = line.partition("=")
            if key.strip() not in _KEYS:
                raise FaultListError(f"{name}: {line!r} must begin with '- ', '+ ', or {', '.join(_KEYS)} and '='")
            values[key.strip()] = value.strip()
        tests, old, new = tuple(values.get("tests", "").split()), *map("\n".join, parts.values())
        if name in faults:
            raise FaultListError(f"{name}: comes twice")
        if not ("file" in values and tests and old) or old == new:
            raise FaultListError(f"{name}: must have a file, tests, lines '- ', and other lines '+ ' or none")
        if not {values.get("hangs", "yes"), values.get("slow", "yes")} == {"yes"}:
            raise FaultListError(f"{name}: hangs and slow can only be yes")
        is_slow = "slow" in values or "hangs" in values
        faults[name] = Fault(name, values["file"], old, new, tests, subject, "hangs" in values, is_slow)
    return list(faults.values())


def _sections(path: Path) -> list[tuple[str, str, list[str]]]:
    """Each fault's subject, its name and its lines."""
    subject, found = "", list[tuple[str, str, list[str]]]()
    for line in path.read_text(encoding="utf-8").splitlines():
        if heading := _SUBJECT.fullmatch(line):
            subject = heading[1]
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            found.append((subject, line.strip("[] "), []))
        elif found:
            found[-1][2].append(line)
        else:
            raise FaultListError(f"{path.name}: {line!r} comes before the first [name]")
    return found


@dataclass(frozen=True)
class Outcome:
    """What tests did.

    Attributes:
        code: pytest's exit code; None if they were stopped after the timeout.
        output: theirs.
        seconds: how long they took.
    """

    code: int | None
    output: str
    seconds: float

    @property
    def failed_test(self) -> str:
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", self.output, re.MULTILINE)
        return found[1] if found else ""

    @property
    def explanation(self) -> str:
        """Why they neither passed nor failed."""
        if self.code is None:
            return "the tests hung"
        lines = self.output.strip().splitlines()
        return f"pytest ended with exit code {self.code}:\n    " + "\n    ".join(lines[-15:])


class Copy:
    """A copy of the repository, in which one fault at a time is planted, and a process that tests it (warm_pytest)."""

    def __init__(self, source: Path, root: Path):
        self.root = root
        root.mkdir()
        for path in [path for pattern in _COPIED for path in source.glob(pattern)]:
            if path.is_dir():
                shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
            else:
                shutil.copy2(path, root)
        # Bytecode that is compared with its source by content: a planted file can have the size and time of the other.
        package = [str(path) for path in (root / "nanovllm", root / "tests") if path.is_dir()]
        self._call("-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *package)
        where = "import importlib.util; print(importlib.util.find_spec('nanovllm').origin)"
        origin = self._call("-c", where).strip()
        if not Path(origin).is_relative_to(root.resolve()):
            raise RuntimeError(f"tests of the copy would import {origin}")
        self._session: int | None = None  # of the tests that run
        # Not as a file: its folder would be where tests look for modules first.
        command = [sys.executable, "-c", _WARM_PYTEST.read_text(encoding="utf-8"), *IMPORTED]
        options = {"cwd": root, "env": self._environment(), "start_new_session": True, "bufsize": 0}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)

    def _call(self, *arguments: str) -> str:
        options = {"cwd": self.root, "env": self._environment(), "text": True, "check": True}
        return subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, **options).stdout

    def _environment(self) -> dict[str, str]:
        # PYTHONPATH reaches the processes that tests start too.
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return own | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path, text = self.root / fault.file, fault.planted(self.root)
        before = path.read_bytes()
        path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            path.write_bytes(before)

    def test(self, targets: Iterable[str], timeout: float) -> Outcome:
        start, output = time.monotonic(), self.root.with_suffix(".out")
        arguments = [*_PYTEST, f"--basetemp={self.root.with_suffix('.tmp')}", *targets]
        self._process.stdin.write(json.dumps([str(output), arguments]).encode() + b"\n")
        self._session = self._answer()
        try:
            is_done = select.select([self._process.stdout], [], [], timeout)[0]
            if not is_done:
                self.stop()
            code = self._answer()
        finally:
            self._session = None
        text = output.read_text(encoding="utf-8", errors="replace")
        return Outcome(code if is_done else None, text, time.monotonic() - start)

    def _answer(self) -> int:
        line = self._process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise RuntimeError(f"the process that runs the tests has ended, with code {self._process.returncode}")
        return int(line)

    def stop(self) -> None:
        """Kill the tests that run."""
        if self._session is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._session, signal.SIGKILL)

    def close(self) -> None:
        self.stop()
        self._process.kill()
        self._process.communicate()


class Copies:
    """Copies of a repository, in which faults are planted side by side."""

    def __init__(self, root: Path, folder: Path, num_copies: int, timeout: float):
        self.timeout = timeout
        self._copies = [Copy(root, folder / f"copy-{i}") for i in range(num_copies)]
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for copy in self._copies:
            self._free.put(copy)
        self._is_stopped = threading.Event()

    def each(self, function: Callable[[Copy, T], R], items: Sequence[T]) -> Iterator[tuple[T, R]]:
        """(item, result) as they are ready, of calls in a copy each."""

        def call(item: T) -> tuple[T, R]:
            copy = self._free.get()
            try:
                if self._is_stopped.is_set():
                    raise KeyboardInterrupt
                return item, function(copy, item)
            finally:
                self._free.put(copy)

        with ThreadPoolExecutor(len(self._copies)) as pool:
            try:
                for future in as_completed([pool.submit(call, item) for item in items]):
                    yield future.result()
            except BaseException:
                self._is_stopped.set()
                for copy in self._copies:
                    copy.stop()
                raise

    def close(self) -> None:
        for copy in self._copies:
            copy.close()

    def check_unplanted(self, faults: Sequence[Fault]) -> None:
        """Print how long the tests take without a fault, a file at a time. Raises FaultListError if some fail."""
        of_files: dict[str, dict[str, None]] = {}
        for target in (target for fault in faults for target in fault.tests):
            of_files.setdefault(target.partition("::")[0], {})[target] = None
        targets = [(file,) if file in names else tuple(names) for file, names in of_files.items()]
        wrong = []
        for tests, outcome in self.each(lambda copy, tests: copy.test(tests, len(tests) * self.timeout), targets):
            is_right, file = outcome.code == _PASSED, tests[0].partition("::")[0]
            print(f"{outcome.seconds:5.1f} s  {'passed   ' if is_right else 'FAILED   '} {file}", flush=True)
            if not is_right:
                what = f"{outcome.failed_test} fails" if outcome.code == _FAILED else outcome.explanation
                wrong.append(f"{file}: {what}")
        if wrong:
            raise FaultListError("without a fault, tests must pass:\n" + "\n".join(wrong))

    def plant(self, faults: Sequence[Fault]) -> Iterator[tuple[Fault, Outcome]]:
        def plant(copy: Copy, fault: Fault) -> Outcome:
            with copy.planted(fault):
                return copy.test(fault.tests, self.timeout)

        return self.each(plant, faults)


def check_all(faults: Sequence[Fault], root: Path) -> None:
    """Raises FaultListError for all faults that do not fit the code."""
    wrong = []
    for fault in faults:
        try:
            fault.check(root)
        except FaultListError as error:
            wrong.append(str(error))
    if wrong:
        raise FaultListError("\n".join(wrong))


def run(faults: Sequence[Fault], root: Path, jobs: int, timeout: float, has_baseline: bool) -> bool:
    """Plant the faults, and print what comes of each. Returns whether all are noticed. Raises FaultListError."""
    check_all(faults, root)
    survived, wrong = [], []
    with (
        tempfile.TemporaryDirectory(prefix="planted-faults-") as folder,
        closing(Copies(root, Path(folder), min(jobs, len(faults)), timeout)) as copies,
    ):
        if has_baseline:
            print("without a fault:", flush=True)
            copies.check_unplanted(faults)
        print("with faults:", flush=True)
        for fault, outcome in copies.plant(faults):
            if outcome.code == _FAILED or (outcome.code is None and fault.hangs):
                verdict = f"noticed   {fault.name}  by {outcome.failed_test or 'a hang'}"
            elif outcome.code == _PASSED:
                verdict = f"SURVIVED  {fault.name}  ({' '.join(fault.tests)})"
                survived.append(fault.name)
            else:
                verdict = f"ERROR     {fault.name}: {outcome.explanation}"
                wrong.append(fault.name)
            print(f"{outcome.seconds:5.1f} s  {verdict}", flush=True)
    summary = [f"{len(faults) - len(survived) - len(wrong)} of {len(faults)} planted faults noticed"]
    summary += [f"{what}: {', '.join(names)}" for what, names in (("survived", survived), ("errors", wrong)) if names]
    print("; ".join(summary))
    return not survived and not wrong


def chosen(
    faults: Sequence[Fault], names: Sequence[str], sample: int | None, seed: str | None, is_quick: bool
) -> list[Fault]:
    """The faults of these names, or all; of them a sample. is_quick: leave out those that are slow. Raises
    FaultListError for an unknown name."""
    known = {fault.name: fault for fault in faults}
    if unknown := [name for name in names if name not in known]:
        raise FaultListError(f"there is no fault {', '.join(unknown)}; --list shows all")
    found = [known[name] for name in dict.fromkeys(names or known)]
    found = [fault for fault in found if not (is_quick and fault.is_slow)]
    if sample is None:
        return found
    seed = str(random.randrange(2**16)) if seed is None else seed
    print(f"a sample of {min(sample, len(found))} of {len(found)} faults, --seed {seed}", flush=True)
    return random.Random(seed).sample(found, min(sample, len(found)))


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, path: Path = FAULTS) -> int:
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the repository; tests must notice each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the faults to plant (all)")
    parser.add_argument("--list", action="store_true", help="show the faults, and plant none")
    parser.add_argument("--sample", type=_positive, metavar="N", help="plant N of them, chosen at random")
    parser.add_argument("--seed", metavar="S", help="of the choice: any text, such as a commit")
    parser.add_argument("--quick", action="store_true", help="leave out those whose tests take long")
    parser.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="copies that are tested side by side (1)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120, metavar="S", help="seconds for the tests of a fault (120)"
    )
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    options = parser.parse_args(arguments)
    try:
        faults = chosen(read_faults(path), options.names, options.sample, options.seed, options.quick)
        if options.list:
            for fault in faults:
                print(f"{fault.subject}: {fault.name}  {fault.file}  {' '.join(fault.tests)}")
            return 0
        return 0 if run(faults, root, options.jobs, options.timeout, not options.no_baseline) else 1
    except FaultListError as error:
        print(f"planted_faults: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
