"""Times a layer's products on a GPU, as the engine launches them."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any

import torch

from nanovllm.engine.batch_sizes import MAX_GRAPH_BATCH_SIZE
from nanovllm.engine.start.package_kernels import CompileProcesses
from nanovllm.kernels.launch import compile_ahead
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.candidates.quack import Quack, load_product, load_quack
from nanovllm.layers.matmul.problem import AnyProblem, ExpertsProblem
from nanovllm.layers.matmul.table import Choice
from nanovllm.models.layer_facts import LayerProduct
from nanovllm.tuning.timed_attention import TimedAttention
from nanovllm.tuning.tuner import Picks
from nanovllm.utils.context import Context, get_context, step_context
from nanovllm.utils.interrupts import held_interrupt

_MIN_WEIGHT_BYTES = 900 * 10**6  # many times the L2 cache of any GPU; with 400 MB, other constants win
_RUN_MICROS = 6_000
_NUM_RUNS = 3
_HOPELESS = 1.3  # of the best time, far enough from it for a single run, which takes longer than one of many
_MAX_DISTANCE = 0.03  # of bfloat16 results from the default's, relative to their norm
# Not all candidates quantize their input, which changes a product by 3 % of its norm, and each factor of SwiGLU.
_MAX_FP8_DISTANCE = 0.08


class LayerTimer:
    """Times several layers of one shape, whose weights together are larger than the L2 cache.

    Decode steps have attention, whose launches begin to read the weights of o. A CUDA graph launches them, if it would
    in an engine. Prefills are launched by the host, without attention: the first columns of the q, k, v product stand
    for its result. GELU, norms after o and down, and sums over ranks are left out: linear_sum is timed as linear_add.
    """

    def __init__(self, products: Sequence[LayerProduct], attention: TimedAttention):
        """products: `layer_facts.layer_products`. Their tensors are not used. attention: between two of them, if the
        layer has it. Linear attention is left out."""
        self.products, problems = tuple(products), [product(1) for product in products]
        self.attention = attention
        self.device = device = attention.shape.device
        keys = [problem.key for problem in problems]
        are_quantized = [problem.weight.scale is not None for problem in problems]
        dtype = problems[0].weight.dtype
        self._max_distance = _MAX_FP8_DISTANCE if any(are_quantized) else _MAX_DISTANCE
        is_alone = all(key.operation != "linear_sum" for key in keys)  # Over several GPUs engines have no Quack.
        quack: Any = load_quack(dtype, device, decodes=True) if is_alone else None
        if quack is not None:
            quack.attempt = lambda launch: launch()  # An error ends one trial here, not the use of the package.
        self.candidates: dict[str, Candidate] = {each.name: each for each in make_candidates(device, quack)}
        # Of experts a step reads one for each token at least.
        top_ks = [getattr(problem, "mean_top_k", 1) for problem in problems]
        bits = [problem.weight.format.bits or 8 * dtype.itemsize for problem in problems]
        sizes = zip(keys, top_ks, bits, strict=True)
        num_bytes = sum(key.N * key.K * top_k * number for key, top_k, number in sizes) / 8
        self._layers: list[list[AnyProblem]] = [
            [_with_weights(problem, device) for problem in problems]
            for _ in range(max(2, math.ceil(_MIN_WEIGHT_BYTES / num_bytes)))
        ]
        self._defaults = [
            next(each for each in self.candidates.values() if each.is_default and each.is_for(key)) for key in keys
        ]
        self._norm = RMSNorm(keys[0].K).to(dtype=dtype, device=device)
        self._works: dict[tuple, bool] = {}
        self._expected: dict[tuple, tuple[Any, torch.Tensor]] = {}
        self._best: dict[tuple[str, int], float] = {}
        self._contexts: dict[tuple[str, int], Context] = {}
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    def compile(self, trials: Iterable[tuple[str, int, int, Choice]], tell: Callable[[int, int], None]) -> None:
        """Compile the kernels of (phase, number of tokens, index of the product, choice) in parallel."""
        quack: Any = self.candidates.get(Quack.name)
        modules = ["nanovllm.layers.matmul.candidates.quack_products"]
        with CompileProcesses(modules) if quack else nullcontext() as processes:
            with torch.inference_mode(), compile_ahead(tell, held_interrupt):
                for phase, num_tokens, i, choice in trials:
                    if choice != Choice(self._defaults[i].name):
                        with suppress(Exception), step_context(self._context(phase, num_tokens)):
                            self._launch(self._problem(i, num_tokens), choice)  # Its first launch will say so.
                if processes is not None:
                    processes.submit([(load_product, wanted, self.device) for wanted in quack.wanted.values()])
            if processes is not None:
                processes.wait(tell)

    def fitted(self, i: int, choice: Choice) -> Choice | None:
        """The choice for a product, as this GPU's shared memory allows it; None if it does not."""
        constants = self.candidates[choice.candidate].fitted(self._layers[0][i].weight, choice.constants)
        return None if constants is None else Choice(choice.candidate, constants)

    @torch.inference_mode()
    def __call__(self, phase: str, num_tokens: int, picks: Picks) -> float | None:
        """Microseconds for a layer with these choices, one for each product; None if one of them does not work. phase:
        "decode" or "prefill". What takes much longer than the best choices so far is timed less exactly."""
        with step_context(self._context(phase, num_tokens)):
            if not all(self._is_right(phase, num_tokens, i, choice) for i, choice in enumerate(picks)):
                return None
            return self._time_layer(phase, num_tokens, picks)

    def _context(self, phase: str, num_tokens: int) -> Context:
        key = phase, num_tokens
        if key not in self._contexts:
            is_prefill = phase == "prefill"
            self._contexts[key] = Context(is_prefill=True) if is_prefill else self.attention.context(num_tokens)
        return self._contexts[key]

    def _time_layer(self, phase: str, num_tokens: int, picks: Picks) -> float:
        hidden_size = len(self._norm.weight)
        residual = torch.randn(num_tokens, hidden_size, dtype=self._norm.weight.dtype, device=self.device)

        def run() -> None:
            for layer in self._layers:
                self._run_layer(residual, layer, picks)

        has_graph = phase != "prefill" and num_tokens <= MAX_GRAPH_BATCH_SIZE
        best = self._best.get((phase, num_tokens), math.inf)
        micros = _time(self._captured(run) if has_graph else run, len(self._layers), _HOPELESS * best)
        self._best[phase, num_tokens] = min(best, micros)
        return micros

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture without `torch.cuda.graph`, which collects garbage and empties the allocator's cache."""
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

    def _run_layer(self, residual: torch.Tensor, layer: list[AnyProblem], picks: Picks) -> None:
        """What does not read the residual stream adds to it, unless a norm is in between. Experts add in any case: what
        follows those beside an MLP is left out."""
        context = get_context()
        y: Any = residual
        for product, problem, choice in zip(self.products, layer, picks, strict=True):
            y = self._launch(self._with_tensors(problem, product.reads_stream, residual, y, residual), choice)
            if product.has_attention and not context.is_prefill:
                y = self.attention(y, context)

    def _with_tensors(
        self, problem: AnyProblem, reads_stream: bool, stream: torch.Tensor, before: Any, out: Any
    ) -> AnyProblem:
        """A product of the layer, in this step's phase. stream: the residual stream, if it reads that. before: the
        result before it. out: what it may add to."""
        hidden = Normed(stream, self._norm) if isinstance(problem.x, Normed) else stream
        key = problem.key._replace(phase="prefill" if get_context().is_prefill else "decode")
        if isinstance(problem, ExpertsProblem):
            lens = get_context().context_lens
            logits = before[:, : problem.logits.shape[1]]
            return problem._replace(key=key, x=hidden, logits=logits, out=out, add=True, context_lens=lens)
        if reads_stream:
            return problem._replace(key=key, x=hidden)
        x = before if isinstance(before, Gated) else before[:, : key.K]
        if key.operation == "linear":
            return problem._replace(key=key, x=x, out=None)
        return problem._replace(key=key._replace(operation="linear_add"), x=x, out=out)

    def _launch(self, problem: AnyProblem, choice: Choice) -> Any:
        return self.candidates[choice.candidate].launch(problem, choice.constants)

    def _problem(self, i: int, num_tokens: int) -> AnyProblem:
        """A problem on numbers of order one."""
        problem, reads_stream = self._layers[0][i], self.products[i].reads_stream
        key, weight = problem.key, problem.weight
        stream, out = (weight.new_empty(num_tokens, key.K).normal_() for _ in range(2))
        before = stream
        if isinstance(problem, ExpertsProblem):
            before = weight.new_empty(num_tokens, problem.logits.shape[1]).normal_()
        elif not reads_stream:
            out = weight.new_empty(num_tokens, key.N).normal_()
        return self._with_tensors(problem, reads_stream, stream, before, out)

    def _is_right(self, phase: str, num_tokens: int, i: int, choice: Choice) -> bool:
        """Whether the candidate supports the product and gives the default's result, except for rounding. Raises what
        the default raises, without which there is nothing to compare with."""
        key = phase, num_tokens, i, choice
        if key not in self._works:
            problem, expected = self._expected_of(phase, num_tokens, i)
            try:
                is_there = self.candidates[choice.candidate].supports(problem.key, problem.weight)
                found = self._launch(self._afresh(problem), choice) if is_there else None
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
        """A problem, and the default's result for it in float32. Those of the last number of tokens are kept."""
        key = phase, num_tokens, i
        if key not in self._expected:
            if any(other[:2] != key[:2] for other in self._expected):
                self._expected.clear()
            problem = self._problem(i, num_tokens)
            result: Any = self._defaults[i].launch(self._afresh(problem), ())
            self._expected[key] = problem, (result.value() if isinstance(result, Gated) else result).float()
        return self._expected[key]

    def _afresh(self, problem: Any) -> Any:
        """The problem for one launch, which may write to `out`, and keeps the norm that it computes."""
        x = problem.x
        x = Normed(x.residual, self._norm) if isinstance(x, Normed) else x
        return problem._replace(x=x, out=None if problem.out is None else problem.out.clone())


def _with_weights(problem: AnyProblem, device: torch.device) -> AnyProblem:
    """The problem with new weights on a device, and new biases and scales of experts where it has some: a candidate may
    take another launch for them."""

    def weight(like: Weight) -> Weight:
        values = torch.randn(like.shape, dtype=like.dtype, device=device).mul_(like.shape[-1] ** -0.5)
        return like.format.quantize(values, like.dtype)

    def vector(like: torch.Tensor | None) -> torch.Tensor | None:
        return None if like is None else torch.randn(like.shape, dtype=like.dtype, device=device)

    if isinstance(problem, ExpertsProblem):
        problem = problem._replace(weight=weight(problem.weight), down=weight(problem.down))
        bias, down_bias, scales = map(vector, (problem.bias, problem.down_bias, problem.scales))
        return problem._replace(bias=bias, down_bias=down_bias, scales=scales)
    return problem._replace(weight=weight(problem.weight), bias=vector(problem.bias))


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
