"""Batches of /v1/embeddings: their answers are those of live requests, and a model that cannot embed refuses them."""

import base64
import json
import threading

import numpy as np
import pytest
from checkpoints import assert_idle, make_ascii_checkpoint, make_llm
from job_files import ReadHere
from served import MODEL, served, wait_for
from served import request as completion
from vector_checkpoints import add_sentence_files, make_pooling_checkpoint

from nanovllm.jobs import work

REASON = "needs OpenAI's client and the server's packages: pip install '.[test]'"
openai = pytest.importorskip("openai", reason=REASON)
pytest.importorskip("uvicorn", reason=REASON)
pytest.importorskip("starlette", reason=REASON)

EMBEDDINGS, CHAT = "/v1/embeddings", "/v1/chat/completions"
TEXTS = ["a block is a row of slots", "a table names the blocks", "of a sequence"]
OPTIONS = {"max_model_len": 200, "max_num_seqs": 16, "num_kvcache_blocks": 64, "kvcache_block_size": 16}


@pytest.fixture(autouse=True)
def quick_reader(monkeypatch):
    from nanovllm.integrations.serving.batches import runner

    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 600)  # so that no second attempt hides an error


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """A model that generates, and embeds too."""
    path = make_ascii_checkpoint(tmp_path_factory.mktemp("generates"))
    with make_llm(path, skip_tokenizer_init=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """An embedding model as they are published: without a head, and with a text that is put before others."""
    path = make_pooling_checkpoint(tmp_path_factory.mktemp("embeds"), tokenizer=True)
    add_sentence_files(path, prompts={"document": "a block: "}, default_prompt_name="document")
    with make_llm(path, skip_tokenizer_init=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    path = make_pooling_checkpoint(tmp_path_factory.mktemp("classifies"), num_labels=3, tokenizer=True)
    with make_llm(path, skip_tokenizer_init=False, **OPTIONS) as llm:
        yield llm


def line(i, input, **body):
    return {"custom_id": f"line-{i}", "method": "POST", "url": EMBEDDINGS, "body": {"input": input} | body}


def vectors(server, batch):
    """{custom_id: float array [num_inputs, size]}, and the bodies of the answers."""
    rows = {row["custom_id"]: row["response"] for row in server.lines(batch.output_file_id)}
    assert {row["status_code"] for row in rows.values()} == {200}
    bodies = {name: row["body"] for name, row in rows.items()}
    return {name: np.array([each["embedding"] for each in body["data"]]) for name, body in bodies.items()}, bodies


@pytest.mark.parametrize("name", ["generator", "embedder"])
def test_answers_are_those_of_live_requests(name, request, tmp_path):
    llm = request.getfixturevalue(name)
    tokens = llm.get_tokenizer()(TEXTS[0])["input_ids"]
    inputs = [TEXTS[0], TEXTS, tokens, [tokens, TEXTS[1]], TEXTS * 20]
    rows = [line(i, each) for i, each in enumerate(inputs)]
    rows.append(line(5, TEXTS[:2], dimensions=8, model=MODEL, encoding_format="float"))
    with served(llm, tmp_path) as server:
        batch = server.ended(server.start(rows, EMBEDDINGS))
        assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None), batch
        assert (batch.endpoint, batch.request_counts.completed, batch.request_counts.total) == (EMBEDDINGS, 6, 6)
        found, bodies = vectors(server, batch)
        assert sorted(found) == [f"line-{i}" for i in range(6)]
        num_tokens = 0
        for row in rows:
            body, answer = {"model": MODEL} | row["body"], bodies[row["custom_id"]]
            live = server.client.embeddings.create(**body)
            np.testing.assert_allclose(found[row["custom_id"]], [each.embedding for each in live.data], atol=1e-5)
            assert [each["index"] for each in answer["data"]] == list(range(len(live.data)))
            assert (answer["object"], answer["model"]) == ("list", MODEL)
            assert answer["usage"] == live.usage.model_dump(exclude_unset=True)
            num_tokens += live.usage.prompt_tokens
        assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (
            *(num_tokens, 0),
            num_tokens,
        )
        assert found["line-5"].shape == (2, 8)


def test_base64(embedder, tmp_path):
    with served(embedder, tmp_path) as server:
        batch = server.ended(server.start([line(0, TEXTS[0], encoding_format="base64"), line(1, TEXTS[0])], EMBEDDINGS))
        rows = {row["custom_id"]: row["response"]["body"]["data"][0] for row in server.lines(batch.output_file_id)}
        packed = np.frombuffer(base64.b64decode(rows["line-0"]["embedding"]), "<f4")
        np.testing.assert_allclose(packed, rows["line-1"]["embedding"], atol=1e-6)


def test_wrong_bodies_are_errors_of_their_lines(generator, tmp_path):
    wrong = [
        (line(1, ""), "not empty"),
        (line(2, TEXTS, dimensions=0), "dimensions=0"),
        (line(3, TEXTS, dimensions=65), "dimensions=65: must be in 1..64"),
        (line(4, "a " * 300), "tokens"),
        (line(5, ["a", "a " * 300, "b"]), "input[1]: "),
        (line(6, TEXTS, pooling="mean"), "pooling='mean'"),
        (line(7, TEXTS, prompt_name="query"), "prompt_name='query'"),
        (line(8, TEXTS, temperature=0), "temperature=0: is unknown here"),
        (line(9, [1, 100_000]), "100000"),
    ]
    with served(generator, tmp_path) as server:
        batch = server.ended(server.start([line(0, TEXTS), *(row for row, _ in wrong), line(10, "b")], EMBEDDINGS))
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, len(wrong))
        assert sorted(vectors(server, batch)[0]) == ["line-0", "line-10"]
        errors = {row["custom_id"]: row["response"] for row in server.lines(batch.error_file_id)}
        for row, message in wrong:
            response = errors[row["custom_id"]]
            assert response["status_code"] == 400
            assert message in response["body"]["error"]["message"]
            assert "prompts[" not in response["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("name", "endpoint", "reason"),
    [
        ("classifier", EMBEDDINGS, "has a classification head with 3 labels here: it can classify()"),
        ("classifier", CHAT, "does not generate, because its task is 'classify'"),
        ("embedder", CHAT, "does not generate, because its task is 'embed': it can embed()"),
        ("embedder", "/v1/completions", "does not generate"),
    ],
)
def test_what_the_model_cannot_do_is_refused_at_once(name, endpoint, reason, request, tmp_path):
    with served(request.getfixturevalue(name), tmp_path) as server:
        with pytest.raises(openai.BadRequestError) as found:
            server.start([line(0, "a")], endpoint)
        message = found.value.body["message"]
        assert message.startswith(f"endpoint='{endpoint}': cannot be served by 'tiny': ")
        assert reason in message
        assert "sampling_params" not in message
        assert server.store.batches() == []


def test_a_server_with_another_model_than_before(generator, embedder, tmp_path, monkeypatch):
    """A batch that it cannot answer fails, and says why."""
    from nanovllm.integrations.serving.batches.runner import BatchRunner

    with monkeypatch.context() as patch:
        patch.setattr(BatchRunner, "_next", lambda self: None)
        with served(generator, tmp_path) as server:
            batch = server.until(server.start([completion(0)]), "in_progress")
    with served(embedder, tmp_path) as server:
        found = server.ended(batch)
        assert (found.status, found.output_file_id) == ("failed", None)
        assert "does not generate" in found.errors.data[0].message
        (row,) = server.lines(found.error_file_id)
        assert (row["custom_id"], row["error"]["code"]) == ("line-0", "batch_failed")


def test_embeddings_and_completions_of_batches_beside_live_requests(generator, tmp_path):
    with served(generator, tmp_path) as server:
        options = {"model": MODEL, "prompt": TEXTS[0], "max_tokens": 60, "temperature": 0}
        options["extra_body"] = {"ignore_eos": True}
        alone = server.client.completions.create(**options).choices[0].text
        rows = [line(i, [f"{text} {i}" for text in TEXTS]) for i in range(60)]
        first = server.start([completion(i, max_tokens=40) for i in range(30)])
        second = server.start(rows, EMBEDDINGS)
        texts, live = [], []
        calls = [
            threading.Thread(target=lambda: texts.append(server.client.completions.create(**options).choices[0].text)),
            threading.Thread(
                target=lambda: live.append(server.client.embeddings.create(model=MODEL, input=TEXTS * 10))
            ),
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join(60)
        assert texts == [alone]
        batches = [server.ended(first), server.ended(second)]
        assert [each.status for each in batches] == ["completed"] * 2
        assert [each.request_counts.completed for each in batches] == [30, 60]
        found, _ = vectors(server, batches[1])
        expected = generator.embed([text for row in rows for text in row["body"]["input"]], use_tqdm=False)
        whole = np.concatenate([found[row["custom_id"]] for row in rows])
        np.testing.assert_allclose(whole, [each["embedding"] for each in expected], atol=1e-5)
        same = generator.embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose(
            [each.embedding for each in live[0].data], [each["embedding"] for each in same] * 10, atol=1e-5
        )


def test_a_batch_goes_on_after_the_end_of_its_server(generator, tmp_path):
    rows = [line(i, [f"{i} {place} " * 12 for place in range(3)]) for i in range(400)]
    with served(generator, tmp_path) as server:
        batch = server.start(rows, EMBEDDINGS)
        wait_for(lambda: server.client.batches.retrieve(batch.id).request_counts.completed >= 20)
    assert_idle(generator)
    parts = [part.read_text() for part in server.store.job_folder(batch.id).glob("part-*.jsonl")]
    assert 20 <= sum(part.count("\n") for part in parts) < 400
    with served(generator, tmp_path) as server:
        batch = server.ended(batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 400)
        text = server.client.files.content(batch.output_file_id).text
        assert all(part in text for part in parts), "what was answered is not computed again"
        ids = [json.loads(row)["custom_id"] for row in text.splitlines()]
        assert sorted(ids) == sorted(row["custom_id"] for row in rows), "each line once"
