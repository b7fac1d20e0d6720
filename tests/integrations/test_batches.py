"""/v1/files and /v1/batches, called by OpenAI's client: answers, errors, files, pages, and what outlives a server."""

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import assert_idle, make_ascii_checkpoint, make_llm
from job_files import ReadHere
from served import MODEL, SECONDS, as_lines, request, served, wait_for

from nanovllm import SamplingParams
from nanovllm.cli import main
from nanovllm.jobs import work
from nanovllm.openai_format.pooled_calls import CALLS

REASON = "needs OpenAI's client and the server's packages: pip install '.[test]'"
openai = pytest.importorskip("openai", reason=REASON)
pytest.importorskip("uvicorn", reason=REASON)
pytest.importorskip("starlette", reason=REASON)

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = make_ascii_checkpoint(tmp_path_factory.mktemp("batches"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shared_llm(path):
    options = {"max_model_len": 400, "max_num_seqs": 16, "num_kvcache_blocks": 64, "kvcache_block_size": 16}
    with make_llm(path, skip_tokenizer_init=False, **options) as llm:
        yield llm


@pytest.fixture(autouse=True)
def quick_reader(monkeypatch):
    from nanovllm.integrations.serving.batches import runner

    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 600)  # so that no second attempt hides an error


@pytest.fixture(scope="module")
def shared_server(shared_llm, tmp_path_factory):
    with served(shared_llm, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(shared_server, llm):
    """A server with batches of earlier tests, but without files."""
    yield shared_server
    wait_for(llm.is_finished)
    for file in shared_server.store.files():
        shared_server.store.delete_file(file.id)


@pytest.fixture
def fresh_server(llm, tmp_path):
    with served(llm, tmp_path / "batches") as server:
        yield server


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["/v1/completions", CHAT])
def test_a_batch_from_file_to_answers(server, endpoint):
    rows = [request(i, endpoint) for i in range(20)]
    file = server.upload(rows, "my lines.jsonl")
    assert (file.filename, file.purpose, file.bytes) == ("my lines.jsonl", "batch", len(as_lines(rows)))
    batch = server.client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )
    assert re.fullmatch("batch_[0-9a-f]{32}", batch.id)
    assert batch.expires_at - batch.created_at in (86399, 86400, 86401)
    batch = server.ended(batch)
    assert batch.status == "completed", batch
    assert (batch.metadata, batch.model, batch.endpoint) == ({"a": "b"}, MODEL, endpoint)
    assert (batch.errors, batch.error_file_id) == (None, None)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    answers = {row["custom_id"]: row["response"] for row in server.lines(batch.output_file_id)}
    assert sorted(answers) == sorted(row["custom_id"] for row in rows)
    assert {answer["status_code"] for answer in answers.values()} == {200}
    calls = server.client.chat.completions if endpoint == CHAT else server.client.completions
    for row in rows[:3]:
        body = dict(row["body"])
        live = calls.create(**{k: v for k, v in body.items() if k != "ignore_eos"}, extra_body={"ignore_eos": True})
        answer = answers[row["custom_id"]]["body"]
        assert answer["choices"] == live.model_dump(exclude_unset=True)["choices"], "as a live request is answered"
        assert answer["model"] == MODEL
    usages = [answer["body"]["usage"] for answer in answers.values()]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == 20 * 4
    assert batch.usage.total_tokens == batch.usage.input_tokens + 80
    output = server.client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert not server.store.job_folder(batch.id).exists(), "the answers are kept once"


def test_a_deterministic_engine_answers_in_openais_format_alone(path, tmp_path):
    options = {"max_model_len": 400, "num_kvcache_blocks": 64, "kvcache_block_size": 16, "deterministic": True}
    with make_llm(path, skip_tokenizer_init=False, **options) as llm, served(llm, tmp_path / "batches") as server:
        file = server.upload([request(i, CHAT) for i in range(3)])
        batch = server.client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch = server.ended(batch)
        rows = server.lines(batch.output_file_id)
    assert [sorted(row) for row in rows] == [["custom_id", "error", "id", "response"]] * 3


def test_wrong_bodies_are_errors_of_their_lines(server):
    rows = [
        request(0),
        request(1, temperature=-1),
        request(2, prompt="a" * 5000),
        request(3, stream=True),
        request(4, n=3, logprobs=1),
        request(5, prompt_logprobs=1),
    ]
    batch = server.ended(server.start(rows))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 2, 4)
    answers = {row["custom_id"]: row["response"]["body"] for row in server.lines(batch.output_file_id)}
    assert sorted(answers) == ["line-0", "line-4"]
    assert len(answers["line-4"]["choices"]) == 3
    assert len(answers["line-4"]["choices"][2]["logprobs"]["tokens"]) == 4
    errors = {row["custom_id"]: row for row in server.lines(batch.error_file_id)}
    for i, word in ((1, "temperature=-1"), (2, "tokens"), (3, "stream"), (5, "prompt_logprobs")):
        row = errors.pop(f"line-{i}")
        assert (row["error"], row["response"]["status_code"]) == (None, 400)
        assert word in row["response"]["body"]["error"]["message"]
        assert row["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert not errors


def test_a_batch_whose_lines_all_fail(server):
    batch = server.ended(server.start([request(0, n=0), request(1, top_p=2)]))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert [row["custom_id"] for row in server.lines(batch.error_file_id)] == ["line-0", "line-1"]


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "line-0"}, "duplicate_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": CHAT}, "invalid_url", "url"),
        ({"body": None}, "missing_required_parameter", "body"),
        ({"body": "text"}, "invalid_body", "body"),
        ({"body": {"model": "other", "prompt": "a"}}, "model_not_found", "body.model"),
        ('{"custom_id": "line-1", ', "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_wrong_line_fails_the_batch(server, change, code, param):
    wrong = change if isinstance(change, str) else request(1) | change
    batch = server.ended(server.start([request(0), "", wrong, request(2)]))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    (error,) = batch.errors.data
    assert (error.code, error.line, error.param) == (code, 3, param)
    assert batch.failed_at is not None


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"\x1f\x8b\x08gz", "invalid_file"), (b"[\n{}]", "invalid_file")],
    ids=["empty", "blank", "gzip", "a JSON array"],
)
def test_a_file_that_has_no_lines(server, content, code):
    file = server.client.files.create(file=("x.jsonl", content), purpose="batch")
    options = {"endpoint": CHAT, "completion_window": "24h"}
    batch = server.ended(server.client.batches.create(input_file_id=file.id, **options))
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == [code]
    assert str(server.store.path) not in batch.errors.data[0].message


def test_many_wrong_lines_show_the_first_hundred_errors(server):
    batch = server.ended(server.start([request(i) | {"method": "PUT"} for i in range(150)]))
    assert [error.line for error in batch.errors.data] == list(range(1, 101))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint='/v1/responses': must be one of"),
        ({"completion_window": "1w"}, "completion_window='1w': must be hours or days"),
        ({"completion_window": "99999d"}, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, "there is no such file"),
        ({"input_file_id": "../../etc/passwd"}, "there is no such file"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after: cannot be served"),
        ({"extra_body": {"nonsense": 1}}, "nonsense: is no parameter of a batch"),
        ({"extra_body": {"endpoint": None}}, "endpoint=None"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_wrong_batches(server, options, message):
    file = server.upload([request(0)])
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | options
    before = len(server.store.batches())
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        server.client.batches.create(**given)
    assert len(server.store.batches()) == before


def test_batches_that_are_not_there(server):
    for call in (server.client.batches.retrieve, server.client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_" + "0" * 32)
        with pytest.raises(openai.NotFoundError):
            call("..%2f..")


def test_answers_are_no_input(server):
    batch = server.ended(server.start([request(0)]))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        server.client.batches.create(
            input_file_id=batch.output_file_id, endpoint="/v1/completions", completion_window="24h"
        )


def test_the_example_of_the_page(server, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("http://127.0.0.1:8000/v1", server.url).replace("Qwen/Qwen3-0.6B", MODEL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace("time.sleep(5)", "time.sleep(0.05)"), names)
    assert sorted(names["answers"]) == sorted(names["rivers"])
    assert names["batch"].status == "completed"


# -- one after the other, cancelled, expired ---------------------------------------------------------------------------


def slow(count, first=0):
    """Lines that take some seconds."""
    return [request(i, max_tokens=300) for i in range(first, first + count)]


def in_files(server, batch):
    """Ids of the answers, and {id: code} of the errors without a response."""
    answers = server.lines(batch.output_file_id) if batch.output_file_id else []
    errors = server.lines(batch.error_file_id) if batch.error_file_id else []
    assert all(row["response"] is None for row in errors)
    return [row["custom_id"] for row in answers], {row["custom_id"]: row["error"]["code"] for row in errors}


def test_a_batch_that_is_cancelled(server):
    rows = [request(i) for i in range(10)] + slow(200, 10)
    first, second = server.start(rows), server.start(slow(5))
    wait_for(lambda: server.client.batches.retrieve(first.id).request_counts.completed >= 10)
    assert server.client.batches.retrieve(second.id).request_counts.completed == 0, "one at a time"
    assert server.client.batches.cancel(second.id).status == "cancelled", "at once, because it has not begun"
    assert server.client.batches.cancel(first.id).status == "cancelling"
    with suppress(openai.BadRequestError):  # It may have ended since.
        assert server.client.batches.cancel(first.id).status == "cancelling", "a second time"
    batch = server.ended(first)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    answers, errors = in_files(server, batch)
    assert len(answers) >= 10
    assert set(errors.values()) == {"batch_cancelled"}
    assert sorted([*answers, *errors]) == sorted(row["custom_id"] for row in rows), "each line in one of the files"
    counts = batch.request_counts
    assert (counts.completed, counts.failed) == (len(answers), len(errors))
    with pytest.raises(openai.BadRequestError, match="is cancelled, and cannot be cancelled"):
        server.client.batches.cancel(first.id)
    wait_for(server.llm.is_finished)


def test_a_batch_that_expires(server, monkeypatch):
    rows = [request(i) for i in range(5)] + slow(100, 5)
    first, second = server.start(rows, window="1h"), server.start(slow(1), window="2h")
    wait_for(lambda: server.client.batches.retrieve(first.id).request_counts.completed >= 5)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3 * 3600)
    assert server.client.batches.retrieve(second.id).status == "expired"
    batch = server.ended(first)
    assert (batch.status, batch.expired_at >= batch.expires_at) == ("expired", True)
    answers, errors = in_files(server, batch)
    assert set(errors.values()) == {"batch_expired"}
    assert sorted([*answers, *errors]) == sorted(row["custom_id"] for row in rows)


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_come_back_as_they_were_sent(server):
    content = bytes(range(256)) * 1000 + b"\r\n--\r\n--x\r\n"
    file = server.client.files.create(file=('../../a "b".jsonl', content), purpose="batch")
    assert server.client.files.content(file.id).content == content
    found = server.client.files.retrieve(file.id)
    assert found.bytes == len(content)
    assert found.filename == '../../a "b".jsonl', "a name, and no path"
    stored = {path.name for path in (server.store.path / "files").iterdir()}
    assert stored == {f"{file.id}.jsonl", f"{file.id}.json"}
    assert server.client.files.delete(file.id).deleted
    assert not list((server.store.path / "files").iterdir())
    for call in (server.client.files.retrieve, server.client.files.content, server.client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_a_file_in_use_is_not_deleted(server):
    batch = server.until(server.start(slow(50)), "in_progress")
    with pytest.raises(openai.BadRequestError, match=f"is the input of {batch.id}"):
        server.client.files.delete(batch.input_file_id)
    server.client.batches.cancel(batch.id)
    server.ended(batch)
    assert server.client.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"purpose": "fine-tune"}, 400, "purpose='fine-tune': must be 'batch'"),
        ({"expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "expires_after: cannot be served"),
        ({"extra_body": {"more": "x"}}, 400, "'more': is no field"),
        ({"file": ("a.jsonl", b"x" * (1 << 20) + b"y")}, 413, "--batch-file-max-mib"),
        ({"file": ("a.jsonl", b"x" * (2 << 20))}, 413, "--batch-file-max-mib"),
    ],
    ids=["purpose", "expiry", "field", "large", "larger"],
)
def test_wrong_uploads_leave_nothing(server, options, status, message):
    with pytest.raises(openai.APIStatusError, match=message) as found:
        server.client.files.create(**{"file": ("a.jsonl", b"{}"), "purpose": "batch"} | options)
    assert found.value.status_code == status
    assert not list((server.store.path / "files").iterdir())
    assert server.client.files.list().data == []


def test_all_files_together_are_limited(llm, tmp_path):
    with served(llm, tmp_path, max_bytes=100_000) as server:
        kept = [server.client.files.create(file=("a.jsonl", b"x" * 40_000), purpose="batch") for _ in range(2)]
        with pytest.raises(openai.APIStatusError, match="--batches-max-gib") as found:
            server.client.files.create(file=("a.jsonl", b"x" * 40_000), purpose="batch")
        assert found.value.status_code == 413
        server.client.files.delete(kept[0].id)
        server.client.files.create(file=("a.jsonl", b"x" * 40_000), purpose="batch")
        assert len(list((tmp_path / "files").iterdir())) == 4


def test_pages(fresh_server):
    server = fresh_server
    files = [server.upload([request(i)]) for i in range(7)]
    options = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batches = [server.client.batches.create(input_file_id=file.id, **options) for file in files]
    list_files, list_batches = server.client.files.list, server.client.batches.list
    newest = [file.id for file in files[::-1]]
    for batch in batches:
        server.ended(batch)

    def ids(page, most=20):
        """Of all pages; a server that repeats itself would give them for ever."""
        return [each.id for each, _ in zip(page, range(most), strict=False)]

    assert ids(list_batches(limit=3)) == [batch.id for batch in batches[::-1]]
    assert ids(list_batches()) == [batch.id for batch in batches[::-1]]
    assert ids(list_files(purpose="batch", limit=2)) == newest
    assert ids(list_files(purpose="batch", order="asc")) == newest[::-1]
    assert len(ids(list_files(purpose="batch_output"))) == 7
    page = list_batches(limit=3, after=batches[3].id)
    assert ([batch.id for batch in page.data], page.has_more) == ([batch.id for batch in batches[2::-1]], False)
    page = list_batches(limit=3)
    assert (len(page.data), page.has_more, page.has_next_page()) == (3, True, True)
    for wrong in ({"limit": 0}, {"limit": 101}, {"after": "batch_x"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            list_batches(**wrong)


# -- who may use it, and clients that leave ----------------------------------------------------------------------------


def send(server, method, path, headers=(), body=b"", kind="application/json"):
    """(status, JSON or text) of a request as no client would send it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    connection.request(method, path, body, {"Content-Type": kind, **dict(headers)})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if text.startswith("{") else text


ROUTES = [
    *(("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/x"), ("DELETE", "/v1/files/x")),
    *(("GET", "/v1/files/x/content"), ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/batches/x")),
    *(("POST", "/v1/batches/x/cancel"), ("POST", "/v1/completions"), ("POST", CHAT), ("GET", "/v1/models")),
    *(("GET", "/health"), ("GET", "/metrics"), ("GET", "/nothing")),
    *(("POST", url) for call in CALLS for url in call.urls),
]


def test_every_route_needs_the_key(llm, tmp_path):
    with served(llm, tmp_path, key="secret") as server:
        assert [send(server, *route)[0] for route in ROUTES] == [401] * len(ROUTES)
        assert send(server, "GET", "/metrics", {"Authorization": "Bearer secret"})[0] == 200
        assert server.client.files.list().data == []


def test_no_route_serves_a_foreign_page(server):
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        assert [send(server, *route, headers)[0] for route in ROUTES] == [403] * len(ROUTES)
    # What a form of any page can send, without asking.
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
    upload = "POST", "/v1/files", {"Origin": "null"}, form, "multipart/form-data; boundary=b"
    assert send(server, *upload)[0] == 403
    assert server.store.files() == []
    assert send(server, *upload[:2], {}, *upload[3:])[0] == 200


def test_a_page_in_a_file_is_not_shown(server):
    file = server.client.files.create(file=("page.html", b"<script>1</script>"), purpose="batch")
    headers = server.client.files.with_raw_response.content(file.id).headers
    assert headers["content-type"] == "application/octet-stream"
    assert (headers["x-content-type-options"], headers["content-disposition"]) == ("nosniff", "attachment")


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "text/plain"])
def test_other_bodies_for_files(server, kind):
    status, body = send(server, "POST", "/v1/files", {}, b"{}", kind)
    assert status == 415
    assert "multipart/form-data" in body["error"]["message"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n--b--", "file: is missing"),
        (b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\n{}\r\n--b--", "purpose=none"),
        (b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch", "it has no end"),
        (b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\n" + b"x" * 5000 + b"\r\n--b--", "more than 4096"),
        (b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\n{}\r\n" * 2 + b"--b--", "the form has it twice"),
    ],
    ids=["no file", "no purpose", "no end", "long purpose", "two files"],
)
def test_forms_that_lack_something(server, form, message):
    status, body = send(server, "POST", "/v1/files", {}, form, "multipart/form-data; boundary=b")
    assert (status, message in body["error"]["message"]) == (400, True), body
    assert not list((server.store.path / "files").iterdir())


def test_a_client_that_leaves_in_the_middle_of_a_file(server):
    folder = server.store.path / "files"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        start = "--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n"
        connection.sendall(f"{head}Content-Length: 900000\r\n\r\n{start}".encode() + b"x" * 100_000)
        wait_for(lambda: list(folder.iterdir()))
    wait_for(lambda: not list(folder.iterdir()))


def test_options_of_the_command(capsys):
    for option in ("--batch-file-max-mib", "--batches-max-gib"):
        with pytest.raises(SystemExit):
            main(["serve", "model", option, "5"])
        assert f"argument {option}: needs --batches" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["serve", "model", "--batches", "x", option, "0"])
        assert "'0' is no size" in capsys.readouterr().err


# -- live requests go first --------------------------------------------------------------------------------------------


def test_live_requests_are_answered_while_a_batch_fills_the_engine(server):
    batch = server.start(slow(100))
    wait_for(lambda: server.llm.stats()["running"] >= 8)
    for i in range(3):
        answer = server.client.completions.create(model=MODEL, prompt=f"live {i}", max_tokens=5, n=4)
        assert len(answer.choices) == 4
    found = server.client.batches.retrieve(batch.id)
    assert found.request_counts.completed < 60, "lines had to wait"
    server.client.batches.cancel(batch.id)
    server.ended(batch)


# -- what outlives a server --------------------------------------------------------------------------------------------


def test_a_batch_goes_on_after_the_end_of_its_server(llm, tmp_path):
    rows = [request(i) for i in range(10)] + [request(i, max_tokens=40) for i in range(10, 150)]
    with served(llm, tmp_path) as server:
        batch, waiting = server.start(rows), server.start([request(0)])
        wait_for(lambda: server.client.batches.retrieve(batch.id).request_counts.completed >= 10)
    assert_idle(llm)
    parts = {part: part.read_text() for part in server.store.job_folder(batch.id).glob("part-*.jsonl")}
    assert parts, "what was answered is kept"
    with served(llm, tmp_path) as server:
        assert [each.id for each in server.client.batches.list()] == [waiting.id, batch.id]
        found = server.ended(batch)
        assert (found.status, found.metadata, found.request_counts.completed) == ("completed", None, 150)
        text = server.client.files.content(found.output_file_id).text
        assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == sorted(
            row["custom_id"] for row in rows
        )
        assert all(part in text for part in parts.values()), "and is not computed again"
        assert server.ended(waiting).status == "completed"


def test_the_end_waits_for_the_step_under_way(llm):
    """So that whoever has the engine finds it idle."""
    from nanovllm.integrations.serving.engine_loop import EngineLoop, Submission

    async def begin_and_end():
        loop = EngineLoop(llm)
        loop.start()
        submission = Submission([[5, 6, 7]] * 3, SamplingParams(max_tokens=150, ignore_eos=True), None)
        loop.submit(submission)
        for _ in range(3):
            await asyncio.wait_for(submission.events.get(), SECONDS)
        loop.stop()

    asyncio.run(begin_and_end())
    assert_idle(llm)


@pytest.mark.parametrize("moment", ["answers are written", "a file is known", "both files are known"])
def test_a_server_that_dies_while_it_makes_the_files(llm, tmp_path, moment, monkeypatch):
    """The next one makes the same files, and no others."""
    from nanovllm.integrations.serving.batches import runner as module
    from nanovllm.integrations.serving.batches.store import BatchStore

    keep, num_kept = BatchStore.keep, []

    def dying(store, file):
        if file.purpose == "batch_output":
            num_kept.append(file.id)
            if moment != "both files are known" and len(num_kept) == 1 + (moment == "a file is known"):
                raise OSError("killed")
        return keep(store, file)

    monkeypatch.setattr(BatchStore, "keep", dying)
    monkeypatch.setattr(module, "RETRY_SECONDS", 600)
    if moment == "both files are known":
        update = BatchStore.update

        def fail(store, batch_id, change):
            if len(num_kept) == 2:
                raise OSError("killed")
            return update(store, batch_id, change)

        monkeypatch.setattr(BatchStore, "update", fail)
    rows = [request(0), request(1, temperature=-1), request(2)]
    with served(llm, tmp_path) as server:
        batch = server.start(rows)
        wait_for(lambda: len(num_kept) == 2 - (moment == "answers are written"))
        found = server.client.batches.retrieve(batch.id)
        assert (found.status, found.output_file_id) == ("finalizing", None)
    monkeypatch.undo()
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    with served(llm, tmp_path) as server:
        found = server.ended(batch)
        assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", 2, 1)
        assert [row["custom_id"] for row in server.lines(found.error_file_id)] == ["line-1"]
        assert len(server.lines(found.output_file_id)) == 2
        assert len(server.client.files.list().data) == 3
        assert len(list((tmp_path / "files").iterdir())) == 6


def test_leftovers_of_a_killed_server(llm, tmp_path):
    with served(llm, tmp_path) as server:
        kept = server.upload([request(0)])
    files = tmp_path / "files"
    name = "file-" + "a" * 32
    for end in (".upload", ".jsonl", ".tmp"):
        (files / f"{name}{end}").write_bytes(b"half of it")
    (files / "somebody else's.upload").write_bytes(b"")
    (files / f"file-{'b' * 32}.json").write_text("{damaged")
    with served(llm, tmp_path) as server:
        assert [file.id for file in server.client.files.list()] == [kept.id]
        left = {path.name for path in files.iterdir()}
    assert left == {f"{kept.id}.json", f"{kept.id}.jsonl", "somebody else's.upload", f"file-{'b' * 32}.json"}


def test_one_server_a_folder(llm, tmp_path, monkeypatch):
    from nanovllm.integrations.serving.batches import store

    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.1)
    with served(llm, tmp_path), pytest.raises(ValueError, match="another server works on this folder"):
        store.BatchStore(tmp_path, 1, 1).__enter__()


def test_a_disk_that_is_full_for_a_while(llm, tmp_path, monkeypatch):
    from nanovllm.integrations.serving.batches import runner
    from nanovllm.jobs.part_writer import PartWriter

    write, failures = PartWriter.write, list[list[str]]()

    def failing(self, answers, errors):
        if answers and len(failures) < 2:
            failures.append(answers)
            raise OSError(28, "No space left on device")
        write(self, answers, errors)

    monkeypatch.setattr(PartWriter, "write", failing)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.05)
    with served(llm, tmp_path) as server:
        batch = server.ended(server.start([request(i) for i in range(30)]))
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert len({row["custom_id"] for row in server.lines(batch.output_file_id)}) == 30
    assert len(failures) == 2


def test_a_disk_that_takes_no_file(server, monkeypatch):
    from nanovllm.integrations.serving.batches.store import Upload

    def fail(upload, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Upload, "write", fail)
    with pytest.raises(openai.InternalServerError, match="the disk does not take it: No space left on device"):
        server.upload([request(0)])
    assert not list((server.store.path / "files").iterdir())


def test_another_model_than_before(llm, tmp_path):
    """Its answers so far are kept, and not mixed with another model's."""
    with served(llm, tmp_path) as server:
        batch = server.start([request(i) for i in range(5)] + slow(100, 5))
        wait_for(lambda: server.client.batches.retrieve(batch.id).request_counts.completed >= 5)
    manifest = Path(server.store.job_folder(batch.id) / "_manifest.json")
    row = json.loads(manifest.read_text())
    row["model_files"] = dict.fromkeys(row["model_files"], "0" * 32)
    manifest.write_text(json.dumps(row))
    with served(llm, tmp_path) as server:
        found = server.ended(batch)
        assert found.status == "failed"
        assert "its model was another one" in found.errors.data[0].message
        answers, errors = in_files(server, found)
        assert len(answers) >= 5
        assert set(errors.values()) == {"batch_failed"}
        assert len(answers) + len(errors) == 105


def start_command(path, folder, *options):
    """`nanovllm serve` as a process, and a client for it."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "NANOVLLM_API_KEY": "secret"}
    engine = ["--device", "cpu", "--max-model-len", "400", "--dtype", "float32", "--port", "0"]
    command = [sys.executable, "-m", "nanovllm", "serve", str(path), *engine, "--batches", str(folder), *options]
    process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    line = process.stdout.readline()
    if (found := re.search(r"on (http://\S+)", line)) is None:
        raise AssertionError(line + process.communicate(timeout=SECONDS)[1])
    return process, openai.OpenAI(base_url=found[1], api_key="secret", max_retries=0, timeout=SECONDS)


def wait_until_done(client, batch_id, num_lines):
    """The batch when so many lines are answered, or all lines and its files are made."""

    def look():
        found = client.batches.retrieve(batch_id)
        is_done = found.request_counts.completed >= num_lines and (num_lines < 600 or found.status == "completed")
        return found if is_done else None

    return wait_for(look, SECONDS * 6)


@pytest.mark.nightly  # test_a_batch_goes_on_after_the_end_of_its_server ends a server in order, in a second.
def test_a_server_that_is_killed(path, tmp_path):
    """Twice, in the middle of a batch. Each line has one answer in the end."""
    rows = [request(i, max_tokens=120) for i in range(600)]
    batch_id, num_done = None, 0
    for is_last in (False, False, True):
        process, client = start_command(path, tmp_path, "--served-model-name", MODEL)
        try:
            if batch_id is None:
                file = client.files.create(file=("a.jsonl", as_lines(rows)), purpose="batch")
                options = {"endpoint": "/v1/completions", "completion_window": "24h"}
                batch_id = client.batches.create(input_file_id=file.id, **options).id
            found = wait_until_done(client, batch_id, 600 if is_last else num_done + 50)
            num_done = found.request_counts.completed
            assert found.status == ("completed" if is_last else "in_progress")
            if is_last:
                text = client.files.content(found.output_file_id).text
        finally:
            client.close()
            process.kill()
            process.communicate(timeout=SECONDS)
    assert (found.error_file_id, num_done) == (None, 600)
    ids = [json.loads(line)["custom_id"] for line in text.splitlines()]
    assert sorted(ids) == sorted(row["custom_id"] for row in rows)
