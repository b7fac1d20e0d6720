"""Jobs of vectors, classes and ranks: rows are what LLM.embed, classify and rerank give, each line exactly once."""

import base64
import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import make_llm
from job_files import ReadHere, by_id, interrupted_after, prompts, read_folder, read_lines, write_lines
from thread_replicas import ThreadReplicas
from vector_checkpoints import add_sentence_files, make_pooling_checkpoint

from nanovllm.cli import main
from nanovllm.engine.replicas import replicated_engine
from nanovllm.jobs import check_batch, job_status, part_writer, run_batch, work
from nanovllm.jobs.generate_actor import SharedEngine
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.tasks.all_tasks import NAMES, make_task

ROWS = prompts(12)
TEXTS = [row["prompt"] for row in ROWS]
DOCUMENTS = ["a row of slots", "a table", "names the blocks of a sequence"]


@pytest.fixture(autouse=True)
def no_reading_process(monkeypatch):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)


@pytest.fixture
def job(llm, tmp_path, answers):
    """job(task, lines, **options): a job over these lines, by default into `answers`."""

    def start(task, lines=None, output=answers, model=llm, **options):
        if lines is not None:
            write_lines(tmp_path / "lines.jsonl", lines)
        return run_batch(tmp_path / "lines.jsonl", output, model, task=task, use_tqdm=False, **options)

    return start


@pytest.fixture(scope="module")
def sentence_path(tmp_path_factory):
    """An embedding model as they are published: without a head, and with a text that is put before others."""
    path = make_pooling_checkpoint(tmp_path_factory.mktemp("sentences"), tokenizer=True)
    add_sentence_files(path, prompts={"query": "a query: ", "document": "a block: "}, default_prompt_name="document")
    return path


def head_llm(tmp_path_factory, num_labels):
    path = make_pooling_checkpoint(tmp_path_factory.mktemp("head"), num_labels=num_labels, tokenizer=True)
    return make_llm(path, skip_tokenizer_init=False, max_model_len=200)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    with head_llm(tmp_path_factory, 3) as llm:
        yield llm


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    with head_llm(tmp_path_factory, 1) as llm:
        yield llm


def embedded(llm, texts, **options) -> np.ndarray:
    return np.stack([output["embedding"] for output in llm.embed(texts, use_tqdm=False, **options)])


def vectors_of(rows) -> np.ndarray:
    """float32 [num_rows, size]. JSON must hold each number so that the same one is read again."""
    return np.array([row["embedding"] for row in rows]).astype(np.float32)


# -- embed -------------------------------------------------------------------------------------------------------------


def test_vectors_are_those_of_embed(job, llm, answers):
    tokens = llm.get_tokenizer()(TEXTS[0])["input_ids"]
    lines = [*ROWS, {"id": "tokens", "prompt_token_ids": tokens}, {"id": "x", "text": TEXTS[1], "embedding": "mine"}]
    summary = job("embed", lines)
    rows = {row["id"]: row for row in read_folder(answers)}
    expected = llm.embed(TEXTS, use_tqdm=False)
    for row, output in zip(ROWS, expected, strict=True):
        found = rows[row["id"]]
        np.testing.assert_allclose(vectors_of([found])[0], output["embedding"], atol=1e-6)
        assert (found["num_prompt_tokens"], found["topic"]) == (output["num_prompt_tokens"], row["topic"])
        assert set(found) == {"id", "num_prompt_tokens", "topic", "embedding"}
    np.testing.assert_allclose(vectors_of([rows["tokens"]])[0], expected[0]["embedding"], atol=1e-6)
    assert rows["x"]["input_embedding"] == "mine"
    assert summary[:5] == (14, 14, 0, sum(row["num_prompt_tokens"] for row in rows.values()), 0)
    assert summary.tokens_per_second > 0
    assert json.loads((answers / "_manifest.json").read_text())["job"]["task"] == "embed"
    assert job_status(answers).counts[:3] == (14, 0, summary.num_prompt_tokens)


def test_numbers_are_kept_exactly(job, llm, answers, monkeypatch):
    exact = np.array([1 / 3, 1e-7, -2.5, 123456.79, 1.1754944e-38], np.float32)
    iterate = llm.embed_iter

    def embed_iter(*args, **options):
        for index, output in iterate(*args, **options):
            yield index, {**output, "embedding": exact}

    monkeypatch.setattr(llm, "embed_iter", embed_iter, raising=False)
    job("embed", ROWS[:2], normalize=False)
    assert vectors_of(read_folder(answers)).tobytes() == np.stack([exact, exact]).tobytes()


def test_numbers_that_are_too_large_are_errors(job, llm, answers, monkeypatch):
    iterate = llm.embed_iter

    def embed_iter(*args, **options):
        for index, output in iterate(*args, **options):
            yield index, {**output, "embedding": np.array([1, 1e6 if index else 1], np.float32)}

    monkeypatch.setattr(llm, "embed_iter", embed_iter, raising=False)
    rows = [{"id": i, "prompt": f"a block {i}"} for i in range(3)]
    assert job("embed", rows, normalize=False, embedding_dtype="float16")[1:3] == (1, 2)
    assert "too large for float16" in read_lines(answers / "_errors.jsonl")[0]["error"]
    assert read_folder(answers)[0]["embedding"] == [1, 1]


def test_options_of_embeddings(job, llm, answers, tmp_path):
    options = {"pooling": "mean", "dimensions": 24}
    job("embed", ROWS, **options, normalize=False)
    expected = embedded(llm, TEXTS, **options, normalize=False)
    np.testing.assert_allclose(vectors_of(by_id(read_folder(answers)))[:2], expected[[0, 1]], atol=1e-5)
    job("embed", [{"a": text} for text in TEXTS], output=tmp_path / "others", template="{a}", dimensions=24)
    found = vectors_of(read_folder(tmp_path / "others"))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert found.shape == (12, 24)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parquet_has_lists_of_fixed_size(job, llm, tmp_path, monkeypatch, dtype):
    pa = pytest.importorskip("pyarrow", reason="needs the extra jobs")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(part_writer, "PART_LINES", 5)
    file = tmp_path / "vectors.parquet"
    assert job("embed", ROWS, output=file, embedding_dtype=dtype).num_answered == 12
    table = parquet.read_table(file)
    number = pa.float32() if dtype == "float32" else pa.float16()
    assert table.schema.field("embedding").type == pa.list_(pa.field("element", number), 64)
    assert table.schema.names == ["id", "num_prompt_tokens", "topic", "embedding"]
    found = {row["id"]: row["embedding"] for row in table.to_pylist()}
    expected = embedded(llm, TEXTS).astype(dtype)
    for row, vector in zip(ROWS, expected, strict=True):
        np.testing.assert_allclose(np.array(found[row["id"]], dtype), vector, atol=1e-6 if dtype == "float32" else 1e-3)
    assert job("embed", output=file, embedding_dtype=dtype).num_answered == 12, "nothing is left to do"


def test_the_text_that_a_model_puts_before_others(sentence_path, job, tmp_path):
    options = {"device": "cpu", "max_model_len": 100, "kvcache_block_size": 16, "num_kvcache_blocks": 64}
    job("embed", ROWS, output=tmp_path / "default", model=sentence_path, **options)
    job("embed", ROWS, output=tmp_path / "query", model=sentence_path, prompt_name="query", **options)
    with make_llm(sentence_path, skip_tokenizer_init=False) as llm:
        for folder, name in (("default", None), ("query", "query")):
            rows = {row["id"]: row for row in read_folder(tmp_path / folder)}
            found = vectors_of([rows[row["id"]] for row in ROWS])
            np.testing.assert_allclose(found, embedded(llm, TEXTS, prompt_name=name), atol=1e-6)
        lines = [*ROWS[:1], {"id": "t", "prompt": [1, 2]}]
        assert job("embed", lines, tmp_path / "tokens", llm, prompt_name="query")[1:3] == (1, 1)
        assert "is token ids" in read_lines(tmp_path / "tokens" / "_errors.jsonl")[0]["error"]
        with pytest.raises(ValueError, match="prompt_name='title': the model's names are 'query', 'document'"):
            job("embed", ROWS, tmp_path / "wrong", llm, prompt_name="title")
    assert not (tmp_path / "wrong").exists()


def test_wrong_lines_do_not_stop_the_others(job, answers):
    lines = [*ROWS, {"prompt": ""}, {"prompt": "a", "text": "b"}, {"topic": "t"}, {"prompt": [1, 100000]}, "{"]
    lines += [{"prompt": "a " * 300}, {"messages": [{"role": "user", "content": "a"}]}]
    assert job("embed", lines)[1:3] == (12, 7)
    errors = "\n".join(row["error"] for row in by_id(read_lines(answers / "_errors.jsonl")))
    for part in ("not empty", "has 'prompt' and 'text'", "has no prompt", "token id 100000", "is not JSON", "tokens"):
        assert part in errors


def test_a_job_goes_on_and_stays_its_own(job, llm, answers, classifier):
    with interrupted_after(4), pytest.raises(KeyboardInterrupt):
        job("embed", ROWS)
    first = read_folder(answers)
    assert 0 < len(first) < 12
    for task, options, message in (
        ("generate", {}, "task was 'embed' and is now 'generate'"),
        ("embed", {"pooling": "mean"}, "pooling was None and is now 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            job(task, **options)
    with pytest.raises(ValueError, match="task was 'embed' and is now 'classify'"):
        job("classify", model=classifier)
    assert job("embed")[1:3] == (12, 0)
    rows = read_folder(answers)
    assert rows[: len(first)] == first
    assert sorted(row["id"] for row in rows) == list(range(12))


def test_a_job_that_generates_is_not_resumed_as_another(job, answers):
    job("generate", ROWS[:2], temperature=0, max_tokens=2)
    assert "task" not in json.loads((answers / "_manifest.json").read_text())["job"], "as in folders of before"
    with pytest.raises(ValueError, match="task was 'generate' and is now 'embed'"):
        job("embed")


def test_order_is_kept(job, answers, monkeypatch):
    monkeypatch.setattr("nanovllm.jobs.run._MAX_AHEAD", 2)
    rows = [{"id": i, "prompt": f"a block {i}"} for i in range(12)]  # too short to be grouped
    assert job("embed", rows, ordered=True).num_answered == 12
    assert [row["id"] for row in read_folder(answers)] == list(range(12))


def test_several_engines_share_a_job(path, llm, job, answers, monkeypatch):
    """The replicas are threads here."""
    monkeypatch.setattr(replicated_engine, "Replicas", ThreadReplicas)
    options = {"max_model_len": 200, "skip_tokenizer_init": False, "max_num_seqs": 4}
    with make_llm(path, data_parallel_size=2, **options) as replicated:
        assert job("embed", ROWS, model=replicated).num_answered == 12
    rows = {row["id"]: row for row in read_folder(answers)}
    np.testing.assert_allclose(vectors_of([rows[row["id"]] for row in ROWS]), embedded(llm, TEXTS), atol=1e-5)


@pytest.mark.nightly
def test_engines_on_ray(cluster, path, llm, job, answers):
    options = {"max_model_len": 200, "kvcache_block_size": 16, "num_kvcache_blocks": 64}
    assert job("embed", ROWS, model=path, replicas=2, **options).num_answered == 12
    rows = {row["id"]: row for row in read_folder(answers)}
    np.testing.assert_allclose(vectors_of([rows[row["id"]] for row in ROWS]), embedded(llm, TEXTS), atol=1e-5)


def test_lines_of_several_threads_share_an_engine(path, llm):
    """As in an actor of Ray, whose engine waits for lines."""
    task = make_task("embed", {}, {})
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as fresh:
        engine = SharedEngine(fresh, task)
        for start in (0, 6):  # It waits in between.
            lines = [task.read(row)._replace(inputs=[row["prompt"]]) for row in ROWS[start : start + 6]]
            given = [
                Prepared(i, row["id"], "", i, line, None)
                for i, (row, line) in enumerate(zip(ROWS, lines, strict=False))
            ]
            outputs = [output for _, output in engine.answer(given)]
            asked = [task.as_asked(each.line, output["outputs"]) for each, output in zip(given, outputs, strict=True)]
            found = np.stack([output["embedding"] for (output,) in asked])
            np.testing.assert_allclose(found, embedded(llm, TEXTS[start : start + 6]), atol=1e-5)
            assert {task.num_tokens(output) > 0 for output in outputs} == {True}


def test_requests_of_openai(job, llm, answers):
    url = "/v1/embeddings"
    lines = [
        {"custom_id": "one", "method": "POST", "url": url, "body": {"model": "m", "input": TEXTS[0]}},
        {"custom_id": "many", "url": url, "body": {"input": [TEXTS[1], [5, 6]], "encoding_format": "base64"}},
        {"custom_id": "short", "url": url, "body": {"input": TEXTS[0], "dimensions": 10}},
        {"custom_id": "wrong", "url": url, "body": {"input": [TEXTS[0], ""]}},
        {"custom_id": "large", "url": url, "body": {"input": TEXTS[0], "dimensions": 65}},
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": []}},
        {"custom_id": "own", "url": url, "body": {"input": "a", "pooling": "mean"}},
    ]
    assert job("embed", lines)[1:3] == (3, 4)
    bodies = {row["custom_id"]: row["response"]["body"] for row in read_folder(answers)}
    (expected,) = embedded(llm, TEXTS[:1])
    (data,) = bodies["one"]["data"]
    np.testing.assert_allclose(data["embedding"], expected, atol=1e-6)
    assert (data["object"], data["index"], bodies["one"]["object"]) == ("embedding", 0, "list")
    num_tokens = len(llm.get_tokenizer()(TEXTS[0])["input_ids"])
    assert bodies["one"]["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in bodies["many"]["data"]]
    np.testing.assert_allclose(found, embedded(llm, [TEXTS[1], [5, 6]]), atol=1e-6)
    cut = expected[:10] / np.linalg.norm(expected[:10])
    np.testing.assert_allclose(bodies["short"]["data"][0]["embedding"], cut, atol=1e-6)
    errors = {row["id"]: row["error"] for row in read_lines(answers / "_errors.jsonl")}
    assert errors["wrong"].startswith("input[1]=''")
    assert "dimensions=65" in errors["large"]
    assert "must be '/v1/embeddings' with task='embed'" in errors["chat"]
    assert errors["own"] == "pooling='mean': must be that of the job, 'auto'"


# -- classes and ranks -------------------------------------------------------------------------------------------------


def test_classes(job, classifier, answers, tmp_path):
    lines = [*ROWS, {"custom_id": "request", "url": "/classify", "body": {"input": TEXTS[:2]}}]
    assert job("classify", lines, model=classifier)[1:3] == (13, 0)
    rows = {row.get("custom_id", row["id"]): row for row in read_folder(answers)}
    expected = classifier.classify(TEXTS, use_tqdm=False)
    for row, output in zip(ROWS, expected, strict=True):
        assert rows[row["id"]]["label"] == output["label"]
        for name in ("probs", "logits"):
            np.testing.assert_allclose(rows[row["id"]][name], output[name], atol=1e-5)
    data = rows["request"]["response"]["body"]["data"]
    assert [(each["label"], each["num_classes"]) for each in data] == [(each["label"], 3) for each in expected[:2]]
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra jobs")
    job("classify", ROWS, output=tmp_path / "classes", model=classifier, format="parquet")
    table = parquet.read_table(tmp_path / "classes")
    assert table.schema.field("probs").type.list_size == 3
    found = {row["id"]: row["label"] for row in table.to_pylist()}
    assert [found[row["id"]] for row in ROWS] == [output["label"] for output in expected]


def test_a_reward_of_a_conversation(tmp_path, job, answers):
    """It ends with the answer that is judged, and not with the beginning of another."""
    path = make_pooling_checkpoint(tmp_path / "model", num_labels=1, tokenizer=True)
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    (path / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "a block"}, {"role": "assistant", "content": "a row"}]
    lines = [
        {"id": "chat", "messages": chat},
        {"id": "json", "messages": json.dumps(chat)},
        {"id": "text", "prompt": "a"},
    ]
    lines += [{"id": "wrong", "messages": [{"content": "a"}]}, {"id": "none", "messages": "a"}]
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as llm:
        assert job("classify", lines, model=llm)[1:3] == (3, 2)
        expected = llm.classify(["user: a block\nassistant: a row\n", "a"], use_tqdm=False)
    rows = {row["id"]: row for row in read_folder(answers)}
    for name, output in (("chat", expected[0]), ("json", expected[0]), ("text", expected[1])):
        np.testing.assert_allclose(rows[name]["logits"], output["logits"], atol=1e-5)
    errors = {row["id"]: row["error"] for row in read_lines(answers / "_errors.jsonl")}
    assert errors["wrong"].startswith("messages: ")
    assert "must be a list of objects with role and content" in errors["none"]


def test_ranks(job, ranker, answers, tmp_path):
    query = "what is a block"
    lines = [{"id": i, "query": query, "document": text} for i, text in enumerate(DOCUMENTS)]
    lines += [{"id": "all", "query": query, "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}], "topic": "t"}]
    body = {"query": query, "documents": DOCUMENTS, "top_n": 2}
    lines += [{"custom_id": "request", "url": "/v1/rerank", "body": body}, {"id": "none", "query": query}]
    assert job("rerank", lines, model=ranker)[1:3] == (5, 1)
    rows = {row.get("custom_id", row["id"]): row for row in read_folder(answers)}
    expected = ranker.rerank(query, DOCUMENTS, use_tqdm=False)
    scores = {each["index"]: each["relevance_score"] for each in expected}
    assert len({round(score, 4) for score in scores.values()}) == 3
    for index, score in scores.items():
        assert rows[index]["relevance_score"] == pytest.approx(score, abs=1e-5)
    results = rows["all"]["results"]
    assert [each["index"] for each in results] == [each["index"] for each in expected]
    assert rows["all"]["topic"] == "t"
    found = rows["request"]["response"]["body"]["results"]
    assert [(each["index"], each["document"]["text"]) for each in found] == [
        (each["index"], each["document"]) for each in expected[:2]
    ]
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra jobs")
    job("rerank", lines[:4], output=tmp_path / "ranks", model=ranker, format="parquet")
    table = {row["id"]: row for row in parquet.read_table(tmp_path / "ranks").to_pylist()}
    assert table["0"]["relevance_score"] == pytest.approx(scores[0], abs=1e-5)
    assert [each["index"] for each in table["all"]["results"]] == [each["index"] for each in expected]


# -- wrong calls, and looks ahead --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("vectors", {}, "task='vectors': must be one of generate, embed, classify, rerank"),
        ("embed", {"top_k": 5}, "top_k=5: is an option of task='generate', and this job has task='embed'"),
        ("embed", {"system": "Be brief."}, "system='Be brief.': is an option of task='generate'"),
        ("embed", {"line_parameters": False}, "line_parameters=False: is an option of task='generate'"),
        ("embed", {"seed": 3}, "seed=3: is an option of task='generate'"),
        ("embed", {"instruction": "a"}, "instruction='a': is an option of task='rerank'"),
        ("embed", {"pooling": "max"}, "pooling='max'"),
        ("embed", {"embedding_dtype": "int8"}, "embedding_dtype='int8': must be one of float32, float16"),
        ("embed", {"dimensions": 65}, "dimensions=65: must be in 1..64"),
        ("generate", {"dimensions": 8}, "dimensions=8: is an option of task='embed', and this job has"),
        ("classify", {"normalize": False}, "normalize=False: is an option of task='embed'"),
        ("classify", {}, "task='classify': "),
        ("rerank", {"template": "{a}"}, "template='{a}': lines of task='rerank' have 'query'"),
        ("embed", {"task_of_engine": 1}, "task_of_engine"),
    ],
)  # fmt: skip
def test_wrong_calls(job, answers, task, options, message):
    with pytest.raises((ValueError, TypeError)) as refusal:
        job(task, ROWS, **options)
    assert message in str(refusal.value)
    assert not answers.exists(), "a refused call leaves nothing"


def test_every_task_reads_its_lines_by_a_default(llm):
    for name in NAMES:
        task = make_task(name, {}, {})
        assert task.name == name
        assert "id" in task.line_format.added_keys


def test_the_reading_process_needs_no_torch(llm, tmp_path):
    """It imports the tasks, and would take seconds more."""
    lines = [{"id": 1, "prompt": "a block", "query": "a", "document": "b"}]
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from nanovllm.jobs.reader import ReadPlan, read\n"
        "from nanovllm.jobs.tasks.all_tasks import NAMES, make_task\n"
        "for name in NAMES:\n"
        "    plan = ReadPlan([sys.argv[1]], make_task(name, {}, {}), sys.argv[2], None, None, 16, 100)\n"
        "    print(name, [each.error for batch in read(plan) for each in batch])\n"
    )
    command = [sys.executable, "-c", code, str(write_lines(tmp_path / "a.jsonl", lines)), llm.config.model]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.stdout.splitlines() == [f"{name} [None]" for name in NAMES], said.stderr


def test_a_look_ahead(llm, ranker, tmp_path):
    file = write_lines(tmp_path / "lines.jsonl", [*ROWS, {"prompt": ""}])
    found = check_batch(file, llm, task="embed", sample=5, use_tqdm=False)
    num_tokens = sum(output["num_prompt_tokens"] for output in llm.embed(TEXTS, use_tqdm=False))
    assert found[:4] == (13, 1, num_tokens, 0)
    assert (found.data, found.parameters, found.task) == (["id", "topic"][1:], [], "embed")
    assert found.estimate.sample.num_lines == 5
    assert 0 < found.estimate.sample.num_completion_tokens < num_tokens
    lines = [{"query": "a", "document": text} for text in DOCUMENTS]
    ranks = check_batch(write_lines(tmp_path / "pairs.jsonl", lines), ranker, task="rerank", use_tqdm=False)
    assert ranks[:2] == (3, 0)
    assert ranks.num_prompt_tokens > 3


def test_the_command(sentence_path, tmp_path, capsys):
    file = write_lines(tmp_path / "lines.jsonl", ROWS)
    engine = ["--device", "cpu", "--max-model-len", "100"]
    options = ["--task", "embed", "--pooling", "mean", "--no-normalize", "--dimensions", "7", "--prompt-name", "query"]
    command = ["run-batch", str(sentence_path), "-i", str(file), *engine, *options, "--embedding-dtype", "float16"]
    assert main([*command, "--dry-run"]) == 0
    assert "12 of 12 lines can be answered" in (said := capsys.readouterr().out)
    assert "completion" not in said
    assert main([*command, "-o", str(tmp_path / "answers")]) == 0
    assert "completion" not in capsys.readouterr().out
    rows = read_folder(tmp_path / "answers")
    assert {len(row["embedding"]) for row in rows} == {7}
    assert main(["status", str(tmp_path / "answers")]) == 0
    assert "task='embed'" in capsys.readouterr().out
    assert main([*command, "-o", str(tmp_path / "answers"), "--max-tokens", "5"]) == 2
    assert "max_tokens=5: is an option of task='generate'" in capsys.readouterr().err
