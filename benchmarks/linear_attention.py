"""How fast are the kernels of the gated delta rule, and which launch constants of a prefill are best?

    python benchmarks/linear_attention.py --json out.json
    python benchmarks/linear_attention.py --value-heads 16 48 --sweep

Heads of 128, 16 key heads, bfloat16 with states in float32. Our figures are those of the whole layer between its
projections: convolution, gates, rule and gated norm. Those of fla-core, where it is installed, are of the rule alone,
with the L2 norms of q and k. All are microseconds in a CUDA graph.

GB/s counts one read and one write of each state, and a write for each proposed token, beside what a copy of a large
tensor reaches. A prefill's FLOPs are those of the products of chunks of 64 tokens, without the inverses.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from graph_timing import time_graph
from required_gpus import require_gpus
from torch import Tensor

from nanovllm.kernels.linear_attention import chunked_delta
from nanovllm.kernels.linear_attention.chunked_delta import ScanConfig
from nanovllm.kernels.linear_attention.chunks import CHUNK
from nanovllm.kernels.linear_attention.gated_delta import delta_rule_decode, delta_rule_prefill

KEY_HEADS, DIM, TAPS, EPS = 16, 128, 4, 1e-6
BATCHES = (1, 16, 64, 256, 512)
PROPOSALS = ((1, 3), (1, 7), (16, 3), (64, 3))  # sequences, proposed tokens of each
PREFILLS = ((500, 32), (128, 128), (16, 1024), (1, 16384))  # sequences, tokens of each
MIN_STATE_BYTES = 512 * 2**20  # of the layers that take turns, so that no state is in the L2 cache from the call before
MAX_LAYERS = 48
SCAN_SWEEP = [ScanConfig(*each) for each in product((16, 32, 64, 128), (4, 8), (1, 2, 3))]


class Layer(NamedTuple):
    """Weights, and inputs as slices of one tensor."""

    weights: tuple[Tensor, Tensor, Tensor, Tensor, float]
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    heads: tuple[int, int]

    @classmethod
    def make(cls, num_tokens: int, value_heads: int) -> "Layer":
        conv_dim = (2 * KEY_HEADS + value_heads) * DIM
        sizes = conv_dim, value_heads * DIM, value_heads, value_heads
        inputs = torch.randn(num_tokens, sum(sizes), device="cuda").bfloat16().split(sizes, dim=1)
        conv_weight = torch.randn(conv_dim, TAPS, device="cuda").bfloat16() * 0.5
        A_log, dt_bias = torch.randn(2, value_heads, device="cuda")
        weights = conv_weight, A_log, dt_bias, torch.ones(DIM, device="cuda"), EPS
        return cls(weights, inputs, (KEY_HEADS, value_heads))

    def store(self, num_cells: int, state_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        conv_dim, value_heads = self.inputs[0].shape[1], self.heads[1]
        tails = torch.zeros(num_cells, TAPS - 1, conv_dim, dtype=torch.bfloat16, device="cuda")
        return tails, torch.zeros(num_cells, value_heads, DIM, DIM, dtype=state_dtype, device="cuda")

    def rule_inputs(self, *shape: int) -> tuple[Tensor, ...]:
        """q, k, v, g and beta `[*shape, heads, DIM]`, as fla-core's functions take them."""
        qkv, _, b, a = self.inputs
        q, k, v = qkv.split((KEY_HEADS * DIM, KEY_HEADS * DIM, self.heads[1] * DIM), dim=1)
        _, A_log, dt_bias, *_ = self.weights
        g = -A_log.exp() * F.softplus(a.float() + dt_bias)
        heads = (x.reshape(*shape, -1, DIM).contiguous() for x in (q, k, v))
        return *heads, g.view(*shape, -1), b.float().sigmoid().view(*shape, -1)


def ints(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def copy_speed() -> float:
    """GB/s, read and written."""
    source = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / time_graph(lambda: [target.copy_(source) for _ in range(5)], 5, 5) / 1e3


def time_decode(batch: int, value_heads: int, state_dtype: torch.dtype, num_proposed: int = 0) -> dict[str, float]:
    num_rows = batch * (1 + num_proposed)
    layer = Layer.make(num_rows, value_heads)
    num_bytes = batch * value_heads * DIM * DIM * state_dtype.itemsize
    num_layers = min(MAX_LAYERS, max(2, -(-MIN_STATE_BYTES // num_bytes)))
    stores = [layer.store(num_rows, state_dtype) for _ in range(num_layers)]
    cells = ints(range(num_rows))
    is_proposed = ints(min(row % (1 + num_proposed), 1) for row in range(num_rows)) if num_proposed else None
    context_lens = ints(100 + row % (1 + num_proposed) for row in range(num_rows))

    def run() -> None:
        for store in stores:
            delta_rule_decode(*layer.inputs, *layer.weights, *store, cells, context_lens, *layer.heads, is_proposed)

    micros = time_graph(run, num_layers, 9, 3)
    return {"us": micros, "gb_per_s": (2 + num_proposed) * num_bytes / micros / 1e3}


def time_fla_decode(batch: int, value_heads: int) -> dict[str, Any]:
    layer = Layer.make(batch, value_heads)
    num_bytes = batch * value_heads * DIM * DIM * 4
    num_layers = min(MAX_LAYERS, max(2, -(-MIN_STATE_BYTES // num_bytes)))
    states = [layer.store(batch)[1] for _ in range(num_layers)]
    q, k, v, g, beta = layer.rule_inputs(batch, 1)

    def run(function: Callable) -> None:
        for state in states:
            options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            function(q, k, v, g=g, beta=beta, **options)

    micros = with_fla("fused_recurrent_gated_delta_rule", run, num_layers)
    return micros if isinstance(micros, dict) else {"us": micros, "gb_per_s": 2 * num_bytes / micros / 1e3}


def prefill_flops(num_seqs: int, length: int, value_heads: int) -> int:
    of_token = 3 * DIM * DIM + 2 * CHUNK * DIM + 2 * CHUNK * DIM
    return 2 * of_token * num_seqs * length * value_heads


def prefill_call(num_seqs: int, length: int, value_heads: int) -> Callable[[], Tensor]:
    layer = Layer.make(num_seqs * length, value_heads)
    cells = ints(range(num_seqs))
    snapshots = ints([-1] * num_seqs)
    places = ints(range(0, num_seqs * length + 1, length)), snapshots, cells, snapshots, snapshots
    store = layer.store(num_seqs)
    return partial(delta_rule_prefill, *layer.inputs, *layer.weights, *store, *places, *layer.heads)


def time_prefill(num_seqs: int, length: int, value_heads: int) -> dict[str, Any]:
    call = prefill_call(num_seqs, length, value_heads)
    micros = time_graph(lambda: [call() for _ in range(4)], 4, 7, 3)
    flops = prefill_flops(num_seqs, length, value_heads)
    return {"us": micros, "tflops": flops / micros / 1e6, "kernels": kernel_times(call)}


def kernel_times(call: Callable) -> dict[str, float]:
    """Microseconds of each kernel, by torch's profiler."""
    repeats = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {each.key: each.device_time_total / repeats for each in profile.key_averages()}


def time_fla_prefill(num_seqs: int, length: int, value_heads: int) -> dict[str, Any]:
    layer = Layer.make(num_seqs * length, value_heads)
    q, k, v, g, beta = layer.rule_inputs(1, num_seqs * length)
    cu_seqlens = torch.arange(0, num_seqs * length + 1, length, device="cuda")
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens}

    def run(function: Callable) -> None:
        for _ in range(4):
            function(q, k, v, g=g, beta=beta, **options)

    micros = with_fla("chunk_gated_delta_rule", run, 4)
    flops = prefill_flops(num_seqs, length, value_heads)
    return micros if isinstance(micros, dict) else {"us": micros, "tflops": flops / micros / 1e6}


def with_fla(name: str, run: Callable[[Callable], None], num_calls: int) -> float | dict[str, str]:
    """Microseconds a call, or what went wrong."""
    try:
        function = getattr(import_module("fla.ops.gated_delta_rule"), name)
        run(function)  # Its own tuning synchronizes, which a graph does not allow.
        torch.cuda.synchronize()
        return time_graph(lambda: run(function), num_calls, 7, 3)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def sweep(value_heads: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for scan in SCAN_SWEEP:
        with patch.object(chunked_delta, "choose_scan", lambda *_, scan=scan: scan):
            times = {f"prefill {n} x {length}": attempt(time_scan, n, length, value_heads) for n, length in PREFILLS}
        rows.append({"scan": scan._asdict(), **times})
    return rows


def time_scan(num_seqs: int, length: int, value_heads: int) -> dict[str, Any]:
    call = prefill_call(num_seqs, length, value_heads)
    return {"us": time_graph(lambda: [call() for _ in range(4)], 4, 5, 1)}


def attempt(function: Callable[..., dict[str, Any]], *args: Any) -> Any:
    """Its microseconds, or the name of the error: some constants need more than a card has."""
    try:
        return round(function(*args)["us"], 1)
    except Exception as error:
        return type(error).__name__


def show(what: str, figures: dict[str, Any]) -> None:
    texts = (f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items())
    print(f"{what:40}", ", ".join(texts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--value-heads", type=int, nargs="+", default=[32])
    parser.add_argument("--sweep", action="store_true", help="time other launch constants too")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    require_gpus(parser)

    torch.manual_seed(0)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.inference_mode():
        results["copy_gb_per_s"] = copy_speed()
        show("copy", {"gb_per_s": results["copy_gb_per_s"]})
        for value_heads in args.value_heads:
            rows = {}
            for batch in BATCHES:
                rows[f"decode {batch}"] = time_decode(batch, value_heads, torch.float32)
                for name in ("float16", "bfloat16"):
                    rows[f"decode {batch}, states in {name}"] = time_decode(batch, value_heads, getattr(torch, name))
                rows[f"decode {batch}, fla"] = time_fla_decode(batch, value_heads)
            for batch, num_proposed in PROPOSALS:
                name = f"decode {batch}, with {num_proposed} proposed tokens each"
                rows[name] = time_decode(batch, value_heads, torch.float32, num_proposed)
            for num_seqs, length in PREFILLS:
                rows[f"prefill {num_seqs} x {length}"] = time_prefill(num_seqs, length, value_heads)
                rows[f"prefill {num_seqs} x {length}, fla"] = time_fla_prefill(num_seqs, length, value_heads)
            for name, figures in rows.items():
                show(f"{value_heads} heads, {name}", figures)
            results[f"{value_heads} heads"] = rows
            if args.sweep:
                results[f"{value_heads} heads, sweep"] = sweep(value_heads)
                for row in results[f"{value_heads} heads, sweep"]:
                    show("", row)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
