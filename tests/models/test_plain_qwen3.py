"""The plain Qwen3, driven by hand: against transformers, and against the fast decoder."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from checkpoints import Reference, make_checkpoint, random_prompt
from families import SOME_WINDOWS
from rank_threads import on_ranks
from transformers import AutoConfig

from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models import loader
from nanovllm.models.make_model import make_plain_model
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Qwen3MLP
from nanovllm.models.registry import model_class
from nanovllm.utils.context import get_context, reset_context, set_context
from nanovllm.utils.loader import load_model

BLOCK_SIZE, CPU = 16, torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CHECKPOINTS = {
    "usual": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 64},
    "odd heads": {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 1, "vocab_size": 307},
    "windows": SOME_WINDOWS.values[0],
}


def plain_model(path, **options) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(AutoConfig.from_pretrained(path), **options)
    load_model(model, str(path))
    return model


def fast_model(path) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(path)
    model = model_class(config)(config, 64, TorchBackend(), TensorParallel(), Matmul())
    loader.load_model(model, str(path))
    return model.requires_grad_(False)


def plain_logits(model) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda input_ids, positions: model.compute_logits(model(input_ids, positions))


def fast_logits(model) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def compute(input_ids, positions):
        hidden_states = model(input_ids, positions)
        context = get_context()
        if context.is_prefill:
            hidden_states = hidden_states[context.cu_seqlens_q[1:].long() - 1]
        return model.gather_logits(model.compute_logits(hidden_states))

    return compute


class ByHand:
    """Sequences in a paged cache of ours, computed in steps that we set the context of."""

    def __init__(self, model, logits_of, seqs: list[list[int]], num_heads: int, head_dim: int):
        self.logits_of, self.seqs, self.done = logits_of, seqs, [0] * len(seqs)
        num_blocks = -(-max(map(len, seqs)) // BLOCK_SIZE)
        order = torch.randperm(len(seqs) * num_blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order.int().view(len(seqs), num_blocks)
        for layer in [x for x in model.modules() if isinstance(x, Attention)]:
            caches = torch.full((2, order.numel(), BLOCK_SIZE, num_heads, head_dim), torch.nan)
            layer.k_cache, layer.v_cache = caches

    def step(self, ends: list[int]) -> torch.Tensor:
        """Compute each sequence up to its end. Returns the logits of the last token of each."""
        starts, self.done = self.done, ends
        positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        slots = [
            table[of_seq // BLOCK_SIZE] * BLOCK_SIZE + of_seq % BLOCK_SIZE
            for table, of_seq in zip(self.tables, positions, strict=True)
        ]
        tokens = [torch.tensor(seq)[of_seq] for seq, of_seq in zip(self.seqs, positions, strict=True)]
        slots, lens = torch.cat(slots).int(), torch.tensor(ends).int()
        if all(len(of_seq) == 1 for of_seq in positions) and all(starts):
            set_context(False, slot_mapping=slots, context_lens=lens, block_tables=self.tables)
        else:
            cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)).int() for x in (lens - torch.tensor(starts), lens))
            longest = max(map(len, positions)), max(ends)
            set_context(True, cu_q, cu_k, *longest, slots, None, self.tables if any(starts) else None)
        try:
            return self.logits_of(torch.cat(tokens), torch.cat(positions))
        finally:
            reset_context()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_logits_are_transformers_and_the_fast_decoders(name, tmp_path):
    path = make_checkpoint(tmp_path, **CHECKPOINTS[name])
    reference = Reference(path)
    vocab_size = reference.model.config.vocab_size
    seqs = [random_prompt(length, seed=length, vocab_size=vocab_size) for length in (45, 6, 33)]
    # A prefill, one after a cached prefix, and decode steps.
    steps = [[30, 1, 20], [41, 3, 31], [42, 4, 32], [43, 5, 33]]
    heads = reference.model.config.num_key_value_heads, reference.model.config.head_dim
    plain, fast = plain_model(path, max_position=64), fast_model(path)
    assert isinstance(plain, Qwen3ForCausalLM)
    assert type(fast) is not Qwen3ForCausalLM
    runs = [ByHand(plain, plain_logits(plain), seqs, *heads), ByHand(fast, fast_logits(fast), seqs, *heads)]
    for ends in steps:
        found, of_fast = (run.step(ends) for run in runs)
        expected = [reference.logits(seq[:end], [0])[0] for seq, end in zip(seqs, ends, strict=True)]
        assert (found - torch.stack(expected)).abs().max() < 1e-4
        assert (found - of_fast).abs().max() < 1e-4


def test_a_configuration_without_head_dim(tmp_path):
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path, head_dim=16))
    model = Qwen3ForCausalLM(config)
    fields = config.to_dict()
    del fields["head_dim"]
    other = Qwen3ForCausalLM(SimpleNamespace(**fields))
    assert [x.shape for x in other.parameters()] == [x.shape for x in model.parameters()]


def test_layers_share_one_table_of_rope(tmp_path):
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path))
    models = [Qwen3ForCausalLM(config) for _ in range(2)]
    tables = {id(layer.self_attn.rotary_emb) for model in models for layer in model.model.layers}
    assert len(tables) == 1
    assert len(models[0].model.layers[0].self_attn.rotary_emb.cos_sin_cache) == config.max_position_embeddings


def test_parts_by_hand():
    mlp, x = Qwen3MLP(8, 6, "silu"), torch.randn(3, 8)
    for parameter in mlp.parameters():
        parameter.normal_()
    gate, up = F.linear(x, mlp.gate_up_proj.weight).chunk(2, dim=1)
    torch.testing.assert_close(mlp(x), F.linear(F.silu(gate) * up, mlp.down_proj.weight))
    with pytest.raises(ValueError, match="hidden_act='gelu': must be 'silu'"):
        Qwen3MLP(8, 6, "gelu")


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "vocab_size": 307, "attention_bias": True}])
def test_two_ranks_give_the_logits_of_one(fields, tmp_path):
    path = make_checkpoint(tmp_path, **fields)
    tokens = torch.tensor(random_prompt(9, seed=0, vocab_size=300))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)

    def work(tp):
        model = plain_model(path, tp=tp)
        set_context(True, ends, ends, 5, 5)
        try:
            return plain_logits(model)(tokens, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]))
        finally:
            reset_context()

    expected = work(TensorParallel())
    first, second = on_ranks(2, work)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    assert second is None


def test_make_plain_model(tmp_path):
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path))
    model = make_plain_model(config, torch.bfloat16, torch.device("meta"), 40, TorchBackend(), TensorParallel())
    assert {(x.dtype, x.device.type, x.requires_grad) for x in model.parameters()} == {(torch.bfloat16, "meta", False)}
    assert model.model.layers[1].self_attn.attn.backend is model.model.layers[0].self_attn.attn.backend
    assert model.model.layers[0].self_attn.rotary_emb.cos_sin_cache.shape == (40, 1, config.head_dim)
    assert torch.get_default_dtype() == torch.float32
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"plain=True: runs unquantized .* quantization_config=.*fp8.*plain=False"):
        make_plain_model(config, torch.float32, CPU)
    other = AutoConfig.from_pretrained(make_checkpoint(tmp_path / "llama", family="llama"))
    with pytest.raises(ValueError, match=r"plain=True: runs Qwen3ForCausalLM alone.* not LlamaForCausalLM"):
        make_plain_model(other, torch.float32, CPU)
