"""Layers with a window that give blocks back, on a GPU: with each back end, in CUDA graphs and without them."""

import pytest
from checkpoints import Reference, complete, generate, greedy, make_checkpoint, make_llm, needs_family

from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.layers.stores.window_split import WindowSplit

pytestmark = pytest.mark.gpu

NUM_TOKENS = 40
LENGTHS = (1200, 700, 300, 90, 30)
SHAPE = {"max_position_embeddings": 2048, "head_dim": 64, "num_hidden_layers": 4}
FAMILIES = {
    "gemma3_text": {"sliding_window": 300, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 260},
    "gpt_oss": {
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
# The blocks of every back end are of a multiple of 256 tokens or of any size; 16 gives many of them back.
ENGINES: dict[str, dict] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 200},
    "mixed": {"mixed_step_rows": 40},
    "speculation": {"speculation": "suffix"},
    "preempted": {"num_kvcache_blocks": 100, "enable_prefix_caching": False},
}
COMMON = {"device": "cuda", "max_model_len": 2048, "num_kvcache_blocks": 1000}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs_family(name)) for name in FAMILIES])
def case(request, tmp_path_factory):
    """A checkpoint, prompts, and transformers' completions of them."""
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **SHAPE, **FAMILIES[request.param])
    reference = Reference(path)
    prompts = reference.draw_prompts(LENGTHS, NUM_TOKENS)
    return path, prompts, reference.greedy(prompts, NUM_TOKENS)


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_those_of_transformers_in_float32(case, engine):
    path, prompts, expected = case
    with make_llm(path, dtype="float32", **COMMON | ENGINES[engine]) as llm:
        assert isinstance(llm.scheduler.block_manager.cells, WindowBlocks)
        for _ in range(2):  # The second time, beginnings are cached.
            assert complete(llm, prompts, greedy(NUM_TOKENS)) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probabilities_are_those_of_an_engine_that_keeps_all(case, engine, monkeypatch):
    """In bfloat16, with flash-attn where it is installed. Both round alike but for the order of sums: of logits near
    one, by a few units of 2 ** -8."""
    path, prompts, _ = case
    options = {"dtype": "bfloat16", "kvcache_block_size": 256, **COMMON, "num_kvcache_blocks": 60}
    with monkeypatch.context() as patch:
        patch.setattr(WindowSplit, "gives_back", False)
        with make_llm(path, **options) as llm:
            outputs = generate(llm, prompts, greedy(NUM_TOKENS))
    completions = [output["token_ids"] for output in outputs]
    more = {name: value for name, value in ENGINES[engine].items() if name != "num_kvcache_blocks"}
    found = []
    for gives_back in (False, True):
        monkeypatch.setattr(WindowSplit, "gives_back", gives_back)
        with make_llm(path, **options | more) as llm:
            assert isinstance(llm.scheduler.block_manager.cells, WindowBlocks) == gives_back
            scores = llm.score(prompts, completions, use_tqdm=False)
            found.append([score["logprobs"] for score in scores])
            assert [len(each["token_ids"]) for each in generate(llm, prompts, greedy(NUM_TOKENS))] == [NUM_TOKENS] * 5
    for before, after in zip(*found, strict=True):
        assert after == pytest.approx(before, abs=0.1)
