"""Times a layer's products on a GPU, as the engine launches them."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from statistics import median
from typing import Any

import torch

from nanovllm.engine.runner.cuda_graphs import MAX_GRAPH_BATCH_SIZE
from nanovllm.engine.runner.startup.package_kernels import CompileProcesses
from nanovllm.kernels.launch import compile_ahead
from nanovllm.layers.activation import Gated
from nanovllm.layers.experts.expert_candidates import expert_candidates
from nanovllm.layers.experts.expert_products import ExpertsProblem
from nanovllm.layers.formats.quantization import FORMATS, Fp8Format, Fp8Weight, Weight
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.kernel_matmul import our_candidates
from nanovllm.layers.matmul.matmul import Candidate, Cublas, Problem
from nanovllm.layers.matmul.quack import Quack, load_product, load_quack
from nanovllm.layers.matmul.table import Choice
from nanovllm.tuning.timed_attention import TimedAttention
from nanovllm.tuning.tuner import CUBLAS, Picks, Shape
from nanovllm.utils.context import Context, get_context, step_context
from nanovllm.utils.interrupts import held_interrupt

_MIN_WEIGHT_BYTES = 900 * 10**6  # many times the L2 cache of any GPU; with 400 MB, other constants win
_RUN_MICROS = 6_000
_NUM_RUNS = 3
_HOPELESS = 1.3  # of the best time, far enough from it for a single run, which takes longer than one of many
_MAX_DISTANCE = 0.03  # of bfloat16 results from cuBLAS's, relative to their norm
# Not all candidates quantize their input, which changes a product by 3 % of its norm, and each factor of SwiGLU.
_MAX_FP8_DISTANCE = 0.08


class LayerTimer:
    """Times several layers of one shape, whose weights together are larger than the L2 cache.

    Decode steps have attention, whose launches begin to read the weights of o. A CUDA graph launches them, if it would
    in an engine. Prefills are launched by the host, without attention: the first columns of the q, k, v product stand
    for its result. GELU, norms after o and down, and sums over ranks are left out: linear_sum is timed as linear_add.
    """

    def __init__(self, shapes: Sequence[Shape], attention: TimedAttention):
        self.shapes = tuple(shapes)
        self.attention = attention
        self.device = device = attention.shape.device
        formats = [FORMATS.get(shape.dtype) for shape in shapes]
        dtype = torch.bfloat16 if any(formats) else getattr(torch, shapes[0].dtype)
        self._max_distance = _MAX_FP8_DISTANCE if any(formats) else _MAX_DISTANCE
        is_alone = all(shape.operation != "linear_sum" for shape in shapes)  # Over several GPUs engines have no Quack.
        quack: Any = load_quack(dtype, device, decodes=True) if is_alone else None
        if quack is not None:
            quack.attempt = lambda launch: launch()  # An error ends one trial here, not the use of the package.
        found = [Cublas(), *our_candidates(device), *expert_candidates(device, quack)]
        found += [] if quack is None else [quack]
        self.candidates: dict[str, Candidate] = {candidate.name: candidate for candidate in found}
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        # Of experts a step reads one for each token at least.
        num_bytes = sum(shape.N * shape.K * shape.top_k for shape in shapes) * dtype.itemsize
        self._layers: list[list[Any]] = [
            [_weights(shape, options) for shape in shapes] for _ in range(max(2, -(-_MIN_WEIGHT_BYTES // num_bytes)))
        ]
        self._norm = RMSNorm(shapes[0].K).to(dtype=dtype, device=device)
        self._works: dict[tuple, bool] = {}
        self._expected: dict[tuple, tuple[Any, torch.Tensor]] = {}
        self._best: dict[tuple[str, int], float] = {}
        self._contexts: dict[tuple[str, int], Context] = {}
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    def compile(self, trials: Iterable[tuple[str, int, int, Choice]], tell: Callable[[int, int], None]) -> None:
        """Compile the kernels of (phase, number of tokens, index of the product, choice) in parallel."""
        quack: Any = self.candidates.get(Quack.name)
        with ExitStack() as stack:
            processes = stack.enter_context(CompileProcesses(["nanovllm.layers.matmul.quack_early"])) if quack else None
            with torch.inference_mode(), compile_ahead(tell, held_interrupt):
                for phase, num_tokens, i, choice in trials:
                    if choice != CUBLAS:
                        with suppress(Exception), step_context(self._context(phase, num_tokens)):
                            self._launch(self._problem(i, num_tokens), choice)  # Its first launch will say so.
                if quack is not None:
                    processes.submit([(load_product, product, self.device) for product in quack.wanted.values()])
            if quack is not None:
                processes.wait(tell)

    def fitted(self, i: int, choice: Choice) -> Choice | None:
        """The choice for a product, as this GPU's shared memory allows it; None if it does not."""
        weight = self._layers[0][i]
        weight = weight[0] if self.shapes[i].operation == "experts" else weight
        constants = self.candidates[choice.candidate].fitted(weight, choice.constants)
        return None if constants is None else Choice(choice.candidate, constants)

    @torch.inference_mode()
    def __call__(self, phase: str, num_tokens: int, picks: Picks) -> float | None:
        """Microseconds for a layer with these choices, one for each product; None if one of them does not work. phase:
        "decode", "prefill", or "padding": a decode step's products with attention that has no keys. What takes much
        longer than the best choices so far is timed less exactly."""
        with step_context(self._context(phase, num_tokens)):
            if not all(self._is_right(phase, num_tokens, i, choice) for i, choice in enumerate(picks)):
                return None
            return self._time_layer(phase, num_tokens, picks)

    def _context(self, phase: str, num_tokens: int) -> Context:
        key = phase, num_tokens
        if key not in self._contexts:
            if phase == "prefill":
                self._contexts[key] = Context(is_prefill=True)
            else:
                self._contexts[key] = self.attention.context(num_tokens, has_keys=phase != "padding")
        return self._contexts[key]

    def _time_layer(self, phase: str, num_tokens: int, picks: Picks) -> float:
        hidden_size = self.shapes[0].K
        residual = torch.randn(num_tokens, hidden_size, dtype=self._norm.weight.dtype, device=self.device)

        def run() -> None:
            for weights in self._layers:
                self._run_layer(residual, weights, picks)

        has_graph = phase != "prefill" and num_tokens <= MAX_GRAPH_BATCH_SIZE
        best = self._best.get((phase, num_tokens), math.inf)
        micros = _time(self._captured(run) if has_graph else run, len(self._layers), _HOPELESS * best)
        self._best[phase, num_tokens] = min(best, micros)
        return micros

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Without `torch.cuda.graph`, which collects garbage and empties the allocator's cache."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            graph.capture_begin(self._pool)
            run()
            graph.capture_end()
        self._graph = graph  # The pool lives as long as a graph does.
        return graph.replay

    def _run_layer(self, residual: torch.Tensor, weights: list[Any], picks: Picks) -> None:
        """q, k, v; o; gate and up, or the router; down, or the experts. The first and the third read the residual
        stream. The others read what came before, and add to the stream unless a norm is in between."""
        context = get_context()
        y: Any = residual
        for i, (shape, weight, choice) in enumerate(zip(self.shapes, weights, picks, strict=True)):
            hidden = Normed(residual, self._norm) if shape.has_norm else residual
            if shape.operation == "experts":
                problem: Problem | ExpertsProblem = self._experts(hidden, y, weight, residual)
            elif i in (0, 2):
                problem = Problem(shape.operation, hidden, weight)
            else:
                x = y if isinstance(y, Gated) else y[:, : shape.K]
                problem = _output_problem(shape, x, weight, residual)
            y = self._launch(problem, choice)
            if i == 0 and not context.is_prefill:
                y = self.attention(y, context)

    def _experts(
        self, x: torch.Tensor | Normed, logits: torch.Tensor, weights: tuple[Weight, Weight], out: torch.Tensor
    ) -> ExpertsProblem:
        gate_up, down = weights
        lens = get_context().context_lens
        return ExpertsProblem(x, logits, gate_up, down, self.shapes[3].top_k, True, out, True, lens)

    def _launch(self, problem: Problem | ExpertsProblem, choice: Choice) -> Any:
        candidate = self.candidates[choice.candidate]
        return candidate.launch(problem, choice.constants) if candidate.supports(problem) else None

    def _problem(self, i: int, num_tokens: int) -> Problem | ExpertsProblem:
        """On numbers of order one."""
        shape, weight = self.shapes[i], self._layers[0][i]
        if shape.operation == "experts":
            sizes = shape.K, shape.num_experts, shape.K
            x, logits, out = (weight[0].new_empty(num_tokens, size).normal_() for size in sizes)
            return self._experts(Normed(x, self._norm), logits, weight, out)
        x, out = (weight.new_empty(num_tokens, size).normal_() for size in (shape.K, shape.N))
        if i in (1, 3):
            return _output_problem(shape, x, weight, out)
        return Problem(shape.operation, Normed(x, self._norm) if shape.has_norm else x, weight)

    def _is_right(self, phase: str, num_tokens: int, i: int, choice: Choice) -> bool:
        """Whether the candidate supports the product and gives cuBLAS's result, except for rounding."""
        key = phase, num_tokens, i, choice
        if key not in self._works:
            try:
                problem, expected = self._expected_of(phase, num_tokens, i)
                found = self._launch(self._afresh(problem), choice)
                found = found.value() if isinstance(found, Gated) else found
                self._works[key] = found is not None and bool(
                    (found.float() - expected).norm() <= self._max_distance * expected.norm()
                )
            except torch.OutOfMemoryError:
                raise
            except Exception:  # Of a compiler or a launch: these constants are not for this GPU.
                self._works[key] = False
        return self._works[key]

    def _expected_of(self, phase: str, num_tokens: int, i: int) -> tuple[Any, torch.Tensor]:
        """A problem, and cuBLAS's result for it in float32. Those of the last number of tokens are kept."""
        key = phase, num_tokens, i
        if key not in self._expected:
            if any(other[:2] != key[:2] for other in self._expected):
                self._expected.clear()
            problem = self._problem(i, num_tokens)
            result: Any = self._launch(self._afresh(problem), CUBLAS)
            self._expected[key] = problem, (result.value() if isinstance(result, Gated) else result).float()
        return self._expected[key]

    def _afresh(self, problem: Any) -> Any:
        """For one launch, which may write to `out`, and keeps the norm that it computes."""
        x = problem.x
        x = Normed(x.residual, self._norm) if isinstance(x, Normed) else x
        return problem._replace(x=x, out=None if problem.out is None else problem.out.clone())


def _output_problem(shape: Shape, x: torch.Tensor | Gated, weight: Weight, residual: torch.Tensor) -> Problem:
    """Of o or down."""
    if shape.operation == "linear":
        return Problem("linear", x, weight)
    return Problem("linear_add", x, weight, out=residual)


def _weights(shape: Shape, options: dict) -> Weight | tuple[Weight, Weight]:
    """Of experts both weights: gate and up, and down."""
    format = FORMATS.get(shape.dtype)
    if shape.operation != "experts":
        weight = torch.randn(shape.N, shape.K, **options) * shape.K**-0.5
        return weight if format is None else Fp8Weight(*format.quantize(weight), format, options["dtype"])
    gate_up = torch.randn(shape.num_experts, shape.N, shape.K, **options).mul_(shape.K**-0.5)
    down = torch.randn(shape.num_experts, shape.K, shape.N // 2, **options).mul_((shape.N // 2) ** -0.5)
    return (gate_up, down) if format is None else (_of_experts(gate_up, format), _of_experts(down, format))


def _of_experts(weights: torch.Tensor, format: Fp8Format) -> Fp8Weight:
    values, scales = zip(*map(format.quantize, weights), strict=True)
    return Fp8Weight(torch.stack(values), torch.stack(scales), format, weights.dtype)


def _time(run: Callable[[], None], num_layers: int, enough: float) -> float:
    """Microseconds for a layer, in runs back to back: at the power limit other tiles are the fastest. One run alone if
    that takes more than enough."""
    run()
    micros = _elapsed(run, 1)
    if micros > enough * num_layers:
        return micros / num_layers
    repeats = max(1, round(_RUN_MICROS / micros))
    return median(_elapsed(run, repeats) / repeats for _ in range(_NUM_RUNS)) / num_layers


def _elapsed(run: Callable[[], None], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
