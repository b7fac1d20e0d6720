"""RayEngine, which runs in an actor of Ray, called in this process."""

import pickle
import sys

import pytest
from job_files import prompts

pytest.importorskip("ray")

from nanovllm.jobs import ray_engine
from nanovllm.jobs.arguments import Arguments
from nanovllm.jobs.generate_actor import SharedEngine
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.ray_engine import RayEngine
from nanovllm.jobs.reader import Prepared


def test_an_engine_tells_its_tokens_and_a_missing_package(llm, path, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(ray_engine, "start_engine", lambda *_: SharedEngine(llm))
    engine = RayEngine()
    assert engine.start(Arguments(str(path), {}), 1).error is None
    line_format = LineFormat({"max_tokens": 5, "ignore_eos": True})

    def exchange(rows):
        lines = [line_format.read(row | {"prompt": [5, 6, 7]}, row["id"]) for row in rows]
        given = [Prepared(i, i, "a", i, line, None) for i, line in enumerate(lines)]
        return pickle.loads(engine.exchange(pickle.dumps(given), 30.0))

    before = llm.stats()["generated_tokens"]
    found = exchange(prompts(3))
    assert sum(row.num_completion_tokens for row in found.rows) == found.generated.num_tokens - before == 15
    assert found.error is None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        found = exchange([{"id": 1, "structured_outputs": {"regex": "a+"}}])
    assert (found.rows, type(found.error)) == ([], ImportError)
    assert "pip install llguidance (on " in str(found.error)
