"""Jobs in this process, on one small engine."""

import pytest
from checkpoints import make_ascii_checkpoint, make_llm
from job_files import ReadHere, write_lines

from nanovllm.jobs import run_batch, work


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return make_ascii_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def shared_llm(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200, seed=0) as llm:
        yield llm


@pytest.fixture
def answers(tmp_path):
    return tmp_path / "answers"


@pytest.fixture
def job(llm, tmp_path, answers, monkeypatch):
    """job(lines, **options): run a job over these lines, by default into `answers`."""
    monkeypatch.setattr(work, "ReadAhead", ReadHere)

    def start(lines=None, output=answers, model=llm, **options):
        if lines is not None:
            write_lines(tmp_path / "prompts.jsonl", lines)
        options = {"input": tmp_path / "prompts.jsonl", "temperature": 0, "max_tokens": 8} | options
        return run_batch(output=output, model=model, **options)

    return start
