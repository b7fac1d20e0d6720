"""What the scripts that draw docs/figures share: where data is read, where figures go, and their colours."""

import json
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from floor import Ceilings

BLUE, ORANGE, GREEN, PINK, GREY, INK = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#8c8c8c", "#222222"


class Figures:
    """Where data is read and figures are written."""

    def __init__(self, data: list[Path], out: Path):
        self.data, self.out = data, out

    def find(self, name: str) -> Path | None:
        return next((d / name for d in self.data if (d / name).is_file()), None)

    def load(self, name: str):
        """The file's content; FileNotFoundError where no folder has it."""
        path = self.find(name)
        if path is None:
            raise FileNotFoundError(name)
        return json.loads(path.read_text())

    def ceilings(self) -> Ceilings:
        """The median of what the runs of the benchmark have measured."""
        files = [json.loads(p.read_text()) for d in self.data for p in sorted(d.glob("*.json"))]
        runs = [f for f in files if isinstance(f, dict) and f.get("bandwidth") and f.get("flops")]
        if not runs:
            raise FileNotFoundError("run of the benchmark with bandwidth and flops")
        return Ceilings(median(run["bandwidth"] for run in runs), median(run["flops"] for run in runs))

    def save(self, figure, name: str) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.out / name, dpi=100, facecolor="white")
        plt.close(figure)
        print(f"{self.out / name}: {(self.out / name).stat().st_size / 1e3:.0f} KB")
