"""Qwen3-Next: a mixture of experts with linear attention in most layers."""

from nanovllm.models.qwen3_5_moe import Qwen3_5MoeForCausalLM


class Qwen3NextForCausalLM(Qwen3_5MoeForCausalLM):
    """Qwen3.5's layers, with the projections of linear attention fused in the checkpoint. Some layers may have an MLP
    instead of experts, as in Qwen3-MoE."""

    packed_modules_mapping = Qwen3_5MoeForCausalLM.packed_modules_mapping | {
        "in_proj": {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"},
        "in_proj_qkvz": {"in_proj_qkvz": "qkvz"},
        "in_proj_ba": {"in_proj_ba": "ba"},
    }
