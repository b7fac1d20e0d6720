"""`nanovllm fit`: what it says of a model, and that a real engine agrees."""

import re

import pytest
import torch
from checkpoints import edit_json, make_checkpoint

from nanovllm import LLM
from nanovllm.cli import main
from nanovllm.config import Config
from nanovllm.fit import GIB, Place, Question, needs


def fit(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["fit", *arguments])
    return status, capsys.readouterr().out


def test_a_published_shape(capsys):
    """Qwen3-8B: 8.19 billion parameters of two bytes; keys and values of 36 layers, 8 heads, 128 dimensions."""
    status, out = fit(capsys, "Qwen3-8B", "--gpu-memory", "16", "24")
    assert status == 0
    assert float(re.search(r"weights +([\d.]+) GiB", out)[1]) == pytest.approx(8.19e9 * 2 / GIB, abs=0.05)
    assert "144.0 KiB a token" in out
    answers = dict(re.findall(r"(\d+) GiB +(yes|no)", out))
    assert answers["16"] == "no"
    assert answers["24"] == "yes"


def test_layers_with_a_window_keep_their_last_tokens_alone(capsys):
    """Gemma 3: 52 of 62 layers see 1,024 tokens, of which a sequence keeps 1,280 in blocks of 256."""
    status, out = fit(capsys, "gemma-3-27b", "--gpu-memory", "80")
    assert status == 0
    per_layer = 2 * 16 * 128 * 2 / 1024
    assert f"{62 * per_layer:.1f} KiB a token, " in out
    assert re.search(rf"{52 * per_layer:.1f} KiB of it, for the last 1,280 tokens alone", out)
    of_one = (10 * 4096 + 52 * 1280) * per_layer / 2**20
    assert f"{of_one:.2f} GiB for 4,096 tokens" in out
    counts = re.search(r"80 GiB +yes +([\d,]+) +(\d+)", out).groups()
    num_tokens, num_sequences = (int(count.replace(",", "")) for count in counts)
    assert num_sequences == num_tokens // 4096
    assert num_tokens > 1.4 * 9 * 4096, "nine sequences would fit if all layers kept all tokens"


def test_formats_and_gpus_change_the_answer(capsys):
    assert fit(capsys, "Qwen3-8B", "--gpu-memory", "12")[0] == 1
    eight_bits = ("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--max-num-batched-tokens", "8192")
    assert fit(capsys, "Qwen3-8B", "--gpu-memory", "12", *eight_bits)[0] == 0
    assert fit(capsys, "Qwen3-8B", "--gpu-memory", "12", "--tensor-parallel-size", "2")[0] == 0


def question(model: str = "Qwen3-8B", **options) -> Question:
    return Question(model, **options)


def gpu(gib: float, **fields) -> Place:
    return Place(f"{gib} GiB", int(gib * GIB), **fields)


def cpu(gib: float) -> Place:
    return gpu(gib, is_cpu=True)


@pytest.fixture(scope="module")
def dense() -> Question:
    return question()


def helpful(asked: Question, place: Place) -> list[dict]:
    """The changes that help; each really does, and without it the model does not fit."""
    assert not asked.fit(place).num_sequences
    found = list(asked.what_helps(place))
    for change, fit in found:
        assert asked.fit(place, **change) == fit
        assert fit.num_sequences > 0
    return [change for change, _ in found]


def test_it_says_which_option_makes_a_model_fit(capsys):
    status, out = fit(capsys, "Qwen3-8B", "--quantization", "int4", "--gpu-memory", "8")
    assert status == 1
    assert "8 GiB: --max-num-batched-tokens 4096 (1 sequence) or --tensor-parallel-size 2\n" in out
    status, out = fit(
        capsys, "Qwen3-8B", "--quantization", "int4", "--gpu-memory", "8", "--max-num-batched-tokens", "4096"
    )
    assert (status, "What makes it fit" in out) == (0, False)
    assert max(map(len, out.splitlines())) <= 80


def test_experts_of_a_token_are_wider_than_an_mlp():
    """Qwen3-30B-A3B: 8 experts of 768 columns, and as many results of 2,048, beside the stream and its norm."""
    needed = question("Qwen3-30B-A3B", max_num_seqs=1, max_num_batched_tokens=4096).needs()
    values = 2 * 2048 + 8 * (768 + 2048)
    assert needed.activations == (4096 * values + 151_936) * 2


def test_the_least_harmful_change_comes_first(dense):
    """Smaller steps change no answer; then the KV cache's format, the length, the weights' format."""
    assert helpful(dense, gpu(19)) == [{"max_num_batched_tokens": 8192}, {"tensor_parallel_size": 2}]
    assert helpful(dense, gpu(16)) == [{"quantization": "fp8"}, {"tensor_parallel_size": 2}]
    assert helpful(dense, gpu(1)) == []
    long = question(max_model_len=40960)
    assert helpful(long, gpu(23))[0] == {"kv_cache_dtype": "fp8"}
    no_fp8 = gpu(23, capability=(8, 0))
    assert helpful(long, no_fp8)[0] == {"quantization": "int4"}, "this machine's GPU does not have the other format"


def test_what_a_checkpoint_or_a_model_does_not_allow_is_not_named(tmp_path):
    """Weights in fp8 are rounded to no other format, and 4 GPUs do not share 2 heads."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 2}
    path = make_checkpoint(tmp_path, **sizes, num_hidden_layers=1)
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert "quantization" in str(list(question(str(path))._answer_changes(gpu(1))))
    edit_json(path / "config.json", quantization_config=blocks)
    asked = question(str(path))
    assert "quantization" not in str(list(asked._answer_changes(gpu(1))))
    assert asked._try(gpu(1), {"tensor_parallel_size": 2}).num_sequences
    assert not asked._try(gpu(1), {"tensor_parallel_size": 4}).num_sequences
    assert helpful(asked, gpu(0.01)) == []


def test_room_for_less_than_one_sequence_is_no(capsys):
    asked = question(max_model_len=40960, quantization="fp8")
    found = asked.fit(gpu(16))
    assert 0 < found.num_tokens < 40960
    assert found.num_sequences == 0
    status, out = fit(capsys, "Qwen3-8B", "--quantization", "fp8", "--max-model-len", "40960", "--gpu-memory", "16")
    assert (status, re.search(r"16 GiB +no +[\d,]+ +0\n", out) is not None) == (1, True)


def test_a_length_is_not_cut_silently(capsys):
    _, out = fit(capsys, "Qwen3-8B", "--gpu-memory", "80", "--max-model-len", "100000")
    assert "40,960 tokens, not 100,000: the model supports no more" in out
    _, out = fit(capsys, "Qwen3-8B", "--gpu-memory", "80")
    assert "4,096 tokens (the model supports 40,960: --max-model-len)" in out


def test_this_machines_cpu(capsys, dense):
    """Weights in float32, with a packed copy of a tied head, beside 2 GiB of KV cache."""
    small = question("Qwen3-0.6B")
    config, needed = small.config(is_cpu=True), small.needs(is_cpu=True)
    assert config.dtype == torch.float32
    tables = 4 * 4096 * 128
    assert needed.weights == pytest.approx((596e6 + 151936 * 1024) * 4 + tables, rel=1e-3)
    assert small.fit(cpu(16)).num_tokens == 2 * GIB // (4 * 2 * 28 * 8 * 128) // 256 * 256
    assert helpful(dense, cpu(24)) == [{"dtype": "bfloat16"}]
    assert helpful(question(dtype="bfloat16"), cpu(18.5)) == [{"kvcache_gib": 1.0}]
    assert helpful(question("Qwen3-0.6B", max_model_len=40960), cpu(24)) == [{"kvcache_gib": 8.75}]
    status, out = fit(capsys, "Qwen3-0.6B", "--kvcache-gib", "1")
    assert re.search(r"this CPU \([\d.]+ GiB free\) +(yes|no)", out)
    assert "1 GiB of KV cache" in out
    assert status == 0


def test_kvcache_gib_is_the_size_of_the_cache_on_a_gpu():
    asked = question("Qwen3-0.6B", kvcache_gib=1.0)
    assert asked.fit(gpu(24)).num_tokens == GIB // (2 * 2 * 28 * 8 * 128) // 256 * 256
    assert asked.fit(gpu(2)).num_tokens == 0


@pytest.mark.parametrize(
    ("typed", "meant"), [("qwen3-8b", "Qwen3-8B"), ("Qwen3-8", "Qwen3-8B or"), ("qwen/qwen3-8b", "Qwen3-8B")]
)
def test_a_mistyped_shape(capsys, no_network, typed, meant):
    assert main(["fit", typed]) == 2
    err = capsys.readouterr().err
    assert f"did you mean {meant}" in err
    assert "Llama" not in err


def test_a_checkpoint_of_ones_own(capsys, tmp_path):
    status, out = fit(capsys, str(make_checkpoint(tmp_path)), "--gpu-memory", "8", "--max-model-len", "64")
    assert status == 0
    assert "sequences of 64\n" in out


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B", "gemma-3-4b"])
def test_a_real_engine_has_room_for_about_as_many_tokens(model):
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.8, "dtype": "bfloat16"}
    expected = needs(Config(model, **options, device="cpu"))
    with LLM(model, **options) as llm:
        memory = torch.cuda.get_device_properties(0).total_memory
        manager = llm.scheduler.block_manager
        real = len(manager.blocks) * manager.block_size
        assert real == pytest.approx(expected.on(Place("", memory), llm.config).num_tokens, rel=0.05)
