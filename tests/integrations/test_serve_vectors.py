"""`nanovllm serve`: embeddings, ranks and classes beside requests that generate."""

import json
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from checkpoints import make_ascii_checkpoint, make_llm
from vector_checkpoints import add_sentence_files, make_pooling_checkpoint

REASON = "needs OpenAI's client and the server's packages: pip install '.[test]'"
openai = pytest.importorskip("openai", reason=REASON)
pytest.importorskip("uvicorn", reason=REASON)
pytest.importorskip("starlette", reason=REASON)
serving = pytest.importorskip("test_serve", reason=REASON)

TEXTS = ["a block is a row of slots", "a table names the blocks", "of a sequence"]


def start(path, **options):
    options = {"skip_tokenizer_init": False, "max_model_len": 200} | options
    running = serving.Running(make_llm(path, **options))
    running.other_llm = make_llm(path, **options)
    return running


def end(running):
    running.wait_until_idle()
    running.end()
    running.llm.exit()
    running.other_llm.exit()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A model that generates."""
    running = start(make_ascii_checkpoint(tmp_path_factory.mktemp("generates")))
    yield running
    end(running)


@pytest.fixture(scope="module")
def ranking(tmp_path_factory):
    """A model with a head of one label."""
    running = start(make_pooling_checkpoint(tmp_path_factory.mktemp("ranks"), num_labels=1, tokenizer=True))
    yield running
    end(running)


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=running.url, api_key=serving.KEY, max_retries=0, timeout=60) as client:
        yield client
    running.wait_until_idle()


def post(running, path, body, key=serving.KEY) -> tuple[int, dict]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    url = running.url.removesuffix("/v1") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def from_here(running, method, *args, **options):
    """What another LLM of this model gives."""
    return getattr(running.other_llm, method)(*args, use_tqdm=False, **options)


def test_the_clients_embeddings(running, client):
    """The client asks for base64, and decodes it, unless told otherwise."""
    expected = [output["embedding"] for output in from_here(running, "embed", TEXTS)]
    answers = [client.embeddings.create(model=serving.MODEL, input=TEXTS)]
    answers.append(client.embeddings.create(model=serving.MODEL, input=TEXTS, encoding_format="float"))
    tokens = [running.llm.get_tokenizer()(text)["input_ids"] for text in TEXTS]
    answers.append(client.embeddings.create(model=serving.MODEL, input=tokens))
    for answer in answers:
        np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=1e-6)
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.model == serving.MODEL
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    one = client.embeddings.create(model=serving.MODEL, input=TEXTS[0], dimensions=8)
    short = expected[0][:8] / np.linalg.norm(expected[0][:8])
    np.testing.assert_allclose(one.data[0].embedding, short, atol=1e-6)
    (same,) = client.embeddings.create(model=serving.MODEL, input=tokens[0], dimensions=8).data
    np.testing.assert_allclose(same.embedding, short, atol=1e-6)


def test_embeddings_beside_completions(running, client):
    expected = [output["embedding"] for output in from_here(running, "embed", TEXTS)]
    options = {"model": serving.MODEL, "prompt": TEXTS[0], "max_tokens": 60, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    alone = client.completions.create(**options).choices[0].text
    found = {}

    def embed(index):
        found[index] = client.embeddings.create(model=serving.MODEL, input=TEXTS).data

    threads = [threading.Thread(target=embed, args=(index,)) for index in range(4)]
    parts = []
    for part in client.completions.create(**options, stream=True):
        parts.append(part.choices[0].text)
        if len(parts) == 3:
            for thread in threads:
                thread.start()
    for thread in threads:
        thread.join(60)
    assert "".join(parts) == alone
    assert len(found) == 4
    for data in found.values():
        np.testing.assert_allclose([each.embedding for each in data], expected, atol=1e-5)


def test_ranks_in_the_forms_of_clients(ranking):
    expected = from_here(ranking, "rerank", "what is a block", TEXTS)
    order = [each["index"] for each in expected]
    body = {"model": serving.MODEL, "query": "what is a block", "documents": [{"text": TEXTS[0]}, *TEXTS[1:]]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        status, answer = post(ranking, path, body)
        assert status == 200
        assert [each["index"] for each in answer["results"]] == order
        assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[i] for i in order]
        scores = [each["relevance_score"] for each in answer["results"]]
        assert scores == pytest.approx([each["relevance_score"] for each in expected], abs=1e-5)
        assert answer["usage"]["total_tokens"] > 0
    status, answer = post(ranking, "/rerank", body | {"top_n": 1, "return_documents": False})
    assert [sorted(each) for each in answer["results"]] == [["index", "relevance_score"]]


def test_classes_in_vllms_form(ranking):
    expected = from_here(ranking, "classify", TEXTS)
    status, answer = post(ranking, "/classify", {"model": serving.MODEL, "input": TEXTS})
    assert status == 200
    for each, output in zip(answer["data"], expected, strict=True):
        assert (each["label"], each["num_classes"]) == (output["label"], 1)
        np.testing.assert_allclose(each["probs"], output["probs"], atol=1e-5)


def test_the_text_that_a_model_puts_before_others(tmp_path):
    path = make_pooling_checkpoint(tmp_path, tokenizer=True)
    add_sentence_files(path, prompts={"query": "a query: ", "document": "a block: "}, default_prompt_name="document")
    running = start(path)
    try:
        for name in (None, "query"):
            expected = from_here(running, "embed", TEXTS, prompt_name=name)
            body = {"input": TEXTS} | ({} if name is None else {"prompt_name": name})
            _, answer = post(running, "/v1/embeddings", body)
            found = [each["embedding"] for each in answer["data"]]
            np.testing.assert_allclose(found, [output["embedding"] for output in expected], atol=1e-6)
        status, answer = post(running, "/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert status == 400
        assert "does not generate" in answer["error"]["message"]
        assert post(running, "/v1/embeddings", {"input": "a", "prompt_name": "title"})[0] == 400
    finally:
        end(running)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {}, "has no 'input'"),
        ("/v1/embeddings", {"input": ""}, "not empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]=''"),
        ("/v1/embeddings", {"input": []}, "input=[]"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "2049 texts in one call: must be at most 2048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions=0"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions=65: must be in 1..64"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format='int8'"),
        ("/v1/embeddings", {"input": "a", "dimension": 8}, "dimension=8: is unknown here"),
        ("/v1/embeddings", {"input": "a " * 300}, "tokens"),
        ("/v1/embeddings", {"input": [1, 100000]}, "100000"),
        ("/classify", {"input": "a"}, "classif"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "task='rerank'"),
        ("/rerank", {"query": "a", "documents": []}, "documents=[]"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]="),
        ("/rerank", {"query": "", "documents": ["b"]}, "query=''"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n=0"),
    ],
)
def test_what_cannot_be_served(running, path, body, message):
    status, answer = post(running, path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert message in answer["error"]["message"]
    running.wait_until_idle()


def test_the_key_and_the_model(running):
    assert post(running, "/v1/embeddings", {"input": "a"}, key="wrong")[0] == 401
    assert post(running, "/v1/embeddings", {"input": "a", "model": "other"})[0] == 404


def test_they_are_counted(running, client):
    def finished() -> int:
        url = running.url.removesuffix("/v1") + "/metrics"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {serving.KEY}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = response.read().decode().splitlines()
        (line,) = [line for line in lines if "request_success_total" in line and 'finished_reason="stop"' in line]
        return int(float(line.split()[-1]))

    before = finished()
    client.embeddings.create(model=serving.MODEL, input=TEXTS)
    assert finished() == before + 3
