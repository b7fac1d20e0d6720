"""How fast is every model of the documentation's tables, with `pip install .` and with the extra packages?

    python benchmarks/measure_speed.py out --plain venv/bin/python --extra venv-extra/bin/python --gpus 0 1
    python benchmarks/measure_speed.py out --plain venv/bin/python --models Qwen3-8B gpt-oss-20b --minutes 20
    python benchmarks/measure_speed.py out --put
    python benchmarks/speed_tables.py
    python benchmarks/plot_speed.py

The first commands run bench.py for one model after the other on each GPU, with both installs on the same GPU, and write
a report of each into the folder `out`. What is there already is not measured again, so the same command goes on after
an interruption; what failed is named at the end, with the log beside its report. `--put` puts the reports into
docs/data/speed.json, speed_tables.py writes the tables, and plot_speed.py draws README's picture.

All rows of a table should be of one commit, one kind of card, and a host that does nothing else. With both installs
the workloads alone take 50 minutes on one H200, and each start of bench.py some more.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from speed_data import FORMATS, INSTALLS, ROOT, Setup, put, reduced

_CEILINGS = "bandwidth", "flops", "fp8_flops"
_EXTRA_PACKAGES = ["flash-attn-4", "quack-kernels"]
_INTERRUPTED = -signal.SIGINT, 130  # statuses of bench.py after Ctrl-C


class Block(NamedTuple):
    """The rows of one setup, by one start of bench.py."""

    setup: Setup
    workloads: Sequence[str]
    passes: int = 1

    @property
    def name(self) -> str:
        """Of its files."""
        given = [self.setup.model, f"{self.setup.gpus}-gpus" if self.setup.gpus > 1 else None]
        given += [f"{name}-{value}" for name in FORMATS if (value := getattr(self.setup, name)) is not None]
        return "_".join(filter(None, given))


_USUAL = "bench", "single", "prefill"
_SMALL = "bench", "single", "batch16", "prefill"
# In the order of the tables.
BLOCKS = (
    Block(Setup("Qwen3-0.6B"), ("bench", "many", "single", "batch16", "prefix", "prefill", "long"), passes=3),
    Block(Setup("Qwen3-0.6B", kv_cache_dtype="fp8"), ("bench", "single"), passes=3),
    Block(Setup("Qwen3-1.7B"), _SMALL),
    Block(Setup("Qwen3-4B"), _SMALL),
    Block(Setup("Qwen3-8B"), (*_SMALL, "long")),
    Block(Setup("Qwen3-8B", quantization="fp8"), _USUAL),
    Block(Setup("Qwen3-8B", quantization="fp8", kv_cache_dtype="fp8"), (*_USUAL, "long", "throughput")),
    Block(Setup("Qwen3-8B", quantization="int4"), _SMALL),
    Block(Setup("Qwen3-8B", gpus=2), _SMALL),
    Block(Setup("Qwen3-30B-A3B"), ("bench", "many", "single", "prefill")),
    Block(Setup("Qwen3-30B-A3B", quantization="fp8", kv_cache_dtype="fp8"), ("bench", "single")),
    Block(Setup("Qwen3.5-9B"), (*_SMALL, "long", "throughput")),
    Block(Setup("Qwen3.5-9B", state_dtype="bfloat16"), ("bench",)),
    Block(Setup("Qwen3.5-35B-A3B", quantization="fp8"), (*_USUAL, "throughput")),
    Block(Setup("gpt-oss-20b"), ("bench", "many", "single", "prefill", "throughput")),
    Block(Setup("gpt-oss-20b", kv_cache_dtype="fp8"), ("bench",)),
    Block(Setup("gemma-4-26B-A4B"), _USUAL),
    Block(Setup("gemma-4-26B-A4B", kv_cache_dtype="fp8"), ("bench", "single")),
    Block(Setup("gemma-4-12B"), _USUAL),
    Block(Setup("gemma-4-31B"), _USUAL),
    Block(Setup("gemma-4-31B", kv_cache_dtype="fp8"), ("bench",)),
    Block(Setup("gemma-3-4b"), _USUAL),
    Block(Setup("Llama-3.1-8B"), _USUAL),
    Block(Setup("Llama-3.2-1B"), _USUAL),
    Block(Setup("Qwen2.5-7B"), _USUAL),
    Block(Setup("Mistral-7B-v0.3"), _USUAL),
    Block(Setup("Ministral-3-3B-Base-2512"), _USUAL),
    Block(Setup("Ministral-3-8B-Base-2512"), _USUAL),
    Block(Setup("Ministral-3-14B-Base-2512"), _USUAL),
    Block(Setup("Olmo-3-1025-7B"), _USUAL),
    Block(Setup("Olmo-3-1125-32B"), _USUAL),
    Block(Setup("granite-3.3-2b-instruct"), _USUAL),
)


@dataclass
class Run:
    """How blocks are measured.

    Attributes:
        folder: of the reports.
        pythons: the interpreter of each install.
        ceilings: bench.py's options of the machine's rates.
        commit: that is measured.
        end: when nothing is started any more, as time.monotonic counts.
    """

    folder: Path
    pythons: dict[str, str]
    ceilings: list[str]
    commit: str
    end: float

    def measure(self, block: Block, gpus: Sequence[str]) -> list[str]:
        """The reports of a block by each install, one after the other: the names of those that are not there now."""
        missing = []
        for install, python in self.pythons.items():
            report = self.folder / f"{block.name}_{install}.json"
            if not report.exists() and (time.monotonic() > self.end or not self._bench(block, install, python, gpus)):
                missing.append(report.name)
        return missing

    def _bench(self, block: Block, install: str, python: str, gpus: Sequence[str]) -> bool:
        report = self.folder / f"{block.name}_{install}.json"
        draft = report.with_suffix(".draft")
        command = [python, str(ROOT / "bench.py"), "--model", block.setup.model, "--load-format", "dummy", "-q"]
        command += ["--workload", *block.workloads, "--passes", str(block.passes), "--json", str(draft), *self.ceilings]
        for name in FORMATS:
            if (value := getattr(block.setup, name)) is not None:
                command += ["--" + name.replace("_", "-"), value]
        command += ["--tensor-parallel-size", str(block.setup.gpus)] if block.setup.gpus > 1 else []
        begin = time.monotonic()
        with report.with_suffix(".log").open("w") as log:
            env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[: block.setup.gpus])}
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, check=False).returncode
        if status in _INTERRUPTED:  # Ctrl-C reached bench.py first, maybe before this process knows of it.
            self.end = float("-inf")
        if status == 0:  # A report that is there is whole.
            found = {"install": install, "commit": self.commit, **json.loads(draft.read_text(encoding="utf-8"))}
            report.write_text(json.dumps(found, indent=1), encoding="utf-8")
        draft.unlink(missing_ok=True)
        print(f"{block.name}, {install}: status {status}, {time.monotonic() - begin:.0f} s", flush=True)
        return status == 0


def measure_all(run: Run, blocks: Sequence[Block], gpus: Sequence[str]) -> list[str]:
    """Each GPU takes one block after the other; those of several GPUs come last, alone. Names of missing reports."""
    of_one: SimpleQueue[Block] = SimpleQueue()
    for block in blocks:
        if block.setup.gpus == 1:
            of_one.put(block)

    def take_blocks(gpu: str) -> list[str]:
        missing = []
        with suppress(Empty):
            while True:
                missing += run.measure(of_one.get_nowait(), [gpu])
        return missing

    with ThreadPoolExecutor(len(gpus)) as lanes:
        try:
            missing = [name for of_gpu in lanes.map(take_blocks, gpus) for name in of_gpu]
        except BaseException:  # Start nothing more. The terminal has told bench.py of Ctrl-C, too.
            run.end = float("-inf")
            raise
    for block in blocks:
        if block.setup.gpus > len(gpus):
            print(f"{block.name}: left out, because it needs {block.setup.gpus} GPUs", flush=True)
        elif block.setup.gpus > 1:
            missing += run.measure(block, gpus)
    return missing


def read_reports(folder: Path, card: str, blocks: Sequence[Block] = BLOCKS) -> list[dict]:
    """Rows of speed.json from the reports in a folder, in the order of the blocks.

    Raises ValueError where a file is no report, or of another card or other packages, or where there is none.
    """
    rows = []
    for block in blocks:
        for install in INSTALLS:
            file = folder / f"{block.name}_{install}.json"
            if file.exists():
                try:
                    report = json.loads(file.read_text(encoding="utf-8"))
                    rows.append(reduced(report, block.setup._replace(card=card), install, report["commit"]))
                    device, packages = report["device"], report["packages"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{file}: is no report of this script ({error!r})") from error
                if card not in device:
                    raise ValueError(f"{file}: was measured on {device}, not on {card}: give --card")
                has = [name for name in _EXTRA_PACKAGES if packages.get(name) is not None]
                wanted = _EXTRA_PACKAGES if install == "extra" else []
                if has != wanted:
                    found, asked = (" and ".join(names) or "no extra packages" for names in (has, wanted))
                    raise ValueError(f"{file}: was measured with {found}, and --{install} is for {asked}")
    if not rows:
        raise ValueError(f"{folder}: has no reports of these models")
    return rows


def find_commit() -> str:
    """The commit of the tree, and whether files differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short=7", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    return commit + " and changes" if changed else commit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the reports are")
    for install, meaning in zip(INSTALLS, ("`pip install .`", "the extra packages"), strict=True):
        parser.add_argument(f"--{install}", metavar="PYTHON", help=f"an interpreter with {meaning}; not given: not run")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only these, in all their formats")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which nothing is started any more")
    parser.add_argument("--commit", help="that is measured, where the tree is no git repository")
    parser.add_argument("--put", action="store_true", help="put the reports into docs/data/speed.json")
    parser.add_argument("--card", default="H200", help="what the table calls the card, with --put")
    for name in _CEILINGS:
        parser.add_argument("--" + name.replace("_", "-"), type=float, help="as for bench.py; not given: measured")
    options = parser.parse_args(arguments)
    unknown = set(options.models or ()) - {block.setup.model for block in BLOCKS}
    if unknown:
        parser.error(f"--models: the tables have no {', '.join(sorted(unknown))}")
    blocks = [block for block in BLOCKS if options.models is None or block.setup.model in options.models]
    if options.folder.exists() and not options.folder.is_dir():
        parser.error(f"{options.folder}: is no folder")
    if options.put:
        try:
            rows = read_reports(options.folder, options.card, blocks)
        except ValueError as error:
            parser.error(str(error))
        put(rows)
        print(f"put {len(rows)} reports into docs/data/speed.json")
        return 0
    pythons = {install: python for install in INSTALLS if (python := getattr(options, install))}
    if not pythons:
        parser.error("give --plain, --extra or both: the interpreters to measure with; or --put")
    for install, python in pythons.items():
        if shutil.which(python) is None:
            parser.error(f"--{install} {python}: there is no such program")
    if len(set(options.gpus)) < len(options.gpus):
        parser.error(f"--gpus {' '.join(options.gpus)}: names a GPU twice")
    given = {name: value for name in _CEILINGS if (value := getattr(options, name)) is not None}
    ceilings = [each for name, value in given.items() for each in ("--" + name.replace("_", "-"), str(value))]
    try:
        commit = options.commit or find_commit()
    except (OSError, subprocess.CalledProcessError):
        parser.error("--commit: give it, because git does not know this tree")
    for file in options.folder.glob("*.json"):
        try:
            there = json.loads(file.read_text(encoding="utf-8"))["commit"]
        except (ValueError, KeyError, TypeError):
            parser.error(f"{file}: is no report of this script: remove it, or name another folder")
        if there != commit:
            parser.error(f"{file}: is of commit {there}, and the tree of {commit}: name another folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    run = Run(options.folder.resolve(), pythons, ceilings, commit, end)
    try:
        missing = measure_all(run, blocks, options.gpus)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    if missing:
        print("not measured:", *missing, sep="\n  ", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
