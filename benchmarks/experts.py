"""Which constants compute a layer's experts the fastest, and how far from the floor? For the table's rows.

    python benchmarks/experts.py --output experts.json
    python benchmarks/experts.py --ranks 4 [--whole-experts]    a part of the layer: columns of each expert, or experts

For each number of tokens it times our kernels for any number of tokens ("expert-tiles") with many constants, gate_up
and down by themselves; then our kernels for a few tokens ("experts-gemv") likewise; then whole layers, with the best
constants. Everything is captured in CUDA graphs over several layers,
whose weights together are larger than the L2 cache. The table's rows are written to a file, as `nanovllm tune` does.

With --whole-experts it times the first of the ranks. Where few tokens choose their experts, others may have more work,
for which the sum over the ranks waits.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import time_graph
from required_gpus import require_gpus

from nanovllm.kernels.experts import experts as tiles
from nanovllm.kernels.experts import experts_gemv as gemv
from nanovllm.kernels.experts.experts import TileConfig
from nanovllm.kernels.experts.experts_gemv import ExpertsGemvConfig
from nanovllm.kernels.launch import compile_ahead
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.expert_tiles import ExpertTiles
from nanovllm.layers.matmul.candidates.experts_gemv import ExpertsGemv
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table, write_table
from nanovllm.utils.optional_packages import installed_versions

DECODE_TOKENS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 192, 256, 384, 512)
PREFILL_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
GEMV_TOKENS = 16
BANDWIDTH, MATRIX_RATE = 4.27e12, 780e12  # of an H200: bytes a second of a large copy, and operations of a product
SHARED_MEMORY = 226 * 1024
NUM_LAYERS = 4
NUM_REPLAYS = 5


class Sizes(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    num_ranks: int = 1  # among which experts are divided

    @property
    def mine(self) -> range | None:
        """The experts of the first rank; None for all."""
        return range(self.num_experts // self.num_ranks) if self.num_ranks > 1 else None


class Layer(NamedTuple):
    gate_up: torch.Tensor  # [num_experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [num_experts, hidden, intermediate]


class Step(NamedTuple):
    """What a layer computes in a step, in parts."""

    layer: Layer
    x: torch.Tensor
    norm: RMSNorm
    logits: torch.Tensor
    context_lens: torch.Tensor | None  # of a decode step
    weights: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    hidden: torch.Tensor  # between gate_up and down
    top_k: int
    mine: range | None

    def gate_up_tiles(self, config: TileConfig) -> None:
        tiles.gate_up(self.x, self.order, self.starts, self.layer.gate_up, config)

    def down_tiles(self, config: TileConfig) -> None:
        tiles.down(self.hidden, self.order, self.starts, self.weights, self.layer.down, config)

    def gate_up_gemv(self, config: ExpertsGemvConfig) -> None:
        norm = self.norm.weight, self.norm.eps
        lens = self.context_lens
        gemv.gate_up(self.x, *norm, self.logits, self.layer.gate_up, self.top_k, lens, config, mine=self.mine)

    def down_gemv(self, config: ExpertsGemvConfig) -> None:
        weight, lens = self.layer.down, self.context_lens
        gemv.down(self.hidden, self.logits, weight, self.top_k, True, self.x, True, lens, config, mine=self.mine)

    def problem(self) -> ExpertsProblem:
        gate_up, down = (Unquantized().quantize(weight, weight.dtype) for weight in self.layer)
        tensors = Normed(self.x, self.norm), self.logits, gate_up, down
        key = Key.of("experts", self.context_lens is None, gate_up)
        return ExpertsProblem(key, *tensors, self.top_k, True, self.x, True, self.context_lens, mine=self.mine)


def make_layers(sizes: Sizes, device: torch.device) -> list[Layer]:
    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=shape[-1] ** -0.5)

    hidden, intermediate, experts = sizes.hidden, sizes.intermediate, sizes.num_experts // sizes.num_ranks
    return [
        Layer(weight(experts, 2 * intermediate, hidden), weight(experts, hidden, intermediate))
        for _ in range(NUM_LAYERS)
    ]


def make_steps(layers: list[Layer], sizes: Sizes, num_tokens: int, is_prefill: bool) -> list[Step]:
    """One for each layer. Tokens choose their experts at random."""
    device = layers[0].down.device
    norm = RMSNorm(sizes.hidden).to(device, torch.bfloat16).requires_grad_(False)
    lens = None if is_prefill else torch.ones(num_tokens, dtype=torch.int32, device=device)
    steps = []
    for layer in layers:
        x = torch.randn(num_tokens, sizes.hidden, device=device).bfloat16()
        logits = torch.randn(num_tokens, sizes.num_experts, device=device).bfloat16()
        experts, weights = tiles.route(logits, sizes.top_k, True, lens, mine=sizes.mine)
        order, starts = tiles.sort_by_expert(experts, len(layer.down))
        hidden = torch.randn(num_tokens * sizes.top_k, sizes.intermediate, device=device).bfloat16()
        steps.append(Step(layer, x, norm, logits, lens, weights, order, starts, hidden, sizes.top_k, sizes.mine))
    return steps


def tile_configs(sizes: Sizes, num_tokens: int, num_weights: int) -> Iterator[TileConfig]:
    """Those whose tiles suit the tokens of an expert, with stages that fill the shared memory of a multiprocessor by
    one program or by two. num_weights: tiles of weights in a stage."""
    mean = num_tokens * sizes.top_k / sizes.num_experts
    for tokens in (16, 32, 64, 128, 256):
        if not min(mean / 2, 128) <= tokens <= max(32, 3 * mean):
            continue
        for columns, k in product((64, 128, 256), (64, 128)):
            if tokens * columns * num_weights > 128 * 256 or (tokens < 64 and columns * num_weights > 256):
                continue
            stage = (tokens + num_weights * columns) * k * 2
            for programs in (1, 2):
                stages = min(6, SHARED_MEMORY // programs // stage)
                if stages >= 3:
                    # 64 accumulators a thread, or 128.
                    for num_warps in (4, 8):
                        accumulators = tokens * columns * num_weights // (32 * num_warps)
                        if accumulators <= 128 and (num_warps == 4 or accumulators >= 32):
                            yield TileConfig(tokens, columns, k, num_warps, stages)


def gemv_configs(row_size: int, num_experts: int) -> Iterator[ExpertsGemvConfig]:
    """num_experts: of a program. A thread holds 32 to 128 numbers of a tile."""
    longest = 1 << (row_size - 1).bit_length()
    for rows, k_tile, num_warps in product((2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8)):
        if k_tile <= longest and 32 <= rows * k_tile * num_experts // (32 * num_warps) <= 128:
            yield ExpertsGemvConfig(rows, k_tile, num_warps)


class Sweep:
    """Times the constants for one number of tokens after the other."""

    def __init__(self, sizes: Sizes, layers: list[Layer], time: Callable[[Callable[[], Any], int, int], float]):
        """time: `time_graph`."""
        self.sizes, self.layers, self._time = sizes, layers, time
        padded_top_k = 1 << (sizes.top_k - 1).bit_length()
        self.gemv_configs = (
            list(gemv_configs(sizes.hidden, 1)),
            list(gemv_configs(sizes.intermediate, padded_top_k)),
        )

    def tile_configs(self, num_tokens: int) -> tuple[list[TileConfig], list[TileConfig]]:
        return tuple(list(dict.fromkeys(tile_configs(self.sizes, num_tokens, n))) for n in (2, 1))

    def compile(self, num_tokens: Iterable[int]) -> None:
        """Compile all kernels that a sweep over these numbers of tokens launches, in parallel."""
        steps = make_steps(self.layers[:1], self.sizes, 8, False)
        with compile_ahead(lambda done, total: print(f"\rcompiled {done} of {total}", end="", flush=True)):
            for config in {config for n in num_tokens for config in self.tile_configs(n)[0]}:
                steps[0].gate_up_tiles(config)
            for config in {config for n in num_tokens for config in self.tile_configs(n)[1]}:
                steps[0].down_tiles(config)
            for gemv_config in self.gemv_configs[0]:
                steps[0].gate_up_gemv(gemv_config)
            for gemv_config in self.gemv_configs[1]:
                steps[0].down_gemv(gemv_config)
        print()

    def best(self, steps: list[Step], part: str, configs: Iterable[tuple]) -> tuple[float, tuple]:
        """Microseconds with the fastest constants, and these. part: a method of Step."""
        times = {}
        for config in configs:
            try:
                times[config] = self._run(steps, lambda step, config=config: getattr(step, part)(config))
            except Exception as error:  # Of the compiler: these constants are not for this GPU.
                print(f"  {part} {tuple(config)}: {type(error).__name__}")
        ranked = sorted(times, key=times.get)
        for config in ranked[:3]:
            print(f"  {part:14} {times[config]:9.1f} us  {tuple(config)}")
        return times[ranked[0]], tuple(ranked[0])

    def measure(self, num_tokens: int, is_prefill: bool) -> list[Choice]:
        """The candidates, the best first."""
        steps = make_steps(self.layers, self.sizes, num_tokens, is_prefill)
        used = sum(int((step.starts.diff() > 0).sum()) for step in steps) / len(steps)
        pairs = sum(int(step.starts[-1]) for step in steps) / len(steps)
        numbers = 3 * self.sizes.hidden * self.sizes.intermediate
        floor = max(used * numbers * 2 / BANDWIDTH, 2 * pairs * numbers / MATRIX_RATE)
        print(f"{'prefill' if is_prefill else 'decode'} {num_tokens} tokens, {used:.0f} experts:", flush=True)
        configs = self.tile_configs(num_tokens)
        parts = [self.best(steps, part, c) for part, c in zip(("gate_up_tiles", "down_tiles"), configs, strict=True)]
        choices: list[tuple[Candidate, tuple]] = [(ExpertTiles(), tuple(constants for _, constants in parts))]
        if num_tokens <= GEMV_TOKENS:
            names = "gate_up_gemv", "down_gemv"
            parts = [self.best(steps, part, c) for part, c in zip(names, self.gemv_configs, strict=True)]
            choices.append((ExpertsGemv(), tuple(constants for _, constants in parts)))
        times = {}
        for candidate, constants in choices:
            micros = self._run(steps, lambda step, c=candidate, k=constants: c.launch(step.problem(), k))
            times[candidate.name, constants] = micros
            share = 1e6 * floor / micros
            print(f"  {candidate.name:14} {micros:9.1f} us a layer, {share:.2f} of the floor", flush=True)
        return [Choice(*min(times, key=times.get))]

    def _run(self, steps: list[Step], launch: Callable[[Step], Any]) -> float:
        rounds = 4 if len(steps[0].x) <= 512 else 1

        def run() -> None:
            for step in steps * rounds:
                launch(step)

        return self._time(run, len(steps) * rounds, NUM_REPLAYS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=4, default=(128, 8, 2048, 768), help="as in `Sizes`")
    parser.add_argument("--decode", type=int, nargs="*", default=DECODE_TOKENS, help="numbers of tokens")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILL_TOKENS, help="numbers of tokens")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="time one of N ranks' part of the layer")
    parser.add_argument("--whole-experts", action="store_true", help="with --ranks: experts, not columns of each")
    parser.add_argument("--output", type=Path, default=Path("experts.json"))
    args = parser.parse_args()
    require_gpus(parser)
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = Sizes(*args.sizes)
    size = sizes.num_experts if args.whole_experts else sizes.intermediate
    if args.ranks < 1 or size % args.ranks:
        parser.error(f"--ranks {args.ranks}: must divide {size}")
    if args.whole_experts:
        sizes = sizes._replace(num_ranks=args.ranks)
    else:
        sizes = sizes._replace(intermediate=sizes.intermediate // args.ranks)
    rows = {}
    with torch.inference_mode():
        sweep = Sweep(sizes, make_layers(sizes, device), time_graph)
        sweep.compile([*args.decode, *args.prefill])
        weight = Unquantized().quantize(sweep.layers[0].gate_up, torch.bfloat16)
        for is_prefill, counts in ((False, args.decode), (True, args.prefill)):
            if counts:
                row = Row({n: sweep.measure(n, is_prefill) for n in counts})
                rows[Key.of("experts", is_prefill, weight)._replace(experts=sizes.num_experts)] = row
    table = Table(rows, versions=installed_versions("torch", "triton"))
    write_table(args.output, torch.cuda.get_device_name(device), table)
    print(args.output.read_text())


if __name__ == "__main__":
    main()
