"""What needs no Ray: one engine for many threads, and the error where Ray is missing."""

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from checkpoints import greedy, make_llm, random_prompt
from job_files import prompts, write_lines

from nanovllm.jobs import ray_engine, run, run_batch
from nanovllm.jobs.arguments import Arguments
from nanovllm.jobs.generate_actor import SharedEngine
from nanovllm.jobs.lines import Line, LineFormat
from nanovllm.jobs.ray_engine import RayEngine
from nanovllm.jobs.reader import Prepared
from nanovllm.jobs.tasks.generate import Generate


@pytest.fixture
def fresh_llm(path):
    """One for each test, because its thread never ends."""
    return make_llm(path, skip_tokenizer_init=False, max_model_len=200)


def line(number: int, prompt: list[int], num_tokens: int) -> Prepared:
    return Prepared(number, number, "a.jsonl", number, Line(prompt, greedy(num_tokens), {}, {}), None)


def lines(start: int, num_lines: int) -> list[Prepared]:
    return [line(i, random_prompt(3 + i % 11, seed=i), 1 + 7 * i % 23) for i in range(start, start + num_lines)]


def answers(engine: SharedEngine, block: list[Prepared]) -> list:
    pairs = engine.answer(block)
    assert [prepared for prepared, _ in pairs] == block
    return [output for _, output in pairs]


def test_blocks_of_many_threads_share_the_batch(fresh_llm):
    blocks = [lines(20 * i, 20) for i in range(12)]
    expected = [
        fresh_llm.generate([x.line.prompt for x in b], [x.line.params for x in b], use_tqdm=False) for b in blocks
    ]
    batch_sizes = []
    run = fresh_llm.model_runner.prepare
    fresh_llm.model_runner.prepare = lambda step: batch_sizes.append(len(step.seqs)) or run(step)
    engine = SharedEngine(fresh_llm, Generate(LineFormat()))
    with ThreadPoolExecutor(12) as threads:
        outputs = list(threads.map(partial(answers, engine), blocks))
    assert [[output["token_ids"] for output in block] for block in outputs] == [
        [output["token_ids"] for output in block] for block in expected
    ]
    assert max(batch_sizes) > 20  # sequences of several blocks in one step


def test_a_request_joins_those_under_way(fresh_llm):
    engine = SharedEngine(fresh_llm, Generate(LineFormat()))
    long = [line(0, [1, 2, 3], 150)]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(answers, engine, long)
        while fresh_llm.stats()["running"] == 0:
            assert not waiting.done()
        (short,) = answers(engine, [line(1, [4, 5], 1)])
        assert len(short["token_ids"]) == 1
        assert not waiting.done()
        assert len(waiting.result()[0]["token_ids"]) == 150


def test_a_request_that_cannot_be_served_fails_alone(fresh_llm):
    engine = SharedEngine(fresh_llm, Generate(LineFormat()))
    outputs = answers(engine, [*lines(0, 3), line(3, [1] * 5000, 3), *lines(4, 2)])
    assert ["error" in output for output in outputs] == [False, False, False, True, False, False]
    assert "5000 tokens" in outputs[3]["error"]


def test_an_engine_that_dies_says_why(fresh_llm):
    ended = threading.Event()

    def fail(*args):
        raise RuntimeError("a step that fails")

    fresh_llm.model_runner.prepare = fail
    engine = SharedEngine(fresh_llm, Generate(LineFormat()), ended.set)
    engine.check()
    engine.submit(lines(0, 1), lambda pair: None)
    assert ended.wait(60)
    with pytest.raises(RuntimeError, match="a step that fails"):
        engine.check()


def test_replicas_need_ray(path, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    file = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    with pytest.raises(ImportError, match=r"pip install 'ray>=2\.59'"):
        run_batch(file, tmp_path / "answers", path, replicas=2)
    assert not (tmp_path / "answers").exists()


def test_an_engine_tells_its_tokens_and_a_missing_package(fresh_llm, path, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(ray_engine, "start_engine", lambda *_: SharedEngine(fresh_llm, Generate(LineFormat())))
    engine = RayEngine()
    assert engine.start(Arguments(str(path), {}), 1).error is None
    line_format = LineFormat({"max_tokens": 5, "ignore_eos": True})

    def exchange(rows):
        lines = [line_format.read(row | {"prompt": [5, 6, 7]}, row["id"]) for row in rows]
        given = [Prepared(i, i, "a", i, line, None) for i, line in enumerate(lines)]
        return pickle.loads(engine.exchange(pickle.dumps(given), 30.0))

    found = exchange(prompts(3))
    assert sum(row.num_completion_tokens for row in found.rows) == found.generated.num_tokens == 15
    assert found.error is None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        found = exchange([{"id": 1, "structured_outputs": {"regex": "a+"}}])
    assert (found.rows, type(found.error)) == ([], ImportError)
    assert "pip install llguidance (on " in str(found.error)
