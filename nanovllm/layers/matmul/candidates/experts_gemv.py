"""Our kernels for the experts of a few tokens, which contain the norm and the routing."""

from collections.abc import Iterator

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.experts import experts_gemv as kernels
from nanovllm.kernels.experts.experts_gemv import ExpertsGemvConfig
from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE
from nanovllm.layers.formats.format import Weight, value_of
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import ExpertsProblem, is_waiting_norm
from nanovllm.layers.matmul.table import Key


class ExpertsGemv(Candidate):
    """constants: two `ExpertsGemvConfig`s, for gate_up and down."""

    name = "experts-gemv"
    operations = ("experts",)
    formats = (Unquantized.name, Fp8.name, Fp8Blocks.name)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values) and key.K <= MAX_NORM_SIZE

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor | None:
        _, x, logits, weight, down, top_k, normalize, out, add, lens, bias, down_bias, activation, *_ = problem
        scales, mine = problem.scales, problem.mine
        if len(x) > kernels.MAX_TOKENS:
            return None
        gate_up_config, down_config = (ExpertsGemvConfig(*each) for each in constants)
        values, norm_weight, eps = (x.residual, x.weight, x.eps) if is_waiting_norm(x) else (value_of(x), None, 0.0)
        args = weight.values, top_k, lens, gate_up_config, weight.scale, bias, activation, mine
        hidden = kernels.gate_up(values, norm_weight, eps, logits, *args)
        sizes = top_k, normalize, out, add, lens
        return kernels.down(hidden, logits, down.values, *sizes, down_config, down.scale, down_bias, scales, mine)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if not cls.is_for(key) or num_tokens > kernels.MAX_TOKENS:
            return
        gate_up_row, down_row = (1 << (size - 1).bit_length() for size in (key.K, key.N // 2))
        for rows, k_tile, num_warps in ((8, 1024, 4), (4, 2048, 4), (16, 1024, 8)):
            gate_up = ExpertsGemvConfig(rows, min(gate_up_row, k_tile), num_warps)
            for down_rows, down_tile, down_warps in ((4, 256, 4), (2, 512, 4), (4, 512, 8)):
                yield gate_up, ExpertsGemvConfig(down_rows, min(down_row, down_tile), down_warps)
