"""What a server counts, in Prometheus' text format. The names are vLLM's, with our prefix, so that its dashboards fit.

The format is a line for each number, so that no package is needed for it:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from nanovllm import EngineStats, StreamDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS_TO_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_SECONDS_OF_REQUEST = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """How many values are at most as large as each bound."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, label: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {total}'
        yield f"{name}_sum{{{label}}} {self._sum}"
        yield f"{name}_count{{{label}}} {total}"


class Metrics:
    """Of one server. All is counted in its event loop."""

    def __init__(self, model: str):
        """model: its name, which is each line's label."""
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._label = f'model_name="{escaped}"'
        self.first_token = Histogram(_SECONDS_TO_FIRST_TOKEN)
        self.request = Histogram(_SECONDS_OF_REQUEST)
        self.finished = dict.fromkeys(_FINISH_REASONS, 0)

    def text(self, stats: EngineStats) -> str:
        usage = stats["kv_blocks_used"] / max(stats["kv_blocks_total"], 1)
        numbers = (
            ("num_requests_running", "gauge", "Sequences that are computed now.", stats["running"]),
            ("num_requests_waiting", "gauge", "Sequences that wait for their turn.", stats["waiting"]),
            ("kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1.", usage),
            ("prompt_tokens_total", "counter", "Tokens of prompts, for each sample.", stats["prompt_tokens"]),
            ("generation_tokens_total", "counter", "Generated tokens.", stats["generated_tokens"]),
            ("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", stats["prefix_cache_queries"]),
            ("prefix_cache_hits_total", "counter", "Prompt tokens found.", stats["prefix_cache_hits"]),
            ("num_preemptions_total", "counter", "Sequences computed again for lack of room.", stats["preemptions"]),
        )
        lines = list[str]()
        for name, kind, meaning, number in numbers:
            lines += _described(name, kind, meaning, [f"nanovllm:{name}{{{self._label}}} {number}"])
        name = "request_success_total"
        ended = [
            f'nanovllm:{name}{{{self._label},finished_reason="{reason}"}} {number}'
            for reason, number in self.finished.items()
        ]
        lines += _described(name, "counter", "Answers that have ended, by their finish reason.", ended)
        for name, meaning, histogram in (
            ("time_to_first_token_seconds", "Seconds from a request to its first token.", self.first_token),
            ("e2e_request_latency_seconds", "Seconds from a request to the end of its answer.", self.request),
        ):
            lines += _described(name, "histogram", meaning, histogram.lines(f"nanovllm:{name}", self._label))
        return "\n".join(lines) + "\n"


def _described(name: str, kind: str, meaning: str, lines: Iterable[str]) -> list[str]:
    return [f"# HELP nanovllm:{name} {meaning}", f"# TYPE nanovllm:{name} {kind}", *lines]


class CallRecord:
    """What is counted of one call.

    Attributes:
        num_prompt_tokens: None until the engine has accepted it.
        num_tokens: generated so far, of all choices.
        seconds_to_first_token: None until there is one.
        finish_reasons: of the choices that have ended.
    """

    def __init__(self) -> None:
        self.metrics: Metrics | None = None
        self.num_prompt_tokens: int | None = None
        self.num_tokens = 0
        self.seconds_to_first_token: float | None = None
        self.finish_reasons: list[str] = []
        self._start, self._has_ended = time.monotonic(), False

    def add(self, delta: StreamDelta) -> None:
        self.num_tokens += len(delta["token_ids"])
        if delta["token_ids"] and self.seconds_to_first_token is None:
            self.seconds_to_first_token = time.monotonic() - self._start
            if self.metrics is not None:
                self.metrics.first_token.add(self.seconds_to_first_token)
        if delta["finish_reason"] is not None:
            self._finish(delta["finish_reason"])

    def end(self, num_choices: int) -> None:
        """num_choices: of the call. Those that have not ended never will: the client has left, or the engine died."""
        if self.num_prompt_tokens is None or self._has_ended:
            return
        self._has_ended = True
        if self.metrics is not None and len(self.finish_reasons) == num_choices:
            self.metrics.request.add(time.monotonic() - self._start)
        while len(self.finish_reasons) < num_choices:
            self._finish("abort")

    def _finish(self, reason: str) -> None:
        self.finish_reasons.append(reason)
        if self.metrics is not None:
            self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
