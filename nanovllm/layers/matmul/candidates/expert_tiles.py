"""Our kernels for the experts of any number of tokens, and on a CPU their twins."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.experts.experts import (
    TileConfig,
    add_pairs,
    default_config,
    down,
    experts_torch,
    gate_up,
    route,
    route_torch,
    sort_by_expert,
)
from nanovllm.layers.formats.all_formats import format_of_table
from nanovllm.layers.formats.format import Input, Weight, value_of
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key


class ExpertTiles(Candidate):
    """With weights in fp8 the inputs of both products are quantized first, because tensor cores multiply such numbers
    twice as fast. constants: two `TileConfig`s, for gate_up and down; none for some that work."""

    name = "expert-tiles"
    operations = ("experts",)
    formats = (Unquantized.name, Fp8.name, Fp8Blocks.name)
    is_default = True
    adds_more = True

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        itemsize = weight.values.itemsize  # of the inputs too, as they are multiplied
        pairs = zip((2, 1), constants, strict=True) if constants else ()
        configs = tuple(TileConfig(*each).fitted(n, itemsize, weight.device) for n, each in pairs)
        return None if None in configs else configs

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        _, x, logits, weight, second, _, _, out, add, lens, bias, down_bias, activation, *_ = problem
        if not use_kernels(logits):
            return experts_twin(problem)
        experts, weights = route(*_routing(problem))
        order, starts = sort_by_expert(experts, len(weight))
        default = default_config(len(order), logits.shape[1], weight.values.itemsize)
        gate_up_config, down_config = (TileConfig(*each) for each in constants or (default, default))
        values, options = _operands(x, weight)
        options |= {"bias": bias, "activation": activation}
        hidden = gate_up(values, order, starts, weight.values, gate_up_config, **options)
        values, options = _operands(hidden, second)
        y = down(values, order, starts, weights, second.values, down_config, **options, bias=down_bias)
        return add_pairs(y, out, add, lens, **others(problem, experts))

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """The default ones. Then tiles of about as many tokens as an expert has, and of up to four times as many, with
        stages that fill a multiprocessor's shared memory with one program or with two."""
        if not cls.is_for(key):
            return
        yield ()
        mean = num_tokens * top_k / key.experts
        configs = _TILES_IN_FP8 if isinstance(format_of_table(key.format), Fp8) else _TILES
        for tokens in (16, 32, 64, 128):
            if min(mean, 128) <= tokens <= max(32, 4 * mean):
                gate_ups, downs = configs[tokens == 128]
                for each in gate_ups:
                    for other in downs:
                        yield TileConfig(tokens, *each), TileConfig(tokens, *other)


# Columns, input columns of a step, warps and stages of gate_up and of down: with up to 64 tokens, and with 128.
_TILES = (
    (((64, 64, 4, 4), (64, 128, 4, 3)), ((128, 64, 4, 4), (64, 128, 4, 4))),
    (((128, 64, 8, 4), (64, 64, 4, 3)), ((128, 64, 4, 3), (256, 64, 8, 4))),
)
_TILES_IN_FP8 = (
    (((64, 128, 4, 4), (64, 128, 4, 3)), ((128, 128, 4, 4), (64, 128, 4, 4))),
    (((128, 128, 8, 3), (64, 128, 4, 4)), ((128, 128, 4, 4), (128, 128, 8, 4), (256, 128, 8, 3))),
)


def experts_twin(problem: ExpertsProblem, linear: Callable[[Tensor, Weight], Tensor] | None = None) -> Tensor:
    """The result in plain torch. linear: `x W^T` of one expert's weight; None: the plain product of its format."""
    _, x, _, weight, second, _, _, out, add, _, bias, down_bias, activation, *_ = problem
    routed = route_torch(*_routing(problem))
    products = _product(weight, bias, linear), _product(second, down_bias, linear)
    total = experts_torch(value_of(x), *routed, len(weight), *products, activation)
    total = total if problem.more is None else total + problem.more
    return out.copy_(out.float() + total if add else total)


def _routing(problem: ExpertsProblem) -> tuple:
    """The arguments of `route`."""
    options = problem.context_lens, problem.scales, problem.mine
    return problem.logits, problem.top_k, problem.normalize, *options


def _product(
    weight: Weight, bias: Tensor | None, linear: Callable[[Tensor, Weight], Tensor] | None
) -> Callable[[Tensor, int], Tensor]:
    """The product of rows by an expert's weight."""

    def product(x: Tensor, expert: int) -> Tensor:
        of_expert = weight.of_expert(expert)
        y = of_expert.linear(x) if linear is None else linear(x, of_expert)
        return y if bias is None else y + bias[expert]

    return product


def others(problem: ExpertsProblem, experts: Tensor) -> dict[str, Any]:
    """Arguments of `add_pairs`: for what else is added, and for pairs with experts whose weights are not here. experts:
    from `route`."""
    more: dict[str, Any] = {"more": problem.more}
    return more if problem.mine is None else more | {"experts": experts, "num_experts": len(problem.weight)}


def _operands(x: Input, weight: Weight) -> tuple[Tensor, dict[str, Any]]:
    """A product's input as it is multiplied, and further arguments of the kernels."""
    values, scale = weight.format.quantize_input(x)
    return values, {"x_scale": scale, "weight_scale": weight.scale, "dtype": weight.dtype}
