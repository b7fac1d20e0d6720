"""The decoder that all families share: pre-norm attention and a gated MLP on a residual stream."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.layers.embed_head import ParallelLMHead, ReplicatedEmbedding
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.matmul import LayerProduct, Matmul
from nanovllm.layers.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.rank_sums import NormedParts, begin_sums
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.models.hf_config import get_head_dim
from nanovllm.utils.context import get_context
from nanovllm.utils.parallel import TensorParallel

Rows = torch.Tensor | slice  # of a flat batch of tokens


@dataclass(frozen=True)
class DecoderSpec:
    """What differs between families."""

    qkv_bias: bool = False  # whether the q, k and v projections have biases
    o_bias: bool = False  # whether the output projection of attention has one
    qk_norm: bool = False  # whether each head of q and k is normalized before RoPE


class DecoderAttention(nn.Module):
    """Fused q/k/v projection, RMSNorm on each head of q and k, RoPE, paged attention.

    forward: [num_tokens, hidden_size] -> the input of o_proj, [num_tokens, this rank's num_heads * head_dim]. The layer
    calls o_proj, which adds to the residual stream.
    """

    def __init__(
        self, config, spec: DecoderSpec, rotary_emb: RotaryEmbedding, backend: AttentionBackend, tp: TensorParallel
    ):
        super().__init__()
        self.head_dim = get_head_dim(config)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(config.hidden_size, self.head_dim, num_heads, num_kv_heads, spec.qkv_bias, tp)
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, config.hidden_size, spec.o_bias, tp)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if spec.qk_norm else None
        self.eps = config.rms_norm_eps
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.head_dim, backend)

    def forward(self, positions: torch.Tensor, hidden: Normed | NormedParts, rows: Rows | None = None) -> torch.Tensor:
        """rows: the tokens whose attention is needed; only the keys and values of the others are. None: all."""
        qkv = self.qkv_proj(hidden)
        context = get_context()
        has_cache = self.attn.k_cache is not None  # The warm-up runs without one.
        qk_norm_rope_store(
            qkv,
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            self.eps,
            self.rotary_emb.cos_sin_cache,
            positions,
            self.attn.k_cache,
            self.attn.v_cache,
            context.slot_mapping if has_cache else None,
            self.num_heads,
            self.num_kv_heads,
            pdl=not context.is_prefill,
        )
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if rows is None:
            return self.attn(q, k, v, context).flatten(1)
        if context.is_prefill:
            return self.attn(q[rows], k, v, context.of_last_tokens()).flatten(1)
        return self.attn(q, k, v, context).flatten(1)[rows]  # Plans are for all rows.


class DecoderMLP(nn.Module):
    """SwiGLU: silu(gate(x)) * up(x), gate and up in one product.

    forward: [num_tokens, hidden_size] -> the input of down_proj, [num_tokens, this rank's intermediate_size]; in parts
    if the hidden states come in parts. The layer calls down_proj, which adds to the residual stream.
    """

    def __init__(self, config, tp: TensorParallel):
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act={config.hidden_act!r} in config.json: supported is silu")
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, False, tp)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, False, tp)

    def forward(self, hidden: Normed | NormedParts) -> torch.Tensor | Iterator[torch.Tensor]:
        if isinstance(hidden, NormedParts):
            return map(self.gate_up_proj.silu, hidden.parts)
        return self.gate_up_proj.silu(hidden)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP on a residual stream."""

    def __init__(
        self, config, spec: DecoderSpec, rotary_emb: RotaryEmbedding, backend: AttentionBackend, tp: TensorParallel
    ):
        super().__init__()
        self.self_attn = DecoderAttention(config, spec, rotary_emb, backend, tp)
        self.mlp = DecoderMLP(config, tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden: Normed | NormedParts, next_norm: RMSNorm, rows: Rows | None = None
    ) -> Normed | NormedParts:
        """
        Args:
            positions: int64 [num_tokens].
            hidden: input_layernorm of the residual stream [num_tokens, hidden_size], which is overwritten.
            next_norm: the next layer's input_layernorm, or the final norm.
            rows: the tokens that the next layer needs, all by default.

        Returns:
            next_norm of the residual stream.
        """
        residual = hidden.residual
        attended = self.self_attn(positions, hidden, rows)
        if rows is not None:
            residual = residual[rows]
        hidden = self.self_attn.o_proj.add(residual, attended, self.post_attention_layernorm)
        return self.mlp.down_proj.add(residual, self.mlp(hidden), next_norm)

    def products(self) -> list[LayerProduct]:
        """The layer's four matrix products, in order."""
        attn, mlp = self.self_attn, self.mlp
        qkv, o, gate_up, down = attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj
        return [
            LayerProduct("linear", qkv.weight, qkv.bias, self.input_layernorm),
            LayerProduct(o.operation, o.weight, o.bias),
            LayerProduct("linear_silu", gate_up.weight, norm=self.post_attention_layernorm),
            LayerProduct(down.operation, down.weight, down.bias),
        ]


class DecoderModel(nn.Module):
    """Embedding, decoder layers, final norm. forward: see `DecoderForCausalLM`."""

    def __init__(self, config, spec: DecoderSpec, max_position: int, backend: AttentionBackend, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.embed_tokens = ReplicatedEmbedding(config.vocab_size, config.hidden_size)
        rotary_emb = get_rope(get_head_dim(config), max_position, config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, rotary_emb, backend, tp) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.tp.reducer is not None:
            begin_sums(self.layers, len(input_ids), self.tp.reducer)
        norms: list[Any] = [layer.input_layernorm for layer in self.layers] + [self.norm]
        hidden = Normed(self.embed_tokens(input_ids), norms[0])
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            rows = _rows_wanted() if next_norm is self.norm else None
            hidden = layer(positions, hidden, next_norm, rows)
        return hidden.value()


def _rows_wanted() -> Rows | None:
    """The rows that the step's tokens are sampled from; None for all. Of other tokens only keys and values are
    needed."""
    context = get_context()
    return context.last_tokens if context.num_drawn is None else slice(context.num_drawn)


class DecoderForCausalLM(nn.Module, ABC):
    """A decoder with its head. A family is a subclass that says what differs.

    Raises ValueError for a configuration that asks for what we do not implement (sliding windows, other RoPE scaling).
    """

    # Fused parameter -> {the checkpoint's name of a part: its shard id}
    packed_modules_mapping: ClassVar[dict[str, dict[str, str | int]]] = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(self, config, max_position: int, backend: AttentionBackend, tp: TensorParallel):
        """config: the transformers configuration. max_position: positions that RoPE's table must cover."""
        super().__init__()
        self.matmul = Matmul()  # cuBLAS alone, before `use_matmul`
        if getattr(config, "use_sliding_window", False):
            raise ValueError("use_sliding_window=true in config.json: sliding windows are not supported")
        self.model = DecoderModel(config, self.spec(config), max_position, backend, tp)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied_to)

    @staticmethod
    @abstractmethod
    def spec(config) -> DecoderSpec:
        """What this family's configuration asks for."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions, int64 [num_tokens] -> hidden states [num_tokens, hidden_size], or only those that
        Context.last_tokens or num_drawn selects."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_rows, hidden_size] -> logits of this rank's part of the vocabulary."""
        return self.lm_head(hidden_states)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The results of compute_logits on all ranks -> logits [num_rows, vocab_size], on all ranks."""
        return self.lm_head.gather(logits)

    @cached_property  # because a CPU needs it at each step
    def num_layer_params(self) -> int:
        """Parameters of one layer on this rank."""
        return sum(parameter.numel() for parameter in self.model.layers[0].parameters())

    def use_matmul(self, matmul: Matmul) -> None:
        self.matmul = matmul
        for module in self.modules():
            if isinstance(module, LinearBase):
                module.matmul = matmul

    def padded_batch(self, num_seqs: int) -> int:
        """The rows, padding included, with which a decode step of num_seqs sequences takes the least time."""
        first: Any = self.model.layers[0]
        return self.matmul.padded_batch(num_seqs, first.mlp.gate_up_proj.weight)

    @contextmanager
    def first_and_last_layer(self) -> Iterator[None]:
        """A block in which the model has these layers only: they launch every kernel that any layer does."""
        layers = self.model.layers
        self.model.layers = nn.ModuleList([layers[0], *layers[1:][-1:]])
        try:
            yield
        finally:
            self.model.layers = layers
