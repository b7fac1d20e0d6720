"""Qwen3-VL with a mixture of experts."""

from nanovllm.models.expert_tensors import Content, ExpertPart, stacked_experts
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.qwen3_vl import Qwen3VLForConditionalGeneration
from nanovllm.models.seeing_decoder import SeeingDecoder


class Qwen3VLMoeForConditionalGeneration(SeeingDecoder, Qwen3MoeForCausalLM):
    """Qwen3-MoE that sees images as Qwen3-VL does."""

    checkpoint_prefixes = Qwen3VLForConditionalGeneration.checkpoint_prefixes
    vision_type = Qwen3VLForConditionalGeneration.vision_type

    def split_experts(self, name: str, content: Content) -> dict[str, ExpertPart]:
        return stacked_experts(name, content, hidden_size=self.model.norm.weight.numel())
