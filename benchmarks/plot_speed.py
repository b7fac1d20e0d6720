"""How close do nano-vLLM, vLLM and nanovllm come to the hardware's floor? Draws docs/figures/speed.png.

    python benchmarks/plot_speed.py

Reads docs/data/speed.json (nanovllm, written from the reports of bench.py) and docs/data/peers.json. An engine's
share of the floor is the floor's time over its own time. Needs matplotlib (`pip install '.[plots]'`), but no GPU.
"""

import json
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLAIN, EXTRA = "nanovllm", "nanovllm with flash-attn-4 and quack-kernels"
COLORS = {"nano-vLLM": "#b0b0b0", "vLLM": "#e69f00", PLAIN: "#7fb5d6", EXTRA: "#0072b2"}
PANELS = (("Qwen3-0.6B", 1), ("Qwen3-8B", 1), ("Qwen3-8B", 2))
BAR_WIDTH = 0.21
LEFT_OUT = "prefix"  # Its requests share keys, of which the floor counts everybody's: it would be beyond the top.


def collect_shares() -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """{(model, GPUs): {workload: {engine: share of the floor}}}, for the workloads that peers were measured on."""
    runs = {
        (row["install"], row["model"], row["gpus"]): row["workloads"]
        for row in json.loads((DOCS / "data/speed.json").read_text())["rows"]
        if "quantization" not in row and "kv_cache_dtype" not in row
    }
    shares: dict = {}
    for row in json.loads((DOCS / "data/peers.json").read_text())["rows"]:
        model, gpus, workload = row["model"], row["gpus"], row["workload"]
        if (model, gpus) not in PANELS or "quantization" in row or workload == LEFT_OUT:
            continue
        plain, extra = (runs[install, model, gpus][workload] for install in ("plain", "extra"))
        seconds = {PLAIN: median(plain["passes_s"]), EXTRA: median(extra["passes_s"])}
        for peer in ("nano-vLLM", "vLLM"):
            if peer in row:
                seconds[peer] = row[peer] if workload == "prefill" else extra["tokens"] / row[peer]
        floor = extra["share_of_floor"] * seconds[EXTRA]
        by_workload = shares.setdefault((model, gpus), {})
        by_workload[workload] = {engine: floor / seconds[engine] for engine in COLORS if engine in seconds}
        by_workload[workload][PLAIN] = plain["share_of_floor"]  # its own run measured a floor of its own
    return shares


def main() -> None:
    shares = collect_shares()
    plt.rcParams.update({"font.size": 11})
    ratios = [len(shares[panel]) for panel in PANELS]
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(13, 3.6), sharey=True, width_ratios=ratios, layout="constrained"
    )
    for ax, (model, gpus) in zip(axes, PANELS, strict=True):
        by_workload = shares[model, gpus]
        for i, by_engine in enumerate(by_workload.values()):
            left = i - BAR_WIDTH * (len(by_engine) - 1) / 2
            for j, (engine, share) in enumerate(by_engine.items()):
                x = left + j * BAR_WIDTH
                ax.bar(x, share, BAR_WIDTH * 0.94, color=COLORS[engine], label=engine if i == 0 else None)
        ax.grid(axis="y", alpha=0.3)
        ax.set_axisbelow(True)
        ax.set_ylim(0, 1)
        ax.set_xticks(range(len(by_workload)), by_workload)
        ax.tick_params(axis="x", length=0)
        ax.set_title(f"{model}, {gpus} GPU{'s' * (gpus > 1)}", loc="left", fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of the floor")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(COLORS), frameon=False)
    out = DOCS / "figures" / "speed.png"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=90, facecolor="white")
    print(f"{out.name}: {out.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
