"""`nanovllm pull`, and what is said when the hub does not give a model."""

import errno
import os
from collections import namedtuple
from pathlib import Path

import pytest
from fake_hub import fake_hub, new_sessions

from nanovllm.cli import main
from nanovllm.models.model_files import WEIGHT_FILES, download

MODEL = "someone/some-model"
FILES = {
    "config.json": b"{}",
    "model-1.safetensors": b"a" * 2_000_000,
    "model-2.safetensors": b"b" * 3_000_000,
    "consolidated.safetensors": b"the same in another format",
    "README.md": b"not read",
}
READ = {"config.json", "model-1.safetensors", "model-2.safetensors"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with fake_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.models[MODEL] = dict(FILES)
        yield hub


def pull(capsys, *words: str) -> tuple[int, str, str]:
    status = main(["pull", *words])
    return status, *capsys.readouterr()


def test_what_the_engine_reads_is_downloaded(capsys, hub, tmp_path):
    status, out, err = pull(capsys, MODEL)
    assert status == 0
    folder = Path(out.removesuffix("\n"))
    assert folder.is_relative_to(tmp_path / "hub")
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {name: FILES[name] for name in READ}
    assert sorted(hub.asked) == sorted(READ)
    assert f"{MODEL}: 3 files, 4.8 MiB; to download: 4.8 MiB\n" in err
    assert "1 of 3: config.json (0.0 MiB)\n2 of 3: model-1.safetensors (1.9 MiB)\n3 of 3: model-2" in err
    assert download(MODEL, "model", WEIGHT_FILES) == str(folder), "an engine starts from it"
    hub.asked.clear()
    assert pull(capsys, "--quiet", MODEL) == (0, out, "")
    assert hub.asked == []


def test_the_same_command_goes_on(capsys, hub):
    hub.lost = {"model-1.safetensors"}
    status, out, err = pull(capsys, MODEL)
    assert (status, out) == (2, "")
    assert "cannot be downloaded: the hub answers with status 404" in err
    assert hub.asked == ["config.json"], "one file after the other"
    hub.lost = set()
    hub.asked.clear()
    status, _, err = pull(capsys, MODEL)
    assert (status, hub.asked) == (0, ["model-1.safetensors", "model-2.safetensors"])
    assert "4.8 MiB; to download: 4.8 MiB\n1 of 2: model-1.safetensors (1.9 MiB)\n" in err.replace(to_where(err), "")


def test_an_engine_that_finds_all_files_shows_no_bar(capfd, hub, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    folder = download(MODEL, "model", WEIGHT_FILES)
    capfd.readouterr()
    assert download(MODEL, "model", WEIGHT_FILES) == folder
    assert capfd.readouterr().err.strip("\r\n ") == ""


def to_where(text: str) -> str:
    return next(line for line in text.splitlines(keepends=True) if line.startswith("to "))


def test_a_name_without_its_organization_and_a_folder(capsys, hub, tmp_path):
    hub.models["Qwen/Qwen3-0.6B"] = dict(FILES)
    assert "models--Qwen--Qwen3-0.6B" in pull(capsys, "qwen3-0.6b")[1]
    assert "did you mean Qwen/Qwen3-0.6B or" in pull(capsys, "Qwen3-06B")[2]
    hub.asked.clear()
    assert pull(capsys, str(tmp_path))[:2] == (0, f"{tmp_path}\n")
    assert hub.asked == []


def test_what_cannot_be_used_is_not_downloaded(capsys, hub, monkeypatch):
    hub.models["someone/other"] = {"config.json": b"{}", "pytorch_model.bin": b"a", "model.gguf": b"b"}
    status, _, err = pull(capsys, "someone/other")
    assert status == 2
    assert "has no weights in .safetensors, which are those that are read; it has .bin, .gguf\n" in err
    usage = namedtuple("usage", "total used free")(2**40, 2**40, 10**6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    status, _, err = pull(capsys, MODEL)
    assert status == 1
    assert "has 1.0 MiB free, and the download needs 4.8 MiB: the variable HF_HUB_CACHE names another folder" in err
    assert hub.asked == []


def test_a_full_disk_is_no_wrong_call(capsys, hub, monkeypatch):
    def fill(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fill)
    status, _, err = pull(capsys, MODEL)
    assert status == 1
    assert f"cannot be stored in {hub.cache}: No space left on device\n" in err


@pytest.mark.parametrize(
    ("status", "word", "reason"),
    [
        (401, "RepoNotFound", "the hub has no such model, or it is private: check the name, or `hf auth login`"),
        (403, "GatedRepo", "it is for those who agree to its terms: {hub}/{model}, then `hf auth login`"),
        (404, "RevisionNotFound", "the model has no such revision"),
        (403, "", "the hub answers with status 403: `hf auth login`"),
        (500, "", "the hub answers with status 500: try later"),
        ("offline", "", "HF_HUB_OFFLINE is set, and {cache} does not have all of it: unset HF_HUB_OFFLINE"),
        ("no network", "", "{hub} cannot be reached (ConnectionRefusedError: [Errno 111] Connection refused): check"),
    ],
)
def test_why_the_hub_does_not_give_a_model(capsys, hub, monkeypatch, status, word, reason):
    """The same short line from the command and from an engine that starts."""
    if status == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        new_sessions()
    elif status == "no network":
        hub.address = "http://127.0.0.1:9"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    else:
        hub.status, hub.error = status, word
    reason = reason.format(hub=hub.address, model=MODEL, cache=hub.cache)
    found, out, err = pull(capsys, MODEL)
    assert (found, out) == (2, "")
    asked = f"model='{MODEL}': no such directory, and as a hub id it cannot be downloaded: "
    assert err.startswith(f"nanovllm pull: {asked}{reason}")
    assert err.count("\n") == 1
    with pytest.raises(FileNotFoundError) as raised:
        download(MODEL, "model", WEIGHT_FILES)
    assert str(raised.value).startswith(f"{asked}{reason}")


def test_what_is_no_hub_id(capsys, no_network):
    assert "a hub id is organization/name, of letters" in pull(capsys, "a b")[2]
    assert "model='./nowhere': no such directory\n" in pull(capsys, "./nowhere")[2]
