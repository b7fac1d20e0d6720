"""What is found out from shapes and headers, before anything is allocated for a model."""

import pytest
import torch
from checkpoints import edit_json, edit_tensors, make_llm
from transformers import AutoConfig

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.engine.start import build, model_check
from nanovllm.models.model_size import GIB, meta_model, model_bytes
from nanovllm.utils.host_memory import HostMemory


@pytest.fixture
def nothing_is_built(monkeypatch):
    """The test fails if a model is made."""

    def fail(*args):
        raise AssertionError("a model was made")

    monkeypatch.setattr(build, "make_model", fail)


def set_memory(monkeypatch, num_bytes: int) -> None:
    memory = HostMemory(num_bytes, num_bytes, "this machine")
    monkeypatch.setattr(model_check, "host_memory", lambda: memory)


DUMMY = {"load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True}


@pytest.mark.parametrize(
    ("options", "gib"), [({}, 30.51), ({"dtype": "bfloat16", "tensor_parallel_size": 2}, 16.42)], ids=str
)
def test_a_published_shape_that_is_too_large(nothing_is_built, monkeypatch, options, gib):
    """Two ranks of a CPU share its memory, and each holds the whole embedding."""
    set_memory(monkeypatch, 8 * GIB)
    message = rf"Qwen3-8B.*weights take {gib} GiB in \w+, and 8\.00 GiB are available in this machine.*smaller model"
    with pytest.raises(MemoryError, match=message):
        LLM("Qwen3-8B", **DUMMY, **options)


def test_a_tied_head_is_counted_as_well(nothing_is_built, monkeypatch):
    """The embedding of 151,936 x 1,024 numbers looks tokens up, and its packed copy is the head."""
    set_memory(monkeypatch, int(2.5 * GIB))
    with pytest.raises(MemoryError, match=r"Qwen3-0\.6B.*weights take 2\.8\d GiB in float32, and 2\.50 GiB are"):
        LLM("Qwen3-0.6B", dtype="float32", **DUMMY)


def test_a_checkpoint_that_is_too_large(nothing_is_built, monkeypatch, checkpoints):
    set_memory(monkeypatch, 1000)
    with pytest.raises(MemoryError, match=r"plain.*weights take 0\.00 GiB in float32, and 0\.00 GiB are"):
        make_llm(checkpoints["plain"])


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 2**30},
        {"hidden_size": 2**30, "head_dim": None},
        {"hidden_size": 2**31 - 4, "intermediate_size": 2**31 - 1},
        {"intermediate_size": 2**30},
        {"head_dim": 2**30},
        {"num_attention_heads": 2**30},
        {"vocab_size": 2**31 - 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_absurd_sizes(nothing_is_built, copy, sizes, load_format):
    path = copy()
    edit_json(path / "config.json", **sizes)
    with pytest.raises((MemoryError, ValueError), match=r"GiB|has shape .*is config\.json the same") as error:
        make_llm(path, load_format=load_format)
    assert load_format == "auto" or error.type is MemoryError


def test_absurdly_many_layers(copy):
    path = copy()
    edit_json(path / "config.json", num_hidden_layers=2**30)
    with pytest.raises(ValueError, match=r"num_hidden_layers=1073741824: must be an integer in 1\.\.1024"):
        Config(str(path))


def test_headers_are_compared_before_anything_is_made(nothing_is_built, copy):
    path = copy()
    edit_tensors(path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"lacks 'model\.norm\.weight'"):
        make_llm(path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}], ids=["bfloat16", "fp8"]
)
def test_bytes_are_those_of_the_engine(num_ranks, options):
    """Of a model with experts, whose ranks have different parts."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    sizes |= {"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 4, "num_hidden_layers": 2}
    sizes |= {"num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **sizes, vocab_size=320)
    options = options | {"tensor_parallel_size": num_ranks, "max_model_len": 100, "load_format": "dummy"}
    with make_llm("a shape", hf_config=config, **options) as llm:
        model, cache = llm.model_runner.model, llm.model_runner.kv_store.tensors[0]
        sizes = model_bytes(llm.config, meta_model(llm.config))
        tensors = [*model.parameters(), *model.buffers()]
        assert sizes.weights + sizes.tables == sum(tensor.nbytes for tensor in tensors)
        assert sizes.tables == 100 * 32 * 4
        assert sizes.per_block * cache.shape[2] == cache.nbytes


@pytest.mark.gpu
def test_a_model_that_is_too_large_for_the_gpu(nothing_is_built):
    before = torch.cuda.memory_allocated()
    with pytest.raises(MemoryError, match=r"weights take 262\.\d\d GiB in float32, and .* GiB are free on the GPU"):
        LLM("Llama-3.1-70B", load_format="dummy", dtype="float32", skip_tokenizer_init=True)
    assert torch.cuda.memory_allocated() == before
