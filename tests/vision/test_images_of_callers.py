"""Images as callers give them, on a tiny model that sees: chat, generate and jobs all ask the engine the same."""

import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs the extra images")
from checkpoints import greedy, make_llm, needs_family
from job_files import ReadHere, by_id, interrupted_after, read_folder, read_lines, write_lines
from vision_checkpoints import IMAGE, MARK, draw_image

from nanovllm import ImageRules, SamplingParams, read_image
from nanovllm.cli import main
from nanovllm.jobs import check_batch, run_batch, work

pytestmark = needs_family("qwen3_vl")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "use_tqdm": False}
SIZES = {"a.png": (48, 48), "b.png": (32, 64), "inner/c.png": (64, 32)}


@pytest.fixture(scope="module")
def llm(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=300) as llm:
        yield llm


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """A folder of images, and a file of lines beside them."""
    folder = tmp_path_factory.mktemp("scans")
    (folder / "inner").mkdir()
    for seed, (name, size) in enumerate(SIZES.items()):
        draw_image(*size, seed).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(llm, scans):
    """Texts of "read" asked of each image."""
    prompts = [
        {"prompt": f"<user><|vision_start|>{MARK}<|vision_end|>read", "images": [scans / name]} for name in SIZES
    ]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    texts = dict(zip(SIZES, [output["text"] for output in outputs], strict=True))
    assert len(set(texts.values())) == 3  # It sees them.
    return texts


@pytest.fixture(autouse=True)
def reads_here(monkeypatch):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)


def ask(*parts) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "read"}]}]


def test_chat_takes_images_in_every_form(llm, scans, expected):
    file = scans / "a.png"
    url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    sources = [
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "image_url", "image_url": f"file://{file}"},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": str(file)},
        {"type": "image", "path": file},
        {"type": "image", "base64": url.partition(",")[2]},
        {"type": "image", "image": read_image(file, rules=ImageRules(image_root=str(scans)))},
    ]
    outputs = llm.chat([ask(source) for source in sources], PARAMS, use_tqdm=False)
    assert [output["text"] for output in outputs] == [expected["a.png"]] * len(sources)


def test_chat_takes_several_images_and_streams(llm, scans):
    parts = [{"type": "image", "image": scans / name} for name in SIZES]
    (output,) = llm.chat(ask(*parts), PARAMS, use_tqdm=False, split_reasoning=True)
    assert output["num_prompt_tokens"] > llm.chat(ask(parts[0]), PARAMS, use_tqdm=False)[0]["num_prompt_tokens"]
    assert "".join(delta["text"] for delta in llm.stream_chat(ask(*parts), PARAMS)) == output["text"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            [{"type": "image", "image": "nothing.png"}],
            r"prompts\[0\]: images\[0\]: image 'nothing.png': it cannot be read",
        ),
        ([{"type": "image", "image": b"abc"}], "it is no image"),
        ([{"type": "text", "text": MARK}, {"type": "image", "image": "x.png"}], "its prompt has 2 places for images"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}], r"rules=ImageRules\(allow_remote=True\)"),
        ([{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}], "detail='low': cannot be served"),
        (
            [{"type": "image", "image": "x", "image_url": "y"}],
            r"content\[0\] is one image, and has image and image_url",
        ),
        ([{"type": "image_url", "image_url": "y", "url": "x"}], "is one image, and has image_url and url"),
        ([{"type": "image", "image": "x", "path": "y"}], "is one image, and has image and path"),
        ([{"type": "image", "image_url": "x"}], "must have the form"),
        ([{"type": "image", "image": "x", "text": "y"}], "is an image, and has a text: that is a part of its own"),
        ([{"type": "text", "text": "y", "image": "x"}], "is a text, and has image: an image is a part of its own"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], r"message 0: content\[0\] has type 'video_url', which is"),
        ([{"type": "input_audio", "input_audio": {}}], "has type 'input_audio', which is not read"),
    ],
)
def test_wrong_images_of_chats_are_named(llm, parts, said):
    with pytest.raises((ValueError, TypeError), match=said):
        llm.chat(ask(*parts), PARAMS, use_tqdm=False)


def test_a_template_without_a_place_for_images(llm):
    with pytest.raises(ValueError, match="conversation 0: it shows texts alone, and no images"):
        llm.chat(
            ask({"type": "image", "image": "x"}), PARAMS, False, "{% for m in messages %}{{ m.content }}{% endfor %}"
        )
    blind = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="its prompt has 0 places for images, and it has 1 image"):
        llm.chat(ask({"type": "image", "image": "x"}), PARAMS, False, blind)


@pytest.mark.parametrize(
    "prompt",
    [
        f"{MARK}x",
        [5, IMAGE, 7],
        {"prompt": f"{MARK}x"},
        {"prompt": f"{MARK}x", "images": []},
        {"prompt": f"{MARK}x", "images": None},
        {"prompt_token_ids": [IMAGE]},
    ],
)
def test_a_place_without_an_image_is_an_error_of_its_prompt(llm, prompt):
    outputs = llm.generate(["read", prompt], PARAMS, use_tqdm=False, on_error="return")
    assert outputs[0]["text"] == llm.generate("read", PARAMS, use_tqdm=False)[0]["text"]
    said = rf"its prompt has 1 place for images, and it has no image: each needs one place.* every {re.escape(MARK)} is"
    assert re.fullmatch(rf"prompts\[1\]: {said} a place, also one that a text itself contains", outputs[1]["error"])
    with pytest.raises(ValueError, match=rf"prompt: {said}"):
        llm.add_request(prompt, PARAMS)
    with pytest.raises(ValueError, match=rf"prompts\[0\]: {said}"):
        llm.score([prompt], ["x"])


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        ({"images": ["a.png"]}, "{'images': list}"),
        ({"messages": [], "images": ["a.png"]}, "{'messages': list, 'images': list}"),
        ({"prompt": 5, "images": ["a.png"]}, "{'prompt': int, 'images': list}"),
        ({"prompt": {}, "images": ["a.png"]}, "{'prompt': dict, 'images': list}"),
        ({"prompt": MARK, "image": "a.png"}, "{'prompt': str, 'image': str}"),
        ({"prompt": MARK, "multi_modal_data": {"image": 1}}, "{'prompt': str, 'multi_modal_data': dict}"),
    ],
)
def test_a_wrong_form_is_shown_whole_beside_the_one_of_images(llm, prompt, given):
    said = rf"{{'prompt': a string or token ids, 'images': a list}} or .*, not {re.escape(given)}$"
    with pytest.raises(TypeError, match=said):
        llm.generate([prompt], PARAMS, use_tqdm=False)


def test_too_many_images_of_a_caller(llm):
    with pytest.raises(ValueError, match="it has 1001 images; this engine allows a prompt 1000"):
        llm.generate([{"prompt": MARK * 1001, "images": ["a.png"] * 1001}], PARAMS, use_tqdm=False)


def test_a_text_that_contains_the_token_of_a_place(llm, scans):
    said = rf"{re.escape(MARK)} is a place, also one that a text itself contains"
    with pytest.raises(ValueError, match=rf"its prompt has 1 place for images, and it has no image: .*{said}"):
        llm.chat([{"role": "user", "content": f"what does {MARK} mean?"}], PARAMS, use_tqdm=False)
    parts = {"type": "image", "image": scans / "a.png"}, {"type": "text", "text": MARK}
    with pytest.raises(ValueError, match=rf"its prompt has 2 places for images, and it has 1 image: .*{said}"):
        llm.chat(ask(*parts), PARAMS, use_tqdm=False)


def test_without_a_tower_the_token_of_a_place_is_any_other(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=300, text_only=True) as llm:
        (output,) = llm.generate(f"{MARK}x", PARAMS, use_tqdm=False)
        assert output["num_prompt_tokens"] == 2


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_a_job_asks_each_image_of_a_folder_once(llm, scans, expected, tmp_path):
    asked = {"input": None, "model": llm, "images": f"{scans}/**/*.png", "prompt": "read"} | OPTIONS
    check = check_batch(**asked)
    assert (check.num_lines, check.num_failed, check.num_images) == (3, 0, 3)
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        run_batch(output=tmp_path / "answers", **asked)
    summary = run_batch(output=tmp_path / "answers", **asked)
    assert (summary.num_answered, summary.num_failed) == (3, 0)
    rows = read_folder(tmp_path / "answers")
    assert {row["id"]: row["text"] for row in rows} == expected
    assert len(rows) == 3
    with pytest.raises(ValueError, match="prompt was 'read' and is now 'copy'"):
        run_batch(output=tmp_path / "answers", **asked | {"prompt": "copy"})


def test_a_line_with_a_place_and_no_image_is_wrong(llm, tmp_path):
    """A column of another name than `images` is data, also if it names an image."""
    lines = [{"id": 1, "prompt": f"{MARK}x", "image": "a.png"}, {"id": 2, "prompt": "x", "image": "a.png"}]
    lines += [{"id": 3, "prompt_token_ids": [IMAGE]}, {"id": 4, "messages": [{"role": "user", "content": MARK}]}]
    file = write_lines(tmp_path / "lines.jsonl", lines)
    check = check_batch(file, llm, **OPTIONS)
    assert (check.num_lines, check.num_failed) == (4, 3)
    summary = run_batch(file, tmp_path / "answers", llm, **OPTIONS)
    assert (summary.num_answered, summary.num_failed) == (1, 3)
    (row,) = read_folder(tmp_path / "answers")
    assert (row["id"], row["image"]) == (2, "a.png")
    errors = read_lines(tmp_path / "answers" / "_errors.jsonl")
    assert all("1 place for images, and it has no image" in error["error"] for error in errors)


def test_a_folder_that_has_changed_is_another_job(llm, scans, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "a.png").write_bytes((scans / "a.png").read_bytes())
    asked = {"input": None, "model": llm, "images": f"{folder}/*.png", "prompt": "read"} | OPTIONS
    run_batch(output=tmp_path / "answers", **asked)
    (folder / "a.png").write_bytes((scans / "b.png").read_bytes())
    with pytest.raises(ValueError, match="the input images has changed"):
        run_batch(output=tmp_path / "answers", **asked)


@pytest.mark.parametrize("output", ["answers", "answers.jsonl"])
def test_an_image_that_has_failed_may_be_replaced(llm, scans, tmp_path, output):
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes((scans / name).read_bytes())
    (folder / "b.png").write_bytes(b"no image")
    (folder / "c.png").write_bytes(b"none either")
    asked = {"input": None, "model": llm, "images": f"{folder}/*.png", "prompt": "read"} | OPTIONS
    output = tmp_path / output
    assert run_batch(output=output, **asked)[1:3] == (1, 2)
    (folder / "b.png").write_bytes((scans / "b.png").read_bytes())
    with pytest.raises(ValueError, match=r"changed: b\.png differs; retry_errors \(--retry-errors\) tries it again;"):
        run_batch(output=output, **asked)
    # An answered image may not change, whatever else has.
    answered = (folder / "a.png").read_bytes()
    (folder / "a.png").write_bytes((scans / "b.png").read_bytes())
    with pytest.raises(ValueError, match=r"the input images has changed: a\.png differs, b\.png differs; choose"):
        run_batch(output=output, **asked, retry_errors=True)
    (folder / "a.png").write_bytes(answered)
    (folder / "c.png").rename(tmp_path / "c.png")
    with pytest.raises(ValueError, match=r"changed: b\.png differs, c\.png is gone; choose"):
        run_batch(output=output, **asked, retry_errors=True)
    (tmp_path / "c.png").rename(folder / "c.png")
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        run_batch(output=output, **asked, retry_errors=True)
    assert run_batch(output=output, **asked)[1:3] == (2, 1)
    rows = read_lines(output) if output.is_file() else read_folder(output)
    assert sorted(row["id"] for row in rows) == ["a.png", "b.png"]
    (folder / "b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"changed: b\.png differs; choose"):
        run_batch(output=output, **asked, retry_errors=True)


def test_a_folder_of_an_earlier_version_gets_a_fingerprint_of_each_image(llm, scans, tmp_path):
    asked = {"input": None, "model": llm, "images": f"{scans}/*.png", "prompt": "read"} | OPTIONS
    run_batch(output=tmp_path / "answers", **asked)
    kept = tmp_path / "answers" / "_images.jsonl"
    before = kept.read_text()
    kept.unlink()
    run_batch(output=tmp_path / "answers", **asked)
    assert kept.read_text() == before
    kept.write_text("{}\n")
    manifest = tmp_path / "answers" / "_manifest.json"
    manifest.write_text(manifest.read_text().replace('"fingerprint": "', '"fingerprint": "0', 1))
    with pytest.raises(ValueError, match=r"_images\.jsonl: is damaged: KeyError\('name'\)"):
        run_batch(output=tmp_path / "answers", **asked)


def test_a_job_of_lines_with_images(llm, scans, expected, tmp_path):
    parts = ask({"type": "image", "image": "a.png"})
    lines = [
        {"id": 1, "messages": parts},
        {"custom_id": "2", "body": {"messages": parts, "max_tokens": 6, "ignore_eos": True}},
        {"id": 3, "messages": [{"role": "user", "content": "read"}], "images": ["inner/c.png"], "topic": "t"},
        {"id": 4, "messages": ask({"type": "image", "image": "../secret.png"})},
        {"id": 5, "prompt": "read"},
    ]
    file = write_lines(scans / "lines.jsonl", lines)
    assert check_batch(file, llm, **OPTIONS).num_images == 3
    summary = run_batch(file, tmp_path / "answers", llm, **OPTIONS)
    assert (summary.num_answered, summary.num_failed) == (4, 1)
    rows = {str(row.get("custom_id", row["id"])): row for row in by_id(read_folder(tmp_path / "answers"))}
    assert rows["1"]["text"] == expected["a.png"]
    assert rows["2"]["response"]["body"]["choices"][0]["message"]["content"] == expected["a.png"]
    assert (rows["3"]["text"], rows["3"]["topic"]) == (expected["inner/c.png"], "t")
    assert "images" not in rows["3"]
    (error,) = read_lines(tmp_path / "answers" / "_errors.jsonl")
    assert "lies outside the folder" in error["error"]


@pytest.mark.slow
def test_the_reading_process_reads_images(path, scans, expected, tmp_path):
    """From the command line, with both processes."""
    command = [sys.executable, "-m", "nanovllm", "run-batch", "--images", f"{scans}/*.png", "--prompt", "read"]
    command += ["-o", str(tmp_path / "answers"), "--model", str(path), "--device", "cpu", "--max-model-len", "300"]
    command += ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--kvcache-gib", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    names = ("a.png", "b.png")
    assert {row["id"]: row["text"] for row in read_folder(tmp_path / "answers")} == {n: expected[n] for n in names}


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(llm, tmp_path_factory):
    for name in ("starlette", "uvicorn", "openai"):
        pytest.importorskip(name, reason="needs the extra serve and openai")
    from served import Served

    served = Served(llm, tmp_path_factory.mktemp("batches"))
    yield served
    served.end()


@pytest.fixture
def client(server):
    return server.client


def test_the_server_reads_images_that_requests_hold(client, scans, expected):
    url = f"data:image/png;base64,{base64.b64encode((scans / 'b.png').read_bytes()).decode()}"
    options = {"temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    messages = ask({"type": "image_url", "image_url": {"url": url}})
    answer = client.chat.completions.create(model="tiny", messages=messages, **options)
    assert answer.choices[0].message.content == expected["b.png"]
    text = client.chat.completions.create(model="tiny", messages=ask(), **options)
    assert answer.usage.prompt_tokens == text.usage.prompt_tokens + 8 + 2  # its rows, between two marks
    parts = client.chat.completions.create(model="tiny", messages=messages, stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected["b.png"]


def test_the_server_refuses_a_place_without_an_image(client):
    import openai

    said = "1 place for images, and it has no image"
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(model="tiny", prompt=f"{MARK}x", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": MARK}], max_tokens=1)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/etc/hostname", "files are not read here"),
        ("file:///etc/hostname", "files are not read here"),
        ("http://169.254.169.254/latest/meta-data", "allow_remote"),
        ("data:image/png;base64,AAAA", "it is no image"),
    ],
)
def test_the_server_reads_no_others_by_default(client, url, said):
    import openai

    messages = ask({"type": "image_url", "image_url": {"url": url}})
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="tiny", messages=messages)


def test_completions_of_the_server_take_no_images(client):
    import openai

    with pytest.raises(openai.BadRequestError, match="images"):
        client.completions.create(model="tiny", prompt="x", max_tokens=1, extra_body={"images": ["data:,"]})


def test_a_body_has_room_for_the_largest_image(client):
    """20 MiB of base64, and so 15 of a file, by the default rules: 50."""
    import openai

    def ask_of(num_characters):
        url = "data:image/png;base64," + "A" * num_characters
        client.chat.completions.create(model="tiny", messages=ask({"type": "image_url", "image_url": {"url": url}}))

    with pytest.raises(openai.BadRequestError, match="it is no image"):
        ask_of(20 << 20)
    said = rf"more than {2**24 + 69905068} bytes, which follow from max_image_mib \(--max-image-mib\)"
    with pytest.raises(openai.APIStatusError, match=said) as found:
        ask_of(84 << 20)
    assert found.value.status_code == 413


def test_the_server_limits_the_images_of_a_request(path, capsys):
    assert main(["serve", str(path), "--max-images", "0"]) == 2
    assert "max_images=0: must be" in capsys.readouterr().err


def test_batches_read_images_by_the_rules_of_the_server(server, scans, expected, monkeypatch):
    from served import request

    def line(i, url):
        messages = ask({"type": "image_url", "image_url": {"url": url}})
        return request(i, "/v1/chat/completions", messages=messages, max_tokens=6)

    data = f"data:image/png;base64,{base64.b64encode((scans / 'a.png').read_bytes()).decode()}"
    lines = [line(0, data), line(1, "b.png"), line(2, "http://127.0.0.1/a.png"), line(3, data)]
    found = answers_of_batch(server, lines)
    assert [found[f"line-{i}"] for i in (0, 3)] == [expected["a.png"]] * 2
    assert "files are not read here" in found["line-1"]
    assert "allow_remote" in found["line-2"]
    monkeypatch.setattr(server.runner, "_image_rules", ImageRules(image_root=str(scans)))
    lines = [line(0, "b.png"), line(1, "../secret.png"), line(2, "inner/c.png")]
    found = answers_of_batch(server, lines)
    assert [found[f"line-{i}"] for i in (0, 2)] == [expected["b.png"], expected["inner/c.png"]]
    assert "lies outside the folder" in found["line-1"]


def answers_of_batch(server, lines) -> dict[str, str]:
    """By the ids of the lines, the text or the error."""
    batch = server.ended(server.start(lines, "/v1/chat/completions"))
    assert (batch.status, batch.request_counts.total) == ("completed", len(lines))
    good, wrong = server.lines(batch.output_file_id), server.lines(batch.error_file_id)
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in good}
    return found | {row["custom_id"]: row["response"]["body"]["error"]["message"] for row in wrong}


# -- docs/images.md ----------------------------------------------------------------------------------------------------


def test_the_examples_of_the_page_run(llm, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "images.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert code.count('LLM("Qwen/Qwen3-VL-2B-Instruct")') == 1
    names = {"tiny": llm}
    exec(code.replace('LLM("Qwen/Qwen3-VL-2B-Instruct")', "tiny"), names)
    pages, answer, size = capsys.readouterr().out.split("\n", 1)[0], names["answer"], names["image"]
    assert pages == "1 pages"
    # What it says is drawn, and may be nothing.
    (blind,) = llm.chat([{"role": "user", "content": "What is the total?"}], greedy(1), use_tqdm=False)
    assert answer["token_ids"]
    assert answer["num_prompt_tokens"] > blind["num_prompt_tokens"] + 10, "the page is in the prompt"
    assert (size.width, size.height) == (1000, 1400)
    (row,) = read_folder(tmp_path / "text")
    assert row["id"] == "page-01.png"
