"""roofline.png: kernels against the ceilings of the machine."""

from math import atan2, degrees
from random import Random
from typing import NamedTuple

import matplotlib.pyplot as plt
from attention_decode import HEAD_DIM, HEADS, KV_HEADS
from attention_prefill import SHAPES as PREFILL_SHAPES
from figures import BLUE, GREEN, GREY, INK, ORANGE, PINK, Figures
from floor import Ceilings
from matplotlib.lines import Line2D

from nanovllm.kernels import skinny_kernel

ITEMSIZE = 2  # bf16


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
        shape = f"{batch} x {low}..{high} tokens" if high > low else f"{batch} x {low} tokens"
        for by, time in (("ours", seconds["ours"]), ("flash-attn 2", seconds.get("flash-attn 2"))):
            if time:
                points.append(Point(DECODE, shape, by, flops, num_bytes, time))
    return points


def linear_points(rows: list[dict]) -> list[Point]:
    points = []
    for row in rows:
        case = row["case"]
        M, N, K = case["M"], case["N"], case["K"]
        chosen = skinny_kernel.choose_config(M, N, K, ITEMSIZE, case["function"].startswith("norm"))._asdict()
        good = [r for r in row["results"] if "us" in r]
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
