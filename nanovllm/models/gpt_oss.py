"""gpt-oss (arXiv:2508.10925)."""

from typing import Any

from torch import nn

from nanovllm.kernels.silu_and_mul import Activation
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.expert_tensors import Content, ExpertPart, interleaved_experts
from nanovllm.models.hf_config import rope_of_layers, windows_of_layers
from nanovllm.models.qwen3_moe import check_experts, count_experts
from nanovllm.models.spec import DecoderSpec


class GptOssForCausalLM(DecoderForCausalLM):
    """A sink for each head, and experts with biases in place of each MLP. Every other layer has a window."""

    packed_modules_mapping = DecoderForCausalLM.packed_modules_mapping | {"gate": {"router": None}}
    switches = frozenset(
        {"attention_bias", "sliding_window", "num_experts", "num_local_experts", "swiglu_alpha", "swiglu_limit"}
    )

    @staticmethod
    def spec(config) -> DecoderSpec:
        check_experts(config)
        bias = bool(config.attention_bias)
        ropes, windows = rope_of_layers(config), windows_of_layers(config)
        return DecoderSpec(ropes, windows, qkv_bias=bias, o_bias=bias, sinks=True)

    def split_experts(self, name: str, content: Content) -> dict[str, ExpertPart]:
        return interleaved_experts(name, content)

    @staticmethod
    def mlp(config, spec: DecoderSpec, layer: int, tp: TensorParallel, matmul: Matmul) -> nn.Module:
        num_experts = count_experts(config) or 0
        sizes = config.hidden_size, config.intermediate_size, num_experts, config.num_experts_per_tok
        # Before transformers 5 the configuration has no alpha.
        alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        # The softmax over a token's experts alone is that over all, divided by their sum.
        options: dict[str, Any] = {"biases": True, "activation": Activation(alpha=alpha, limit=limit)}
        return MixtureOfExperts(*sizes, True, tp, matmul, size_name="intermediate_size", **options)
