"""PlainQwen3: the plain Qwen3 with what an engine asks of a decoder beside its forward pass."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.layers.stores.store import Store, StoreLimits
from nanovllm.models.expert_tensors import stacked_experts
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import get_context


class PlainQwen3(Qwen3ForCausalLM):
    """All layers are `models.qwen3`'s. Of the hidden states it returns those that tokens are sampled from, as the fast
    decoder does, and all ranks get all logits."""

    # For `models.loader`, when weights are updated.
    checkpoint_parts: ClassVar[dict[str, dict[str, str | int]]] = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }
    checkpoint_prefixes: ClassVar[dict[str, str]] = {}
    vision_spec = None
    hidden_scale = 1.0  # as `DecoderForCausalLM`'s
    split_experts = staticmethod(stacked_experts)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden_states, last_tokens = super().forward(input_ids, positions), get_context().last_tokens
        return hidden_states if last_tokens is None else hidden_states[last_tokens]

    def compute_logits(self, hidden_states: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states [num_rows, hidden_size] -> logits [num_rows, vocab_size]. out: where they go, with one rank."""
        return self.lm_head.gather_shards(self.lm_head.shard_logits(hidden_states, out))

    def gather_logits(self, logits: Tensor) -> Tensor:
        """All ranks have them already."""
        return logits

    def make_stores(self, shape: AttentionShape, state_dtype: torch.dtype, limits: StoreLimits) -> list[Store]:
        """As `DecoderForCausalLM.make_stores`, but all layers keep all tokens."""
        layers: list[Any] = [layer.self_attn.attn for layer in self.model.layers]  # type: ignore[union-attr]
        return [PagedKVCache(layers, [shape] * len(layers))]

    def pack_weights(self) -> None:
        """Its products are torch's."""

    def unpack_weights(self) -> None:
        """As `pack_weights`."""
