"""Which figures of speed stand in README.md and docs/performance.md? Writes their tables.

    python benchmarks/speed_tables.py
    python benchmarks/speed_tables.py --check

Reads docs/data/speed.json (nanovllm, from measure_speed.py) and docs/data/peers.json, and replaces what stands between
the marks `<!-- NAME: written by benchmarks/speed_tables.py -->` and `<!-- end of NAME -->`. With --check it writes
nothing and names the files that are not what the data say.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence

from measure_speed import BLOCKS
from speed_data import FORMATS, IN_SECONDS, INSTALLS, ROOT, Figure, Setup, load_figures, load_peers

Tables = dict[str, Callable[[], list[str]]]  # of a document: lines by the table's name
ENGINES = "nano-vLLM", "vLLM", "LMDeploy"
WORKLOADS = "bench", "many", "single", "batch16", "prefix", "prefill", "long", "throughput"
FP8 = Setup("Qwen3-8B", quantization="fp8", kv_cache_dtype="fp8")
# The first figures that a reader meets.
GLANCE = (
    ("Qwen3-0.6B, the published benchmark of nano-vLLM", Setup("Qwen3-0.6B"), "bench"),
    ("Qwen3-0.6B, one request", Setup("Qwen3-0.6B"), "single"),
    ("Qwen3-8B in fp8, weights and KV cache", FP8, "bench"),
)
# README's models and workloads. What a workload is stands where it comes first.
USUAL = {"bench": "bench", "single": "single", "prefill": "prefill"}
CHOSEN = {
    Setup("Qwen3-0.6B"): {
        "bench": "bench: 256 requests of 100 to 1024 tokens in and out",
        "many": "many: 2048 short requests",
        "single": "single: one request",
        "batch16": "batch16: 16 requests",
        "prefix": "prefix: 256 requests with 2048 shared tokens",
        "prefill": "prefill: 128 prompts of 2000 tokens",
        "long": "long: 128 requests of 2000 to 3500 tokens in",
    },
    Setup("Qwen3-8B"): USUAL,
    FP8: USUAL | {"long": "long"},
    Setup("Qwen3-8B", quantization="int4"): USUAL,
    Setup("Qwen3-8B", gpus=2): USUAL,
    Setup("Qwen3-30B-A3B"): USUAL | {"many": "many"},
    Setup("gpt-oss-20b"): USUAL,
    Setup("Qwen3.5-9B"): USUAL | {"long": "long"},
    Setup("gemma-4-26B-A4B"): USUAL,
}


class Speeds:
    """The figures of both files, as rows of tables."""

    def __init__(self) -> None:
        self._figures, self._peers = load_figures(), load_peers()

    def ours(self, setup: Setup, workload: str) -> dict[str, Figure]:
        """By install, where it was measured."""
        found = {install: self._figures.get((setup, install), {}).get(workload) for install in INSTALLS}
        return {install: figure for install, figure in found.items() if figure is not None}

    def cells(self, setup: Setup, workload: str, engines: Sequence[str], installs: Sequence[str]) -> list[str]:
        """A figure of each, the best of several in bold."""
        peers, ours = self._peers.get((setup, workload), {}), self.ours(setup, workload)
        values = [peers.get(engine) for engine in engines]
        values += [ours[install].value if install in ours else None for install in installs]
        known = [value for value in values if value is not None]
        best = min(known, key=lambda value: _as_time(workload, value)) if len(known) > 1 else None
        texts = ["" if value is None else written(workload, value) for value in values]
        return [f"**{text}**" if text and value == best else text for text, value in zip(texts, values, strict=True)]

    def glance(self) -> list[str]:
        heads = ["output tokens a second on an H200", "nano-vLLM", "vLLM 0.33", "nanovllm"]
        rows = [[text, *self.cells(setup, name, ENGINES[:2], INSTALLS[:1])] for text, setup, name in GLANCE]
        return _table(heads, rows)

    def chosen(self) -> list[str]:
        heads = ["model", "workload", "nano-vLLM", "vLLM 0.33", "LMDeploy 0.18", "nanovllm", "nanovllm, extra"]
        rows = []
        for setup, texts in CHOSEN.items():
            shown = [name for name in WORKLOADS if name in texts]
            rows += [[texts[name], *self.cells(setup, name, ENGINES, INSTALLS)] for name in shown]
            rows[-len(shown) :] = _labelled(setup, rows[-len(shown) :])
        return _table(heads, rows)

    def of_card(self, card: str, engines: Sequence[str]) -> list[str]:
        """All rows of a card, with their floors and commits."""
        rows = []
        for block in BLOCKS:
            setup = block.setup._replace(card=card)
            of_setup = []
            for name in WORKLOADS:
                ours = self.ours(setup, name)
                if ours:
                    best = min(ours.values(), key=lambda figure, name=name: _as_time(name, figure.value))
                    share = _as_time(name, best.floor) / _as_time(name, best.value)
                    commits = ", ".join(dict.fromkeys(figure.commit for figure in ours.values()))
                    of_row = self.cells(setup, name, engines, INSTALLS)
                    of_setup.append([name, *of_row, written(name, best.floor), f"{share:.2f}", commits])
            rows += _labelled(setup, of_setup)
        return _table(["model", "workload", *engines, *INSTALLS, "floor", "share", "commits"], rows)


def label(setup: Setup) -> str:
    """A setup in words, such as "Qwen3-8B, weights in int4, 2 GPUs"."""
    kinds: dict[str | None, list[str]] = {}
    for option, kind in FORMATS.items():
        kinds.setdefault(getattr(setup, option), []).append(kind)
    kinds.pop(None, None)
    parts = [re.sub("-(Base-2512|instruct|1025|1125)", "", setup.model)]
    parts += [f"{' and '.join(of_format)} in {format}" for format, of_format in kinds.items()]
    return ", ".join([*parts, f"{setup.gpus} GPUs"] if setup.gpus > 1 else parts)


def written(workload: str, value: float) -> str:
    """A figure: 28,902 tokens a second, or 0.577 s."""
    if workload != IN_SECONDS:
        return f"{value:,.0f}"
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _as_time(workload: str, value: float) -> float:
    """What is proportional to the time that a figure stands for."""
    return value if workload == IN_SECONDS else 1 / value


def _labelled(setup: Setup, rows: list[list[str]]) -> list[list[str]]:
    return [["" if i else label(setup), *row] for i, row in enumerate(rows)]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]


def with_tables(text: str, tables: Tables) -> str:
    """A document with its tables written anew. Raises ValueError where it has no place for one."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by benchmarks/speed_tables.py -->", f"<!-- end of {name} -->"
        if not text.count(begin) == text.count(end) == 1:
            raise ValueError(f"needs one line {begin!r} and one line {end!r}")
        before, rest = text.split(begin)
        # Blank lines, because a table right after a comment is text.
        text = "\n".join([before + begin, "", *table(), "", end + rest.split(end)[1]])
    return text


def all_tables() -> dict[str, Tables]:
    """By the document."""
    speeds = Speeds()
    of_cards = {
        "speed-h200": lambda: speeds.of_card("H200", ENGINES),
        "speed-h100": lambda: speeds.of_card("H100", ()),
    }
    return {
        "README.md": {"speed-at-a-glance": speeds.glance, "speed": speeds.chosen},
        "docs/performance.md": of_cards,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file would change")
    check = parser.parse_args(arguments).check
    changed = []
    for name, tables in all_tables().items():
        file = ROOT / name
        old = file.read_text(encoding="utf-8")
        new = with_tables(old, tables)
        if new != old:
            changed.append(name)
            if not check:
                file.write_text(new, encoding="utf-8")
    print("changed:", ", ".join(changed) or "nothing")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
