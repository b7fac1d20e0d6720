"""How an engine starts on a CUDA device: what it compiles and loads, which options it takes and chooses, what it leaves
alone."""

import logging

import pytest
import torch

pytest.importorskip("triton")

import triton
from checkpoints import VOCAB_SIZE, Reference, assert_idle, complete, greedy, make_checkpoint, make_llm, random_prompt
from gpu_engines import REGRET, gpu_llm, needs_flash_attn

from nanovllm.engine.model_runner import ModelRunner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [False, True])
def test_every_kernel_compiles_ahead_of_its_launch(tmp_path, monkeypatch, eager):
    # Shapes that no other test has, or their kernels would be there already.
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 40 if eager else 48}
    sizes = {"hidden_size": 208, "intermediate_size": 224} if eager else {"hidden_size": 176, "intermediate_size": 208}
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16, **sizes, **heads)
    compiled, ahead = [], []
    # Called for every variant that is not in this process yet, in Triton's cache on the disk or not.
    hook = lambda **kernel: compiled.append(kernel["repr"]) is not None  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    warmup_model = ModelRunner.warmup_model

    def first_launches(runner):
        ahead.extend(compiled)
        warmup_model(runner)

    monkeypatch.setattr(ModelRunner, "warmup_model", first_launches)
    options = {"attention_backend": "triton", "dtype": "bfloat16", "num_kvcache_blocks": 64, "max_num_seqs": 64}
    with gpu_llm(path, enforce_eager=eager, **options) as llm:
        assert len(ahead) > 20
        # Eager steps have batches of any size, and a kernel of each size up to 16; captured ones are padded.
        for num_seqs in (1, 2, 4, 8, 16, 20, 33, 64) if eager else (1, 2, 3, 5, 7, 11, 16, 20, 33, 64):
            prompts = [random_prompt(length + 1, seed=length) for length in range(num_seqs)]
            complete(llm, prompts, greedy(4))
            complete(llm, prompts, greedy(4))
    assert compiled == ahead


def test_weights_arrive_on_the_gpu(tmp_path):
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16, max_shard_size="30KB")
    with make_llm(path, dtype="float32") as on_cpu, gpu_llm(path, dtype="float32") as on_gpu:
        expected = dict(on_cpu.model_runner.model.named_parameters())
        for name, parameter in on_gpu.model_runner.model.named_parameters():
            on_host = expected[name].to_dense() if expected[name].is_mkldnn else expected[name]
            assert torch.equal(parameter.cpu(), on_host), name


@pytest.mark.parametrize(
    ("stored", "runs"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_default_dtype(tmp_path, stored, runs):
    path = make_checkpoint(tmp_path, dtype=getattr(torch, stored), head_dim=64)
    reference = Reference(path)
    prompt = random_prompt(20, seed=0)
    with gpu_llm(path, max_num_seqs=2) as llm:
        assert llm.config.dtype == getattr(torch, runs)
        assert {p.dtype for p in llm.model_runner.model.parameters()} == {getattr(torch, runs)}
        assert {p.device.type for p in llm.model_runner.model.parameters()} == {"cuda"}
        (tokens,) = complete(llm, [prompt], greedy(10))
    assert reference.regret(prompt, tokens) < REGRET["bfloat16"]


def test_default_device_and_backend_are_named_in_the_log(base, caplog):
    path, _ = base
    with caplog.at_level(logging.INFO, logger="nanovllm"), gpu_llm(path, device="auto", enforce_eager=True):
        pass
    assert torch.cuda.get_device_name() in caplog.text
    assert "back end: triton" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"dtype": "float32"}, "float32"), ({"kvcache_block_size": 128}, "kvcache_block_size=128")],
    ids=["float32", "block-size"],
)
@needs_flash_attn
def test_flash_attn_says_what_it_does_not_take(base, options, reason):
    path, _ = base
    with pytest.raises(ValueError, match=f"flash_attn.*{reason}.*triton"):
        gpu_llm(path, attention_backend="flash_attn", **options)
    with gpu_llm(path, attention_backend="auto", max_num_seqs=2, **options) as llm:
        assert len(complete(llm, [[1, 2]], greedy(3))[0]) == 3


def test_wrong_ids_never_reach_the_gpu(base):
    path, reference = base
    prompts = reference.draw_prompts((20,), 8)
    with gpu_llm(path, attention_backend="triton", dtype="float32", max_num_seqs=2) as llm:
        for wrong in ([VOCAB_SIZE], [-1], [2**40], [-(2**40)], [1, 2, VOCAB_SIZE + 7]):
            with pytest.raises(ValueError, match=r"prompts\[1\]: token id .* outside the vocabulary"):
                llm.generate([[1], wrong], greedy(3), use_tqdm=False)
            with pytest.raises(ValueError, match="outside the vocabulary"):
                llm.add_request(wrong, greedy(3))
        # A device-side assertion would show here at the latest.
        torch.cuda.synchronize()
        assert_idle(llm)
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_torch_defaults_are_the_callers(base):
    def defaults():
        x = torch.ones(1)
        matmul = torch.backends.cuda.matmul
        return x.dtype, x.device, torch.is_grad_enabled(), matmul.allow_tf32, torch.cuda.current_stream().cuda_stream

    path, _ = base
    before = defaults()
    with gpu_llm(path, max_num_seqs=2) as llm:
        assert defaults() == before
        complete(llm, [[1, 2]], greedy(3))
        assert defaults() == before
    assert defaults() == before
