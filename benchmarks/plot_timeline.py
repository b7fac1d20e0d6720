"""timeline.png: a decode step before and after our kernels."""

from itertools import pairwise
from math import inf
from typing import NamedTuple

import matplotlib.pyplot as plt
from figures import BLUE, GREEN, GREY, INK, ORANGE, PINK, Figures
from matplotlib.patches import Patch

# A kernel is of the first kind that names a part of its name.
KINDS = {
    "attention": (BLUE, ("flash", "paged_decode", "prefetch_cache")),
    "linear layers": (ORANGE, ("nvjet", "gemm", "cublas", "skinny_linear", "decode_linear")),
    "norm, rope, silu": (GREEN, ("rms_norm", "rope", "silu")),
    "sampler": (PINK, ("_race_kernel", "_combine_kernel", "_combine_shard_kernel", "_pick_kernel")),
    "copies and other": (GREY, ("",)),
}


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
        begin, end = [span.end for span in spans if span.name.startswith(("Memcpy DtoH", "_return_kernel"))][-2:]
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


def in_turn(spans: list[Span]) -> list[Span]:
    """Each from the moment that those which end before it have ended: a dependent launch waits until then."""
    reached, shown = -inf, []
    for span in sorted(spans, key=lambda span: span.end):
        shown.append(span._replace(start=max(span.start, reached)))
        reached = span.end
    return shown


def draw_spans(ax, spans: list[Span], y: float, height: float, lanes: int = 1) -> None:
    """A bar a span, from where those that end before it have ended. With more than one of `lanes` all of it: those that
    overlap others are thinner, and each goes into the first free one."""
    if lanes == 1:
        beside = [span for span in spans if "prefetch" in span.name]
        for span in in_turn([span for span in spans if span not in beside]):
            ax.broken_barh(
                [(span.start, span.end - span.start)], (y - height / 2, height), color=span.color, linewidth=0
            )
        for span in beside:  # on a branch of the graph
            ax.broken_barh([(span.start, span.end - span.start)], (y + height / 4, height / 4), color=span.color)
        return
    ends = [-inf] * lanes
    for span in spans:
        width = span.end - span.start
        alone = not any(other.start < span.end and span.start < other.end for other in spans if other is not span)
        if alone:
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
            ("decode-steps.json", "our attention, norm and silu inside our linear layers"),
        ),
        (256, ("decode-flash-attn-2.json", "flash-attn 2"), ("decode-steps.json", "our attention, quack-kernels")),
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
