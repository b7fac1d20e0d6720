"""The tuner: times the ways to compute a layer's products, and writes the best into a table.

It times a whole layer, because launches overlap. First it replaces the table's present choice for one product by each
challenger. Then it combines the winners, or takes one candidate for all products if that is faster, and tries the best
few challengers again beside those. The result becomes the table's rows if it takes 2 % less time than the present
choices, in two runs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from nanovllm.engine.runner.cuda_graphs import MAX_GRAPH_BATCH_SIZE
from nanovllm.layers.formats.quantization import FORMATS
from nanovllm.layers.matmul.table import Choice, Key, Row, Table

CUBLAS = Choice("cublas")
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 1024)
PREFILL_TOKENS = (2048, 4096, 8192, 16384)
_MIN_GAIN = 0.02
_NUM_FINALISTS = 4  # of each product
_NUM_RUNS = 2


class Shape(NamedTuple):
    """A product of a layer: one of `layers.matmul`'s operations, and its weight `[N, K]` of a dtype."""

    operation: str
    N: int
    K: int
    dtype: str
    num_experts: int = 1  # with such a weight each
    top_k: int = 1  # of them for a token
    has_norm: bool = True  # whether its input, if it is the residual stream, is normalised first

    @property
    def name(self) -> str:
        """As `step_rows` calls it."""
        experts = f"{self.num_experts}x" if self.num_experts > 1 else ""
        return f"{experts}{self.N}x{self.K} {self.dtype}"

    def key(self, phase: str) -> Key:
        return Key(self.operation, phase, self.N, self.K, self.dtype, self.num_experts)


Picks = tuple[Choice, ...]
# (phase, number of tokens, a choice for each product) -> microseconds a layer, or None if one of them does not work.
# The phase "padding" is that of a decode step whose tokens have no keys.
TimeLayer = Callable[[str, int, Picks], float | None]


class Result(NamedTuple):
    """What was found for one number of tokens."""

    choices: list[list[Choice]]  # for each product, the best first; none for cuBLAS
    micros: float  # microseconds for a layer, with the best choices
    is_new: bool  # whether these are not the table's


def challengers(shape: Shape, phase: str, num_tokens: int, num_multiprocessors: int) -> list[Choice]:
    """All choices to try for a product besides the table's."""
    if shape.operation == "experts":
        tiles = _fp8_expert_tiles if shape.dtype in FORMATS else _expert_tiles
        quack = _quack_experts() if phase == "prefill" else ()
        return [CUBLAS, *_experts_gemv(shape, num_tokens), *tiles(shape, num_tokens), *quack]
    if shape.dtype in FORMATS:
        return [CUBLAS, *_fp8(shape, phase, num_tokens, num_multiprocessors)]
    kinds = {"decode": (_gemv, _split_k, _decode_tiles), "prefill": (_fused_silu, _prefill_tiles)}[phase]
    return [CUBLAS, *(choice for kind in kinds for choice in kind(shape, num_tokens, num_multiprocessors))]


def _fp8(shape: Shape, phase: str, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    yield from _fp8_tiles(shape, phase, num_tokens, num_multiprocessors)
    if phase == "decode":
        yield from _gemv(shape, num_tokens, num_multiprocessors)
        yield from _fp8_split_k(shape, num_tokens, num_multiprocessors)


def _fp8_split_k(shape: Shape, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    """As few splits as give most multiprocessors a program, and twice as many. The stages fill a multiprocessor's
    shared memory, or half of it, where another program, perhaps the next kernel's, finds room too."""
    in_blocks = FORMATS[shape.dtype].is_blocked
    for tile_rows, tile_tokens in _fp8_split_k_tiles(num_tokens):
        tiles = -(-shape.N // tile_rows) * -(-num_tokens // tile_tokens)
        fewest = next((n for n in (1, 2, 4) if n * tiles >= 0.6 * num_multiprocessors or 1024 * n > shape.K), 8)
        for splits in (fewest, 2 * fewest):
            programs = splits * tiles
            if splits > fewest and (splits > 8 or programs > 2.2 * num_multiprocessors or 512 * splits > shape.K):
                continue
            # A program that has few others beside it keeps up with the memory in large steps only.
            steps = (256, 128) if tile_rows == 64 and not in_blocks else (128,)
            kibibytes = 220 if programs <= num_multiprocessors else 110
            num_warps = 8 if tile_rows >= 128 and tile_tokens >= 64 else 4
            for tile_k in steps:
                num_stages = min(max(kibibytes * 1024 // (tile_k * (tile_rows + tile_tokens)), 3), 6)
                yield Choice("split-k", (tile_rows, tile_k, splits, num_stages, 0, tile_tokens, num_warps))


def _fp8_split_k_tiles(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Rows of a weight and tokens. Larger ones read less from L2."""
    tokens = min(max(16, 1 << (num_tokens - 1).bit_length()), 128)
    yield from ((rows, tokens) for rows in (64, 128))
    if tokens == 64:
        yield 256, 64
    if tokens == 128:
        yield 128, 64


def _gemv(shape: Shape, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    if num_tokens > 4:
        return
    row = 1 << (shape.K - 1).bit_length()
    for rows, k_tile, num_warps in product((2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4, 8)):
        if k_tile <= row and 64 <= rows * k_tile // (32 * num_warps) <= 256:  # weights that a thread holds
            yield Choice("gemv", (rows, k_tile, num_warps))


def _split_k(shape: Shape, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    if num_tokens > 128:
        return
    for tile_rows in (16, 32, 64):
        for splits in (1, 2, 4, 8):
            programs = -(-shape.N // tile_rows) * splits * -(-num_tokens // 64)
            if 512 * splits <= shape.K and num_multiprocessors // 2 <= programs <= 4 * num_multiprocessors:
                yield Choice("split-k", (tile_rows, 128, splits, 6, 1024))
                yield Choice("split-k", (tile_rows, 128, splits, 4, 0))


def _decode_tiles(shape: Shape, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    """Tiles of a size that gives each multiprocessor about one; the smallest tiles for small products."""
    if num_tokens <= 16:
        return
    is_silu = shape.operation == "linear_silu"
    for tokens in (64, 128, 192, 256):
        all_columns: tuple[int, ...] = (64, 96, 128, 160, 192) if is_silu else (32, 48, 64, 80, 96, 128)
        if is_silu and tokens == 192:
            all_columns = (64, 96, 128)  # The package gets SwiGLU in tiles of 192 x 192 wrong.
        for columns in all_columns:
            programs = -(-num_tokens // tokens) * -(-shape.N // columns) / num_multiprocessors
            is_smallest = columns == all_columns[0]
            if tokens >= 2 * num_tokens or programs > 1.6 or (programs < 0.35 and not is_smallest):
                continue
            yield Choice("quack-kernels", (tokens, columns, (1, 1), False))
            if num_tokens > tokens:
                yield Choice("quack-kernels", (tokens, columns, (2, 1), False))
    if num_tokens > 128:
        yield from _prefill_tiles(shape, num_tokens, num_multiprocessors)


def _prefill_tiles(shape: Shape, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    for columns in (128, 192):
        yield Choice("quack-kernels", (128, columns, (1, 2), True))
    for columns in (128, 192):
        for cluster in ((1, 2), (2, 1)):
            yield Choice("quack-kernels", (256, columns, cluster, False))


def _fp8_tiles(shape: Shape, phase: str, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    """For a decode step with a graph, the three tiles with which the busiest multiprocessor has the least to do."""
    if num_tokens < 48 or FORMATS[shape.dtype].is_blocked:
        return
    if phase == "prefill" or num_tokens > MAX_GRAPH_BATCH_SIZE:
        for columns in (128, 192):
            yield Choice("quack-kernels", (128, columns, (1, 2), True))
            yield Choice("quack-kernels", (256, columns, (2, 1), False))
        return

    def duration(tile: tuple[int, int]) -> int:
        tokens, columns = tile
        programs = -(-num_tokens // tokens) * -(-shape.N // columns)
        # It multiplies about 80 pairs of numbers in the time in which it loads one number.
        return -(-programs // num_multiprocessors) * max(tokens * columns, 80 * (tokens + columns))

    tiles = [(64, 256), (128, 256), *product((64, 128, 192, 256), (32, 64, 96, 128)), *product((64, 128, 256), (192,))]
    tiles = [tile for tile in tiles if tile[0] < 2 * num_tokens]
    for tokens, columns in sorted(tiles, key=duration)[:3]:
        for cluster in ((1, 1), (2, 1) if num_tokens > tokens else (1, 2)):
            yield Choice("quack-kernels", (tokens, columns, cluster, False))


def _fused_silu(shape: Shape, num_tokens: int, num_multiprocessors: int) -> Iterator[Choice]:
    if shape.operation == "linear_silu":
        yield Choice("fused-silu")


def _experts_gemv(shape: Shape, num_tokens: int) -> Iterator[Choice]:
    if num_tokens > 16:
        return
    gate_up_row, down_row = (1 << (size - 1).bit_length() for size in (shape.K, shape.N // 2))
    for rows, k_tile, num_warps in ((8, 1024, 4), (4, 2048, 4), (16, 1024, 8)):
        gate_up = rows, min(gate_up_row, k_tile), num_warps
        for down_rows, down_tile, down_warps in ((4, 256, 4), (2, 512, 4), (4, 512, 8)):
            yield Choice("experts-gemv", (gate_up, (down_rows, min(down_row, down_tile), down_warps)))


def _expert_tiles(shape: Shape, num_tokens: int) -> Iterator[Choice]:
    """Tiles of about as many tokens as an expert has, and of up to four times as many. The stages fill a
    multiprocessor's shared memory with one program or with two."""
    for tokens in _tokens_of_tiles(shape, num_tokens):
        # Columns, input columns of a step, warps, stages.
        gate_ups = ((64, 64, 4, 4), (64, 128, 4, 3)) if tokens < 128 else ((128, 64, 8, 4), (64, 64, 4, 3))
        downs = ((128, 64, 4, 4), (64, 128, 4, 4)) if tokens < 128 else ((128, 64, 4, 3), (256, 64, 8, 4))
        for gate_up in gate_ups:
            for down in downs:
                yield Choice("expert-tiles", ((tokens, *gate_up), (tokens, *down)))


def _fp8_expert_tiles(shape: Shape, num_tokens: int) -> Iterator[Choice]:
    """With inputs in fp8 too."""
    for tokens in _tokens_of_tiles(shape, num_tokens):
        gate_ups = ((64, 128, 4, 4), (64, 128, 4, 3)) if tokens < 128 else ((128, 128, 8, 3), (64, 128, 4, 4))
        downs: tuple = (128, 128, 4, 4), (64, 128, 4, 4)
        if tokens == 128:
            downs = (128, 128, 4, 4), (128, 128, 8, 4), (256, 128, 8, 3)
        for gate_up in gate_ups:
            for down in downs:
                yield Choice("expert-tiles", ((tokens, *gate_up), (tokens, *down)))


def _quack_experts() -> Iterator[Choice]:
    tiles = (128, 256, (1, 1), False), (128, 256, (2, 1), False), (128, 192, (2, 1), True)
    return (Choice("quack-experts", pair) for pair in product(tiles, repeat=2))


def _tokens_of_tiles(shape: Shape, num_tokens: int) -> Iterator[int]:
    mean = num_tokens * shape.top_k / shape.num_experts
    return (tokens for tokens in (16, 32, 64, 128) if min(mean, 128) <= tokens <= max(32, 4 * mean))


class Tuner:
    """Measures one model's layer."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        table: Table,
        available: set[str],
        num_multiprocessors: int,
        fitted: Callable[[int, Choice], Choice | None] = lambda i, choice: choice,
    ):
        """shapes: of q, k, v; o; gate and up, or the router; down, or the experts. table: has the present choices.
        available: candidates' names. fitted: of a product's index and a choice, the choice as the GPU's shared memory
        allows it; None if it does not."""
        self.shapes, self.table, self.available = tuple(shapes), table, available
        self.num_multiprocessors, self._fitted = num_multiprocessors, fitted

    def present(self, phase: str, num_tokens: int) -> Picks:
        rows = (self.table.find(shape.key(phase)) for shape in self.shapes)
        found = (self._usable(i, row[num_tokens] if row else ()) for i, row in enumerate(rows))
        return tuple(next(iter(choices), CUBLAS) for choices in found)

    def _usable(self, i: int, choices: Iterable[Choice]) -> list[Choice]:
        """Of a product's choices those that are installed, each once, as they fit the GPU."""
        installed = (choice for choice in choices if choice.candidate in self.available)
        fitted = (self._fitted(i, choice) for choice in installed)
        return list(dict.fromkeys(choice for choice in fitted if choice is not None))

    def trials(self, phase: str, num_tokens: int) -> list[list[Choice]]:
        """The installed challengers for each product."""
        return [
            self._usable(i, challengers(shape, phase, num_tokens, self.num_multiprocessors))
            for i, shape in enumerate(self.shapes)
        ]

    def measure(self, phase: str, num_tokens: int, time_layer: TimeLayer) -> Result:
        """The best choices for one number of tokens."""

        times_of: dict[Picks, float | None] = {}

        def time_anew(picks: Picks) -> float | None:
            return time_layer(phase, num_tokens, picks)

        def time(picks: Picks) -> float | None:
            if picks not in times_of:
                times_of[picks] = time_anew(picks)
            return times_of[picks]

        present = self.present(phase, num_tokens)
        micros = time(present)
        if micros is None:  # The rows of another shape may not suit this one.
            present = (CUBLAS,) * len(self.shapes)
            micros = time(present)
            if micros is None:
                raise RuntimeError(f"a layer of {num_tokens} tokens cannot be computed by cuBLAS")
        times = []
        for i, trials in enumerate(self.trials(phase, num_tokens)):
            tried = {choice: time(_replaced(present, i, choice)) for choice in trials}
            tried[present[i]] = micros
            times.append({choice: micros for choice, micros in tried.items() if micros is not None})
        best = self._combined(times, time)
        is_new = best != present
        for _ in range(_NUM_RUNS if is_new else 0):
            before, after = time_anew(present), time_anew(best)
            if before is None or after is None or after > (1 - _MIN_GAIN) * before:
                is_new = False
                break
            micros = after
        picks = best if is_new else present
        return Result([_ranked(pick, each) for pick, each in zip(picks, times, strict=True)], micros, is_new)

    def most_timings(self, phase: str, num_tokens: int) -> int:
        """How often `tune` times a layer of so many tokens at most."""
        trials = self.trials(phase, num_tokens)
        alone = 2 + sum(map(len, trials))
        together = 1 + len(self.available) + len(trials) * (_NUM_FINALISTS + 1)
        return alone + together + 2 * _NUM_RUNS + _is_padded(phase, num_tokens)

    def _combined(self, times: Sequence[Mapping[Choice, float]], time: Callable[[Picks], float | None]) -> Picks:
        """The best choices together. times: for each product, microseconds of a layer with this choice for it."""
        # Launches of one candidate overlap, so it may be the best for all products where it is for none alone.
        starts = {tuple(min(each, key=each.get) for each in times)}
        for name in sorted(self.available):
            own = [{choice: each[choice] for choice in each if choice.candidate == name} for each in times]
            if all(own):
                starts.add(tuple(min(each, key=each.get) for each in own))
        measured = {picks: micros for picks in starts if (micros := time(picks)) is not None}
        best = min(measured, key=measured.get, default=next(iter(starts)))
        micros = measured.get(best, math.inf)
        for i, each in enumerate(times):
            for choice in dict.fromkeys((*sorted(each, key=each.get)[:_NUM_FINALISTS], CUBLAS)):
                picks = _replaced(best, i, choice)
                found = micros if picks == best else time(picks)
                if found is not None and found < micros:
                    best, micros = picks, found
        return best

    def tune(
        self,
        time_layer: TimeLayer,
        counts: Mapping[str, Sequence[int]],
        tell: Callable[[str], None],
        known: Mapping[tuple[str, int], Result] | None = None,
        keep: Callable[[str, int, Result], None] | None = None,
    ) -> Table:
        """Rows for these numbers of tokens in each phase, and the setting "padding" (`step_rows`).

        tell: called with a line of text for each number of tokens. known: by phase and number of tokens, results that
        need no measurement. keep: called with each further one.
        """
        rows: dict[Key, Row] = {}
        settings: dict[str, dict] = {}
        experts: dict[int, list[Choice]] = {}
        known = known or {}
        for phase, tokens in counts.items():
            results: dict[int, Result] = {}
            for num_tokens in sorted(tokens):
                if (phase, num_tokens) in known:
                    results[num_tokens] = known[phase, num_tokens]
                    continue
                results[num_tokens] = result = self.measure(phase, num_tokens, time_layer)
                if keep is not None:
                    keep(phase, num_tokens, result)
                names = ", ".join((choices or [CUBLAS])[0].candidate for choices in result.choices)
                new = "new" if result.is_new else "as before"
                tell(f"{phase} {num_tokens:6} tokens {result.micros:9.1f} us a layer  {new:9}  {names}")
            for i, shape in enumerate(self.shapes):
                choices = {n: result.choices[i] for n, result in results.items()}
                if shape.operation == "experts":
                    # Short prefills launch the same kernels as decode steps, so these are measured first.
                    experts |= choices
                    rows[shape.key(phase)] = Row(_merged(experts))
                else:
                    rows[shape.key(phase)] = _row(phase, choices)
            if phase == "decode":
                gate_up = self.shapes[3 if self.shapes[3].operation == "experts" else 2]
                with_graph = {n: result for n, result in results.items() if _is_padded(phase, n)}
                settings["padding"] = {gate_up.name: _padding(with_graph, time_layer)}
        return Table(rows, settings)


def _is_padded(phase: str, num_tokens: int) -> bool:
    """Whether a step of so many tokens may be the larger one to which another is padded: it has a graph."""
    return phase == "decode" and num_tokens <= MAX_GRAPH_BATCH_SIZE


def _replaced(picks: Picks, i: int, choice: Choice) -> Picks:
    return (*picks[:i], choice, *picks[i + 1 :])


def _ranked(pick: Choice, times: Mapping[Choice, float]) -> list[Choice]:
    """The pick, then the best of each other candidate, in case the first is not installed; none after cuBLAS."""
    ranked = [pick]
    for choice in sorted(times, key=times.get):
        if choice.candidate not in {each.candidate for each in ranked}:
            ranked.append(choice)
    return ranked[: ranked.index(CUBLAS)] if CUBLAS in ranked else ranked


def _row(phase: str, choices: Mapping[int, list[Choice]]) -> Row:
    """cuBLAS computes decode steps of more tokens than were measured, and shorter prefills, where the other candidates'
    launches would take the host too long."""
    unmeasured = max(choices) + 1 if phase == "decode" else min(choices) - 1
    return Row(_merged({**choices, unmeasured: []}))


def _padding(results: Mapping[int, Result], time_layer: TimeLayer) -> dict[int, list]:
    """results: of the numbers of tokens that have a graph. A step is padded to a larger one of them if its products
    take less time there, and to the next one if a product is computed in tiles. Rows of padding have no keys to read.
    """
    micros: dict[int, float] = {}
    for num_tokens, result in results.items():
        picks = tuple(choices[0] if choices else CUBLAS for choices in result.choices)
        micros[num_tokens] = time_layer("padding", num_tokens, picks) or math.inf
    buckets: dict[int, list] = {}
    best = 0
    for num_tokens in sorted(results):
        is_passed = best >= num_tokens  # Fewer tokens are padded to more than these, so these are too.
        if not is_passed:
            best = min((n for n in results if n >= num_tokens), key=micros.__getitem__)
            if micros[best] > (1 - _MIN_GAIN) * micros[num_tokens]:
                best = num_tokens
        names = {choices[0].candidate for choices in results[best].choices if choices}
        buckets[num_tokens] = []
        if "quack-kernels" in names:
            buckets[num_tokens] = [best, "quack-kernels"]
        elif is_passed or best > num_tokens:
            buckets[num_tokens] = [best, "cublas"]
    buckets[max(results) + 1] = []
    return _merged(buckets)


def _merged(buckets: Mapping[int, list]) -> dict[int, list]:
    """Without buckets that are equal to the next one."""
    bounds = sorted(buckets)
    return {
        bound: buckets[bound]
        for bound, following in zip(bounds, [*bounds[1:], None], strict=True)
        if following is None or buckets[bound] != buckets[following]
    }
