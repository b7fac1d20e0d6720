"""Mixed steps on a CUDA device."""

import pytest
from checkpoints import Reference, assert_idle, greedy, make_checkpoint
from gpu_engines import REGRET, SHAPES, cases, gpu_llm

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shaped(request, tmp_path_factory):
    """(checkpoint, its Reference) of a head_dim."""
    head_dim = request.param
    path = make_checkpoint(tmp_path_factory.mktemp("shaped"), head_dim=head_dim, **SHAPES[head_dim])
    return path, Reference(path)


@cases(
    "shaped backend eager",
    (64, "triton", False),
    (128, "triton", False),
    (128, "triton", True),
    (128, "flash_attn", False),
    (64, "torch", False),
)
def test_prompts_beside_decode_steps(shaped, backend, eager):
    path, reference = shaped
    lengths = (300, 700, 5, 257, 64, 900, 31, 512, 129, 40, 333)
    prompts = reference.draw_prompts(lengths, 4)
    params = [greedy(100 - 9 * i) for i in range(len(prompts))]
    options = {"attention_backend": backend, "dtype": "bfloat16", "enforce_eager": eager, "num_kvcache_blocks": 64}
    with gpu_llm(path, mixed_step_rows=150, max_num_batched_tokens=1024, max_num_seqs=100, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output, p in zip(prompts, outputs, params, strict=True):
            assert len(output["token_ids"]) == p.max_tokens
            assert reference.regret(prompt, output["token_ids"]) < REGRET["bfloat16"]
        # One prefill step, of the first two prompts or a part of the second; else it would be four.
        assert llm.stats()["steps"] <= 101
        assert_idle(llm)
