"""Vision towers on a GPU: in float32 the tokens are transformers', in CUDA graphs, chunks, and beside texts."""

import pytest
from checkpoints import assert_idle, complete, greedy, make_llm, needs_family, needs_transformers
from same_bits import answers, answers_alone
from vision_checkpoints import VISION_FAMILIES, VisionReference, draw_image, image_requests, make_vision_checkpoint

pytest.importorskip("PIL", reason="needs Pillow")
pytestmark = [pytest.mark.gpu, needs_transformers("5")]

NUM_TOKENS = 20
SIZES = (48, 48), (128, 48), (16, 32), (128, 128)
ENGINES: dict[str, dict] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 75},
    "speculation": {"speculation": "suffix"},
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs_family(name)) for name in VISION_FAMILIES])
def case(request, tmp_path_factory):
    """A checkpoint, prompts with one, several and no images, and transformers' completions of them."""
    path = make_vision_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    reference = VisionReference(path)
    images = [draw_image(*size, seed=i) for i, size in enumerate(SIZES)]
    prompts = [reference.draw_prompt(each, NUM_TOKENS, seed=i) for i, each in enumerate([images[:1], images, []])]
    return path, prompts, reference.greedy(prompts, NUM_TOKENS)


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_those_of_transformers(case, engine):
    path, prompts, expected = case
    with make_llm(path, device="cuda", dtype="float32", **ENGINES[engine]) as llm:
        for _ in range(2):  # The second time, beginnings are cached.
            assert complete(llm, prompts, greedy(NUM_TOKENS)) == expected
        assert_idle(llm)


@pytest.mark.alone
def test_a_start_in_bfloat16_with_memory_for_the_largest_image(case):
    path, prompts, _ = case
    with make_llm(path, device="cuda", dtype="bfloat16", num_kvcache_blocks=-1, kvcache_block_size=256) as llm:
        assert [len(tokens) for tokens in complete(llm, prompts, greedy(NUM_TOKENS))] == [NUM_TOKENS] * 3


SAME_BITS: dict[str, dict] = {
    "chunks": {"max_num_batched_tokens": 75, "mixed_step_rows": 4},
    "preempted": {"num_kvcache_blocks": 15, "enable_prefix_caching": False, "speculation": "suffix"},
}
CASES = [(family, "bfloat16") for family in VISION_FAMILIES] + [("qwen3_vl", "float32"), ("gemma3", "float32")]


@pytest.mark.parametrize(
    ("family", "dtype"), [pytest.param(*each, id=" ".join(each), marks=needs_family(each[0])) for each in CASES]
)
def test_a_prompt_with_images_has_the_same_bits_in_any_company(family, dtype, tmp_path):
    path, requests = make_vision_checkpoint(tmp_path, family), image_requests()
    common = {"device": "cuda", "dtype": dtype, "deterministic": True}
    if family.startswith("qwen3_5"):
        common["state_dtype"] = dtype
    with make_llm(path, enable_prefix_caching=False, **common) as llm:
        alone = answers_alone(llm, requests)
        assert answers(llm, requests[::-1]) == alone[::-1]
    for name, options in SAME_BITS.items():
        with make_llm(path, **common | options) as llm:
            for _ in range(2):  # The second time, beginnings are cached.
                assert answers(llm, requests) == alone, name
