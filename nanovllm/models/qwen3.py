"""Qwen3 (arXiv:2505.09388), dense."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.layers.decode_linear import is_small_batch
from nanovllm.layers.embed_head import ParallelLMHead, ReplicatedEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.product import batch_with_padding, product_silu
from nanovllm.layers.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.quack import Quack
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.layers.skinny_linear import is_skinny, is_worth_it, norm_linear, norm_linear_silu
from nanovllm.utils.context import get_context
from nanovllm.utils.parallel import TensorParallel

Rows = torch.Tensor | slice  # of a flat batch of tokens


def _rows_wanted() -> Rows | None:
    """The rows that the step's tokens are drawn from: nobody asks a prompt's other tokens for more than their keys and
    values. None: all."""
    context = get_context()
    return context.last_tokens if context.num_drawn is None else slice(context.num_drawn)


def get_head_dim(config) -> int:
    """Qwen2's configuration names no head_dim: there it is hidden_size / num_attention_heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Qwen3Attention(nn.Module):
    """Fused q/k/v projection, RMSNorm on each head of q and k, RoPE, paged attention, output projection. The layer
    calls the projections itself: what comes before and after them shares their launches where it can."""

    def __init__(
        self,
        config,
        rotary_emb: RotaryEmbedding,
        backend: AttentionBackend,
        tp: TensorParallel,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
    ):
        super().__init__()
        self.head_dim = get_head_dim(config)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(config.hidden_size, self.head_dim, num_heads, num_kv_heads, qkv_bias, tp)
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, config.hidden_size, o_bias, tp)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.eps = config.rms_norm_eps
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.head_dim, backend)

    def attend(self, positions: torch.Tensor, qkv: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """All between the two projections: qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], which is
        overwritten, -> [num_tokens, num_heads * head_dim], or with `rows` that of these tokens alone."""
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
        return self.attn(q, k, v, context).flatten(1)[rows]  # The plan's pieces are of all rows.


class Qwen3MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one product.

    forward: x [num_tokens, hidden_size] -> what down_proj takes, [num_tokens, this rank's intermediate_size].
    """

    def __init__(self, config, tp: TensorParallel):
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act={config.hidden_act!r} in config.json: supported is silu")
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, False, tp)
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, False, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        proj = self.gate_up_proj
        y = product_silu(x, proj.weight, proj.arrivals, proj.quack)
        return self.act_fn(proj(x)) if y is None else y


class Qwen3DecoderLayer(nn.Module):
    """Pre-norm attention and MLP on a residual stream."""

    def __init__(self, config, tp: TensorParallel, **attention):
        super().__init__()
        self.self_attn = Qwen3Attention(config, tp=tp, **attention)
        self.mlp = Qwen3MLP(config, tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        next_norm: RMSNorm,
        rows: Rows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            positions: int64 [num_tokens].
            hidden_states: what input_layernorm makes of residual, [num_tokens, hidden_size].
            residual: the stream, likewise; overwritten.
            next_norm: the next layer's first norm, or the final one, which comes with this layer's last sum.
            rows: the tokens whose stream goes on, all by default.

        Returns:
            The next hidden_states and residual.
        """
        qkv = self.self_attn.qkv_proj(hidden_states)
        attended = self.self_attn.attend(positions, qkv, rows)
        if rows is not None:
            residual = residual[rows]
        hidden_states = self.self_attn.o_proj.add_norm(residual, attended, self.post_attention_layernorm)
        hidden_states = self.mlp(hidden_states)
        return self.mlp.down_proj.add_norm(residual, hidden_states, next_norm), residual

    def forward_parts(
        self,
        positions: torch.Tensor,
        parts: Iterable[torch.Tensor],
        residual: torch.Tensor,
        next_norm: RMSNorm,
    ) -> Iterator[torch.Tensor]:
        """`forward` of a long prefill over two GPUs, hidden_states in two parts that follow each other: while the sum
        of one part travels, the other one is multiplied. The next hidden_states come in parts as well, and are
        computed when they are asked for."""
        attn = self.self_attn
        attended = attn.attend(positions, attn.qkv_proj.of_parts(parts, len(residual)))
        hidden_states = attn.o_proj.add_norm_parts(residual, attended.chunk(2), self.post_attention_layernorm)
        return self.mlp.down_proj.add_norm_parts(residual, map(self.mlp, hidden_states), next_norm)

    def forward_skinny(self, positions: torch.Tensor, residual: torch.Tensor) -> None:
        """The same for a decode step of a few sequences, in six launches instead of nine or more: at batch 1 the
        launches and the bandwidth of skinny products are all there is. `residual` is updated in place."""
        attn, mlp, pdl = self.self_attn, self.mlp, True
        norm, proj = self.input_layernorm, attn.qkv_proj
        qkv = norm_linear(residual, norm.weight, norm.eps, proj.weight, proj.bias, pdl=pdl)
        attn.o_proj.skinny_add(residual, attn.attend(positions, qkv))
        norm = self.post_attention_layernorm
        hidden_states = norm_linear_silu(residual, norm.weight, norm.eps, mlp.gate_up_proj.weight, pdl=pdl)
        mlp.down_proj.skinny_add(residual, hidden_states)


class Qwen3Model(nn.Module):
    """Embedding, decoder layers, final norm: token ids and positions [num_tokens] -> [num_tokens, hidden_size], or what
    Context.last_tokens or num_drawn asks for."""

    def __init__(self, config, max_position: int, tp: TensorParallel, **attention):
        super().__init__()
        self.tp = tp
        self.embed_tokens = ReplicatedEmbedding(config.vocab_size, config.hidden_size)
        rotary_emb = get_rope(get_head_dim(config), max_position, config)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, tp, rotary_emb=rotary_emb, **attention) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        reducer, is_prefill = self.tp.reducer, get_context().is_prefill
        if is_skinny(input_ids) and not is_prefill and self._takes_skinny(len(input_ids)):
            if reducer is not None:
                # Before the embedding: dependent launches read early what this writes.
                reducer.begin_step(num_sums=2 * len(self.layers))
            residual = self.embed_tokens(input_ids)
            for layer in self.layers:
                layer.forward_skinny(positions, residual)
            return self.norm(residual[: get_context().num_drawn])
        residual = self.embed_tokens(input_ids)
        hidden_states = self.layers[0].input_layernorm(residual)
        if is_prefill and reducer is not None and reducer.takes_parts(len(residual)):
            parts = hidden_states.chunk(2)
            for layer, next_layer in pairwise(self.layers):
                parts = layer.forward_parts(positions, parts, residual, next_layer.input_layernorm)
            hidden_states = torch.cat(list(parts))
        else:
            for layer, next_layer in pairwise(self.layers):
                hidden_states, residual = layer(positions, hidden_states, residual, next_layer.input_layernorm)
        hidden_states, _ = self.layers[-1](positions, hidden_states, residual, self.norm, _rows_wanted())
        return hidden_states

    def _takes_skinny(self, num_tokens: int) -> bool:
        """Whether `forward_skinny` is the fast way for that many of `is_skinny`: where the layers' largest weight, with
        so many tokens, is no case for cuBLAS, and, with several ranks, where it posts the sums itself; alone, where it
        is no case for the kernels of small batches either."""
        weight = self.layers[0].mlp.gate_up_proj.weight
        if not is_worth_it(num_tokens, weight):
            return False
        return self.tp.reducer is not None if self.tp.size > 1 else not is_small_batch(num_tokens, weight)


class Qwen3ForCausalLM(nn.Module):
    """Qwen3, dense.

    Args:
        config: its transformers configuration.
        max_position: positions that RoPE's table must cover.
        backend: computes attention.
        tp: this rank's place.

    Raises:
        ValueError: a configuration that asks for what we do not implement (sliding windows, other RoPE scaling).
    """

    # Fused parameter -> the checkpoint's names for its parts, with the shard id of each.
    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(self, config, max_position: int, backend: AttentionBackend, tp: TensorParallel):
        super().__init__()
        if getattr(config, "use_sliding_window", False):
            raise ValueError("use_sliding_window=true in config.json: sliding windows are not supported")
        self.model = Qwen3Model(config, max_position, tp, backend=backend, **self.attention_switches(config))
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied_to)

    @staticmethod
    def attention_switches(config) -> dict[str, bool]:
        bias = bool(getattr(config, "attention_bias", False))
        return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions, int64 [num_tokens] -> hidden states [num_tokens, hidden_size], or those that
        Context.last_tokens or num_drawn asks for."""
        return self.model(input_ids, positions)

    @cached_property  # asked for at each step on a CPU
    def num_layer_params(self) -> int:
        """Parameters of a layer, of this rank's part."""
        return sum(parameter.numel() for parameter in self.model.layers[0].parameters())

    @contextmanager
    def first_and_last_layer(self) -> Iterator[None]:
        """A block in which the model has these two alone: whatever kernel a layer launches, one of them does."""
        layers = self.model.layers
        self.model.layers = nn.ModuleList([layers[0], *layers[1:][-1:]])
        try:
            yield
        finally:
            self.model.layers = layers

    def use_quack(self, quack: Quack | None) -> None:
        """Have the layers' products by that package where it is faster."""
        for module in self.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.quack = quack

    def padded_batch(self, num_seqs: int) -> int:
        """How many rows, the last of them padding, a decode step of so many sequences had better have: products of
        whole tiles are faster."""
        gate_up = self.model.layers[0].mlp.gate_up_proj
        return batch_with_padding(num_seqs, gate_up.weight, gate_up.quack)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_rows, hidden_size] -> logits of this rank's tokens [num_rows, num_tokens]."""
        return self.lm_head(hidden_states)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """What compute_logits returned on each rank -> logits [num_rows, vocab_size], on all of them."""
        return self.lm_head.gather(logits)
