"""What a run of the tuner says while it works."""

import io
import sys

import pytest

from nanovllm.tuning.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then_and_say_what_is_left(capsys):
    now = [0.0]
    with Progress("measuring", "layer", 200, lambda: now[0]) as progress:
        for _ in range(100):
            now[0] += 1
            progress.step()
        progress.tell("decode 1 tokens")
    assert capsys.readouterr() == (
        "measuring: 30 of 200, 3 min left at this speed\n"
        "measuring: 60 of 200, 2 min left at this speed\n"
        "measuring: 90 of 200, 2 min left at this speed\n"
        "decode 1 tokens\n",
        "",
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_never_more_than_all_is_done(monkeypatch, capsys, is_terminal):
    terminal, now = Terminal(), [0.0]
    if is_terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("measuring", "layer", 3, lambda: now[0]) as progress:
        for _ in range(5):
            now[0] += 60
            progress.step()
        progress.show(2, 3)
    if is_terminal:
        assert "3/3" in terminal.getvalue()
        assert capsys.readouterr().out == ""
    for n in (2, 4, 5):
        assert f"{n}/" not in terminal.getvalue().split("3/3")[-1]
    if not is_terminal:
        assert capsys.readouterr().out.splitlines()[-1] == "measuring: 3 of 3, 0 s left at this speed"
