"""Two GPUs, and four where there are so many: NCCL, collectives in CUDA graphs, and a worker that dies while kernels
wait for it."""

import os
import signal

import pytest
import torch
from checkpoints import (
    Reference,
    assert_idle,
    complete,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from gpu_engines import DEMO_MODEL, DEMO_PROMPTS, REGRET, needs_demo_model
from listeners import LOOPBACK, listening_addresses

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, WorkerError
from nanovllm.models.presets import preset_config

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]
# More than two GPUs sum in another way (kernels/parallel/all_reduce.py).
needs_four = pytest.mark.skipif(NUM_GPUS < 4, reason="needs four CUDA devices")
of_two_and_four = pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=needs_four)])
GPU = {"device": "cuda", "kvcache_block_size": 256, "num_kvcache_blocks": 24, "max_num_batched_tokens": 2048}

# Heads of linear attention that four ranks divide.
HYBRID_OF_FOUR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """(checkpoint, Reference): KV heads that all ranks copy, and a vocabulary that they do not divide."""
    fields = {"head_dim": 64, "num_key_value_heads": 1, "vocab_size": 307, "tie_word_embeddings": True}
    path = make_checkpoint(tmp_path_factory.mktemp("tp-gpu"), **fields)
    return path, Reference(path)


@of_two_and_four
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_in_float32(shared, eager, num_ranks):
    path, reference = shared
    prompts = reference.draw_prompts((3, 40, 256, 1, 300, 17, 255), 10)
    expected = reference.greedy(prompts, 10)
    params = SamplingParams(1.0, 16, ignore_eos=True, seed=3)
    options = GPU | {"dtype": "float32", "enforce_eager": eager}
    with make_llm(path, **options) as llm:
        drawn = complete(llm, prompts, params)
    with make_llm(path, tensor_parallel_size=num_ranks, **options) as llm:
        assert (not llm.model_runner.graph_bs) == eager
        for num_seqs in (7, 3, 5, 1):
            assert complete(llm, prompts[:num_seqs], greedy(10)) == expected[:num_seqs]
        assert complete(llm, prompts[::-1], greedy(10)) == expected[::-1]
        agreeing = sum(a == b for a, b in zip(complete(llm, prompts, params), drawn, strict=True))
        assert agreeing >= len(prompts) - 1
        assert_idle(llm)


@needs_family("qwen3_5_text")
@of_two_and_four
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_of_a_hybrid(tmp_path, eager, num_ranks):
    """Its key heads, value heads and query heads are split, and its norms have weights in float32."""
    fields = HYBRID_OF_FOUR | {"num_hidden_layers": 4, "head_dim": 64}
    path = make_checkpoint(tmp_path, family="qwen3_5_text", **fields)
    reference = Reference(path)
    prompts = reference.draw_prompts((3, 40, 1, 300), 10)
    prompts += reference.draw_prompts((530, 600), 10, prefix=random_prompt(515, seed=1))
    expected = reference.greedy(prompts, 10)
    options = GPU | {"dtype": "float32", "enforce_eager": eager, "max_num_batched_tokens": 700}
    with make_llm(path, tensor_parallel_size=num_ranks, **options) as llm:
        for num_seqs in (6, 6, 3, 1):
            assert complete(llm, prompts[:num_seqs], greedy(10)) == expected[:num_seqs]
        assert llm.scheduler.num_prefix_hits >= 3 * 512
        assert_idle(llm)
    # In 16 bits, by kernels that sum over the GPUs.
    agreeing = []
    for size in (1, num_ranks):
        options["dtype"] = "bfloat16"
        with make_llm(path, tensor_parallel_size=size, **options) as llm:
            agreeing.append(complete(llm, prompts, greedy(3)))
    assert sum(a == b for a, b in zip(*agreeing, strict=True)) >= 4


@pytest.mark.parametrize("eager", [False, True])
def test_whole_experts_on_each_gpu(tmp_path, eager):
    """Two GPUs do not divide 33 columns, nor 3 groups of 32. In steps of one token a GPU often has no work."""
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "max_window_layers": 0}
    prompts = [random_prompt(length, seed=length) for length in (3, 40, 256, 1, 300)]
    for columns, options in (
        (33, {"dtype": "float32"}),
        (96, {"dtype": "bfloat16", "quantization": "mxfp4"}),
        (96, {"dtype": "bfloat16", "quantization": "int4"}),
    ):
        path = make_checkpoint(
            tmp_path / options.get("quantization", "none"), family="qwen3_moe", moe_intermediate_size=columns, **fields
        )
        found = []
        for size in (1, 2):
            with make_llm(path, tensor_parallel_size=size, enforce_eager=eager, **GPU | options) as llm:
                experts = llm.model_runner.model.model.layers[0].mlp.experts
                assert len(experts.down_proj.weight) == 8 // size
                found.append([complete(llm, prompts[:n], greedy(10)) for n in (5, 1)])
                assert_idle(llm)
        pairs = [pair for runs in zip(*found, strict=True) for pair in zip(*runs, strict=True)]
        if options["dtype"] == "float32":
            assert all(a == b for a, b in pairs)
        # In 16 bits a choice within rounding may differ, and then what follows it does.
        assert sum(a[:3] == b[:3] for a, b in pairs) >= len(pairs) - 2


@of_two_and_four
@pytest.mark.parametrize("eager", [False, True])
def test_sampling_is_that_of_one_gpu(tmp_path, eager, num_ranks):
    """Graphs that end at gathered logits, prompts' logits in pieces, and tokens that only rank 0 draws."""
    path = make_checkpoint(tmp_path, head_dim=64, tokenizer=True)
    settings = [
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.0, "repetition_penalty": 1.8, "logprobs": 3, "prompt_logprobs": 1},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "top_p": 0.9},
        {},
        {"min_p": 0.2, "temperature": 1.3, "min_tokens": 9, "stop_token_ids": tuple(range(0, 320, 3)), "n": 2},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{12,40}"), "logprobs": 0},
    ]
    params = [SamplingParams(max_tokens=14 + 4 * i, seed=i, ignore_eos=True, **each) for i, each in enumerate(settings)]
    prompts = [random_prompt(length, seed=length) for length in (20, 300, 16, 31, 64, 7)]
    options = GPU | {"dtype": "float32", "enforce_eager": eager, "skip_tokenizer_init": False, "max_num_seqs": 8}
    outputs = []
    for size in (1, num_ranks):
        with make_llm(path, tensor_parallel_size=size, **options) as llm:
            runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            runs.append(llm.generate(prompts[:1], params[:1], use_tqdm=False))
            assert complete(llm, prompts, greedy(8)) == complete(llm, prompts, greedy(8))
            assert_idle(llm)
            outputs.append([output for run in runs for output in run])
    # A choice within rounding may differ, and then what follows it does.
    pairs = list(zip(*outputs, strict=True))
    assert sum(a["token_ids"] == b["token_ids"] for a, b in pairs) >= len(pairs) - 2
    for a, b in pairs:
        if a["logprobs"] is not None and a["token_ids"] == b["token_ids"]:
            values = [[next(iter(each.values())) for each in output["logprobs"]] for output in (a, b)]
            torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-3, atol=1e-3)
        if a["prompt_logprobs"] is not None:
            values = [[next(iter(each.values())) for each in output["prompt_logprobs"][1:]] for output in (a, b)]
            torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-3, atol=1e-3)


@of_two_and_four
@pytest.mark.parametrize("eager", [False, True])
def test_decode_steps_of_forty_and_of_a_hundred(tmp_path, eager, num_ranks):
    """Products by kernels of our own, straight into what the ranks add up: messages, and longer sums."""
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 2176, "attention_bias": True}
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16, **sizes)
    reference = Reference(path)
    prompts = [random_prompt(5 + i % 40, seed=i) for i in range(100)]
    options = GPU | {"dtype": "bfloat16", "enforce_eager": eager, "num_kvcache_blocks": 128, "max_num_seqs": 112}
    with make_llm(path, tensor_parallel_size=num_ranks, **options) as llm:
        for batch in (prompts[:40], prompts, prompts[:17], prompts[:80], prompts[:33]):
            outputs = complete(llm, batch, greedy(8))
            assert max(map(reference.regret, batch, outputs)) < REGRET["bfloat16"]
            assert complete(llm, batch, greedy(8)) == outputs, "equal batches gave other tokens"
        assert_idle(llm)


@of_two_and_four
@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_5_text", marks=needs_family("qwen3_5_text"))])
def test_log_probabilities_of_long_prefills(tmp_path, family, num_ranks):
    """As close to float32 as one GPU is, by one kernel, in two shots, or by NCCL."""
    fields = {"head_dim": 64, "num_hidden_layers": 5, "attention_bias": True, "hidden_size": 192}
    if family == "qwen3_5_text":
        fields |= HYBRID_OF_FOUR
    path = make_checkpoint(tmp_path, family=family, **fields)
    prompts = [random_prompt(length, seed=length) for length in (900, 1000, 513, 700, 983, 1001, 600, 999, 450, 7)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    logprobs = []
    for size, dtype in ((1, "float32"), (1, "bfloat16"), (num_ranks, "bfloat16")):
        options = GPU | {"max_num_batched_tokens": 4097, "dtype": dtype, "enable_prefix_caching": False}
        with make_llm(path, tensor_parallel_size=size, **options) as llm:
            runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(3)]
        values = [
            [next(iter(each.values())) for output in run for each in output["prompt_logprobs"][1:]] for run in runs
        ]
        assert values[0] == values[1] == values[2], "equal steps gave other bits"
        logprobs.append(torch.tensor(values[0]))
    exact, one, two = logprobs
    errors = [(each - exact).abs() for each in (one, two)]
    assert errors[1].mean() < 1.3 * errors[0].mean()
    assert errors[1].max() < 2 * errors[0].max()


@of_two_and_four
def test_decode_steps_in_fp8(tmp_path, num_ranks):
    """One sequence, whose products post their parts, and five, whose products do not: as close to float32 as one GPU
    is. All runs have the same tokens."""
    path = make_checkpoint(tmp_path, head_dim=64, num_hidden_layers=4, hidden_size=192, intermediate_size=128)
    batches = [[random_prompt(30, seed=0)], [random_prompt(length, seed=length) for length in (7, 20, 33, 64, 90)]]
    params = SamplingParams(max_tokens=40, logprobs=0, allowed_token_ids=[7], ignore_eos=True)
    values = []
    for options in (
        {"dtype": "float32"},
        {"dtype": "bfloat16", "quantization": "fp8"},
        {"dtype": "bfloat16", "quantization": "fp8", "tensor_parallel_size": num_ranks},
    ):
        with make_llm(path, **GPU | options) as llm:
            results = [llm.generate(batch, params, use_tqdm=False) for batch in batches]
        of_batches = [[next(iter(x.values())) for each in run for x in each["logprobs"]] for run in results]
        values.append([torch.tensor(each) for each in of_batches])
    for exact, one, two in zip(*values, strict=True):
        assert (two - exact).abs().mean() < 1.5 * (one - exact).abs().mean()


@needs_demo_model
@of_two_and_four
def test_demo_model_agrees_with_one_gpu(num_ranks):
    outputs = []
    for size in (1, num_ranks):
        with LLM(str(DEMO_MODEL), kvcache_gib=1.0, tensor_parallel_size=size) as llm:
            assert llm.config.dtype == torch.bfloat16
            outputs.append(complete(llm, DEMO_PROMPTS, greedy(32)))
    agreeing = sum(a == b for a, b in zip(*outputs, strict=True))
    assert agreeing >= 11, f"{agreeing} of 20 prompts agree for 32 tokens"


@pytest.mark.alone
@of_two_and_four
def test_shapes_of_a_large_model(num_ranks):
    config = preset_config("Qwen3-8B")
    config.num_hidden_layers = 4
    options = {"load_format": "dummy", "hf_config": config, "skip_tokenizer_init": True, "max_num_seqs": 64, "seed": 0}
    prompts = [random_prompt(length, seed=length, vocab_size=config.vocab_size) for length in (1, 700, 2000, 30) * 10]
    params = SamplingParams(0.6, 40, ignore_eos=True)
    with LLM("Qwen3-8B", tensor_parallel_size=num_ranks, gpu_memory_utilization=0.5, **options) as llm:
        outputs = complete(llm, prompts, params)
        assert {len(tokens) for tokens in outputs} == {40}
        assert all(0 <= token < config.vocab_size for tokens in outputs for token in tokens)
        best = max(token for tokens in outputs for token in tokens)
        assert best >= config.vocab_size * (num_ranks - 1) // num_ranks, "the last rank never won"
        assert_idle(llm)


@of_two_and_four
@pytest.mark.parametrize("work", ["decode", "eager decode", "decode of a hundred", "long prefills"])
def test_a_worker_killed_in_the_middle_of_a_batch(shared, work, num_ranks):
    """Between two kernels that wait for each other, and while a part of a sum is on its way."""
    path, reference = shared
    options = GPU | {"tensor_parallel_size": num_ranks, "enforce_eager": work == "eager decode"}
    prompts, params = [[1, 2, 3]] * 2000, greedy(900)
    if work == "long prefills":
        prompts, params = reference.draw_prompts((700, 700), 1) * 3000, greedy(1)
        options |= {"max_num_batched_tokens": 8192, "enable_prefix_caching": False}
    if work == "decode of a hundred":
        options |= {"max_num_seqs": 112, "num_kvcache_blocks": 512, "dtype": "bfloat16"}
    llm = make_llm(path, **options)
    process = llm.ps[-1]

    def kill(stats):
        if stats["steps"] == 20:
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(WorkerError, match=rf"rank {num_ranks - 1} of {num_ranks} .* was killed by SIGKILL"):
        llm.generate(prompts, params, use_tqdm=False, on_step=kill)
    # The process and its GPU are none the worse for it.
    torch.cuda.synchronize()
    prompts = reference.draw_prompts((5, 20), 8)
    with make_llm(path, tensor_parallel_size=num_ranks, dtype="float32", **GPU) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_no_other_host_can_reach_a_rank(shared):
    path, _ = shared
    before = listening_addresses(os.getpid())
    with make_llm(path, tensor_parallel_size=2, **GPU) as llm:
        complete(llm, [[1, 2, 3]], greedy(2))
        pids = [os.getpid(), *(process.pid for process in llm.ps)]
        addresses = [address for pid in pids for address in listening_addresses(pid)]
    for address in before:
        addresses.remove(address)
    assert set(addresses) <= set(LOOPBACK)


@pytest.mark.skipif(NUM_GPUS < 3, reason="needs three CUDA devices")
def test_rank_0_on_another_device_than_the_first(shared):
    path, reference = shared
    prompts = reference.draw_prompts((5, 20), 8)
    with torch.cuda.device(1), make_llm(path, tensor_parallel_size=2, dtype="float32", **GPU) as llm:
        assert {param.device for param in llm.model_runner.model.parameters()} == {torch.device("cuda", 1)}
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_starts_on_the_chosen_device(shared, size):
    """Which is not the current one, and stays so."""
    path, reference = shared
    if size > NUM_GPUS - 1:
        pytest.skip("needs three CUDA devices")
    prompts = reference.draw_prompts((5, 20), 8)
    with make_llm(path, tensor_parallel_size=size, dtype="float32", **GPU | {"device": "cuda:1"}) as llm:
        assert torch.cuda.current_device() == 0
        assert {param.device for param in llm.model_runner.model.parameters()} == {torch.device("cuda", 1)}
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
        assert complete(llm, prompts, greedy(8, top_k=5)) == reference.greedy(prompts, 8)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_works_on_its_own_device(shared, size):
    """Whichever is the current one when it is asked for something."""
    path, reference = shared
    if size > NUM_GPUS - 1:
        pytest.skip("needs three CUDA devices")
    prompts = reference.draw_prompts((5, 20), 8)
    with torch.cuda.device(1):
        llm = make_llm(path, tensor_parallel_size=size, dtype="float32", **GPU)
    with llm:
        assert torch.cuda.current_device() == 0
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
        assert complete(llm, prompts, greedy(8, top_k=5)) == reference.greedy(prompts, 8)
        assert torch.cuda.current_device() == 0
