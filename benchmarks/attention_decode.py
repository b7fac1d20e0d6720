"""How fast does decode attention read the KV cache, and which launch constants are best?

    python benchmarks/attention_decode.py --json out.json [--sweep] [--fp8] [--head-dim 64] [--heads 16 --kv-heads 8]

One layer in bfloat16 (with --fp8 over a cache of float8_e4m3fn) and blocks of 256 tokens. Prints TB/s: the bytes of all
keys and values over the time of a call in a CUDA graph. Compares our kernel with flash-attn 2, where that is installed.

With --sweep it times other launch constants instead, and then other numbers of programs with the best of them. At the
end it prints a group of the table's setting "decode_attention". A choice of today's table stays unless another one is
faster by 2 %.

    python benchmarks/attention_decode.py --group-rows 1 2 4 8 [--sweep] [--fp8] [--heads 32 --kv-heads 8]

times speculative steps, in which each sequence has that many rows: with a program for all rows of a sequence, and with
one for each row. TB/s count a sequence's keys and values once. With --sweep it times the shared programs with other
launch constants too.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import zip_longest
from math import inf, prod
from pathlib import Path
from random import Random

import numpy as np
import torch
from graph_timing import time_graph
from required_gpus import require_gpus

from nanovllm.kernels.attention.decode_plan import (
    GROUP_PIECE_FIELDS,
    MAX_GROUP_ROWS,
    PIECE_FIELDS,
    DecodeConfig,
    DecodeWorkspace,
    RowGroups,
    plan_decode,
    plan_groups,
)
from nanovllm.kernels.attention.paged_decode import has_tma, paged_decode
from nanovllm.kernels.launch import compile_ahead
from nanovllm.layers.backends.decode_constants import DecodeConstants
from nanovllm.layers.matmul.table import load_table, speed_name

BLOCK_SIZE = 256
# Sequences -> the fewest and the most keys of one, for each batch.
SHAPES = {
    **{1: [(600, 600)], 8: [(600, 1200)], 16: [(500, 1024)], 64: [(100, 2048)], 128: [(2000, 4000)]},
    **{256: [(590, 610), (100, 2048)], 512: [(100, 130)]},
}
CACHES = 3
CALLS = 12  # in one graph
REPLAYS = 7
WARM_UP_REPLAYS = 150
NUM_BEST = 2  # configurations that are timed with other numbers of programs
SWEEP_SPARE = (165, 264, 330, 528, 660, 1056)
WORTH_A_CHANGE = 1.02
# Tile, warps and stages. Asking for keys early is for dependent launches, and there are none here. A tile is no longer
# than the unit in which a sequence is cut, of 64 keys.
SWEEP = [DecodeConfig(*x) for x in ((64, 4, 2), (64, 4, 3), (32, 2, 3), (32, 2, 4), (32, 1, 4), (16, 1, 3))]
# By the tensor memory accelerator.
SWEEP_TMA = [(tile, warps, stages, False, True) for tile in (32, 64) for warps in (1, 2) for stages in (3, 4)]
SWEEP_TMA += [(32, 1, 5, False, True), (16, 1, 4, False, True), (64, 4, 3, False, True)]
SWEEP_FP8 = [(32, warps, stages, False, True) for warps, stages in ((1, 3), (1, 4), (1, 5), (2, 3), (2, 4))]
MOST_ROWS = 512  # of a speculative step
SWEEP_GROUPS = [DecodeConfig(*x) for x in ((64, 4, 2, True), (64, 4, 2), (64, 4, 3), (32, 4, 3), (32, 2, 3))]
SWEEP_GROUPS_TMA = [DecodeConfig(*x, False, True) for x in ((64, 4, 2), (64, 4, 3), (32, 4, 3), (32, 4, 4), (32, 2, 3))]
SWEEP_FP8 += [(64, warps, stages, False, True) for warps, stages in ((1, 3), (2, 3), (2, 4), (4, 3), (4, 4))]


class Case:
    """One batch over three caches of its own."""

    def __init__(self, lens: list[int], args: argparse.Namespace):
        batch, self.lens = len(lens), lens
        blocks = [-(-n // BLOCK_SIZE) for n in lens]
        ids = list(range(sum(blocks)))
        Random(batch).shuffle(ids)
        tables = torch.full((batch, 4096 // BLOCK_SIZE), -1, dtype=torch.int32)
        for i, n in enumerate(blocks):
            tables[i, :n] = torch.tensor([ids.pop() for _ in range(n)], dtype=torch.int32)
        self.tables = tables.cuda()
        self.context_lens = torch.tensor(lens, dtype=torch.int32).cuda()
        self.num_kv_heads, self.head_dim = args.kv_heads, args.head_dim
        shape = (CACHES, 2, sum(blocks), BLOCK_SIZE, args.kv_heads, args.head_dim)
        self.caches = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.kv_scales = None
        if args.fp8:
            self.caches = self.caches.to(torch.float8_e4m3fn)
            self.kv_scales = torch.ones(2, args.kv_heads, device="cuda")
        self.q = torch.randn(batch, args.heads, args.head_dim, device="cuda", dtype=torch.bfloat16)
        self.bytes = sum(lens) * 2 * args.kv_heads * args.head_dim * self.caches.itemsize

    @classmethod
    def random(cls, batch: int, low: int, high: int, args: argparse.Namespace) -> "Case":
        rng = Random(batch)
        return cls([rng.randint(low, high) for _ in range(batch)], args)

    def with_rows(self, num_rows: int) -> "Case":
        """The same sequences with num_rows rows each, of which the last one sees all keys."""
        case = copy.copy(self)
        case.lens = [n - num_rows + 1 + row for n in self.lens for row in range(num_rows)]
        case.tables = self.tables.repeat_interleave(num_rows, 0)
        case.q = torch.randn(len(case.lens), *self.q.shape[1:], device="cuda", dtype=self.q.dtype)
        return case

    def time(self, attend: Callable, num_warm_replays: int = 3) -> float:
        """Seconds a call; attend(k_cache, v_cache)."""

        def run():
            for i in range(CALLS):
                attend(*self.caches[i % CACHES])

        return time_graph(run, CALLS, REPLAYS, num_warm_replays) / 1e6

    def print(self, seconds: float, name: str) -> None:
        shape = f"{len(self.lens):4d} x {min(self.lens)}..{max(self.lens)}"
        print(f"{shape:18s} {self.bytes / seconds / 1e12:6.2f} TB/s {seconds * 1e6:8.1f} us  {name}", flush=True)


def ours(case: Case, num_pieces: int, config: DecodeConfig) -> Callable:
    batch, num_heads, head_dim = case.q.shape
    items = np.empty((num_pieces, PIECE_FIELDS), np.int32)
    plan_decode(np.array(case.lens), items)
    plan = torch.from_numpy(items).to("cuda")
    workspace = DecodeWorkspace(batch, num_heads, case.num_kv_heads, head_dim, "cuda", num_pieces)

    def attend(k, v):
        options = {"kv_scales": case.kv_scales}
        return paged_decode(case.q, k, v, case.tables, head_dim**-0.5, plan, workspace, config, **options)

    return attend


def shared(case: Case, num_rows: int, constants: DecodeConstants, config: DecodeConfig | None = None) -> Callable:
    """A program for all rows of a sequence. config: None for what an engine takes."""
    all_rows, num_heads, head_dim = case.q.shape
    num_kv_heads, num_seqs = case.num_kv_heads, all_rows // num_rows
    num_pieces = constants.num_pieces(all_rows, num_kv_heads)
    plan = torch.empty(num_pieces, GROUP_PIECE_FIELDS, dtype=torch.int32)
    group_rows = np.array([num_rows, *[0] * (num_rows - 1)] * num_seqs)
    spare = min(constants.num_pieces(num_seqs, num_kv_heads) - num_seqs, num_pieces - all_rows)
    plan_groups(np.array(case.lens), RowGroups.of(group_rows, num_rows), plan.numpy(), spare)
    plan = plan.cuda()
    workspace = DecodeWorkspace(all_rows, num_heads, num_kv_heads, head_dim, "cuda", num_pieces, num_rows)
    if config is None:
        tma = has_tma(head_dim, BLOCK_SIZE, case.q.itemsize, case.q.device)
        config = constants.group_config(all_rows, num_heads, num_kv_heads, tma, num_rows)
    options = {"kv_scales": case.kv_scales, "group_rows": num_rows}

    def attend(k, v):
        return paged_decode(case.q, k, v, case.tables, head_dim**-0.5, plan, workspace, config, **options)

    return attend


def flash_attn_2(case: Case) -> Callable:
    from flash_attn import flash_attn_with_kvcache

    def attend(k, v):
        flash_attn_with_kvcache(
            case.q.unsqueeze(1), k, v, cache_seqlens=case.context_lens, block_table=case.tables, causal=True
        )

    return attend


class Bucket:
    """The shapes of one batch size, and what was timed with them."""

    def __init__(self, batch: int, args: argparse.Namespace, constants: DecodeConstants):
        self.cases = [Case.random(batch, low, high, args) for low, high in SHAPES[batch]]
        self.batch, self.num_kv_heads = batch, args.kv_heads
        self.today = {tma: constants.config(batch, args.kv_heads, tma) for tma in (False, True)}
        self.today_spare = constants.spare_programs(batch, args.kv_heads)
        self.outputs: list[torch.Tensor] | None = None
        self.seconds: dict[tuple[DecodeConfig, int], float] = {}  # geometric mean over the cases

    def time(self, config: DecodeConfig, spare: int) -> None:
        if (config, spare) in self.seconds:
            return
        num_pieces = self.batch + -(-spare // self.num_kv_heads)
        attends = [ours(case, num_pieces, config) for case in self.cases]
        try:
            outputs = [attend(*case.caches[0]) for case, attend in zip(self.cases, attends, strict=True)]
            self.outputs = self.outputs or outputs
            torch.testing.assert_close(outputs, self.outputs, atol=0.02, rtol=0.02)
            times = [case.time(attend) for case, attend in zip(self.cases, attends, strict=True)]
        except Exception as error:  # one that does not fit must not end the sweep
            print(f"  {config}: {type(error).__name__} {str(error)[:200]}")
            times = [inf]
        else:
            for case, seconds in zip(self.cases, times, strict=True):
                case.print(seconds, f"spare {spare} {list(config)}")
        self.seconds[config, spare] = prod(times) ** (1 / len(times))

    def sweep(self, configs: list[DecodeConfig], tma: bool) -> None:
        # The clocks take a while to rise: without this, whatever is timed first looks 7 % slower.
        num_pieces = self.batch + -(-self.today_spare // self.num_kv_heads)
        self.cases[0].time(ours(self.cases[0], num_pieces, self.today[tma]), WARM_UP_REPLAYS)
        for config in configs:
            self.time(config, self.today_spare)
        best = sorted(configs, key=lambda config: self.seconds[config, self.today_spare])
        for config in best[:NUM_BEST]:
            for spare in SWEEP_SPARE:
                self.time(config, spare)

    def choose(self, tma: bool, least_spare: int, spare: int | None = None) -> tuple[DecodeConfig, int]:
        """The best constants and spare programs; with `spare` of those that were timed with it."""
        today = self.today[tma], self.today_spare
        found = {
            key: seconds
            for key, seconds in self.seconds.items()
            if key[1] >= least_spare and (tma or not key[0].tma) and spare in (None, key[1])
        }
        best = min(found, key=found.__getitem__)
        return today if found.get(today, inf) <= found[best] * WORTH_A_CHANGE else best


def sweep(args: argparse.Namespace, constants: DecodeConstants) -> dict:
    """The group of the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    tma = torch.cuda.get_device_capability(device)[0] == 9
    by_accelerator = [DecodeConfig(*x) for x in (SWEEP_FP8 if args.fp8 else SWEEP_TMA)] if tma else []
    todays = {constants.config(batch, args.kv_heads, by_tma) for batch in SHAPES for by_tma in {False, tma}}
    configs = list(dict.fromkeys([*todays, *SWEEP, *by_accelerator]))
    small = Case([64], args)
    with compile_ahead():
        for config in configs:
            ours(small, 2, config)(*small.caches[0])
    group: dict[str, dict] = {"spare_programs": {}, "configs": {}, "tma_configs": {}}
    least_spare = 0
    for batch in SHAPES:
        bucket = Bucket(batch, args, constants)
        bucket.sweep(configs, tma)
        rows = str(batch * args.kv_heads)
        config, least_spare = bucket.choose(tma, least_spare)
        gain = bucket.seconds[bucket.today[tma], bucket.today_spare] / bucket.seconds[config, least_spare]
        print(f"{rows} rows x KV heads: {list(config)}, {least_spare} spare programs: {gain:.3f} times today's speed")
        group["spare_programs"][rows] = least_spare
        if tma:
            group["tma_configs"][rows] = _constants(config)
        group["configs"][rows] = _constants(bucket.choose(False, 0, bucket.today_spare)[0])
    return {name: dict(_without_repetitions(values)) for name, values in group.items()}


def _constants(config: DecodeConfig) -> list:
    """Without defaults at the end, as the table has them."""
    constants = list(config)
    while constants[-1] == list(DecodeConfig(0, 0, 0))[len(constants) - 1]:
        constants.pop()
    return constants


def _without_repetitions(values: dict) -> Iterator[tuple]:
    """Only the last one of neighbours that are alike: a key is the largest number that it is for."""
    items = list(values.items())
    return (item for item, after in zip_longest(items, items[1:]) if after is None or item[1] != after[1])


def compare(args: argparse.Namespace, constants: DecodeConstants) -> list[dict]:
    """Microseconds of our kernel and of flash-attn 2, for each shape."""
    results = []
    for batch, spans in SHAPES.items():
        for low, high in spans:
            case = Case.random(batch, low, high, args)
            tma = has_tma(args.head_dim, BLOCK_SIZE, case.q.itemsize, case.q.device)
            config = constants.config(batch, args.kv_heads, tma)
            attends = {"ours": ours(case, constants.num_pieces(batch, args.kv_heads), config)}
            if find_spec("flash_attn_2_cuda") and not args.fp8:  # flash-attn-4 lies in the same folder
                attends["flash-attn 2"] = flash_attn_2(case)
            case.time(attends["ours"], WARM_UP_REPLAYS)
            micros = {}
            for name, attend in attends.items():
                seconds = case.time(attend)
                case.print(seconds, name)
                micros[name] = seconds * 1e6
            results.append({"batch": batch, "low": low, "high": high, "micros": micros})
    return results


def compare_groups(args: argparse.Namespace, constants: DecodeConstants) -> list[dict]:
    """Microseconds of steps with several rows of each sequence, for each shape."""
    results = []
    for batch, spans in SHAPES.items():
        for low, high in spans:
            case = Case.random(batch, low, high, args)
            tma = has_tma(args.head_dim, BLOCK_SIZE, case.q.itemsize, case.q.device)
            for num_rows in args.group_rows:
                all_rows = batch * num_rows
                if all_rows > MOST_ROWS:
                    continue
                rows = case.with_rows(num_rows)
                config = constants.config(all_rows, args.kv_heads, tma)
                attends = {"alone": ours(rows, constants.num_pieces(all_rows, args.kv_heads), config)}
                if num_rows > 1:
                    attends["shared"] = shared(rows, num_rows, constants)
                    configs = [*SWEEP_GROUPS, *(SWEEP_GROUPS_TMA if tma else [])] if args.sweep else []
                    attends |= {f"shared {list(x)}": shared(rows, num_rows, constants, x) for x in configs}
                expected, micros = attends["alone"](*rows.caches[0]), {}
                rows.time(attends["alone"], WARM_UP_REPLAYS)
                for name, attend in attends.items():
                    torch.testing.assert_close(attend(*rows.caches[0]), expected, atol=0.02, rtol=0.02)
                    seconds = rows.time(attend)
                    case.print(seconds, f"{num_rows} rows, {name}")
                    micros[name] = seconds * 1e6
                results.append({"batch": batch, "low": low, "high": high, "rows": num_rows, "micros": micros})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="a KV cache of 8 bits")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256))
    parser.add_argument("--heads", type=int, default=16, help="Qwen3-0.6B's by default")
    parser.add_argument("--kv-heads", type=int, default=8, help="of one GPU: 4 for Qwen3-8B over two, with 16 heads")
    parser.add_argument("--group-rows", type=int, nargs="+", choices=range(1, MAX_GROUP_ROWS + 1), metavar="ROWS")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    device = torch.device("cuda", torch.cuda.current_device())
    cache_dtype = torch.float8_e4m3fn if args.fp8 else torch.bfloat16
    constants = DecodeConstants(load_table(device), args.head_dim, torch.bfloat16, cache_dtype)
    result: dict | list
    if args.group_rows:
        result = compare_groups(args, constants)
    elif args.sweep:
        result = {f"{args.head_dim} {speed_name(cache_dtype)}": sweep(args, constants)}
        print(json.dumps(result))
    else:
        result = compare(args, constants)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
