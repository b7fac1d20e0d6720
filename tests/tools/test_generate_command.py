"""`nanovllm generate`: a prompt in, its answer and nothing else on standard output."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from thinking_models import make_thinking_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.cli import main

DEMO = str(Path(__file__).parents[2] / "assets" / "demo-model")
GREEDY = ("--temperature", "0", "--max-tokens", "12")
PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "introduce yourself"


def generate(capsys, *words: str, status: int = 0) -> tuple[str, str]:
    assert main(["generate", *words]) == status
    return capsys.readouterr()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO) as llm:
        yield llm


def test_a_prompt_is_a_message_unless_it_is_raw(capsys, monkeypatch, llm):
    message, system = {"role": "user", "content": PROMPT}, {"role": "system", "content": "Be brief."}
    answer = llm.chat([message], PARAMS)[0]["text"]
    out, err = generate(capsys, DEMO, PROMPT, *GREEDY)
    assert (out, err) == (f"{answer}\n", "")
    assert generate(capsys, DEMO, *GREEDY, "--system", "Be brief.", "--", PROMPT)[0] == (
        llm.chat([system, message], PARAMS)[0]["text"] + "\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
    assert generate(capsys, "--model", DEMO, "-", *GREEDY)[0] == f"{answer}\n"
    (raw,) = llm.generate([PROMPT], PARAMS)
    assert raw["text"] != answer
    assert generate(capsys, DEMO, PROMPT, "--raw", *GREEDY)[0] == f"{raw['text']}\n"


def test_a_model_without_a_chat_template_goes_on_with_the_text(capsys, tmp_path):
    path = str(make_checkpoint(tmp_path, tokenizer=True))
    with LLM(path) as llm:
        (expected,) = llm.generate(["a block"], PARAMS)
    assert generate(capsys, path, "a block", *GREEDY)[0] == f"{expected['text']}\n"
    _, err = generate(capsys, path, "a block", "--system", "Be brief.", status=2)
    assert err == "nanovllm generate: --system: the model has no chat template, and so no place for it\n"


def test_what_a_model_thinks_is_no_answer(capsys, tmp_path):
    path = str(make_thinking_checkpoint(tmp_path))
    params = [SamplingParams(seed=seed, max_tokens=24, temperature=1.0) for seed in range(16)]
    with LLM(path) as llm:
        conversations = [[{"role": "user", "content": "a"}]] * len(params)
        answers = llm.chat(conversations, params, chat_template_kwargs={"opens": True}, split_reasoning=True)
    seed, expected = next((i, each) for i, each in enumerate(answers) if each["reasoning"] and each["content"])
    options = [path, "a", "--temperature", "1", "--seed", str(seed), "--max-tokens", "24"]
    options += ["--chat-template-kwargs", '{"opens": true}']
    out, err = generate(capsys, *options)
    assert out == expected["content"] + "\n"
    assert expected["reasoning"] in err
    assert generate(capsys, *options, "--quiet") == (out, "")


def test_a_model_that_only_thought(capsys, monkeypatch, caplog):
    def stream(*args, **options):
        yield {"text": "", "content": "", "reasoning": "so far", "token_ids": [1, 2], "finish_reason": "length"}

    monkeypatch.setattr(LLM, "stream_chat", stream)
    assert generate(capsys, DEMO, PROMPT, "--max-tokens", "2") == ("\n", "so far\n")
    assert "was cut after 2 tokens" in caplog.text


def test_a_terminal_says_that_it_starts_and_how_fast_it_was(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # --quiet would set it.
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    out, err = generate(capsys, DEMO, PROMPT, *GREEDY)
    assert err.startswith(f"Starting {DEMO} ...\n")
    assert "12 tokens, " not in err, "after a pipe it would stand in the text"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "12 tokens, " in generate(capsys, DEMO, PROMPT, *GREEDY)[1]
    assert generate(capsys, DEMO, PROMPT, *GREEDY, "--quiet") == (out, "")


def test_ctrl_c_says_that_the_answer_is_not_complete(capsys, monkeypatch):
    def stream(*args, **options):
        yield {"text": "half an", "content": "half an", "reasoning": "", "token_ids": [1], "finish_reason": None}
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream_chat", stream)
    out, err = generate(capsys, DEMO, PROMPT, status=130)
    assert (out, err) == ("half an", "\nnanovllm generate: interrupted, the answer is not complete\n")


@pytest.mark.parametrize(
    ("words", "typed", "message"),
    [
        ([], "", "missing: MODEL, PROMPT (usage: nanovllm generate MODEL PROMPT [options])"),
        ([DEMO, "-"], " \n", "standard input: is empty"),
        ([DEMO, "a", "--raw", "--system", "b"], "", "--system: not allowed with --raw"),
        ([DEMO, "a", "--raw", "--chat-template-kwargs", "{}"], "", "--chat-template-kwargs: not allowed with --raw"),
        ([DEMO, "a", "--temp", "0"], "", "unknown option --temp: use --temperature"),
        ([DEMO, "a", "--top-k", "-7"], "", "top_k=-7"),
        (["Qwen3-0.6B", "a"], "", "on the hub it is Qwen/Qwen3-0.6B"),
        ([DEMO, "word " * 300, "--max-model-len", "64"], "", "64"),
    ],
)
def test_mistakes_are_named(capsys, monkeypatch, words, typed, message):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    try:
        status = main(["generate", *words])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) <= 2
