"""A mixture of experts (Shazeer et al. 2017): a router gives each token to a few of many small MLPs.

Over tensor-parallel ranks, every rank has a part of the experts (`ExpertShards`), and the router as a whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.sigmoid_gate import sigmoid_gate
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation
from nanovllm.layers.activation import Gated
from nanovllm.layers.experts.expert_shards import ExpertShards, divide_experts
from nanovllm.layers.formats.all_formats import get_weight_format, weight_format
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.parameters import (
    LayerParameter,
    Shards,
    Sliceable,
    load_rows,
    make_parameter,
    stored,
)
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.linear import (
    LinearOptions,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.matmul.matmul import Matmul, Products, compute
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key, Table
from nanovllm.layers.parallel.rank_sums import add_over_ranks
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.context import get_context

ExpertLoader = Callable[[LayerParameter, Sliceable, Any, int], None]


class ExpertsLinear(nn.Module):
    """The same layer of all experts of a rank: `weight`, `[num_experts, N, K]`, its scales if its format has some, and
    perhaps a bias `[num_experts, N]`. Shard ids are (expert, shard id of a layer without experts), of all ranks'
    experts: the loaders leave out what is another rank's."""

    weight: LayerParameter
    weight_scale: LayerParameter  # in a format with scales
    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, int], of_one: Shards, bias: bool, shards: ExpertShards):
        """shape: this rank's part of an expert's weight. of_one: the shards of one expert, as in `linear`."""
        super().__init__()
        self.shards = shards
        self.format = get_weight_format(of_experts=True)
        all_shards = {(expert, key): full for expert in range(shards.num_experts) for key, full in of_one.items()}
        sizes = len(shards.experts), *shape
        parameters = self.format.parameters(sizes, all_shards, partial(self._load, self.load_weight))
        self.register_parameter("bias", None)
        if bias:
            bias_shards = {key: full[:1] for key, full in all_shards.items()}
            options = bias_shards, partial(self._load, self.load_bias), Unquantized()
            parameters["bias"] = make_parameter(sizes[:2], *options)
        for name, parameter in parameters.items():
            stored(parameter).experts, stored(parameter).num_experts = shards.experts, shards.num_experts
            self.register_parameter(name, parameter)

    def _load(
        self, load: ExpertLoader, param: LayerParameter, loaded: Sliceable, shard_id: tuple[int, int | None]
    ) -> None:
        expert, part = shard_id
        if expert in self.shards.experts:
            load(param, loaded, part, self.shards.experts.index(expert))

    def load_weight(self, param: LayerParameter, loaded: Sliceable, part: Any, place: int) -> None:
        """Copy this rank's columns of a tensor of the checkpoint to a parameter: the weight, or its scales. part: the
        shard id without the expert, which is this rank's expert number `place`."""
        raise NotImplementedError

    def load_bias(self, param: LayerParameter, loaded: Sliceable, part: Any, place: int) -> None:
        """The same of the bias."""
        raise NotImplementedError

    @property
    def matrix(self) -> Weight:
        """The weights, as products take them."""
        return self.format.weight(self)

    def pack_weight(self) -> None:
        """The same as `LinearBase.pack_weight`."""
        self.format, self.weight = self.format.packed(self.weight)

    def unpack_weight(self) -> None:
        """The same as `LinearBase.unpack_weight`."""
        self.format, self.weight = self.format.unpacked(self.weight)


class ColumnParallelExperts(ExpertsLinear):
    """Gate and up projection of each expert, whose rows may be split over the ranks. Shard ids: (expert, 0 or 1)."""

    def __init__(self, hidden_size: int, bias: bool, shards: ExpertShards):
        of_one = dict.fromkeys(range(2), (shards.num_columns, hidden_size))
        super().__init__((2 * len(shards.columns), hidden_size), of_one, bias, shards)

    def load_weight(self, param: LayerParameter, loaded: Sliceable, part: Any, place: int) -> None:
        rows = self.shards.columns
        load_rows(param, part * len(rows), loaded, rows.start, len(rows), place)

    load_bias = load_weight


class RowParallelExperts(ExpertsLinear):
    """Down projection of each expert, whose columns may be split over the ranks. Shard ids: (expert, None)."""

    def __init__(self, hidden_size: int, bias: bool, shards: ExpertShards):
        of_one = {None: (hidden_size, shards.num_columns)}
        super().__init__((hidden_size, len(shards.columns)), of_one, bias, shards)

    def load_weight(self, param: LayerParameter, loaded: Sliceable, part: Any, place: int) -> None:
        # A tensor of scales, or of packed weights, has other columns than the weight.
        num_columns = next(iter(param.shards.values()))[1]
        param.stored.format.store(param, loaded[:, self.shards.columns_of(num_columns)], expert=place)

    def load_bias(self, param: LayerParameter, loaded: Sliceable, part: Any, place: int) -> None:
        param.stored.format.store(param, loaded[:], expert=place)

    @property
    def bias_of_rank(self) -> torch.Tensor | None:
        """What this rank adds to its part of the sum."""
        return self.bias if self.shards.adds_down_bias else None


class Experts(nn.Module):
    """The weights of a rank's experts, under their names in checkpoints."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        tp: TensorParallel,
        size_name: str,
        table: Table,
    ):
        super().__init__()
        format, dtype = get_weight_format(of_experts=True), torch.get_default_dtype()
        format.check_sizes((), ("hidden_size", hidden_size), tp.size)
        key = Key("experts", "decode", 2 * intermediate_size, hidden_size, format.table_name(dtype), num_experts)
        options = tp, format, table.settings, key.shape_name
        self.shards = divide_experts(num_experts, intermediate_size, size_name, *options)
        self.gate_up_proj = ColumnParallelExperts(hidden_size, bias, self.shards)
        self.down_proj = RowParallelExperts(hidden_size, bias, self.shards)


class Router(ReplicatedLinear):
    """The router, with the gate of a shared expert as a further row of its weight: one launch less than two products.
    Shard ids: "router" and "shared"; None of a router alone.

    forward: [num_tokens, hidden_size] -> [num_tokens, num_experts, and more if there is a gate].
    """

    def __init__(
        self, hidden_size: int, num_experts: int, has_gate: bool, bias: bool, tp: TensorParallel, matmul: Matmul
    ):
        self.num_experts = num_experts
        # Rows of whole 16 bytes in its result.
        num_rows = -(-(num_experts + 1) // 8) * 8 if has_gate else num_experts
        super().__init__(hidden_size, num_rows, bias, tp=tp, matmul=matmul)
        if has_gate:
            shards = {"router": (num_experts, hidden_size), "shared": (1, hidden_size)}
            self.weight.shards |= shards
            self.weight.data[num_experts + 1 :] = 0

    def weight_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        param.stored.format.store(param, loaded_weight[:], self.num_experts if loaded_shard_id == "shared" else 0)


class SharedExpert(nn.Module):
    """An MLP that every token passes through, under its names in checkpoints."""

    def __init__(self, hidden_size: int, intermediate_size: int, tp: TensorParallel, matmul: Matmul):
        super().__init__()
        options: LinearOptions = {"tp": tp, "matmul": matmul, "size_name": "shared_expert_intermediate_size"}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, **options)


class MixtureOfExperts(nn.Module):
    """Router and experts, in place of an MLP.

    A token's experts are the top_k with the highest softmax of the router's logits, which is computed in float32. They
    are weighted with it. A shared expert is weighted with the sigmoid of a gate.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool,
        tp: TensorParallel,
        matmul: Matmul,
        shared_size: int = 0,
        biases: bool = False,
        activation: Activation = SWIGLU,
        router_norm: RMSNorm | None = None,
        has_scales: bool = False,
        size_name: str = "moe_intermediate_size",
    ):
        """intermediate_size: of one expert. normalize: whether a token's weights are divided by their sum. shared_size:
        the intermediate size of the shared expert; 0 for none. biases: whether router and experts have some.
        activation: of each expert's gate and up. router_norm: of the router, if it is another one than the experts'.
        has_scales: whether each expert has a number that its output is multiplied by, `expert_scales`. size_name: what
        config.json calls the intermediate size."""
        super().__init__()
        self.tp, self.top_k, self.normalize, self.activation = tp, top_k, normalize, activation
        with weight_format(None):
            self.gate = Router(hidden_size, num_experts, shared_size > 0, biases, tp, matmul)
        self.router_norm = router_norm
        self.expert_scales = nn.Parameter(torch.ones(num_experts)) if has_scales else None
        self.shared_expert: Any = SharedExpert(hidden_size, shared_size, tp, matmul) if shared_size else None
        options = biases, tp, size_name, matmul.table
        self.experts = Experts(num_experts, hidden_size, intermediate_size, *options)
        self.products = Products(matmul, self.experts.gate_up_proj, num_experts=num_experts)

    @property
    def extras(self) -> dict[str, Any]:
        """The last fields of an `ExpertsProblem`."""
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        biases = {"bias": gate_up.bias, "down_bias": down.bias_of_rank}
        mine = self.experts.shards.mine
        return {**biases, "activation": self.activation, "scales": self.expert_scales, "mine": mine}

    def add(
        self,
        residual: torch.Tensor,
        hidden: Normed,
        norm: RMSNorm | None,
        output_norm: RMSNorm | None = None,
    ) -> Normed:
        """norm(residual + y), overwriting residual with the sum, of the experts' output y of hidden; with an
        output_norm norm(residual + output_norm(y)). residual: [num_tokens, hidden_size]."""
        return add_over_ranks(self, residual, hidden, norm, output_norm)

    def part_of_sum(self, operation: str, x: Normed, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same as RowParallelLinear's, of a Normed or, without a router_norm, a tensor."""
        gated: Any = None
        if self.shared_expert is not None:
            if isinstance(x, Normed):
                x.is_read_again = True
            # Before the experts, who may overwrite the residual stream that x is the norm of.
            gated = self.shared_expert.gate_up_proj.silu(x)
        results = logits = self.gate(x if self.router_norm is None else Normed(x.residual, self.router_norm))
        if self.shared_expert is not None:
            logits, of_shared = results[:, : self.gate.num_experts], results[:, self.gate.num_experts :][:, :1]
            # The gate multiplies the input of the last product, which is narrower than its result.
            gated = Gated(gated.gate_up, of_shared) if isinstance(gated, Gated) else sigmoid_gate(gated, of_shared)
        if out is None:
            out = logits.new_empty(len(x), self.gate.weight.shape[1])
        lens = get_context().context_lens
        # Rows that pad a decode step get no expert, so that none is read for them.
        lens = None if lens is None else lens[: len(x)]
        product, down = self.products["experts"], self.experts.down_proj.matrix
        key, row = product.row
        options = self.top_k, self.normalize, out, operation == "linear_add", lens
        choices, more = row[len(x)], None
        # Each of them may leave the problem to the next one.
        if gated is not None and all(candidate.adds_more for candidate, _ in choices):
            more = self.shared_expert.down_proj.products["linear_add"].addend(gated)
        problem = ExpertsProblem(key, x, logits, product.weight, down, *options, **self.extras, more=more)
        y = compute(problem, choices)
        if gated is not None and more is None:
            self.shared_expert.down_proj.part_of_sum("linear_add", gated, y)
        return y
