"""Run all tests that need a GPU, and print the row for the table of CONTRIBUTING.md.

    python scripts/gpu_tests.py                 all of them
    python scripts/gpu_tests.py --kernels       and what tests of kernels check with and without a GPU, with one
    python scripts/gpu_tests.py --dry-run       show the commands
    python scripts/gpu_tests.py -- -k quack     more arguments of pytest

They run in groups, one after the other. Most run side by side in several processes, because they spend their time with
compiling and starting engines. Tests marked `two_gpus` follow where there are two. Tests marked `alone` measure the
memory of a whole device, or take most of it, so they run last, in one process.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Asked in a process of its own: this one shall take no memory of the device.
_ASK = (
    "import torch; num = torch.cuda.device_count(); "
    "print(num, torch.cuda.mem_get_info()[0] >> 30 if num else 0, torch.cuda.get_device_name() if num else '')"
)
_GIB_OF_PROCESS = 8  # A context, an engine, and now and then a cache beyond two billion elements.
_MAX_PROCESSES = 12
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
_SUMMARY = re.compile(r"^(=+ )?\d+ \w+.* in [\d.]+s")
_PASSED, _FAILED, _NONE_CHOSEN = 0, 1, 5  # pytest's exit codes


class Machine(NamedTuple):
    """What the tests run on."""

    card: str
    num_gpus: int
    free_gib: int  # of a GPU's memory
    num_cores: int

    @property
    def num_processes(self) -> int:
        """Of tests that run side by side on one GPU. One process keeps two cores busy while kernels compile."""
        return max(1, min(self.num_cores // 2, self.free_gib // _GIB_OF_PROCESS, _MAX_PROCESSES))


class Group(NamedTuple):
    """Tests that one pytest runs."""

    name: str
    marks: str
    num_processes: int

    def command(self, more: Sequence[str] = ()) -> list[str]:
        processes = 0 if self.num_processes == 1 else self.num_processes
        # `-p no:cacheprovider`: the tree may be another user's.
        options = ["-q", "-p", "no:cacheprovider", f"-n{processes}", "-m", self.marks, "--durations=5"]
        return [sys.executable, "-m", "pytest", *options, *more]


class Result(NamedTuple):
    """What became of tests."""

    passed: int = 0
    failed: int = 0  # also those that could not begin
    skipped: int = 0


def find_machine() -> Machine | None:
    """None without a GPU."""
    said = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True).stdout
    num_gpus, free_gib, card = said.splitlines()[-1].split(" ", 2)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(card, int(num_gpus), int(free_gib), num_cores) if int(num_gpus) else None


def groups(machine: Machine, kernels: bool, num_processes: int | None = None) -> list[Group]:
    """kernels: also tests of kernels that need no GPU. num_processes: None: as many as the machine has room for."""
    of_gpu, num = "(gpu or kernel)" if kernels else "gpu", num_processes or machine.num_processes
    found = [Group("side by side", f"{of_gpu} and not alone and not two_gpus", num)]
    if machine.num_gpus > 1:
        found.append(Group("on two GPUs", "two_gpus and not alone", max(1, num // 2)))  # Each starts two processes.
    return [*found, Group("alone", "gpu and alone", 1)]


def read_summary(output: str, code: int) -> Result:
    """code: the exit code of pytest, of which a group without a summary has failed."""
    lines = [line for line in output.splitlines() if _SUMMARY.match(line)]
    counts: Counter[str] = Counter()
    for number, word in _COUNT.findall(lines[-1] if lines else ""):
        counts[word.rstrip("s") if word.startswith("error") else word] += int(number)
    failed = counts["failed"] + counts["error"]
    if code not in (_PASSED, _NONE_CHOSEN) and not failed:
        failed = 1
    return Result(counts["passed"], failed, counts["skipped"])


def run_group(command: Sequence[str]) -> Result:
    """Show what pytest says, and read its last line."""
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return read_summary("".join(lines), process.returncode)


def find_commit() -> str:
    """The commit, with a plus if files have changed since. "unknown" in a copy without history."""
    try:
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **options).stdout.strip()
        return commit + "+" * bool(subprocess.run(["git", "status", "--porcelain"], **options).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def row(machine: Machine, commit: str, result: Result, seconds: float) -> str:
    """Of the table of CONTRIBUTING.md."""
    card = machine.card + (f" x{machine.num_gpus}" if machine.num_gpus > 1 else "")
    cells = [time.strftime("%Y-%m-%d"), card, commit, *map(str, result), f"{seconds:.0f} s"]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run all tests that need a GPU.")
    parser.add_argument("--kernels", action="store_true", help="also tests of kernels that run without a GPU too")
    parser.add_argument("--processes", type=int, metavar="N", help="side by side (what cores and memory allow)")
    parser.add_argument("--commit", help="the commit, if this is a copy without history")
    parser.add_argument("--dry-run", action="store_true", help="show the commands")
    parser.add_argument("more", nargs="*", metavar="ARGUMENT", help="of pytest, after --")
    options = parser.parse_args(arguments)
    machine = find_machine()
    if machine is None:
        print("gpu_tests: there is no GPU", file=sys.stderr)
        return 2
    start, total = time.monotonic(), Result()
    for group in groups(machine, options.kernels, options.processes):
        command = group.command(options.more)
        print(f"-- {group.name}: {shlex.join(command[1:])}", flush=True)
        if not options.dry_run:
            total = Result(*map(sum, zip(total, run_group(command), strict=True)))
    if options.dry_run:
        return 0
    print(row(machine, options.commit or find_commit(), total, time.monotonic() - start))
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main())
