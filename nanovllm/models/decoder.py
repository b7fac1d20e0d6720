"""The decoder that all families share: attention and a gated MLP on a residual stream."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.layers.activation import Gated, GeluTanhAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.layers.embed_head import ParallelLMHead, ReplicatedEmbedding
from nanovllm.layers.expert_products import ExpertsProduct
from nanovllm.layers.experts import MixtureOfExperts
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.matmul import LayerProduct, Matmul
from nanovllm.layers.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.quantization import Weight
from nanovllm.layers.rank_sums import NormedParts, begin_sums
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sharded_norm import ShardedRMSNorm, normalize_over_ranks
from nanovllm.models.hf_config import check_switches, get_head_dim
from nanovllm.models.spec import DecoderSpec
from nanovllm.utils.context import get_context
from nanovllm.utils.parallel import TensorParallel

Rows = torch.Tensor | slice  # of a flat batch of tokens


class DecoderAttention(nn.Module):
    """Fused q/k/v projection, RMSNorm of q and k, RoPE, paged attention: each as the specification says.

    forward: [num_tokens, hidden_size] -> the input of o_proj, [num_tokens, this rank's num_heads * head_dim]. The layer
    calls o_proj, which adds to the residual stream.
    """

    def __init__(
        self,
        config,
        spec: DecoderSpec,
        layer: int,
        rotary_emb: RotaryEmbedding | None,
        backend: AttentionBackend,
        tp: TensorParallel,
    ):
        super().__init__()
        self.tp = tp
        self.head_dim = get_head_dim(config)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(config.hidden_size, self.head_dim, num_heads, num_kv_heads, spec.qkv_bias, tp)
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, config.hidden_size, spec.o_bias, tp)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.eps = config.rms_norm_eps
        self.q_norm: Any = None
        self.k_norm: Any = None
        self.qk_norm = spec.qk_norm
        if spec.qk_norm == "head":
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, self.eps, spec.norm_offset) for _ in "qk")
        elif spec.qk_norm == "full":
            parts, sizes = self.qkv_proj.parts, self.qkv_proj.output_sizes
            self.q_norm, self.k_norm = (ShardedRMSNorm(*parts[name], sizes[name], self.eps) for name in "qk")
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.head_dim, backend, spec.window(layer), spec.attention_scale)

    def forward(self, positions: torch.Tensor, hidden: Normed | NormedParts, rows: Rows | None = None) -> torch.Tensor:
        """rows: the tokens whose attention is needed; only the keys and values of the others are. None: all."""
        qkv = self.qkv_proj(hidden)
        context = get_context()
        has_cache = self.attn.k_cache is not None  # The warm-up runs without one.
        if self.qk_norm == "full":
            self._normalize_full_width(qkv)
        qk_norm_rope_store(
            qkv,
            self.q_norm.weight if self.qk_norm == "head" else None,
            self.k_norm.weight if self.qk_norm == "head" else None,
            self.eps,
            self.rotary_emb.cos_sin_cache if self.rotary_emb else None,
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

    def _normalize_full_width(self, qkv: torch.Tensor) -> None:
        sizes = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, _ = qkv.split(sizes, dim=1)
        normalize_over_ranks([(q, self.q_norm), (k, self.k_norm)], self.tp)


class DecoderMLP(nn.Module):
    """A gated MLP: activation(gate(x)) * up(x), gate and up in one product, then down."""

    def __init__(self, config, spec: DecoderSpec, tp: TensorParallel):
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, False, tp)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, False, tp)
        self.gelu = GeluTanhAndMul() if spec.activation == "gelu_tanh" else None

    def add(
        self,
        residual: torch.Tensor,
        hidden: Normed | NormedParts,
        norm: RMSNorm | None,
        output_norm: RMSNorm | None = None,
    ) -> Normed | NormedParts:
        """norm(residual + y), overwriting residual with the sum, of the MLP's output y of hidden; with an output_norm
        norm(residual + output_norm(y)). residual: [num_tokens, hidden_size]."""
        return self.down_proj.add(residual, self._gated(hidden), norm, output_norm)

    def _gated(self, hidden: Normed | NormedParts) -> torch.Tensor | Gated | Iterator[torch.Tensor | Gated]:
        """The input of down_proj, [num_tokens, this rank's intermediate_size]; in parts if the hidden states are."""
        if self.gelu is not None:
            return self.gelu(self.gate_up_proj(hidden))
        if isinstance(hidden, NormedParts):
            return map(self.gate_up_proj.silu, hidden.parts)
        return self.gate_up_proj.silu(hidden)

    def products(self, norm: RMSNorm | None, adds: bool) -> list[LayerProduct]:
        """The matrix products. norm: of their input. adds: whether the result is added to the residual stream without
        a norm in between."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return [
            LayerProduct("linear_silu" if self.gelu is None else "linear", gate_up.matrix, norm=norm),
            LayerProduct(down.operation if adds else "linear", down.matrix, down.bias),
        ]


class DecoderLayer(nn.Module):
    """Attention and an MLP on a residual stream, with norms before them, after them, or both."""

    def __init__(
        self,
        config,
        spec: DecoderSpec,
        layer: int,
        rotary_emb: RotaryEmbedding | None,
        mlp: nn.Module,
        backend: AttentionBackend,
        tp: TensorParallel,
    ):
        super().__init__()

        def norm(is_there: bool) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, spec.norm_offset) if is_there else None

        self.kind = spec.ropes[layer] is not None, spec.window(layer), type(mlp)
        self.self_attn = DecoderAttention(config, spec, layer, rotary_emb, backend, tp)
        self.mlp: Any = mlp
        # The first two are called as in Llama. Where there are others, `packed_modules_mapping` has the checkpoint's
        # names.
        self.input_layernorm = norm(spec.norms != "after")
        self.post_attention_layernorm = norm(spec.norms != "after")  # before the MLP
        self.attention_output_norm = norm(spec.norms != "before")
        self.mlp_output_norm = norm(spec.norms != "before")

    def forward(
        self, positions: torch.Tensor, hidden: Normed | NormedParts, next_norm: RMSNorm | None, rows: Rows | None = None
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
        o_proj = self.self_attn.o_proj
        hidden = o_proj.add(residual, attended, self.post_attention_layernorm, self.attention_output_norm)
        return self.mlp.add(residual, hidden, next_norm, self.mlp_output_norm)

    def summed_projections(self) -> list[RowParallelLinear]:
        """The projections whose results are added over all ranks and to the residual stream at once; none unless both
        of the layer's are."""
        adds = self.attention_output_norm is None and isinstance(self.mlp, DecoderMLP)
        return [self.self_attn.o_proj, self.mlp.down_proj] if adds else []

    def products(self) -> list[LayerProduct | ExpertsProduct]:
        """The layer's matrix products, in order."""
        qkv, o, adds = self.self_attn.qkv_proj, self.self_attn.o_proj, self.attention_output_norm is None
        return [
            LayerProduct("linear", qkv.matrix, qkv.bias, self.input_layernorm),
            LayerProduct(o.operation if adds else "linear", o.matrix, o.bias),
            *self.mlp.products(self.post_attention_layernorm, adds),
        ]


class DecoderModel(nn.Module):
    """Embedding, decoder layers, final norm. forward: see `DecoderForCausalLM`."""

    def __init__(
        self,
        config,
        spec: DecoderSpec,
        mlps: list[nn.Module],
        max_position: int,
        backend: AttentionBackend,
        tp: TensorParallel,
    ):
        super().__init__()
        self.tp = tp
        self.embedding_scale = spec.embedding_scale
        self.embed_tokens = ReplicatedEmbedding(config.vocab_size, config.hidden_size)
        # One table for all layers with the same settings.
        tables = {rope: RotaryEmbedding(get_head_dim(config), max_position, rope) for rope in set(spec.ropes) if rope}
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, i, tables.get(rope), mlp, backend, tp)
            for i, (rope, mlp) in enumerate(zip(spec.ropes, mlps, strict=True))
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, spec.norm_offset)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.tp.reducer is not None:
            begin_sums(self.layers, len(input_ids), self.tp.reducer)
        norms: list[Any] = [layer.input_layernorm for layer in self.layers] + [self.norm]
        residual = self.embed_tokens(input_ids)
        if self.embedding_scale != 1:
            residual *= self.embedding_scale
        hidden = Normed(residual, norms[0])
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

    Raises ValueError for a configuration that asks for what we do not implement.
    """

    # Our name of a module -> {the checkpoint's names of its parts: their shard ids}. Names that are not here are equal.
    packed_modules_mapping: ClassVar[dict[str, dict[str, str | int | None]]] = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }
    # What the checkpoint's names of this model begin with. Others, of a vision tower say, are not loaded.
    checkpoint_prefix: ClassVar[str] = ""
    # Keys of the configuration, among those that change what a decoder computes, that this family's `spec` reads.
    switches: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config, max_position: int, backend: AttentionBackend, tp: TensorParallel):
        """config: the transformers configuration. max_position: positions that RoPE's table must cover."""
        super().__init__()
        self.matmul = Matmul()  # cuBLAS alone, before `use_matmul`
        spec = self.checked_spec(config)
        # A window that no sequence exceeds is none.
        windows = tuple(None if window is None or window >= max_position else window for window in spec.windows)
        spec = replace(spec, windows=windows)
        mlps = [self.mlp(config, spec, i, tp) for i in range(config.num_hidden_layers)]
        self.model = DecoderModel(config, spec, mlps, max_position, backend, tp)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied_to)

    @staticmethod
    @abstractmethod
    def spec(config) -> DecoderSpec:
        """What this family's configuration asks for."""

    @staticmethod
    def mlp(config, spec: DecoderSpec, layer: int, tp: TensorParallel) -> nn.Module:
        """The MLP of a layer, with the methods `add` and `products` of DecoderMLP."""
        return DecoderMLP(config, spec, tp)

    @classmethod
    def checked_spec(cls, config) -> DecoderSpec:
        """`spec`. Raises ValueError, naming the key, if the configuration asks for what this family does not have."""
        check_switches(config, cls.switches)
        return cls.spec(config)

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
        """Parameters of one layer on this rank, of experts only those that a token uses."""
        layer: Any = self.model.layers[-1]
        idle = layer.mlp.num_idle_params if isinstance(layer.mlp, MixtureOfExperts) else 0
        return sum(parameter.numel() for parameter in layer.parameters()) - idle

    @property
    def gate_up(self) -> Weight:
        """A layer's gate and up projection, of all experts if it has some. The table's rows for whole steps belong to
        its shape."""
        mlp: Any = self.model.layers[0].mlp
        return mlp.experts.gate_up_proj.weight if isinstance(mlp, MixtureOfExperts) else mlp.gate_up_proj.matrix

    def use_matmul(self, matmul: Matmul) -> None:
        self.matmul = matmul
        for module in self.modules():
            if isinstance(module, (LinearBase, MixtureOfExperts)):
                module.matmul = matmul

    def padded_batch(self, num_seqs: int) -> int:
        """The rows, padding included, with which a decode step of num_seqs sequences takes the least time."""
        return self.matmul.padded_batch(num_seqs, self.gate_up)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """A block in which the model has its first layer, its last one, and one of each other kind: they launch every
        kernel that any layer does."""
        layers: Any = self.model.layers
        one_of_each = {layer.kind: i for i, layer in reversed(list(enumerate(layers)))}
        indices = {*one_of_each.values(), 0, len(layers) - 1}
        self.model.layers = nn.ModuleList(layers[i] for i in sorted(indices))
        try:
            yield
        finally:
            self.model.layers = layers
