"""The decoder that all families share: attention and a gated MLP on a residual stream."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.kernels.attention.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.activation import Gated, GeluTanhAndMul, OutputGate
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape
from nanovllm.layers.embed_head import SHARD_MULTIPLE, ParallelLMHead, ReplicatedEmbedding
from nanovllm.layers.experts.experts import ExpertsLinear
from nanovllm.layers.formats.parameters import LayerParameter, Sliceable, make_parameter, scale_while_loading
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.linear import (
    GatedQKVParallelLinear,
    KeysAsValuesParallelLinear,
    LinearBase,
    LinearOptions,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.linear_attention import GatedDeltaNet
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.rank_sums import begin_sums
from nanovllm.layers.parallel.sharded_norm import ShardedRMSNorm, normalize_over_ranks
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.layers.stores.state_cells import StateCells
from nanovllm.layers.stores.store import Store, StoreLimits
from nanovllm.layers.stores.windowed_kv_cache import make_kv_caches
from nanovllm.models.expert_tensors import Content, ExpertPart, stacked_experts
from nanovllm.models.heads import NoVocabulary, head_of, make_score
from nanovllm.models.hf_config import check_switches, get_head_dim
from nanovllm.models.spec import DecoderSpec, LayerHeads
from nanovllm.utils.context import get_context

Rows = torch.Tensor | slice  # of a flat batch of tokens


def layer_heads(config, spec: DecoderSpec, layer: int) -> LayerHeads:
    """The heads of a layer's keys and values."""
    return spec.heads[layer] if spec.heads else LayerHeads(config.num_key_value_heads, get_head_dim(config))


class DecoderAttention(nn.Module):
    """Fused q/k/v projection, RMSNorm of q, k and v, RoPE, paged attention, gate: each as the specification says.

    forward: the normed residual stream [num_tokens, hidden_size] -> the input of o_proj, [num_tokens, this rank's
    num_heads * head_dim]. The layer calls o_proj, because it adds to the residual stream.
    """

    def __init__(
        self,
        config,
        spec: DecoderSpec,
        layer: int,
        rotary_emb: RotaryEmbedding | None,
        backend: AttentionBackend,
        tp: TensorParallel,
        matmul: Matmul,
    ):
        super().__init__()
        self.tp = tp
        of_layer = layer_heads(config, spec, layer)
        self.head_dim, num_heads = of_layer.head_dim, config.num_attention_heads
        heads = self.head_dim, num_heads, of_layer.num_kv_heads
        projection = GatedQKVParallelLinear if spec.query_gate else QKVParallelLinear
        if of_layer.keys_are_values:
            projection = KeysAsValuesParallelLinear
        self.has_gate = spec.query_gate
        options: LinearOptions = {"tp": tp, "matmul": matmul}
        self.qkv_proj: QKVParallelLinear = projection(
            config.hidden_size, *heads, spec.qkv_bias, names=of_layer.names, **options
        )
        options["size_name"] = self.qkv_proj.size_name
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, config.hidden_size, spec.o_bias, **options)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.eps = config.rms_norm_eps
        self.q_norm: Any = None
        self.k_norm: Any = None
        self.qk_norm, self.value_norm = spec.qk_norm, spec.value_norm
        if spec.qk_norm == "head":
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, self.eps, spec.norm_offset) for _ in "qk")
        elif spec.qk_norm == "full":
            parts, sizes = self.qkv_proj.parts, self.qkv_proj.matrix_sizes
            self.q_norm, self.k_norm = (ShardedRMSNorm(*parts[name], sizes[name], self.eps) for name in "qk")
        self.rotary_emb = rotary_emb
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            shards = {None: (num_heads,)}
            self.sinks = make_parameter((self.num_heads,), shards, self.load_sinks, Unquantized())
        scale = self.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        of_attention = backend, spec.window(layer), self.sinks
        self.attn = Attention(self.num_heads, self.head_dim, scale, self.num_kv_heads, *of_attention)

    def forward(self, positions: torch.Tensor, hidden: Normed, rows: Rows | None = None) -> torch.Tensor | OutputGate:
        """rows: the tokens whose attention is needed, None for all. Of the others only keys and values are needed."""
        qkv, gate = self.qkv_proj(hidden), None
        if self.has_gate:
            qkv, gate = qkv.tensor_split((-self.num_heads * self.head_dim,), dim=1)
        context = self.attn.get_context()
        has_cache = self.attn.k_cache.numel() > 0  # The warm-up runs without one.
        if self.qk_norm == "full":
            self._normalize_full_width(qkv)
        qk_norm_rope_store(
            qkv,
            self.q_norm.weight if self.qk_norm == "head" else None,
            self.k_norm.weight if self.qk_norm == "head" else None,
            self.eps,
            context.rope if self.rotary_emb is None or context.rope is not None else self.rotary_emb.cos_sin_cache,
            positions,
            self.attn.k_cache if has_cache else None,
            self.attn.v_cache if has_cache else None,
            context.slot_mapping if has_cache else None,
            self.attn.kv_scales if has_cache else None,
            self.num_heads,
            self.num_kv_heads,
            pdl=not context.is_prefill,
            query_scales=self.rotary_emb.query_scales if self.rotary_emb else None,
            has_value_norm=self.value_norm,
        )
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if rows is None:
            attended = self.attn.attend(q, k, v, context).flatten(1)
        elif context.is_prefill:
            attended = self.attn.attend(q[rows], k, v, context.of_last_tokens()).flatten(1)
        else:
            attended = self.attn.attend(q, k, v, context).flatten(1)[rows]  # Plans are for all rows.
        return attended if gate is None else OutputGate(attended, gate if rows is None else gate[rows])

    def load_sinks(self, param: LayerParameter, loaded: Sliceable, shard_id: object = None) -> None:
        start = self.tp.rank * self.num_heads
        param.stored.format.store(param, loaded[start : start + self.num_heads])

    def _normalize_full_width(self, qkv: torch.Tensor) -> None:
        sizes = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, _ = qkv.split(sizes, dim=1)
        normalize_over_ranks([(q, self.q_norm), (k, self.k_norm)], self.tp)


class DecoderMLP(nn.Module):
    """A gated MLP: activation(gate(x)) * up(x), gate and up in one product, then down."""

    def __init__(self, config, spec: DecoderSpec, tp: TensorParallel, matmul: Matmul):
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        options: LinearOptions = {"tp": tp, "matmul": matmul, "size_name": "intermediate_size"}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, **options)
        self.gelu = GeluTanhAndMul() if spec.activation == "gelu_tanh" else None

    def add(
        self,
        residual: torch.Tensor,
        hidden: Normed,
        norm: RMSNorm | None,
        output_norm: RMSNorm | None = None,
    ) -> Normed:
        """Add the MLP's output for `hidden`, or output_norm of it, to residual [num_tokens, hidden_size], in place.
        Returns norm of the sum; without a norm, the sum itself."""
        # The input of down_proj, [num_tokens, this rank's intermediate_size].
        gated: torch.Tensor | Gated
        gated = self.gate_up_proj.silu(hidden) if self.gelu is None else self.gelu(self.gate_up_proj(hidden))
        return self.down_proj.add(residual, gated, norm, output_norm)


class DecoderLayer(nn.Module):
    """Attention and an MLP on a residual stream, with norms before them, after them, or both.

    Attributes:
        self_attn, linear_attn: what it has; the other one is None.
        mixer: either of them.
        output_proj: the mixer's output projection.
    """

    mixer: DecoderAttention | GatedDeltaNet
    output_proj: RowParallelLinear

    def __init__(self, config, spec: DecoderSpec, mixer: DecoderAttention | GatedDeltaNet, mlp: nn.Module):
        super().__init__()
        self.self_attn = mixer if isinstance(mixer, DecoderAttention) else None
        self.linear_attn = mixer if isinstance(mixer, GatedDeltaNet) else None
        output_proj = mixer.o_proj if isinstance(mixer, DecoderAttention) else mixer.out_proj
        # Past nn.Module, which would list their parameters a second time.
        vars(self).update(mixer=mixer, output_proj=output_proj)

        def norm(is_there: bool) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, spec.norm_offset) if is_there else None

        self.mlp: Any = mlp
        # The first two have Llama's names in the checkpoint. A family with the others names them in its
        # `packed_modules_mapping`.
        self.input_layernorm = norm(spec.norms != "after")
        self.post_attention_layernorm = norm(spec.norms != "after")  # before the MLP
        self.attention_output_norm = norm(spec.norms != "before")
        self.mlp_output_norm = norm(spec.norms != "before")
        if spec.layer_scalars:
            self.layer_scalar = nn.Parameter(torch.ones(1))
            # Past nn.Module, as above.
            vars(self.mlp_output_norm)["sum_scale"] = self.layer_scalar

    def forward(
        self, positions: torch.Tensor, hidden: Normed, next_norm: RMSNorm | None, rows: Rows | None = None
    ) -> Normed:
        """
        Args:
            positions: int64 [num_tokens].
            hidden: input_layernorm of the residual stream [num_tokens, hidden_size], which is overwritten.
            next_norm: the next layer's input_layernorm, or the final norm.
            rows: the tokens that the next layer needs, all by default.

        Returns:
            next_norm of the residual stream.
        """
        attended = self.mixer(positions, hidden, rows)
        residual = hidden.residual
        if rows is not None:
            residual = residual[rows]
        hidden = self.output_proj.add(residual, attended, self.post_attention_layernorm, self.attention_output_norm)
        return self.mlp.add(residual, hidden, next_norm, self.mlp_output_norm)

    def summed_projections(self) -> list[RowParallelLinear]:
        """The projections whose results one kernel sums over the ranks and adds to the residual stream: both of the
        layer's, or none."""
        adds = self.attention_output_norm is None and isinstance(self.mlp, DecoderMLP)
        return [self.output_proj, self.mlp.down_proj] if adds else []


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
        matmul: Matmul,
    ):
        super().__init__()
        self.tp = tp
        self.embedding_scale = spec.embedding_scale
        self.embed_tokens = ReplicatedEmbedding(config.vocab_size, config.hidden_size)
        # Layers with the same settings share a table.
        keys = [(rope, layer_heads(config, spec, i).head_dim) for i, rope in enumerate(spec.ropes)]
        tables = {key: RotaryEmbedding.of(key[0], key[1], max_position) for key in set(keys) if key[0]}
        self.layers = nn.ModuleList()
        for i, (key, mlp) in enumerate(zip(keys, mlps, strict=True)):
            mixer: DecoderAttention | GatedDeltaNet
            if spec.linear_attention is not None and spec.is_linear(i):
                mixer = GatedDeltaNet(config.hidden_size, spec.linear_attention, config.rms_norm_eps, tp, matmul)
            else:
                mixer = DecoderAttention(config, spec, i, tables.get(key), backend, tp, matmul)
            self.layers.append(DecoderLayer(config, spec, mixer, mlp))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, spec.norm_offset)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.tp.reducer is not None:
            begin_sums(self.layers, len(input_ids), self.tp.reducer)
        norms: list[Any] = [layer.input_layernorm for layer in self.layers] + [self.norm]
        residual = self.embed_tokens(input_ids)
        if self.embedding_scale != 1:
            residual *= self.embedding_scale
        hidden = Normed(residual, norms[0])
        context = get_context()
        # The rows that the step's tokens are sampled from. The last layer computes only keys and values of the others.
        sampled = slice(context.num_sampled) if context.num_sampled is not None else context.last_tokens
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            hidden = layer(positions, hidden, next_norm, sampled if next_norm is self.norm else None)
        return hidden.value()


class DecoderForCausalLM(nn.Module, ABC):
    """A decoder with its head. A family is a subclass that says what differs.

    Raises ValueError for a configuration that asks for what we do not implement.
    """

    # Our name of a module -> {the checkpoint's names of its parts: their shard ids}. Names that are not here are equal.
    packed_modules_mapping: ClassVar[dict[str, dict[str, str | int | None]]] = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }
    # For a text model that may be a part of a larger one: what the checkpoint's names of it then begin with, and what
    # ours begin with. Where a name begins so, the others, of a vision tower say, are not loaded.
    checkpoint_prefixes: ClassVar[dict[str, str]] = {}
    # Parts of our names -> the checkpoint's, for modules that are in other ones there.
    checkpoint_places: ClassVar[dict[str, str]] = {}
    # Keys of the configuration, among those that change what a decoder computes, that this family's `spec` reads.
    switches: ClassVar[frozenset[str]] = frozenset()
    decoder: ClassVar[type[DecoderModel]] = DecoderModel
    vision_spec: Any = None  # a `VisionSpec` of a model that has its vision tower

    def __init__(self, config, max_position: int, backend: AttentionBackend, tp: TensorParallel, matmul: Matmul):
        """config: the transformers configuration. max_position: positions that RoPE's table must cover."""
        super().__init__()
        self.matmul = matmul
        spec = self.checked_spec(config)
        # A window that no sequence exceeds is none.
        windows = tuple(None if window is None or window >= max_position else window for window in spec.windows)
        spec = replace(spec, windows=windows)
        mlps = [self.mlp(config, spec, i, tp, matmul) for i in range(config.num_hidden_layers)]
        self.model = self.decoder(config, spec, mlps, max_position, backend, tp, matmul)
        self.logit_softcap = spec.logit_softcap
        self.lm_head: Any = None
        # What its hidden states are multiplied by to be the family's own: the norm has the scale of the logits.
        self.hidden_scale = 1.0
        if head_of(config) == "vocabulary":
            tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, tp=tp, tied_to=tied_to, shard_multiple=SHARD_MULTIPLE
            )
            scale_while_loading([self.model.norm], spec.logit_scale)
            self.hidden_scale = 1 / spec.logit_scale
        else:
            self.score = make_score(config)
            head = NoVocabulary(self.score)
            vars(self).update(compute_logits=head.compute, gather_logits=head.gather)
        scale_while_loading(self._last_projections(), spec.residual_scale)

    def _last_projections(self) -> list[nn.Module]:
        """Those whose outputs are added to the residual stream."""
        names = ("self_attn.o_proj", "linear_attn.out_proj", "mlp.down_proj", "mlp.experts.down_proj")
        return [module for name, module in self.named_modules() if name.endswith(names)]

    @staticmethod
    @abstractmethod
    def spec(config) -> DecoderSpec:
        """What this family's configuration asks for."""

    def split_experts(self, name: str, content: Content) -> dict[str, ExpertPart]:
        """What a tensor of a checkpoint consists of, if it is one of several experts (`expert_tensors`)."""
        return stacked_experts(name, content)

    @staticmethod
    def mlp(config, spec: DecoderSpec, layer: int, tp: TensorParallel, matmul: Matmul) -> nn.Module:
        """The MLP of a layer, with the method `add` of DecoderMLP."""
        return DecoderMLP(config, spec, tp, matmul)

    @classmethod
    def checked_spec(cls, config) -> DecoderSpec:
        """`spec`. Raises ValueError, naming the key, if the configuration asks for what this family does not have."""
        check_switches(config, cls.switches)
        return cls.spec(config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions, int64 [num_tokens] -> hidden states [num_tokens, hidden_size], or only those that
        Context.last_tokens or num_sampled selects."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [num_rows, hidden_size] -> logits of this rank's part of the vocabulary. out: as for
        `ParallelLMHead.shard_logits`."""
        logits = self.lm_head.shard_logits(hidden_states, out)
        if self.logit_softcap is not None:
            logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The results of compute_logits on all ranks -> logits [num_rows, vocab_size], on all ranks."""
        return self.lm_head.gather_shards(logits)

    def make_stores(self, shape: AttentionShape, state_dtype: torch.dtype, limits: StoreLimits) -> list[Store]:
        """What its sequences keep on the device: the paged KV cache, of one kind of layers or two, and stores in which
        a sequence has a cell each. Nothing is allocated yet. shape: of this rank's attention, in all that its layers
        share. state_dtype: of the states of linear attention."""
        mixers = [x for x in self.modules() if isinstance(x, DecoderAttention)]
        shapes = [shape._replace(num_kv_heads=x.num_kv_heads, head_dim=x.head_dim) for x in mixers]
        layers, linear_layers = [x.attn for x in mixers], [x for x in self.modules() if isinstance(x, GatedDeltaNet)]
        if not linear_layers:
            return [*make_kv_caches(layers, shapes, limits)]
        # A sequence's place is in one store beside the KV cache. So windows give nothing back beside states.
        states = StateCells(linear_layers, shape.dtype, shape.device, state_dtype)
        return [PagedKVCache(layers, shapes), states]

    def pack_weights(self) -> None:
        """Once the weights are loaded: let a CPU's products read them faster (`formats.packed`), if there is no other
        candidate for them."""
        for module in [] if self.matmul.has_choice else self.modules():
            if isinstance(module, (LinearBase, ExpertsLinear, ParallelLMHead)):
                module.pack_weight()

    def unpack_weights(self) -> None:
        """Undo `pack_weights`, so that weights can be loaded again."""
        for module in self.modules():
            if isinstance(module, (LinearBase, ExpertsLinear, ParallelLMHead)):
                module.unpack_weight()
