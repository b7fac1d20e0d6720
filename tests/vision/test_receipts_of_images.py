"""Deterministic jobs with images keep receipts of them, and `verify` reads the images again."""

import base64
import json
import shutil

import pytest

pytest.importorskip("PIL", reason="needs the extra images")
from checkpoints import make_llm, needs_family
from job_files import ReadHere, read_folder, write_lines
from vision_checkpoints import MARK, draw_image

from nanovllm import read_image
from nanovllm.cli import main
from nanovllm.jobs import run_batch, verify_batch, work

pytestmark = needs_family("qwen3_vl")
OPTIONS = {"max_tokens": 6, "ignore_eos": True, "use_tqdm": False}
SIZES = {"a.png": (48, 48), "b.png": (32, 64), "c.png": (16, 32)}


@pytest.fixture(scope="module")
def llm(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=300, deterministic=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def reads_here(monkeypatch):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)


@pytest.fixture
def scans(tmp_path):
    """A folder of images."""
    folder = tmp_path / "scans"
    folder.mkdir()
    for seed, (name, size) in enumerate(SIZES.items()):
        draw_image(*size, seed).save(folder / name)
    return folder


@pytest.fixture
def answers(tmp_path, scans, llm):
    """Of lines with images in several forms, and of texts."""
    data = f"data:image/png;base64,{base64.b64encode((scans / 'c.png').read_bytes()).decode()}"
    of_openai = {"type": "image_url", "image_url": {"url": "a.png"}}
    body = {"messages": [{"role": "user", "content": [of_openai]}], "max_tokens": 4}
    lines = [
        {"id": "two", "prompt": f"{MARK} and {MARK}", "images": ["a.png", "b.png"]},
        {"id": "text", "prompt": "read"},
        {"id": "own", "messages": [{"role": "user", "content": [{"type": "image", "image": data}]}]},
        {"custom_id": "openai", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    file = write_lines(scans / "lines.jsonl", lines)
    summary = run_batch(file, tmp_path / "answers", llm, ordered=True, **OPTIONS)
    assert (summary.num_answered, summary.num_failed) == (4, 0)
    return tmp_path / "answers"


def verified(answers, llm, **options) -> str:
    return str(verify_batch(answers, model=llm, use_tqdm=False, **options))


def test_a_receipt_has_the_hash_of_each_image_and_the_bits_are_the_same(answers, scans, llm, monkeypatch, tmp_path):
    kept = {row.get("id", row.get("custom_id")): row["receipt"].get("images") for row in read_folder(answers)}
    hashes = [read_image(scans / name).sha256.hex() for name in SIZES]
    assert kept["two"] == [{"source": name, "sha256": each} for name, each in zip(SIZES, hashes[:2], strict=False)]
    assert kept["text"] is None
    ((own_source, own_hash),) = (each.values() for each in kept["own"])
    assert own_source.startswith("data:image/png")
    assert own_hash == hashes[2]
    monkeypatch.chdir(tmp_path)
    assert verified(answers, llm) == "4 of 4 lines, the same bits"
    assert verified(answers, llm, alone=True) == "4 of 4 lines, the same bits"


def test_changed_images_are_told_apart_from_changed_bits(answers, scans, llm):
    (part,) = answers.glob("part-*.jsonl")
    before = part.read_text()
    rows = read_folder(answers)
    rows[0]["receipt"]["samples"][0]["logprobs"][2] *= 1 + 2**-20
    part.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert verified(answers, llm).startswith("line 'two': the log-probability of token 2 was")
    part.write_text(before)
    draw_image(*SIZES["b.png"], seed=7).save(scans / "b.png")
    for alone in (False, True):
        said = verified(answers, llm, alone=alone)
        assert said.startswith("line 'two': image 1 has changed: the SHA-256 of its pixels was ")
    assert llm.is_finished()
    (scans / "b.png").unlink()
    assert verified(answers, llm).startswith("line 'two': image 1 cannot be read any more: image 'b.png': ")


def test_images_that_have_moved(answers, scans, llm, tmp_path, path, capsys):
    """The command makes the engine again."""
    scans.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"must be a folder; if the images have moved, image_root \(--image-root\)"):
        verified(answers, llm)
    command = ["verify", str(answers), "--image-root", str(tmp_path / "moved"), "-q"]
    assert main(command) == 0
    assert capsys.readouterr().out == "4 of 4 lines, the same bits\n"
    draw_image(*SIZES["a.png"], seed=8).save(tmp_path / "moved" / "a.png")
    assert main(command) == 1
    assert "line 'two': image 0 has changed" in capsys.readouterr().out


def test_a_folder_of_images_with_another_processor_is_refused(scans, path, tmp_path):
    model = shutil.copytree(path, tmp_path / "model")
    engine = {"device": "cpu", "max_model_len": 300, "kvcache_gib": 0.01, "deterministic": True}
    asked = {"images": f"{scans}/*.png", "prompt": "read"}
    run_batch(None, tmp_path / "answers", model, **asked, format="parquet", **OPTIONS, **engine)
    assert str(verify_batch(tmp_path / "answers", use_tqdm=False)) == "3 of 3 lines, the same bits"
    file = model / "preprocessor_config.json"
    file.write_text(file.read_text().replace("16384", "8192"))
    with pytest.raises(ValueError, match=r"cannot be verified here.*image processor: it was"):
        verify_batch(tmp_path / "answers", use_tqdm=False)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_receipts_have_one_root(scans, llm, tmp_path, form):
    """Otherwise those of the first call could not be verified."""
    other = shutil.copytree(scans, tmp_path / "other")
    (scans / "b.png").unlink()
    lines = [{"id": name, "prompt": MARK, "images": [name]} for name in ("a.png", "b.png")]
    file = write_lines(tmp_path / "lines.jsonl", lines)
    options = {"output": tmp_path / "answers", "model": llm, "format": form} | OPTIONS
    first = run_batch(file, **options, image_root=scans, max_image_mib=30, max_images=2)
    assert (first.num_answered, first.num_failed) == (1, 1)
    again = {"retry_errors": True, "max_image_mib": 20, "max_images": 3}
    said = r"image_root \(--image-root\) was '.*scans' and is now '.*other', and its receipts have images"
    with pytest.raises(ValueError, match=said):
        run_batch(file, **options, **again, image_root=other)
    shutil.copy(other / "b.png", scans)
    assert run_batch(file, **options, **again, image_root=scans).num_answered == 2
    rules = json.loads((tmp_path / "answers" / "_manifest.json").read_text())["image_rules"]
    assert (rules["max_image_mib"], rules["max_images"]) == (30, 3)
    assert verified(tmp_path / "answers", llm) == "2 of 2 lines, the same bits"


def test_another_root_is_no_matter_without_images(scans, llm, tmp_path):
    file = write_lines(tmp_path / "lines.jsonl", [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "a", "images": "x"}])
    assert run_batch(file, tmp_path / "answers", llm, image_root=scans, **OPTIONS).num_failed == 1
    assert run_batch(file, tmp_path / "answers", llm, retry_errors=True, **OPTIONS).num_failed == 1
