"""deterministic=True: vectors, classes and choices have the same bits in any company."""

import pytest
from checkpoints import make_checkpoint, make_llm, random_prompt
from vector_checkpoints import make_pooling_checkpoint

from nanovllm import PoolingParams, SamplingParams

PROMPTS = [random_prompt(length, length) for length in (1, 16, 24, 33, 100, 131, 200)]
# Alone, a prompt is computed whole.
ENGINES: dict[str, dict] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 23},
    "few": {"max_num_batched_tokens": 90, "max_num_seqs": 2, "num_kvcache_blocks": 20},
}


def same_in_any_company(path, ask, **options):
    """ask: (engine, prompts) -> what it gives for each."""
    with make_llm(path, deterministic=True, enable_prefix_caching=False, **options) as llm:
        alone = [ask(llm, [prompt])[0] for prompt in PROMPTS]
    for name, more in ENGINES.items():
        with make_llm(path, deterministic=True, **options | more) as llm:
            assert ask(llm, PROMPTS) == alone, name
            assert ask(llm, PROMPTS[::-1]) == alone[::-1], name


def embedded(pooling):
    def embed(llm, prompts):
        outputs = llm.embed(prompts, pooling=pooling, use_tqdm=False)
        return [output["embedding"].tobytes() for output in outputs]

    return embed


@pytest.mark.parametrize(("pooling", "dtype"), [("mean", "float32"), ("mean", "bfloat16"), ("cls", "float32")])
def test_embeddings(pooling, dtype, tmp_path):
    same_in_any_company(make_pooling_checkpoint(tmp_path), embedded(pooling), dtype=dtype)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes(num_labels, tmp_path):
    """A head with so few rows, and a long K, is multiplied by another kernel for one row than for many."""
    path = make_pooling_checkpoint(tmp_path, "llama", num_labels, bias=True, hidden_size=512, intermediate_size=64)

    def classify(llm, prompts):
        return [output["logits"].tobytes() for output in llm.classify(prompts, use_tqdm=False)]

    same_in_any_company(path, classify)


def test_means_beside_completions(tmp_path):
    """In a granite, whose hidden states have a factor."""
    path = make_checkpoint(tmp_path, "granite", logits_scaling=3.0)

    def embed_beside(llm, prompts):
        for prompt in prompts:
            llm.add_request(prompt, SamplingParams(0, 3, ignore_eos=True))
            llm.add_request(prompt, PoolingParams(pooling="mean"))
        found = {}
        while not llm.is_finished():
            found |= {each["request_id"]: each["output"] for each in llm.step_deltas() if each.get("output")}
        return [found[i]["embedding"].tobytes() for i in sorted(found)]

    same_in_any_company(path, embed_beside)


def test_choices(tmp_path):
    choices = [[1, 2, 3], [4], random_prompt(40, 7)]

    def choose(llm, prompts):
        return [found["logprobs"] for found in llm.score_choices(prompts, choices, use_tqdm=False)]

    same_in_any_company(make_checkpoint(tmp_path), choose)
