"""What a start says on a terminal, and that it says nothing elsewhere."""

import io

import pytest

from nanovllm.utils import progress as progress_module
from nanovllm.utils.progress import StartProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress_module, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "_REFRESH_SECONDS", 0.001)


def show(stream, monkeypatch, **options) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    with StartProgress(**options) as progress:
        progress.count("compiling kernels")(7, 31)
        if progress._thread is not None:
            while "7/31" not in stream.getvalue():
                pass
    return stream.getvalue()


def test_a_terminal_is_told(at_once, monkeypatch):
    text = show(Terminal(), monkeypatch)
    assert "nanovllm: compiling kernels 7/31" in text
    assert text.endswith("\r")


@pytest.mark.parametrize(("stream", "is_wanted"), [(Terminal(), False), (io.StringIO(), True)])
def test_nobody_else_is(stream, is_wanted, at_once, monkeypatch):
    assert show(stream, monkeypatch, is_wanted=is_wanted) == ""


def test_a_start_of_less_than_two_seconds_says_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with StartProgress() as progress:
        progress.tell("loading weights")
    assert stream.getvalue() == ""
