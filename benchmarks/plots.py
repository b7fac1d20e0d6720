"""Figures of docs/figures from the measurements in docs/data; each figure whose data is there.

    python benchmarks/plots.py

timeline.png: a decode step before and after our kernels, from profile_steps.py.
roofline.png: kernels against the ceilings of the machine, from attention_decode.py, attention_prefill.py,
    skinny_linear.py and, for the ceilings, any run of the benchmark.
ladder.png: throughput of every workload change by change, from ladder.json, which was written from the table in
    docs/performance.md (`prefill` in prompts a second).

Every number is read from the data; runs without a GPU.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from figures import BLUE, INK, Figures
from plot_roofline import roofline
from plot_timeline import timeline

ROOT = Path(__file__).resolve().parents[1]


def ladder(figures: Figures) -> None:
    rungs = figures.load("ladder.json")
    workloads = list(dict.fromkeys(k for rung in rungs for k, v in rung.items() if isinstance(v, int | float)))
    columns = min(3, len(workloads))
    rows = -(-len(workloads) // columns)
    # Changes are named once, at the left of each row of panels, from the first at the top to the last.
    height = rows * (0.36 * len(rungs) + 1.1)
    figure, axes = plt.subplots(rows, columns, figsize=(13.5, height), sharey=True, squeeze=False)
    positions = range(len(rungs))
    for ax, name in zip(axes.flat, workloads, strict=False):
        values = [rung.get(name) for rung in rungs]
        known = [v for v in values if v is not None]
        for y, value in zip(positions, values, strict=True):
            if value is None:
                continue
            ax.barh(y, value, color=BLUE if value == max(known) else "#7fb5d6", height=0.68)
            ratio = f"  {value / known[0]:.2f}x" if value != known[0] else ""
            ax.text(value, y, f" {value:,.0f}{ratio}", va="center", fontsize=10.5)
        ax.set_xlim(0, 1.5 * max(known))
        ax.set_title(f"{name}, {'prompts' if name == 'prefill' else 'tokens'}/s", loc="left", fontweight="bold")
        ax.set_yticks(list(positions), [rung["change"] for rung in rungs], fontsize=11)
        ax.tick_params(axis="y", length=0)
        ax.set_xticks([])
        for side in ("right", "top", "bottom"):
            ax.spines[side].set_visible(False)
    axes[0, 0].invert_yaxis()
    for ax in axes.flat[len(workloads) :]:
        ax.set_visible(False)
    figure.tight_layout()
    figures.save(figure, "ladder.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=[ROOT / "docs/data"], help="folders, the first wins")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures")
    args = parser.parse_args()
    plt.rcParams.update({"font.size": 11.5, "axes.titlesize": 13, "text.color": INK, "axes.labelcolor": INK})
    figures = Figures(args.data, args.out)
    for draw in (timeline, roofline, ladder):
        try:
            draw(figures)
        except FileNotFoundError as missing:
            print(f"no {draw.__name__}.png: found no {missing}")


if __name__ == "__main__":
    main()
