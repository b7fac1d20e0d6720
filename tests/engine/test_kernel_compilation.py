"""Which steps the start goes through, so that no later one compiles a kernel in mid-run."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import complete, greedy, make_checkpoint, make_llm, random_prompt
from configs import TUNED

pytest.importorskip("triton")

from decode_cases import H200

from nanovllm.engine.batch_sizes import MAX_GRAPH_BATCH_SIZE, graph_batch_sizes
from nanovllm.engine.start.kernel_compilation import (
    telling_batch_sizes,
    trace_products,
    trace_steps,
    warmup_batches,
    warmup_kernels,
)
from nanovllm.engine.start.memory import largest_prefill
from nanovllm.kernels.attention.paged_prefill import choose_tiles
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.formats import unquantized
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.candidates.quack import Quack
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.table import package_table
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.layer_facts import layer_products
from nanovllm.models.presets import preset_config
from nanovllm.models.qwen3_decoder import Qwen3ForCausalLM
from nanovllm.utils.context import Context, step_context

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_for_cards.py"


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 16, 33, 100, 193, 256, 257, 500, 512, 513, 800, 1024, 1500])
def test_every_variant_of_decode_attention_is_among_them(max_num_seqs, num_kv_heads, tma):
    def variants(batch_sizes):
        return {H200.config(n, num_kv_heads, tma) for n in batch_sizes}

    sizes = telling_batch_sizes(max_num_seqs)
    assert max(sizes) == max_num_seqs
    without_graph = range(MAX_GRAPH_BATCH_SIZE + 1, max_num_seqs + 1)
    assert variants(sizes) >= variants([*graph_batch_sizes(max_num_seqs), *without_graph])
    assert len(sizes) <= 13


class RecordingQuack(Quack):
    """Says which kernels it would be asked for: (operation, tile)."""

    def __init__(self):
        super().__init__(None, None)
        self.asked = set()

    def can_multiply(self, key, weight):
        return True

    def launch(self, problem, tile):
        self.asked.add((problem.key.operation, tile))
        return problem.out if problem.key.operation == "linear_add" else problem.x


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("max_num_seqs", [1, 20, 33, 64, 100, 129, 193, 209, 256, 257, 300, 385, 500, 512, 800])
def test_every_tile_of_quack_kernels_is_compiled_at_the_start(max_num_seqs, name):
    """A tile that the first step of its size had to compile would hold that one up for seconds."""
    config, quack = preset_config(name), RecordingQuack()
    config.update({"num_hidden_layers": 1, "vocab_size": 64, "dtype": "bfloat16"})
    matmul = Matmul(package_table("NVIDIA H200"), make_candidates(quack=quack))
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config, 64, TorchBackend(), TensorParallel(), matmul).bfloat16()
    trace_products(model, max_num_seqs, 16384)
    compiled, quack.asked = quack.asked, set()
    # The table's "prefill" rows begin at 2,048 tokens.
    steps = [(False, n) for n in graph_batch_sizes(max_num_seqs)]
    steps += [(True, n) for n in (1, 2047, 2048, 5000, 9000, 16384)]
    for is_prefill, num_tokens in steps:
        with step_context(Context(is_prefill=is_prefill)):
            for make in layer_products(model.model.layers[0]):
                matmul.run(make(num_tokens))
    assert compiled >= quack.asked
    assert len(quack.asked) > 1


@pytest.mark.parametrize("max_num_seqs", [1, 512])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 33, 600, 16384])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("max_model_len", [2, 33, 100, 300, 4096])
def test_every_variant_of_prefill_attention_is_warmed_up(max_model_len, group, max_num_batched_tokens, max_num_seqs):
    """With flash-attn-4 as well, which leaves steps of few tokens to our kernel."""

    def variants(lens):
        """Of our kernel, for (cached, new) tokens."""
        cpu = torch.device("cpu")
        return {(choose_tiles(128, 2, new * group, cached > 0, cpu), cached > 0) for cached, new in lens}

    limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    config = SimpleNamespace(max_model_len=max_model_len, kvcache_block_size=16, **limits)
    batches = list(warmup_batches(config, num_blocks=300))
    for seqs in batches:
        assert all(seq.num_tokens <= max_model_len and len(seq.block_table) <= 300 for seq in seqs)
        assert sum(seq.num_scheduled_tokens for seq in seqs) <= max_num_batched_tokens
        assert len(seqs) <= max_num_seqs
    for num_seqs in range(1, min(2, max_num_seqs, max_num_batched_tokens) + 1):
        seen = [(seqs[0].num_cached_tokens, seqs[0].num_scheduled_tokens) for seqs in batches if len(seqs) == num_seqs]
        # A cached beginning is a block at least, and one token is always left to compute.
        most = max_num_batched_tokens // num_seqs
        possible = [(0, min(n, most)) for n in range(1, max_model_len)]
        possible += [(16, min(n - 16, most)) for n in range(17, max_model_len)]
        assert variants(seen) >= variants(possible)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("warm-up"), max_position_embeddings=4096)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "mixed_step_rows": 256},
        {"max_num_seqs": 2, "mixed_step_rows": 2, "max_num_batched_tokens": 2},
        {"mixed_step_rows": 1},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 1, "mixed_step_rows": 1, "max_num_seqs": 1, "max_model_len": 2},
        {"max_num_batched_tokens": 256, "mixed_step_rows": 256},
        {"max_num_batched_tokens": 600},
        {"max_model_len": 2, "mixed_step_rows": 40},
        {"num_kvcache_blocks": 1, "max_model_len": 16},
        {"num_kvcache_blocks": 1, "max_model_len": 4096, "kvcache_block_size": 1024, "mixed_step_rows": 1024},
        {"max_num_seqs": 513, "max_num_batched_tokens": 16384, "num_kvcache_blocks": 600, "max_model_len": 4096},
    ],
    ids=str,
)
def test_no_step_of_the_start_is_larger_than_a_later_one(path, options, monkeypatch):
    """What a GPU's start launches before the first request: the ranks share memory for no more tokens than these. None
    of it may be in the way of a request."""
    monkeypatch.setattr(unquantized, "can_pack", lambda weight: False)  # A GPU's weights are plain tensors.
    with make_llm(path, seed=0, **options) as llm:
        runner, config = llm.model_runner, llm.config
        prepare, launched = runner.prepare, []

        def watch(step):
            num_tokens = sum(seq.num_scheduled_tokens for seq in step.seqs)
            kind = "prefill" if step.is_prefill else "mixed" if step.num_prefilled else "decode"
            launched.append((kind, len(step.seqs), num_tokens))
            prepare(step)

        runner.prepare, kv_cache = watch, runner.kv_store.tensors
        runner.kv_store.free()
        trace_steps(runner)
        runner.kv_store.use(kv_cache)
        warmup_kernels(runner, config.num_kvcache_blocks)
        runner.prepare = prepare
        limits = {"prefill": config.max_num_batched_tokens, "decode": config.max_num_seqs}
        limits["mixed"] = min(config.max_num_batched_tokens, runner.mixed_step_rows)
        for kind, num_seqs, num_tokens in launched:
            assert num_seqs <= config.max_num_seqs
            assert num_tokens <= limits[kind]
        kinds = {kind for kind, *_ in launched}
        assert kinds == {"prefill", "decode"} | ({"mixed"} if runner.mixed_step_rows else set())
        input_ids, *_ = largest_prefill(config, runner.device)
        assert len(input_ids) <= config.max_num_batched_tokens
        prompt = random_prompt(min(20, llm.scheduler.max_seq_len - 1), seed=1)
        params = greedy(min(3, llm.scheduler.max_seq_len - len(prompt)))
        found = complete(llm, [prompt, prompt[:1]], params)
    with make_llm(path, max_model_len=config.max_model_len) as llm:
        assert found == complete(llm, [prompt, prompt[:1]], params)


def test_speculative_steps_of_the_start_fit_into_short_sequences(path, monkeypatch):
    """A sequence has no more rows there than a step may give it, so it needs no more blocks than there can be."""
    monkeypatch.setattr(unquantized, "can_pack", lambda weight: False)
    with make_llm(path, speculation="suffix", max_model_len=64, max_num_seqs=32) as llm:
        runner, config, launched = llm.model_runner, llm.config, []
        kv_cache = runner.kv_store.tensors
        runner.kv_store.free()
        runner.launch, runner.backend.shares_reads = launched.append, True
        trace_steps(runner)
        runner.kv_store.use(kv_cache)
        speculative = [step for step in launched if step.kind.shares_reads]
        sizes = [size for size in telling_batch_sizes(config.max_decode_rows) if size > 1]
        assert [step.num_sampled for step in speculative] == sizes
        for step in speculative:
            assert len(step.seqs) <= config.max_num_seqs
            assert max(step.rows.positions) <= config.max_speculative_tokens


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there are other GPUs")
def test_later_prefills_compile_nothing():
    """Heads of 64, 128, 256 and 512, windows, experts and linear attention, on a Hopper GPU that is not here."""
    models = "Qwen3-30B-A3B", "gpt-oss-20b", "gemma-4-26B-A4B", "Qwen3.5-9B"
    command = sys.executable, SCRIPT, "--later-steps", "--cards", "90", "--models", *models
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(f"{model}: 0 variants" in result.stdout for model in models)
