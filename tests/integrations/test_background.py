"""Lines of batches go behind live requests: when they begin, when they are put back, and that nothing is lost."""

import threading
from contextlib import closing

import numpy as np
import pytest
from checkpoints import assert_idle, greedy, make_llm, needs_family
from vision_checkpoints import BEGIN, END, IMAGE, draw_image, make_vision_checkpoint

from nanovllm import NO_PROMPT, ImagePrompt, PoolingParams, SamplingParams

pytest.importorskip("starlette", reason="needs the extra serve")
background_module = pytest.importorskip("nanovllm.integrations.serving.background")

SECONDS = 30


@pytest.fixture(scope="module")
def shared_llm(path):
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_kvcache_blocks": 64, "kvcache_block_size": 16}
    with make_llm(path, max_model_len=200, enable_prefix_caching=False, **options) as llm:
        yield llm


class Loop:
    """The engine's thread, a step at a time, without a server."""

    def __init__(self, llm):
        self.llm = llm
        self.background = background_module.Background(llm, lambda: None)
        self.live = {}  # request id -> its tokens
        self._num_left = {}  # request id -> samples that have not ended
        self.done = {}  # index of a line -> its output
        self._thread = threading.Thread()

    def submit(self, pairs, num_known=None):
        """Begin to answer lines in a thread. Returns when they are known, or the first ones."""
        pairs = list(pairs)

        def answer():
            with closing(self.background.answer(iter(pairs), lambda: None)) as outputs:
                for index, output in outputs:
                    assert index not in self.done
                    self.done[index] = output

        self._thread = threading.Thread(target=answer, daemon=True)
        self._thread.start()
        wanted = num_known or min(len(pairs), 2 * self.llm.config.max_num_seqs)
        event = threading.Event()
        for _ in range(SECONDS * 100):
            run = self.background._run
            if run is not None and len(run.waiting) == wanted:
                return
            event.wait(0.01)
        raise AssertionError("no lines came")

    def add_live(self, token_ids, params):
        request_id = self.llm.add_request(token_ids, params, streams=True)
        self.live[request_id], self._num_left[request_id] = [], params.n
        self.background.expect(request_id, len(token_ids), params.n)
        return request_id

    def step(self, live_requests_come=False):
        self.background.begin(bool(self.live), live_requests_come)
        for delta in self.llm.step_deltas() if not self.llm.is_finished() else ():
            if delta["request_id"] not in self.live:
                self.background.deliver(delta)
                continue
            self.background.count(delta)
            self.live[delta["request_id"]] += delta["token_ids"]
            self._num_left[delta["request_id"]] -= delta["finish_reason"] is not None
            if not self._num_left[delta["request_id"]]:
                del self.live[delta["request_id"]]

    def finish(self, most=2000):
        for _ in range(most):
            self.step()
            if not self._thread.is_alive():
                self.background.begin(False, False)
                assert_idle(self.llm)
                return
            if self.llm.is_finished():
                self._thread.join(0.01)
        raise AssertionError("the lines do not end")


def lines(count, max_tokens=20, length=5):
    params = greedy(max_tokens)
    return [([5 + i % 90, *range(6, 5 + length)], params) for i in range(count)]


def expected(llm, pairs):
    outputs = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def test_lines_are_answered_as_generate_does(llm):
    pairs = [*lines(50), ([5, 6, 7], SamplingParams(temperature=1, seed=3, n=3, max_tokens=5, logprobs=1))]
    whole = llm.generate([pair[0] for pair in pairs], [pair[1] for pair in pairs], use_tqdm=False)
    loop = Loop(llm)
    loop.submit(pairs)
    loop.finish()
    for i, output in enumerate(whole):
        found = loop.done[i]
        for name in ("token_ids", "finish_reason", "logprobs", "num_prompt_tokens", "stop_reason"):
            assert found[name] == output[name], name
    assert [each["token_ids"] for each in loop.done[50]["samples"]] == [
        each["token_ids"] for each in whole[50]["samples"]
    ]


def test_wrong_lines_have_errors(llm):
    wrong = [([], greedy(3)), ([5] * 500, greedy(3)), ([5], SamplingParams(prompt_logprobs=1))]
    loop = Loop(llm)
    loop.submit([*wrong, *lines(2), *wrong])
    loop.finish()
    assert [("error" in loop.done[i]) for i in range(8)] == [True] * 3 + [False] * 2 + [True] * 3


def test_a_share_of_the_sequences_stays_free(llm):
    loop = Loop(llm)
    loop.submit(lines(40, max_tokens=60))
    for _ in range(10):
        loop.step()
    assert llm.stats()["running"] == 14, "two of sixteen are for live requests"
    request_id = loop.add_live([5, 6, 7], greedy(5))
    loop.step()
    loop.step()
    assert loop.live[request_id], "it begins at once"
    loop.finish()


@pytest.mark.parametrize("comes", [True, False])
def test_no_line_begins_while_a_live_request_waits(llm, comes):
    loop = Loop(llm)
    loop.submit(lines(20))
    if not comes:
        loop.add_live([5, 6, 7], greedy(5))
    loop.background.begin(not comes, comes)
    assert not loop.background._under_way
    loop.finish()


def test_lines_of_one_step_begin_together(llm):
    """So that a live request that comes now waits for one step alone."""
    loop = Loop(llm)
    loop.submit(lines(14, length=25))
    loop.background.begin(False, False)
    assert len(loop.background._under_way) == 2, "50 of 64 tokens"
    loop.finish()


def test_a_prompt_that_is_longer_than_a_step(llm):
    pairs = [*lines(3), *lines(1, length=150), *lines(3)]
    loop = Loop(llm)
    loop.submit(pairs)
    loop.finish()
    assert [loop.done[i]["token_ids"] for i in range(7)] == expected(llm, pairs)


def test_lines_are_put_back_for_a_live_request_without_room(llm):
    """Blocks: the lines have nearly all, and the live request needs half of them."""
    pairs = lines(14, max_tokens=100, length=30)
    whole, live = expected(llm, pairs), llm.generate([[5] * 150], [greedy(10)], use_tqdm=False)[0]["token_ids"]
    loop = Loop(llm)
    loop.submit(pairs)
    while llm.stats()["kv_blocks_free"] > 3:
        loop.step()
    before = len(loop.background._under_way)
    request_id = loop.add_live([5] * 150, greedy(10))
    tokens = loop.live[request_id]
    for _ in range(20):
        loop.step()
    assert tokens == live, "it did not wait for lines"
    assert len(loop.background._under_way) < before
    loop.finish()
    assert [loop.done[i]["token_ids"] for i in range(14)] == whole, "whole answers, each once"


def test_sequences_are_put_back_for_many_samples(llm):
    loop = Loop(llm)
    loop.submit(lines(14, max_tokens=100))
    for _ in range(10):
        loop.step()
    request_id = loop.add_live([5, 6], SamplingParams(n=10, max_tokens=4, ignore_eos=True))
    tokens = loop.live[request_id]
    for _ in range(10):
        loop.step()
    assert len(tokens) == 40
    loop.finish()
    assert all(len(loop.done[i]["token_ids"]) == 100 for i in range(14))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    pytest.importorskip("PIL", reason="needs the extra images")
    return make_vision_checkpoint(tmp_path_factory.mktemp("seeing"), "qwen3_vl")


@needs_family("qwen3_vl")
def test_lines_with_images_are_put_back_with_them(seeing):
    """They are taken when the batch has room for them: a NO_PROMPT waits for an answer."""
    options = {"max_num_seqs": 4, "num_kvcache_blocks": 16, "kvcache_block_size": 16, "max_model_len": 200}
    with make_llm(seeing, **options) as llm:
        asked = [
            {"prompt": [5 + i, BEGIN, IMAGE, END, 7], "images": [draw_image(48, 16 * (i + 1), i)]} for i in range(5)
        ]
        whole = expected(llm, [(prompt, greedy(30)) for prompt in asked])
        read = [llm._sequences.image_prompts.read(prompt) for prompt in asked]
        prompts = [ImagePrompt(list(tokens), [each.image for each in tokens.images.each]) for tokens in read]
        pairs = [(prompt, greedy(30)) for prompt in prompts]
        loop = Loop(llm)
        loop.submit([*pairs[:3], (NO_PROMPT, None), *pairs[3:]], num_known=3)
        for _ in range(10):
            loop.step()
        assert len(loop.background._under_way) == 3
        loop.add_live([5] * 100, SamplingParams(n=2, max_tokens=4, ignore_eos=True))
        loop.step()
        assert len(loop.background._under_way) < 3
        loop.finish()
        assert [loop.done[i]["token_ids"] for i in range(5)] == whole
        assert [loop.done[i]["num_prompt_tokens"] for i in range(5)] == [len(tokens) for tokens in read]


def test_lines_that_ask_for_vectors(llm):
    """Beside lines that generate; one of them takes several steps, and some are refused."""
    prompts = [[5 + i, *range(6, 9 + i)] for i in range(40)] + [[7] * 150]
    pairs = [(prompt, PoolingParams(task="embed")) for prompt in prompts]
    pairs[1] = prompts[1], PoolingParams("mean", False, 8, "embed")
    refused = [([], PoolingParams()), ([5] * 500, PoolingParams()), ([5], PoolingParams(task="classify"))]
    loop = Loop(llm)
    loop.submit([*lines(3), *pairs, *refused, *lines(3)])
    loop.finish()
    expected = [output["embedding"] for output in llm.embed(prompts, use_tqdm=False)]
    expected[1] = llm.embed([prompts[1]], "mean", False, 8, use_tqdm=False)[0]["embedding"]
    for i, prompt in enumerate(prompts, 3):
        np.testing.assert_allclose(loop.done[i]["embedding"], expected[i - 3], atol=1e-5)
        assert loop.done[i]["num_prompt_tokens"] == len(prompt)
    assert [("error" in loop.done[i]) for i in range(len(loop.done))] == [44 <= i < 47 for i in range(50)]


def test_a_line_that_asks_for_a_vector_is_put_back(llm):
    prompt = [7] * 190
    whole = llm.embed([prompt], use_tqdm=False)[0]["embedding"]
    loop = Loop(llm)
    loop.submit([(prompt, PoolingParams(task="embed"))])
    loop.step()
    assert loop.background._under_way, "one of its three steps"
    for _ in range(2):
        loop.add_live([5, 6], SamplingParams(n=10, max_tokens=4, ignore_eos=True))
    loop.background.begin(True, False)
    assert not loop.background._under_way
    assert not loop.done
    while loop.live:
        loop.step()
    loop.finish()
    np.testing.assert_allclose(loop.done[0]["embedding"], whole, atol=1e-5)


def test_a_line_that_needs_the_whole_cache(llm):
    """It begins alone, and no rule puts it back again and again."""
    big = ([7] * 60, SamplingParams(temperature=0, n=14, max_tokens=60, ignore_eos=True))
    loop = Loop(llm)
    loop.submit([*lines(2), big, *lines(2)])
    loop.finish()
    assert [len(each["token_ids"]) for each in loop.done[2]["samples"]] == [60] * 14


def test_a_batch_that_is_left(llm):
    loop = Loop(llm)
    pairs = iter(lines(1000, max_tokens=100))

    def check():
        if llm.stats()["running"] >= 5:
            raise KeyError("cancelled")

    def answer():
        with pytest.raises(KeyError):
            list(loop.background.answer(pairs, check))

    thread = threading.Thread(target=answer)
    thread.start()
    while thread.is_alive():
        loop.step()
        thread.join(0.001)
    loop.step()
    loop.step()
    assert_idle(llm)
    loop.submit(lines(3))
    loop.finish()
    assert len(loop.done) == 3, "and the next batch is not disturbed"
