"""Sampling on a CUDA device: what a CPU draws from the same logits, with CUDA graphs and without."""

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm, random_prompt
from sampling_reference import complete_alone, completions, run

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.engine.features.logits.sampling_pipeline import SamplingPipeline
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step, StepKind, StepLogits
from nanovllm.engine.text.results import completion_logprobs

pytestmark = pytest.mark.gpu

SETTINGS = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"repetition_penalty": 1.8, "temperature": 0.0, "logprobs": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 1.0, "top_p": 0.9},
    {},
    {"frequency_penalty": 2.0, "temperature": 0.0},
    {"min_p": 0.2, "repetition_penalty": 0.7, "temperature": 1.3, "logprobs": 0},
    {"min_tokens": 9, "stop_token_ids": tuple(range(0, 320, 3)), "top_k": 50},
]


# -- the pipeline alone ------------------------------------------------------------------------------------------


def decoding(seq_id: int, params: SamplingParams, vocab_size: int) -> Sequence:
    """A sequence before a decode step."""
    prompt = random_prompt(40, seed=seq_id, vocab_size=vocab_size)
    seq = Sequence(prompt, params)
    for token in random_prompt(20, seed=-seq_id, vocab_size=50):
        seq.append_token(token)
    seq.is_prefill = False
    seq.num_cached_tokens, seq.num_scheduled_tokens = seq.num_tokens - 1, 1
    return seq


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1001, 151_936])
def test_pipeline_equals_its_twin(vocab_size, dtype):
    fields = [each for each in SETTINGS if "stop_token_ids" not in each] * 4
    params = [SamplingParams(seed=i, **each) for i, each in enumerate(fields)]
    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(
        hf_config=SimpleNamespace(vocab_size=vocab_size),
        max_decode_rows=32,
        eos=(5, 7),
        logprobs_mode="raw_logprobs",
        features=(),
    )
    pipelines = {name: SamplingPipeline(config, torch.device(name)) for name in ("cpu", "cuda")}
    seqs = [decoding(i + 1, each, vocab_size) for i, each in enumerate(params)]
    for step in range(4):
        logits = (torch.randn(len(seqs), vocab_size, generator=generator) * 3).to(dtype)
        logits[:, :50] += 4  # What the completions hold is what they are likely to draw again.
        rows = [
            torch.tensor([seq.request.params.temperature for seq in seqs]),
            torch.tensor([seq.seed for seq in seqs]),
            torch.tensor([seq.num_tokens for seq in seqs]),
            torch.tensor([seq.last_token for seq in seqs]),
        ]
        drawn, reported = {}, {}
        for name, pipeline in pipelines.items():
            # The second half comes from the states that the device has kept: rows are not written anew.
            on_device = StepLogits(logits.to(name), *(row.to(name) for row in rows), columns={})
            forward = Step(seqs, is_prefill=False, logits=on_device)
            tokens, reported[name] = pipeline.draw(forward)
            drawn[name] = tokens.tolist()
        # A choice in a thousand lies within rounding.
        assert sum(a == b for a, b in zip(drawn["cpu"], drawn["cuda"], strict=True)) >= len(seqs) - 1
        found, expected = reported["cuda"], reported["cpu"]
        assert found.owners == expected.owners
        torch.testing.assert_close(found.values[:, 1:].cpu(), expected.values[:, 1:], rtol=1e-4, atol=1e-4)
        for seq, token in zip(seqs, drawn["cpu"], strict=True):
            seq.append_token(token)
            seq.num_cached_tokens += 1
        if step == 1:
            seqs = seqs[::-1]


# -- the whole engine --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("gpu-sampling"), head_dim=64, tokenizer=True)
    return path, Reference(path)


@pytest.fixture(scope="module")
def requests(base):
    """(prompts, params, completions) that no rounding decides. They end one after the other, so that a batch passes
    through many sizes."""
    found = []
    for i, (fields, length) in enumerate(zip(SETTINGS, (20, 45, 16, 31, 64, 7, 28), strict=True)):
        params = SamplingParams(max_tokens=14 + 4 * i, ignore_eos=True, seed=2**40 + i, **fields)
        for seed in itertools.count(length):
            prompt = random_prompt(length, seed=seed)
            completion = complete_alone(base[1], prompt, params)
            if completion is not None:
                break
        found.append((prompt, params, completion))
    return [list(each) for each in zip(*found, strict=True)]


def gpu_llm(path, **options) -> LLM:
    defaults = {"device": "cuda", "dtype": "float32", "attention_backend": "triton", "max_num_seqs": 8}
    return make_llm(path, **defaults | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": False},
        {"enforce_eager": True},
        {"num_kvcache_blocks": 8, "max_num_batched_tokens": 24},
        {"num_kvcache_blocks": 8, "enforce_eager": True},
    ],
    ids=["graphs", "graphs-one-by-one", "eager", "graphs-preempted-chunked", "eager-preempted"],
)
def test_tokens_with_graphs_and_without(base, requests, options):
    prompts, params, expected = requests
    with gpu_llm(base[0], **options) as llm:
        for _ in range(2):
            assert complete(llm, prompts, params) == expected
            assert complete(llm, prompts[::-1], params[::-1]) == expected[::-1]
            assert_idle(llm)
        assert ("num_kvcache_blocks" in options) == (llm.scheduler.num_preemptions > 0)


def test_a_plain_batch_captures_nothing_more(base, requests):
    prompts, params, expected = requests
    plain = base[1].draw_prompts((12, 40, 5), 12)
    with gpu_llm(base[0]) as llm:
        steps, graphs = llm.model_runner.logit_steps, llm.model_runner.step_graphs
        assert complete(llm, plain, greedy(12)) == base[1].greedy(plain, 12)
        assert steps.pipeline is graphs.logits is None
        assert not any(graphs[kind].graphs for kind in graphs if kind.gives_logits)
        assert complete(llm, prompts[:1], params[:1]) == expected[:1]
        captured = {kind: list(graphs[kind].graphs) for kind in graphs if kind.gives_logits}
        assert {kind: sizes for kind, sizes in captured.items() if sizes} == {StepKind(gives_logits=True): [1]}
        # Beside others, and alone again: the graphs share their memory.
        assert complete(llm, [*plain, *prompts], [greedy(12)] * 3 + params)[3:] == expected
        assert complete(llm, plain, greedy(12)) == base[1].greedy(plain, 12)


@pytest.mark.parametrize("chunk", [24, 2048])
def test_logprobs_are_those_of_a_cpu(base, chunk):
    prompts = [random_prompt(length, seed=length) for length in (1, 40, 200)]
    params = [greedy(8, logprobs=4, prompt_logprobs=2) for _ in prompts]
    with make_llm(base[0]) as llm:
        expected = run(llm, prompts, params)
    with gpu_llm(base[0], max_num_batched_tokens=chunk) as llm:
        found = run(llm, prompts, params)
        assert_idle(llm)
    for gpu, cpu in zip(found, expected, strict=True):
        entries = (
            [*gpu.completion.prompt_logprobs[1:], *completion_logprobs(gpu)],
            [*cpu.completion.prompt_logprobs[1:], *completion_logprobs(cpu)],
        )
        for a, b in zip(*entries, strict=True):
            assert next(iter(a)) == next(iter(b))
            values = list(a.values()), list(b.values())
            torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-3, atol=1e-3)


def test_logprobs_of_a_prompt_in_the_prefix_cache_are_those_of_a_cpu(base):
    prompt = random_prompt(600, seed=0)
    starts = [-9, 0, 300, -300]
    params = [
        greedy(8, logprobs=1, logprob_token_ids=[3, 250], prompt_logprobs=2, prompt_logprobs_start=start)
        for start in starts
    ]
    found = []
    for make in (make_llm, gpu_llm):
        with make(base[0]) as llm:
            run(llm, [prompt], greedy(1))
            found.append(run(llm, [prompt] * len(starts), params))
            assert_idle(llm)
    for cpu, gpu, start in zip(*found, starts, strict=True):
        first = max(1, range(600)[start])
        assert gpu.completion.num_shared_tokens == (first - 1) // gpu.block_size * gpu.block_size
        assert gpu.completion.prompt_logprobs[:first] == cpu.completion.prompt_logprobs[:first] == [None] * first
        entries = ([*seq.completion.prompt_logprobs[first:], *completion_logprobs(seq)] for seq in (gpu, cpu))
        for a, b in zip(*entries, strict=True):
            assert a.keys() == b.keys()
            torch.testing.assert_close(*(torch.tensor([each[i] for i in b]) for each in (a, b)), rtol=1e-3, atol=1e-3)


def test_structured_outputs_are_those_of_a_cpu(base):
    pytest.importorskip("llguidance")
    forms = [
        StructuredOutputsParams(choice=["red", "green", "dark red"]),
        StructuredOutputsParams(regex="[a-z ]{20,40}"),
        StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}),
    ]
    params = [SamplingParams(0.8, 60, seed=i, structured_outputs=form) for i, form in enumerate(forms)]
    params.append(SamplingParams(0.7, 20, seed=9, top_p=0.9, ignore_eos=True))
    prompts = [random_prompt(10 + i, seed=i) for i in range(4)]
    with make_llm(base[0], skip_tokenizer_init=False) as llm:
        expected = completions(run(llm, prompts, params))
    for eager, overlap in ((False, True), (False, False), (True, True)):
        options = {"enforce_eager": eager, "overlap_steps": overlap, "skip_tokenizer_init": False}
        with gpu_llm(base[0], **options) as llm:
            assert completions(run(llm, prompts, params)) == expected
            assert_idle(llm)


def test_memory_is_given_back(base, requests):
    prompts, params, expected = requests

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    after = []
    for _ in range(2):  # The first engine of a process leaves cuBLAS's workspaces.
        llm = gpu_llm(base[0])
        assert complete(llm, prompts, params) == expected
        llm.exit()
        after.append(allocated())
    assert after[1] <= after[0] + 2**20
