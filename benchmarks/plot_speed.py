"""How close do nano-vLLM, vLLM, LMDeploy and nanovllm come to the hardware's floor? Draws docs/figures/speed.png.

    python benchmarks/plot_speed.py

Reads docs/data/speed.json (nanovllm, from measure_speed.py) and docs/data/peers.json. An engine's share of the floor is
the floor's time over its own time. Needs matplotlib (`pip install '.[plots]'`), but no GPU.
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from speed_data import IN_SECONDS, ROOT, Setup, load_figures, load_peers

PLAIN, EXTRA = "nanovllm", "nanovllm with flash-attn-4 and quack-kernels"
COLORS = {"nano-vLLM": "#b0b0b0", "vLLM": "#e69f00", "LMDeploy": "#cc79a7", PLAIN: "#7fb5d6", EXTRA: "#0072b2"}
PANELS = Setup("Qwen3-0.6B"), Setup("Qwen3-8B"), Setup("Qwen3-8B", gpus=2)
BAR_WIDTH = 0.17
LEFT_OUT = "prefix"  # Its requests share keys, of which the floor counts everybody's: it would be beyond the top.


def collect_shares() -> dict[Setup, dict[str, dict[str, float]]]:
    """{setup: {workload: {engine: share of the floor}}}, for the workloads that peers were measured on."""
    figures = load_figures()
    shares: dict = {setup: {} for setup in PANELS}
    for (setup, workload), peers in load_peers().items():
        if setup in shares and workload != LEFT_OUT:
            # Each of our runs has a floor of its own. Peers count with one of the same kind of machine.
            plain, extra = (figures[setup, install][workload] for install in ("plain", "extra"))
            found = {engine: (value, extra.floor) for engine, value in peers.items()}
            found |= {PLAIN: plain[:2], EXTRA: extra[:2]}
            shares[setup][workload] = {
                engine: floor / value if workload == IN_SECONDS else value / floor
                for engine, (value, floor) in found.items()
            }
    return shares


def main() -> None:
    shares = collect_shares()
    plt.rcParams.update({"font.size": 11})
    ratios = [len(shares[panel]) for panel in PANELS]
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(13, 3.6), sharey=True, width_ratios=ratios, layout="constrained"
    )
    for ax, setup in zip(axes, PANELS, strict=True):
        by_workload = shares[setup]
        for i, by_engine in enumerate(by_workload.values()):
            left = i - BAR_WIDTH * (len(by_engine) - 1) / 2
            for j, (engine, share) in enumerate(by_engine.items()):
                x = left + j * BAR_WIDTH
                ax.bar(x, share, BAR_WIDTH * 0.94, color=COLORS[engine])
        ax.grid(axis="y", alpha=0.3)
        ax.set_axisbelow(True)
        ax.set_ylim(0, 1)
        ax.set_xticks(range(len(by_workload)), by_workload)
        ax.tick_params(axis="x", length=0)
        ax.set_title(f"{setup.model}, {setup.gpus} GPU{'s' * (setup.gpus > 1)}", loc="left", fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of the floor")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, list(COLORS), loc="outside upper center", ncols=len(COLORS), frameon=False)
    out = ROOT / "docs/figures/speed.png"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=90, facecolor="white")
    print(f"{out.name}: {out.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
