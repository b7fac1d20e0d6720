"""`nanovllm chat`: lines in, answers out, and what the conversation holds."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.cli import main

DEMO = str(Path(__file__).parents[2] / "assets" / "demo-model")
PARAMS = SamplingParams(temperature=0, max_tokens=12)


def talk(monkeypatch, capsys, *lines: str, options: Sequence[str] = (), model: str = DEMO):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status = main(["chat", model, "--temperature", "0", "--max-tokens", "12", *options])
    return status, *capsys.readouterr()


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def answer():
    """answer(conversation) -> what LLM.chat says."""
    with LLM(DEMO) as llm:
        yield lambda conversation: llm.chat(conversation, PARAMS)[0]["text"]


def test_each_answer_knows_what_was_said(monkeypatch, capsys, answer):
    first, second = "introduce yourself", "what can you do?"
    said = [message("user", first)]
    said += [message("assistant", answer(said)), message("user", second)]
    system = [message("system", "Be brief.")]
    status, out, err = talk(monkeypatch, capsys, first, second, "", "/clear", first, "/exit", "never read")
    assert (status, err) == (0, "")
    assert out.splitlines() == "\n".join([said[1]["content"], answer(said), said[1]["content"]]).splitlines()
    _, out, _ = talk(monkeypatch, capsys, first, "/clear", first, options=("--system", "Be brief."))
    assert out.splitlines() == f"{answer([*system, said[0]])}\n".splitlines() * 2


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(monkeypatch, capsys):
    asked = []

    def stream(llm, prompts, params):
        asked.append(llm.tokenizer.decode(prompts[0]))
        yield {"text": "half an", "token_ids": [1]}
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)
    status, out, _ = talk(monkeypatch, capsys, "one", "two")
    assert (status, out) == (0, "half an\nhalf an\n")
    assert "half an" not in asked[0]
    assert "half an" in asked[1]


def test_a_conversation_that_has_grown_too_long(monkeypatch, capsys, answer):
    status, out, err = talk(monkeypatch, capsys, "word " * 300, "introduce yourself", options=("--max-model-len", "64"))
    assert status == 0
    assert "/clear" in err
    assert out.strip() == answer([message("user", "introduce yourself")])


def test_a_model_without_a_chat_template(monkeypatch, capsys, tmp_path):
    model = str(make_checkpoint(tmp_path))
    status, _, err = talk(monkeypatch, capsys, "hello", model=model)
    assert status != 0
    assert "chat" in err
