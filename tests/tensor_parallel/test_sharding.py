"""How a checkpoint is shared out: every rank its part and no more, all parts together the whole."""

import math

import pytest
import torch
import torch.nn.functional as F
from checkpoints import make_checkpoint, make_llm
from configs import TUNED, dummy
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig

from nanovllm.config import Config
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models import loader
from nanovllm.models.registry import model_class

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, VOCAB_SIZE = 32, 8, 2, 307


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    fields = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS, "vocab_size": VOCAB_SIZE}
    return make_checkpoint(tmp_path_factory.mktemp("sharding"), attention_bias=True, **fields)


def load_ranks(path, size):
    config = AutoConfig.from_pretrained(path)
    models = []
    for rank in range(size):
        model = model_class(config)(config, 64, TorchBackend(), TensorParallel(rank, size), Matmul())
        for param in model.parameters():
            param.data.fill_(math.nan)
        loader.load_model(model, str(path))
        models.append(model)
    return models


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_shards_make_up_the_checkpoint(path, size):
    whole, models = load_file(path / "model.safetensors"), load_ranks(path, size)
    kv_heads = max(1, NUM_KV_HEADS // size)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        ranks = [model.model.layers[layer] for model in models]
        for kind in ("weight", "bias"):
            fused = [getattr(rank.self_attn.qkv_proj, kind) for rank in ranks]
            sizes = [HEAD_DIM * n for n in (NUM_HEADS // size, kv_heads, kv_heads)]
            for name, parts in zip("qkv", zip(*(p.split(sizes) for p in fused), strict=True), strict=True):
                expected = whole[f"{prefix}.self_attn.{name}_proj.{kind}"]
                if name != "q" and size > NUM_KV_HEADS:
                    # Each rank holds the KV head that its query heads read.
                    expected = expected.unflatten(0, (NUM_KV_HEADS, HEAD_DIM)).repeat_interleave(
                        size // NUM_KV_HEADS, dim=0
                    )
                    expected = expected.flatten(0, 1)
                assert torch.equal(torch.cat(parts), expected)
            assert kind == "weight" or all(
                torch.equal(r.self_attn.o_proj.bias, whole[f"{prefix}.self_attn.o_proj.bias"]) for r in ranks
            )
        gates, ups = zip(*(rank.mlp.gate_up_proj.weight.chunk(2) for rank in ranks), strict=True)
        assert torch.equal(torch.cat(gates), whole[f"{prefix}.mlp.gate_proj.weight"])
        assert torch.equal(torch.cat(ups), whole[f"{prefix}.mlp.up_proj.weight"])
        for module in ("self_attn.o_proj", "mlp.down_proj"):
            columns = [rank.get_submodule(module).weight for rank in ranks]
            assert torch.equal(torch.cat(columns, dim=1), whole[f"{prefix}.{module}.weight"])
    assert all(torch.equal(model.model.embed_tokens.weight, whole["model.embed_tokens.weight"]) for model in models)
    assert torch.equal(torch.cat([model.lm_head.weight for model in models]), whole["lm_head.weight"])
    assert all(model.lm_head.vocab_start_idx % 64 == 0 for model in models)


@pytest.fixture
def num_read(monkeypatch):
    """How many numbers each model that is loaded has read, in a list that grows."""
    num_read: list[int] = []

    class Counting:
        def __init__(self, tensor):
            self.tensor = tensor

        def get_shape(self):
            return self.tensor.get_shape()

        def get_dtype(self):
            return self.tensor.get_dtype()

        def __getitem__(self, index):
            part = self.tensor[index]
            num_read[-1] += part.numel()
            return part

    original = loader.open_tensors

    def open_counting(*args):
        return {name: t._replace(content=Counting(t.content)) for name, t in original(*args).items()}

    monkeypatch.setattr(loader, "open_tensors", open_counting)
    monkeypatch.setattr(loader, "load_model", lambda *args, load=loader.load_model: (num_read.append(0), load(*args)))
    return num_read


@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_holds_or_reads_more_than_its_share(path, size, num_read):
    whole = load_file(path / "model.safetensors")
    models = load_ranks(path, size)
    replicated = sum(
        t.numel() for name, t in whole.items() if name.endswith(("norm.weight", "o_proj.bias", "embed_tokens.weight"))
    )
    kv = sum(t.numel() for name, t in whole.items() if name.split(".")[-2] in ("k_proj", "v_proj"))
    shared = sum(t.numel() for t in whole.values()) - replicated - kv
    share = shared / size + replicated + kv * max(1, NUM_KV_HEADS // size) / NUM_KV_HEADS
    padding = 64 * 64  # rows x columns: the head is divided by whole multiples of 64 tokens
    for model, read in zip(models, num_read, strict=True):
        assert sum(p.numel() for p in model.parameters()) <= share + size * padding
        assert 0 < read <= share + size * padding


@pytest.mark.parametrize(("columns", "size"), [(96, 2), (98, 4), (97, 2)])
def test_experts_are_shared_out_by_columns_or_whole(tmp_path, columns, size, num_read):
    """Whole ones where the ranks do not divide the columns."""
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": columns, "max_window_layers": 0}
    path = make_checkpoint(tmp_path, family="qwen3_moe", num_key_value_heads=4, num_hidden_layers=1, **fields)
    models, is_whole = load_ranks(path, size), columns % size > 0
    with safe_open(path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118 (not a dict)
        tensors = {name.partition(".experts.")[2]: file.get_tensor(name) for name in names}
        numbers = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    of_experts = [model.model.layers[0].mlp.experts for model in models]
    for expert in range(8):
        gate, up, down = (tensors[f"{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        if is_whole:
            owner, place = of_experts[expert // (8 // size)], expert % (8 // size)
            assert torch.equal(owner.gate_up_proj.weight[place], torch.cat((gate, up)))
            assert torch.equal(owner.down_proj.weight[place], down)
        else:
            halves = [experts.gate_up_proj.weight[expert].chunk(2) for experts in of_experts]
            assert torch.equal(torch.cat([half[0] for half in halves]), gate)
            assert torch.equal(torch.cat([half[1] for half in halves]), up)
            assert torch.equal(torch.cat([experts.down_proj.weight[expert] for experts in of_experts], 1), down)
    in_experts = sum(tensor.numel() for tensor in tensors.values())
    assert all(read <= in_experts / size + numbers - in_experts for read in num_read)
    for model in models:
        assert loader.num_checkpoint_params(model) == numbers


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_tied_head_is_this_ranks_rows_of_the_embedding(tmp_path, size):
    path = make_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, num_key_value_heads=4, tie_word_embeddings=True)
    whole, models = load_file(path / "model.safetensors"), load_ranks(path, size)
    assert torch.equal(torch.cat([model.lm_head.weight for model in models]), whole["model.embed_tokens.weight"])
    for model in models:
        assert model.lm_head.weight.untyped_storage().data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert loader.num_checkpoint_params(model) == sum(t.numel() for t in whole.values())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_parts_of_a_product_are_the_product_with_one_bias(size):
    weight, bias, x = torch.randn(7, 16), torch.randn(7), torch.randn(3, 16)
    total = torch.zeros(3, 7)
    for rank in range(size):
        layer = RowParallelLinear(16, 7, True, tp=TensorParallel(rank, size), matmul=Matmul())
        for param, whole in ((layer.weight, weight), (layer.bias, bias)):
            param.weight_loader(param, whole)
        columns = 16 // size
        total += layer.part_of_sum("linear", x[:, rank * columns : (rank + 1) * columns].contiguous())
    torch.testing.assert_close(total, F.linear(x, weight, bias))


def test_random_weights_that_every_rank_holds_are_the_same(path):
    models = load_ranks(path, 2)
    for rank, model in enumerate(models):
        loader.load_dummy(model, seed=3, rank=rank)
    first, second = (dict(model.named_parameters()) for model in models)
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.bias", "model.norm.weight"} <= same
    assert not any("qkv" in name or "down_proj" in name or "lm_head" in name for name in same)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_tuned_size_can_be_shared(size):
    for name in TUNED:
        dummy(model=name, device="cpu", tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({"num_attention_heads": 6}, 4, r"num_attention_heads \(6\)"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, r"num_key_value_heads \(3\)"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 98}, 4, r"intermediate_size \(98\)"),
        (
            {"family": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 97},
            2,
            r"moe_intermediate_size \(97\); or use a tensor_parallel_size that divides the number of experts \(3\)",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_before_any_process_starts(tmp_path, monkeypatch, fields, size, message):
    path = make_checkpoint(tmp_path, **fields)
    monkeypatch.setattr("nanovllm.engine.llm_engine.Workers", None)
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={size}.*{message}"):
        make_llm(path, tensor_parallel_size=size)


@pytest.mark.parametrize(("current", "most"), [(0, 3), (2, 1)])
def test_more_ranks_than_gpus_are_refused(path, monkeypatch, current, most):
    for name, value in (("is_available", True), ("device_count", 3), ("current_device", current)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with pytest.raises(ValueError, match=rf"tensor_parallel_size=4: must be at most {most}: 3 GPUs are visible"):
        Config(str(path), tensor_parallel_size=4)
    assert Config(str(path), tensor_parallel_size=4, device="cpu").tensor_parallel_size == 4
