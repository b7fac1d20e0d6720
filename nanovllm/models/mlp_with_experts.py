"""An MLP and a mixture of experts side by side: Gemma 4's 26B model."""

from typing import Any

import torch

from nanovllm.kernels.silu_and_mul import GEGLU, gelu_tanh_and_mul
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.parameters import scale_while_loading, stored
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.decoder import DecoderMLP
from nanovllm.models.spec import DecoderSpec


class MLPWithExperts(DecoderMLP):
    """An MLP, and beside it experts who read the same residual stream, all with GEGLU. Each of the two has a norm
    behind it, and the sum of these goes on.

    The router reads the stream by a norm of its own: its weight is the checkpoint's `router.scale` times hidden_size **
    -0.5, in float32.

    Attributes:
        beside: router and experts.
        mlp_norm, experts_output_norm: behind the MLP and behind the experts.
        experts_norm: before the experts.
    """

    def __init__(self, config, spec: DecoderSpec, tp: TensorParallel, matmul: Matmul):
        super().__init__(config, spec, tp, matmul)
        self.tp = tp
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        router_norm = RMSNorm(hidden_size, eps, dtype=torch.float32)
        stored(router_norm.weight).checkpoint_name = "scale"
        scale_while_loading([router_norm], hidden_size**-0.5)
        sizes = hidden_size, config.moe_intermediate_size, config.num_experts, config.top_k_experts
        self.beside = MixtureOfExperts(
            *sizes, True, tp, matmul, activation=GEGLU, router_norm=router_norm, has_scales=True
        )
        stored(self.beside.expert_scales).checkpoint_name = "router.per_expert_scale"
        self.mlp_norm, self.experts_norm, self.experts_output_norm = (RMSNorm(hidden_size, eps) for _ in range(3))

    def add(
        self,
        residual: torch.Tensor,
        hidden: Normed,
        norm: RMSNorm | None,
        output_norm: Any = None,
    ) -> Normed:
        """The same as DecoderMLP's, with an output_norm. hidden: the norm of residual that the MLP reads."""
        y = self.tp.all_reduce(self.down_proj.part_of_sum("linear", gelu_tanh_and_mul(self.gate_up_proj(hidden))))
        of_experts = self.tp.all_reduce(self.beside.part_of_sum("linear", Normed(residual, self.experts_norm)))
        y = self.experts_output_norm.add_to(self.mlp_norm.norm_in_place(y), of_experts)
        output_norm.add_to(residual, y)
        return Normed(residual, norm)
