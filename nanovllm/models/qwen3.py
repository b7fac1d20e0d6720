"""Qwen3 (arXiv:2505.09388), dense and plain: every operation is a layer, and no kernel is fused with another.

It is the twin of the fast decoder: `qwen3_decoder.py` says what this family is there, and tests hold the two together.
Of a step it sees the context (`utils.context`). Every class can be made and called by hand, without an engine.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.rope_parameters import RopeParameters, rope_parameters
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.hf_config import get_head_dim, supported_length, windows_of_layers
from nanovllm.utils.checks import require


class Qwen3Attention(nn.Module):
    """q/k/v projection, a norm of each head of q and k, RoPE, attention, output projection.

    Args:
        num_heads, num_kv_heads: on all ranks.
        max_position: every position must be below it.
        head_dim: None for hidden_size / num_heads.
        qkv_bias: whether q, k, v and the output projection have biases, which `attention_bias` says.
        rope_scaling: as for `get_rope`.
        window: the number of keys that a token attends to; None: all.
        backend: as for `Attention`.
        tp: this rank's place; None: there is one rank.

    Attributes:
        total_num_heads, total_num_kv_heads: as given.
        num_heads, num_kv_heads: of this rank.
        q_size, kv_size: numbers of q, and of k or v, for a token on this rank.
        scaling: factor of the scores.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position: int = 4096 * 32,
        head_dim: int | None = None,
        rms_norm_eps: float = 1e-06,
        qkv_bias: bool = False,
        rope_theta: float = 10000,
        rope_scaling: RopeParameters | Mapping[str, Any] | None = None,
        *,
        window: int | None = None,
        backend: AttentionBackend | None = None,
        tp: TensorParallel | None = None,
    ):
        super().__init__()
        self.total_num_heads, self.total_num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.qkv_bias = qkv_bias
        self.qkv_proj = QKVParallelLinear(hidden_size, self.head_dim, num_heads, num_kv_heads, qkv_bias, tp=tp)
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, hidden_size, qkv_bias, tp=tp)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.scaling = self.head_dim**-0.5
        self.rotary_emb = get_rope(self.head_dim, self.head_dim, max_position, float(rope_theta), rope_scaling)
        sizes = self.num_heads, self.head_dim, self.scaling, self.num_kv_heads
        self.attn = Attention(*sizes, backend=backend, window=window)
        self.q_norm = RMSNorm(self.head_dim, rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, rms_norm_eps)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: [num_tokens]; hidden_states: [num_tokens, hidden_size]. Returns a tensor like hidden_states."""
        q, k, v = self.qkv_proj(hidden_states).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.view(-1, self.num_heads, self.head_dim))
        k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim))
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v).flatten(1))


class Qwen3MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)). hidden_act: "silu"; ValueError is raised for another."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str, *, tp: TensorParallel | None = None):
        super().__init__()
        require("hidden_act", hidden_act, hidden_act == "silu", "'silu'")
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, tp=tp)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, tp=tp)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Qwen3DecoderLayer(nn.Module):
    """Attention and an MLP, each with a norm before it.

    Args:
        config: the transformers configuration.
        layer: its index, because windows differ between layers.
        max_position: as for Qwen3Attention; None: as many as the model supports.
    """

    def __init__(
        self,
        config,
        *,
        layer: int = 0,
        max_position: int | None = None,
        backend: AttentionBackend | None = None,
        tp: TensorParallel | None = None,
    ):
        super().__init__()
        rope = rope_parameters(config)
        self.self_attn = Qwen3Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            max_position or supported_length(config),
            get_head_dim(config),
            config.rms_norm_eps,
            bool(getattr(config, "attention_bias", False)),
            rope.base,
            rope,
            window=windows_of_layers(config)[layer],
            backend=backend,
            tp=tp,
        )
        self.mlp = Qwen3MLP(config.hidden_size, config.intermediate_size, config.hidden_act, tp=tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The last block's output and the residual stream before it is added, [num_tokens, hidden_size] each; a
        residual of None is an empty stream. Returns the same two of this layer."""
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen3Model(nn.Module):
    """Embedding, decoder layers, final norm. Arguments are those of `Qwen3DecoderLayer`."""

    def __init__(
        self,
        config,
        *,
        max_position: int | None = None,
        backend: AttentionBackend | None = None,
        tp: TensorParallel | None = None,
    ):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, layer=layer, max_position=max_position, backend=backend, tp=tp)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions, int64 [num_tokens] -> hidden states [num_tokens, hidden_size]."""
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Qwen3ForCausalLM(nn.Module):
    """The model with its head. Arguments are those of `Qwen3DecoderLayer`. `utils.loader.load_model` fills it."""

    # The checkpoint's names of modules -> our module that contains them, and the shard id for its weight_loader.
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(
        self,
        config,
        *,
        max_position: int | None = None,
        backend: AttentionBackend | None = None,
        tp: TensorParallel | None = None,
    ):
        super().__init__()
        self.model = Qwen3Model(config, max_position=max_position, backend=backend, tp=tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp=tp)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """As `Qwen3Model.forward`."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Hidden states of all tokens of the step -> the logits to sample from, [num_seqs, vocab_size], on rank 0; None
        on all others. Every rank must call it."""
        return self.lm_head(hidden_states)
