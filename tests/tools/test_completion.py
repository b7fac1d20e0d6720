"""`nanovllm completion`: what a shell offers after Tab."""

import os
import shutil
import subprocess
import sys

import pytest

from nanovllm.cli import main
from nanovllm.commands.completion import SHELLS


def script(capsys, shell: str) -> str:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_offers_commands_options_values_and_folders(capsys, tmp_path):
    for name in ("some-model", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "some-file").touch()
    lines = [
        "nanovllm gen",
        "nanovllm generate --chat-t",
        "nanovllm chat m --load-format d",
        "nanovllm chat so",
        "nanovllm run-batch m -i so",
    ]
    asked = script(capsys, "bash")
    for line in lines:
        asked += f"\nCOMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); "
        asked += '_shtab_nanovllm; echo "${COMPREPLY[@]%/}"'
    shell = ["bash", "--norc", "-s"]
    done = subprocess.run(shell, input=asked, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
    *offers, last = done.stdout.splitlines()
    assert offers == ["generate", "--chat-template-kwargs", "dummy", "some-model"], done.stderr
    assert sorted(last.split()) == ["some-file", "some-model"]


def test_every_shell_has_its_script(capsys):
    scripts = {shell: script(capsys, shell) for shell in SHELLS}
    assert len(set(scripts.values())) == len(SHELLS)
    for text in scripts.values():
        assert "thinking-token-budget" in text
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "invalid choice: 'cmd'" in capsys.readouterr().err


def test_without_shtab_it_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "nanovllm completion: needs shtab: pip install 'nanovllm[completion]'\n"
