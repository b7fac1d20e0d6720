"""Qwen3 with a mixture of experts (arXiv:2505.09388)."""

from torch import nn

from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.decoder import DecoderMLP, DecoderSpec
from nanovllm.models.qwen3_decoder import Qwen3ForCausalLM
from nanovllm.utils.checks import is_int, require

_MAX_EXPERTS = 1024  # that the kernels take


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 whose MLPs are mixtures of experts, except in `mlp_only_layers` and, with a `decoder_sparse_step` of n, in
    all but every n-th layer."""

    switches = Qwen3ForCausalLM.switches | {"num_experts", "num_local_experts"}

    @staticmethod
    def spec(config) -> DecoderSpec:
        check_experts(config)
        return Qwen3ForCausalLM.spec(config)

    @staticmethod
    def mlp(config, spec: DecoderSpec, layer: int, tp: TensorParallel, matmul: Matmul) -> nn.Module:
        if not has_experts(config, layer):
            return DecoderMLP(config, spec, tp, matmul)
        num_experts = count_experts(config) or 0
        sizes = config.hidden_size, config.moe_intermediate_size, num_experts, config.num_experts_per_tok
        # Families without this key divide.
        normalize = getattr(config, "norm_topk_prob", True)
        shared_size = getattr(config, "shared_expert_intermediate_size", 0)
        return MixtureOfExperts(*sizes, normalize, tp, matmul, shared_size)


def check_experts(config, top_k_name: str = "num_experts_per_tok") -> None:
    """Raises ValueError, naming the key, for numbers that cannot be. top_k_name: of how many experts a token has."""
    num_experts, top_k = count_experts(config), getattr(config, top_k_name, None)
    require("num_experts", num_experts, is_int(num_experts, 0, _MAX_EXPERTS), f"an integer in 0..{_MAX_EXPERTS}")
    is_right = not num_experts or is_int(top_k, 1, num_experts)
    require(top_k_name, top_k, is_right, f"an integer in 1..{num_experts}")
    for name in ("moe_intermediate_size", "decoder_sparse_step"):
        value = getattr(config, name, 1)
        require(name, value, is_int(value, 1), "an integer > 0")


def has_experts(config, layer: int) -> bool:
    """Whether a layer has experts instead of an MLP. Qwen3.5 has no mlp_only_layers."""
    mlp_only = getattr(config, "mlp_only_layers", None) or []
    is_excluded = layer in mlp_only or (layer + 1) % getattr(config, "decoder_sparse_step", 1)
    return not is_excluded and (count_experts(config) or 0) > 0


def count_experts(config) -> int | None:
    """None for a family without experts. transformers 5 writes the key num_local_experts; older releases leave
    num_experts at its default then."""
    num_experts = getattr(config, "num_local_experts", None)
    return getattr(config, "num_experts", None) if num_experts is None else num_experts
