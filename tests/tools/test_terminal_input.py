"""What is typed or pasted in `nanovllm chat`: messages and commands, and the model that is offered for a name."""

import json
import os
import subprocess
import sys

import pytest

from nanovllm import model_offer
from nanovllm.model_offer import hub_model, is_downloaded, make_offer
from nanovllm.terminal_chat import _COMMANDS
from nanovllm.terminal_input import find_command, read_messages, toolkit_reader

PASTE = "\x1b[200~one\rtwo\rthree\x1b[201~"


def read(*bursts: list[str]) -> list[str]:
    """The messages of lines that come in bursts; the lines of a burst come at once."""
    lines = [(line, index + 1 < len(burst)) for burst in bursts for index, line in enumerate(burst)]
    has_more = False

    def read_line() -> str:
        nonlocal has_more
        if not lines:
            raise EOFError
        line, has_more = lines.pop(0)
        return line

    return list(read_messages(read_line, lambda: has_more, _COMMANDS))


def test_lines_that_come_at_once_are_one_message():
    assert read(["one", "two", "three"], ["four"]) == ["one\ntwo\nthree", "four"]
    assert read(["one\r\ntwo\rthree"]) == ["one\ntwo\nthree"]
    assert read(["one", "two"]) == ["one\ntwo"], "the input may end in a pasted text"


def test_commands_typed_while_an_answer_was_written_are_commands():
    assert read(["one", "/exit"], ["two"]) == ["one", "/exit", "two"]
    assert read(["/clear", "one"]) == ["/clear", "one"]


@pytest.mark.parametrize("text", ["hello", "/etc/hosts is a file", " /exi", "/exit\nand more", "", "a /exit"])
def test_messages(text):
    assert find_command(text, _COMMANDS) is None


def test_a_mistyped_command_is_no_message():
    assert find_command("/exit ", _COMMANDS) == "/exit"
    for typed, meant in {"/exi": "/exit", "/exit now": "/exit", "/claer": "/clear"}.items():
        with pytest.raises(ValueError, match=f"'{typed}' is no command: did you mean {meant}"):
            find_command(typed, _COMMANDS)
    with pytest.raises(ValueError, match="there are /clear, /exit"):
        find_command("/xyzzy", _COMMANDS)


def test_prompt_toolkit_takes_a_pasted_text_as_one_message():
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as pipe:
        read_line, is_waiting = toolkit_reader("> ", input=pipe, output=DummyOutput())
        pipe.send_text(f"{PASTE}\r")
        assert read_line().splitlines() == ["one", "two", "three"]
        pipe.send_text("four\x1b\rfive\r")
        assert read_line() == "four\nfive"
        assert not is_waiting()
        pipe.send_text("one\rtwo\rthree\r")  # As a terminal sends it before a line is read.
        assert next(read_messages(read_line, is_waiting)) == "one\ntwo\nthree"


@pytest.mark.skipif(sys.platform != "linux", reason="starts a program in a terminal of its own")
def test_a_text_that_is_pasted_before_a_line_is_read_is_one_message():
    program = (
        "import sys; sys.modules['prompt_toolkit'] = None\n"
        "from nanovllm.terminal_input import read_messages, terminal_reader\n"
        "print([next(read_messages(*terminal_reader()))])"
    )
    ours, theirs = os.openpty()
    os.write(ours, b"one\ntwo\nthree\n")
    devices = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with subprocess.Popen([sys.executable, "-c", program], **devices, start_new_session=True) as process:
        process.wait(60)
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "['one\\ntwo\\nthree']" in text


# -- the offer ---------------------------------------------------------------------------------------------------------


def offer_of(model: str, answer: str | None = "y", **options):
    """What is chosen, and what a person reads before."""
    said: list[str] = []
    ask = None if answer is None else lambda question: said.append(question) or answer
    return hub_model(model, ask, said.append, **options), "\n".join(said)


@pytest.fixture
def empty_hub(tmp_path, monkeypatch, no_network):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(model_offer, "is_downloaded", lambda *args: False)


@pytest.mark.usefixtures("empty_hub")
def test_a_name_offers_a_model_of_the_hub(tmp_path):
    chosen, said = offer_of("Qwen3-0.6B", max_num_seqs=1)
    assert chosen == "Qwen/Qwen3-0.6B"
    assert "about 1.1 GiB to" in said, "596 million parameters of two bytes"
    assert "memory" in said
    assert said.endswith("[y/N] ")
    for answer in ("", "n"):
        assert offer_of("qwen3-0.6b", answer)[0] is None
    assert offer_of("gemma-3-1b")[0] == "google/gemma-3-1b-it", "a base model does not talk"
    assert not (tmp_path / "hub").exists()


@pytest.mark.usefixtures("empty_hub")
def test_what_the_offer_leaves_alone_or_refuses():
    for name in ("Qwen/Qwen3-0.6B", "someone/Qwen3-0.6B", "something-else"):
        assert offer_of(name) == (name, "")
    with pytest.raises(FileNotFoundError, match=r"on the hub it is Qwen/Qwen3-0\.6B"):
        offer_of("Qwen3-0.6B", None)
    with pytest.raises(FileNotFoundError, match=r"did you mean Qwen/Qwen3-0\.6B"):
        offer_of("Qwen3-06B")


@pytest.mark.usefixtures("empty_hub")
def test_a_disk_without_room_and_a_model_that_does_not_fit():
    offer = make_offer("Qwen/Qwen3-0.6B", "Qwen3-0.6B", max_num_seqs=1)
    assert "no room" not in str(offer._replace(disk=2 * offer.download))
    assert "no room" in str(offer._replace(disk=offer.download))
    assert "What makes it fit: --dtype bfloat16" in str(offer._replace(helps="--dtype bfloat16"))


def test_a_half_downloaded_model_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *args, **options: str(tmp_path / "config.json")
    )
    assert not is_downloaded("Qwen/Qwen3-0.6B")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert not is_downloaded("Qwen/Qwen3-0.6B")
    (tmp_path / "1.safetensors").touch()
    assert is_downloaded("Qwen/Qwen3-0.6B")
