"""docs/data/speed.json and docs/data/peers.json, as the tables and the picture of the documentation read them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SPEED, PEERS = ROOT / "docs/data/speed.json", ROOT / "docs/data/peers.json"
INSTALLS = "plain", "extra"
# Options of bench.py that a row may have, by what they are of.
FORMATS = {"quantization": "weights", "kv_cache_dtype": "KV cache", "state_dtype": "states"}
IN_SECONDS = "prefill"  # The workload whose figure is its seconds. The others' is output tokens a second.


class Setup(NamedTuple):
    """What ran, of which a table has a block of rows. Options as bench.py takes them; None: not given."""

    model: str
    gpus: int = 1
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    state_dtype: str | None = None
    card: str = "H200"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Setup":
        return cls(**{name: row[name] for name in cls._fields if name in row})


class Figure(NamedTuple):
    """What one workload reached.

    Attributes:
        value: output tokens a second, or seconds (IN_SECONDS).
        floor: the same of the hardware's floor.
        commit: that was measured.
    """

    value: float
    floor: float
    commit: str


Figures = dict[tuple[Setup, str], dict[str, Figure]]


def load_figures(file: Path = SPEED) -> Figures:
    """{(setup, install): {workload: figure}}; of a workload that several rows have, the last row's."""
    found: Figures = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        by_workload = found.setdefault((Setup.of(row), row["install"]), {})
        for workload, measured in row["workloads"].items():
            by_workload[workload] = _figure(workload, measured, row["commit"])
    return found


def _figure(workload: str, measured: Mapping[str, float], commit: str) -> Figure:
    if workload != IN_SECONDS:
        value = measured["throughput"]
        return Figure(value, measured.get("floor") or value / measured["share_of_floor"], commit)
    value = measured["seconds"]
    return Figure(value, measured.get("floor") or value * measured["share_of_floor"], commit)


def load_peers(file: Path = PEERS) -> dict[tuple[Setup, str], dict[str, float]]:
    """{(setup, workload): {engine: output tokens a second, or seconds}}."""
    loaded = json.loads(file.read_text(encoding="utf-8"))
    return {
        (Setup.of(row), row["workload"]): {engine: row[engine] for engine in loaded["engines"] if engine in row}
        for row in loaded["rows"]
    }


def reduced(report: Mapping[str, Any], setup: Setup, install: str, commit: str) -> dict[str, Any]:
    """A row of speed.json from a report of bench.py's --json."""
    options = {name: value for name, value in setup._asdict().items() if value is not None}
    return {
        "install": install,
        **options,
        "commit": commit,
        **{name: report[name] for name in ("packages", "host", "engine", "bandwidth", "flops", "layer_flops")},
        "workloads": {
            name: {
                "passes_s": [round(each["seconds"], 4) for each in measured["passes"]],
                "tokens": measured["tokens"],
                "seconds": round(measured["seconds"], 4),
                "throughput": round(measured["throughput"], 1),
                "share_of_floor": round(measured["share_of_floor"], 4),
            }
            for name, measured in report["workloads"].items()
        },
    }


def put(rows: Iterable[Mapping[str, Any]], file: Path = SPEED) -> None:
    """Put rows into the file. What is there of the same setup and install gives way, workload by workload."""
    loaded = json.loads(file.read_text(encoding="utf-8"))
    for new in rows:
        for old in loaded["rows"]:
            if (Setup.of(old), old["install"]) == (Setup.of(new), new["install"]):
                old["workloads"] = {k: v for k, v in old["workloads"].items() if k not in new["workloads"]}
        loaded["rows"] = [old for old in loaded["rows"] if old["workloads"]] + [dict(new)]
    file.write_text(json.dumps(loaded, indent=1) + "\n", encoding="utf-8")
