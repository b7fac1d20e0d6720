"""Figures of docs/figures from the measurements in docs/data; each figure whose data is there.

    python benchmarks/plots.py

timeline.png: a decode step before and after our kernels, from profile_steps.py.
roofline.png: kernels against the ceilings of the machine, from attention_decode.py, attention_prefill.py,
    skinny_linear.py and, for the ceilings, any run of the benchmark.
ladder.png: throughput of every workload change by change, from ladder.json.

Every number is read from the data; runs without a GPU.
"""

import argparse
import json
from itertools import pairwise
from math import atan2, degrees, inf
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from attention_decode import HEAD_DIM, HEADS, KV_HEADS
from attention_prefill import SHAPES as PREFILL_SHAPES
from floor import Ceilings
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nanovllm.kernels import paged_decode, skinny_kernel
from nanovllm.utils.decode_plan import SMALL_BATCH, SPARE_PROGRAMS, SPARE_PROGRAMS_SMALL_BATCH

ROOT = Path(__file__).resolve().parents[1]
ITEMSIZE = 2  # bf16
BLUE, ORANGE, GREEN, PINK, GREY, INK = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#8c8c8c", "#222222"

# A kernel is of the first kind that names a part of its name.
KINDS = {
    "attention": (BLUE, ("flash", "paged_decode")),
    "linear layers": (ORANGE, ("nvjet", "gemm", "cublas", "skinny_linear", "decode_linear")),
    "norm, rope, silu": (GREEN, ("rms_norm", "rope", "silu")),
    "sampler": (PINK, ("_race_kernel", "_combine_kernel", "_combine_shard_kernel", "_pick_kernel")),
    "copies and other": (GREY, ("",)),
}


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


# Timeline


class Span(NamedTuple):
    start: float
    end: float
    name: str

    @property
    def color(self) -> str:
        return next(color for color, parts in KINDS.values() if any(part in self.name.lower() for part in parts))


class Step:
    """One decode step of a profile, from the moment that the step before has its tokens on the host.

    Attributes:
        spans: what the GPU did, in ms from the step's beginning.
        layer: the same for a layer in the middle, from one rotation of queries and keys to the next, in us.
    """

    def __init__(self, profile: dict):
        spans = [Span(*span) for span in profile["timeline_us"]]
        # The last step is the one least touched by the start of the profiler.
        begin, end = [span.end for span in spans if span.name.startswith("Memcpy DtoH")][-2:]
        inside = [span for span in spans if begin < span.end <= end]
        ropes = [span.start for span in inside if "rope" in span.name]
        first, last = ropes[len(ropes) // 2 - 1], ropes[len(ropes) // 2]
        self.spans = [Span((s.start - begin) / 1e3, (s.end - begin) / 1e3, s.name) for s in inside]
        self.layer = [Span(s.start - first, s.end - first, s.name) for s in inside if first <= s.start < last]
        self.layer_length = last - first
        self.length = (end - begin) / 1e3
        self.wall = profile["wall_ms"]
        busy, reached = 0.0, 0.0
        for span in self.spans:  # spans of programmatic dependent launches overlap
            busy += max(0.0, span.end - max(span.start, reached))
            reached = max(reached, span.end)
        self.idle = self.length - busy


def draw_spans(ax, spans: list[Span], y: float, height: float, lanes: int = 1) -> None:
    """A bar a span; with `lanes`, those that overlap others are thinner and each goes into the first free one."""
    ends = [-inf] * lanes
    for span in spans:
        width = span.end - span.start
        alone = not any(other.start < span.end and span.start < other.end for other in spans if other is not span)
        if lanes == 1 or alone:
            ax.broken_barh([(span.start, width)], (y - height / 2, height), color=span.color, linewidth=0)
            continue
        lane = next((i for i, end in enumerate(ends) if end <= span.start), lanes - 1)
        ends[lane] = span.end
        bottom = y + height / 2 - (lane + 1) * height / lanes
        ax.broken_barh(
            [(span.start, width)], (bottom, height / lanes), color=span.color, edgecolor="white", linewidth=1
        )


def bare(ax) -> None:
    ax.set_yticks([])
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)


def timeline(figures: Figures) -> None:
    comparisons = [
        # batch, then a file and a name for before and after
        (
            1,
            ("decode-flash-attn-2.json", "flash-attn 2, cuBLAS"),
            ("decode-skinny.json", "our attention, norm and silu inside our linear layers"),
        ),
        (256, ("decode-flash-attn-2.json", "flash-attn 2"), ("decode-triton.json", "our attention")),
    ]
    figure, axes = plt.subplots(3, 1, figsize=(13, 9.6), height_ratios=(1, 1.12, 1))
    panels = {1: (axes[0], axes[1]), 256: (axes[2], None)}
    for batch, *sides in comparisons:
        profiles = [next(p for p in figures.load(file) if p["batch"] == batch) for file, _ in sides]
        steps = [Step(profile) for profile in profiles]
        step_ax, layer_ax = panels[batch]
        sequences = f"{batch} sequences" if batch > 1 else "1 sequence"
        step_ax.set_title(
            f"A decode step, {sequences} of {profiles[0]['context']} tokens and more", loc="left", fontweight="bold"
        )
        for y, step, (_, name), when in zip((1, 0), steps, sides, ("before", "after"), strict=True):
            draw_spans(step_ax, step.spans, y, 0.46)
            step_ax.plot([step.length] * 2, [y - 0.29, y + 0.29], color=INK, linewidth=1.5)
            step_ax.plot([0] * 2, [y - 0.29, y + 0.29], color=INK, linewidth=1.5)
            text = f"{step.length:.2f} ms, GPU idle for {step.idle:.2f} ms ({step.wall:.2f} ms without the profiler)"
            step_ax.text(0, y + 0.34, rf"$\bf{{{when}}}$: {name}: {text}", fontsize=11.5, va="bottom")
        limit = max(step.length for step in steps)
        step_ax.set(xlim=(-0.005 * limit, 1.01 * limit), ylim=(-0.35, 1.62), xlabel="ms")
        bare(step_ax)
        if layer_ax is None:
            continue
        layer_ax.set_title("One layer of that step, magnified", loc="left", fontweight="bold")
        for y, step, when in zip((1, 0), steps, ("before", "after"), strict=True):
            overlap = any(b.start < a.end for a, b in pairwise(step.layer))
            draw_spans(layer_ax, step.layer, y, 0.46, lanes=3 if overlap else 1)
            text = f"{step.layer_length:.1f} us, {len(step.layer)} launches"
            if overlap:
                text += "; a linear layer starts while the one before it ends"
            layer_ax.text(0, y + 0.3, rf"$\bf{{{when}}}$: {text}", fontsize=11.5, va="bottom")
        limit = max(span.end for step in steps for span in step.layer)
        layer_ax.set(xlim=(-0.005 * limit, 1.01 * limit), ylim=(-0.35, 1.62), xlabel="us")
        bare(layer_ax)
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, (color, _) in KINDS.items()]
        + [Patch(facecolor="white", edgecolor=GREY, label="GPU idle")],
        loc="upper center",
        ncols=len(KINDS) + 1,
        frameon=False,
        fontsize=12,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.955), h_pad=1.2)
    figures.save(figure, "timeline.png")


# Roofline


class Point(NamedTuple):
    """A kernel's measurement: what it is compared in, by whom, FLOPs, bytes it can't avoid, and seconds."""

    group: str
    shape: str
    by: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        return self.flops / self.seconds

    def share(self, ceilings: Ceilings) -> float:
        return self.rate / min(ceilings.flops, self.intensity * ceilings.bandwidth)


DECODE, LINEAR, PREFILL = "decode attention", "linear layers, few tokens", "prefill attention"
MARKERS = {DECODE: "o", LINEAR: "s", PREFILL: "^"}
COLORS = {"ours": BLUE, "flash-attn 2": ORANGE, "flash-attn-4": GREEN, "cuBLAS + norm, silu": PINK}


def decode_points(rows: list[dict]) -> list[Point]:
    points = []
    for row in rows:
        batch, low, high, seconds = row["batch"], row["low"], row["high"], row["seconds"]
        rng = Random(batch)  # as attention_decode.Case draws
        tokens = sum(rng.randint(low, high) for _ in range(batch))
        flops, num_bytes = 4 * tokens * HEADS * HEAD_DIM, 2 * tokens * KV_HEADS * HEAD_DIM * ITEMSIZE
        # Launch constants that the engine chooses today, where the sweep has them.
        num_rows = batch * KV_HEADS
        spare = SPARE_PROGRAMS_SMALL_BATCH if num_rows <= SMALL_BATCH else SPARE_PROGRAMS
        chosen = f"spare {spare} {tuple(paged_decode.choose_config(num_rows, HEAD_DIM, ITEMSIZE))}"
        shape = f"{batch} x {low}..{high} tokens" if high > low else f"{batch} x {low} tokens"
        ours = seconds.get(chosen, seconds["ours"])
        for by, time in (("ours", ours), ("flash-attn 2", seconds.get("flash-attn 2"))):
            if time:
                points.append(Point(DECODE, shape, by, flops, num_bytes, time))
    return points


def linear_points(rows: list[dict]) -> list[Point]:
    points = []
    for row in rows:
        case = row["case"]
        M, N, K = case["M"], case["N"], case["K"]
        chosen = skinny_kernel.choose_config(M, N, K, ITEMSIZE)._asdict()
        good = [r for r in row["results"] if "us" in r and r["pdl"]]
        # Else the first, which was the engine's choice when it was measured.
        ours = next((r for r in good if r["config"] == chosen), good[0])
        # The weights, and x and y; a residual is read and written.
        silu, add = case["function"] == "norm_linear_silu", case["function"] == "linear_add"
        outputs = N // 2 if silu else N
        num_bytes = ITEMSIZE * (N * K + M * K + M * outputs * (2 if add else 1))
        extra = "norm, silu" if silu else "add" if add else "norm"
        shape = f"{M} token{'s' if M > 1 else ''}, {K} to {outputs}, {extra}"
        for by, time in (("ours", ours["us"]), ("cuBLAS + norm, silu", row["unfused_us"])):
            points.append(Point(LINEAR, shape, by, 2 * M * N * K, num_bytes, time / 1e6))
    return points


def prefill_points(rows: list[dict]) -> list[Point]:
    names = {"triton": "ours", "flash-attn 2": "flash-attn 2", "flash-attn-4": "flash-attn-4"}
    shapes = {shape.name: shape for shape in PREFILL_SHAPES}
    points = []
    for row in rows:
        if row["implementation"] in names:
            shape = shapes[row["shape"]]
            queries, keys = shape.num_seqs * shape.new, shape.num_seqs * (shape.cached + shape.new)
            num_bytes = 2 * ITEMSIZE * HEAD_DIM * (queries * HEADS + keys * KV_HEADS)
            label = row["shape"].replace("x", " x ") + (" cached" if shape.cached else "") + " tokens"
            by, seconds = names[row["implementation"]], row["us"] / 1e6
            points.append(Point(PREFILL, label, by, shape.flops, num_bytes, seconds))
    return points


def roofline(figures: Figures) -> None:
    ceilings = figures.ceilings()
    points = [
        *decode_points(figures.load("attention-decode.json")),
        *linear_points(figures.load("skinny-linear.json")),
        *prefill_points(figures.load("attention-prefill.json")["implementations"]),
    ]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13.8, 9), width_ratios=(1, 0.78))
    draw_roofline(left, points, ceilings)
    draw_shares(right, points, ceilings)
    color_handles = [Line2D([], [], color=c, marker="o", ls="", ms=9, label=by) for by, c in COLORS.items()]
    figure.legend(handles=color_handles, loc="upper center", ncols=len(COLORS), frameon=False, fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    label_slope(left, ceilings)
    figures.save(figure, "roofline.png")


def draw_roofline(ax, points: list[Point], ceilings: Ceilings) -> None:
    ridge = ceilings.flops / ceilings.bandwidth
    low, high = min(p.intensity for p in points) / 2, max(p.intensity for p in points) * 2
    ax.plot([low, ridge, high], [low * ceilings.bandwidth / 1e12, *[ceilings.flops / 1e12] * 2], color=INK, lw=1.8)
    for p in sorted(points, key=lambda p: p.by == "ours"):
        style = {"marker": MARKERS[p.group], "color": COLORS[p.by], "alpha": 0.85, "ms": 9, "mec": "white", "mew": 0.7}
        ax.plot(p.intensity, p.rate / 1e12, **style)
    ax.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP per byte of memory traffic", ylabel="TFLOP/s")
    ax.set_ylim(top=ceilings.flops / 1e12 * 2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_title("Roofline", loc="left", fontweight="bold")
    ax.annotate(
        f"matrix products, {ceilings.flops / 1e12:.0f} TFLOP/s",
        (high, ceilings.flops / 1e12),
        xytext=(-6, 6),
        textcoords="offset points",
        ha="right",
        fontsize=11.5,
    )
    handles = [Line2D([], [], color=GREY, marker=m, ls="", ms=9, label=group) for group, m in MARKERS.items()]
    ax.legend(handles=handles, loc="lower right", fontsize=11.5)


def label_slope(ax, ceilings: Ceilings) -> None:
    """Along the slope; to be called when the layout is final."""
    low, ridge = ax.get_xlim()[0], ceilings.flops / ceilings.bandwidth
    ends = [(x, x * ceilings.bandwidth / 1e12) for x in (low, ridge)]
    (x0, y0), (x1, y1) = ax.transData.transform(ends)
    ax.annotate(
        f"copy bandwidth, {ceilings.bandwidth / 1e12:.2f} TB/s",
        ((x0 + x1) / 2, (y0 + y1) / 2),
        xycoords="figure pixels",
        xytext=(-4, 4),
        textcoords="offset points",
        rotation=degrees(atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
        ha="center",
        va="bottom",
        fontsize=11.5,
    )


def draw_shares(ax, points: list[Point], ceilings: Ceilings) -> None:
    """A row a shape: the share that everybody reaches of what the ceilings allow it."""
    y, ticks = 0.0, {}
    for group in MARKERS:
        ax.text(0.01, y, group, fontweight="bold", fontsize=11, va="center", ha="left")
        shapes = dict.fromkeys(p.shape for p in points if p.group == group)
        for shape in shapes:
            y -= 1
            ticks[y] = shape
            row = [p for p in points if p.group == group and p.shape == shape]
            shares = [p.share(ceilings) for p in row]
            ax.plot([min(shares), max(shares)], [y, y], color="#cccccc", lw=2, zorder=1)
            for p, share in zip(row, shares, strict=True):
                ax.plot(share, y, MARKERS[group], color=COLORS[p.by], ms=8, mec="white", mew=0.7)
        y -= 1.4
    ax.axvline(1, color=INK, lw=1.8, zorder=0.6)
    ax.set_yticks(list(ticks), list(ticks.values()), fontsize=10.5)
    ax.set(xlim=(0, None), ylim=(y + 0.7, 0.8), xlabel="share of the ceiling (reading alone can pass a copy)")
    ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f}%")
    ax.grid(axis="x", color="#dddddd", linewidth=0.7)
    ax.tick_params(axis="y", length=0)
    ax.set_axisbelow(True)
    ax.set_title("Each shape against its ceiling", loc="left", fontweight="bold")


# Ladder


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
        ax.set_title(f"{name}, tokens/s", loc="left", fontweight="bold")
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
