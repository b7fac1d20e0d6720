"""What an engine takes of a CUDA device, and that it gives it back."""

import gc
import threading

import pytest
import torch
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint
from gpu_engines import SHAPES, cases, gpu_llm

from nanovllm import LLM
from nanovllm.engine.model_runner import ModelRunner

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB, GIB = 2**20, 2**30


def memory() -> tuple[int, int]:
    """Bytes that torch's tensors take, and bytes of the device that are in use by anyone."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


@pytest.fixture(scope="module")
def warm(base):
    """An engine has come and gone: libraries and compiled kernels are loaded, and stay, as they should."""
    path, _ = base
    with gpu_llm(path, max_num_seqs=8) as llm:
        complete(llm, [[1, 2, 3]], greedy(3))


@pytest.fixture
def before(warm):
    return memory()


def assert_given_back(before, what=""):
    """All but cuBLAS's workspaces, which torch keeps for each stream."""
    allocated, used = memory()
    assert allocated - before[0] < 128 * MIB, what
    assert used - before[1] < 512 * MIB, what


@cases(
    "end eager",
    ("exit", False),
    ("exit", True),
    ("exit-in-thread", False),
    ("exit-in-thread", True),
    ("with", False),
    ("with-error", False),
    ("del", False),
    ("del", True),
    ("del-unfinished", False),
    ("exception-in-generate", False),
)
def test_memory_is_given_back(base, before, monkeypatch, end, eager):
    path, _ = base
    llm = gpu_llm(path, num_kvcache_blocks=-1, kvcache_gib=4.0, enforce_eager=eager, max_num_seqs=8)
    complete(llm, [[1, 2, 3]] * 3, greedy(3))
    allocated, used = memory()
    assert allocated - before[0] > 3.9 * GIB
    assert used - before[1] > 3.9 * GIB
    if end == "exit":
        llm.exit()
        llm.exit()
    elif end == "exit-in-thread":
        leaver = threading.Thread(target=llm.exit)
        with pytest.raises(RuntimeError, match="exited"):
            llm.generate(
                [[1, 2, 3]] * 3,
                greedy(900),
                use_tqdm=False,
                on_step=lambda stats: None if leaver.ident else leaver.start(),
            )
        leaver.join()
    elif end == "with":
        with llm:
            complete(llm, [[1]], greedy(2))
    elif end == "with-error":
        with pytest.raises(ZeroDivisionError), llm:
            raise ZeroDivisionError
    elif end == "del-unfinished":
        llm.add_request([1, 2, 3], greedy(5))
        llm.step()
        del llm
    elif end == "del":
        del llm
    else:
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner.model, "forward", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([[1]], greedy(3), use_tqdm=False)
        assert_idle(llm)
        assert len(complete(llm, [[1]], greedy(3))[0]) == 3
        llm.exit()
    assert_given_back(before)


def test_memory_does_not_grow_from_engine_to_engine(base, warm):
    path, _ = base
    seen = []
    for _ in range(3):
        with gpu_llm(path, num_kvcache_blocks=-1, kvcache_gib=1.0, max_num_seqs=8) as llm:
            complete(llm, [[1, 2, 3]] * 3, greedy(3))
        seen.append(memory())
    assert seen[-1][0] - seen[0][0] < 64 * MIB
    assert seen[-1][1] - seen[0][1] < 128 * MIB


@pytest.mark.parametrize("step", ["warmup_model", "allocate_kv_cache", "capture_cudagraph"])
def test_memory_is_given_back_when_init_fails(base, before, monkeypatch, step):
    path, _ = base
    original = getattr(ModelRunner, step)
    held = []

    def failing(self, *args):
        original(self, *args)
        held.append(memory()[0])
        raise KeyboardInterrupt("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, step, failing)
        with pytest.raises(KeyboardInterrupt, match="on purpose"):
            gpu_llm(path, num_kvcache_blocks=-1, kvcache_gib=4.0, max_num_seqs=8)
    assert step == "warmup_model" or held[0] - before[0] > 3.9 * GIB
    assert_given_back(before)


def test_more_blocks_than_the_gpu_holds(base, before):
    path, _ = base
    with pytest.raises((MemoryError, torch.OutOfMemoryError)):
        gpu_llm(path, num_kvcache_blocks=2**23)
    assert_given_back(before)
    with gpu_llm(path, max_num_seqs=2) as llm:
        assert len(complete(llm, [[1]], greedy(3))[0]) == 3


def test_no_room_for_a_block(base, before):
    path, _ = base
    with pytest.raises(MemoryError, match=r"this engine's limit is .*gpu_memory_utilization=1e-06, .*uses"):
        gpu_llm(path, num_kvcache_blocks=-1, gpu_memory_utilization=1e-6)
    assert_given_back(before)


def test_two_engines_share_a_gpu(base, tmp_path, before):
    other = make_checkpoint(tmp_path, dtype=torch.bfloat16, head_dim=128, **SHAPES[128])
    engines = []
    total = torch.cuda.get_device_properties(0).total_memory
    share = 0.3  # of the whole for each, whatever the other one holds
    for path, reference in (base, (other, Reference(other))):
        prompts = reference.draw_prompts((40, 17, 300), 12)
        options = {"attention_backend": "triton", "dtype": "float32", "gpu_memory_utilization": share}
        used_before = memory()[1]
        llm = gpu_llm(path, num_kvcache_blocks=-1, max_num_seqs=8, **options)
        used = memory()[1] - used_before
        # What the share leaves is the cache's; the graphs come on top, and may take a little.
        assert (share - 0.05) * total < used < share * total + GIB
        engines.append((llm, prompts, reference.greedy(prompts, 12)))
    done = [{}, {}]
    ids = [[llm.add_request(prompt, greedy(12)) for prompt in prompts] for llm, prompts, _ in engines]
    while not all(llm.is_finished() for llm, *_ in engines):
        for (llm, *_), results in zip(engines, done, strict=True):
            if not llm.is_finished():
                results |= dict(llm.step()[0])
    for (_, _, expected), requests, results in zip(engines, ids, done, strict=True):
        assert [results[i] for i in requests] == expected
    engines[0][0].exit()
    llm, prompts, expected = engines[1]
    assert complete(llm, prompts, greedy(12)) == expected
    llm.exit()
    assert_given_back(before)


def test_a_sleeping_engine_gives_its_memory_back(warm):
    """With a KV cache of tens of GiB and random weights of 1.2 GiB: what is left of it in its sleep is less than 200 MB
    beside the weights, and nothing of it grows."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "seed": 0}
    prompts = [[1, 2, 3], list(range(5, 300))]
    start = memory()[1]
    with LLM("Qwen3-0.6B", gpu_memory_utilization=0.6, **options) as llm:
        expected, awake = complete(llm, prompts, greedy(9)), memory()[1]
        weights = sum(p.numel() * p.element_size() for p in llm.model_runner.model.parameters())
        assert awake - start > 20 * GIB
        for level, kept in ((1, weights), (2, 0), (1, weights)):
            llm.sleep(level)
            assert memory()[1] - start - kept < 200 * 10**6, level
            llm.wake_up()
            assert complete(llm, prompts, greedy(9)) == expected
            assert abs(memory()[1] - awake) < 200 * 10**6, level


@pytest.mark.slow
@pytest.mark.parametrize("count", [25, pytest.param(100, marks=pytest.mark.nightly)])
def test_many_sleeps_take_no_more_memory_than_three(base, warm, count):
    path, _ = base
    with gpu_llm(path, max_num_seqs=4) as llm:
        used = []
        for _ in range(count):
            llm.sleep()
            llm.wake_up()
            used.append(memory()[1])
        assert max(used[3:]) - used[2] < 16 * MIB


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_new_weights_are_seen_by_captured_graphs(warm, quantization):
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "num_kvcache_blocks": 16}
    prompts = [[1, 2, 3], list(range(5, 300))]
    generator = torch.Generator().manual_seed(5)
    with LLM("Qwen3-0.6B", quantization=quantization, seed=0, **options) as llm:
        before = complete(llm, prompts, greedy(9))
        vocab_size, hidden_size = llm.model_runner.model.lm_head.num_embeddings, 1024
        embedding = torch.randn(vocab_size, hidden_size, generator=generator) * 0.02
        llm.update_weights([("model.embed_tokens.weight", embedding)])
        changed = complete(llm, prompts, greedy(9))
        assert changed != before
        llm.update_weights([("model.embed_tokens.weight", embedding.cuda().bfloat16())])
        assert complete(llm, prompts, greedy(9)) == changed
        llm.sleep(2)
        llm.wake_up()
        assert complete(llm, prompts, greedy(9)) == before
