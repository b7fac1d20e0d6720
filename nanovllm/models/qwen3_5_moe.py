"""Qwen3.5 and 3.6 with a mixture of experts."""

from torch import nn

from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5Vision
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM, check_experts
from nanovllm.models.seeing_decoder import SeeingDecoder
from nanovllm.utils.checks import is_int, require


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 whose MLPs are mixtures of experts, one of which every token has, by a gate of its own."""

    packed_modules_mapping = Qwen3_5ForCausalLM.packed_modules_mapping | {
        "gate": {"gate": "router", "shared_expert_gate": "shared"}
    }
    switches = Qwen3_5ForCausalLM.switches | {"num_experts", "num_local_experts"}

    @staticmethod
    def spec(config) -> DecoderSpec:
        check_experts(config)
        size = config.shared_expert_intermediate_size
        require("shared_expert_intermediate_size", size, is_int(size, 1), "an integer > 0")
        return Qwen3_5ForCausalLM.spec(config)

    @staticmethod
    def mlp(config, spec: DecoderSpec, layer: int, tp: TensorParallel, matmul: Matmul) -> nn.Module:
        return Qwen3MoeForCausalLM.mlp(config, spec, layer, tp, matmul)


class Qwen3_5MoeForConditionalGeneration(SeeingDecoder, Qwen3_5MoeForCausalLM):
    """The same with a vision tower."""

    vision_type = Qwen3_5Vision
