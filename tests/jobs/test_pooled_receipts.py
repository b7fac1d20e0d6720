"""Deterministic jobs of vectors, classes and ranks keep receipts, and `verify` gives the same bits for them."""

import base64
from hashlib import sha256

import numpy as np
import pytest
from checkpoints import edit_tensors, make_ascii_checkpoint, make_llm
from job_files import ReadHere, interrupted_after, prompts, read_folder, read_lines, write_lines
from thread_replicas import ThreadReplicas
from vector_checkpoints import add_sentence_files, make_pooling_checkpoint

from nanovllm.cli import main
from nanovllm.engine.replicas import replicated_engine
from nanovllm.jobs import run_batch, verify_batch, work

ROWS = prompts(12)
TEXTS = [row["prompt"] for row in ROWS]
URL = "/v1/embeddings"
# A column called as the receipt is, and as what other tasks say.
OWN = {"id": "own", "prompt": "a table", "receipt": "paid", "label": "mine", "results": "none"}
REQUESTS = [
    {"custom_id": "floats", "url": URL, "body": {"input": TEXTS[0]}},
    {"custom_id": "base64", "url": URL, "body": {"input": [TEXTS[1], [5, 6], TEXTS[2]], "encoding_format": "base64"}},
    {"custom_id": "short", "url": URL, "body": {"input": TEXTS[0], "dimensions": 10}},
    {"custom_id": "whole", "url": URL, "body": {"input": TEXTS[0], "dimensions": 64}},
]
QUERY = "what is a block"
PAIRS = [{"id": i, "query": QUERY, "document": text} for i, text in enumerate(TEXTS)]
PAIRS += [{"id": "all", "query": QUERY, "documents": [*TEXTS[:4], TEXTS[0]]}]
RANK_REQUEST = {"custom_id": "two", "url": "/v1/rerank", "body": {"query": QUERY, "documents": TEXTS[:4], "top_n": 2}}
CLASS_REQUEST = {"custom_id": "request", "url": "/classify", "body": {"input": TEXTS[:2]}}


@pytest.fixture(autouse=True)
def no_reading_process(monkeypatch):
    monkeypatch.setattr(work, "ReadAhead", ReadHere)


def deterministic(path, **options):
    return make_llm(path, skip_tokenizer_init=False, max_model_len=200, deterministic=True, **options)


@pytest.fixture(scope="module")
def engines(path, tmp_path_factory):
    """An engine for each task."""
    labels = {"classify": 3, "rerank": 1}
    paths = {
        task: make_pooling_checkpoint(tmp_path_factory.mktemp(task), num_labels=number, tokenizer=True)
        for task, number in labels.items()
    }
    made = {task: deterministic(each) for task, each in (paths | {"embed": path}).items()}
    yield made
    for llm in made.values():
        llm.exit()


@pytest.fixture
def job(engines, tmp_path, answers):
    """job(task, lines, **options): a job over these lines, by default into `answers`."""

    def start(task, lines=None, output=answers, model=None, **options):
        if lines is not None:
            write_lines(tmp_path / "lines.jsonl", lines)
        model = engines[task] if model is None else model
        return run_batch(tmp_path / "lines.jsonl", output, model, task=task, use_tqdm=False, **options)

    return start


@pytest.fixture
def verified(engines, answers):
    """verified(task, **options): what all lines of `answers` are worth, in words."""

    def verify(task, model=None, **options):
        options = {"sample": None, "model": engines[task] if model is None else model} | options
        return str(verify_batch(answers, use_tqdm=False, **options))

    return verify


def change(folder, line_id, edit):
    """Edit the row of a line."""
    part = next(folder.glob("part-*.jsonl"))
    rows = read_lines(part)
    edit(next(row for row in rows if row.get("custom_id", row["id"]) == line_id))
    write_lines(part, rows)


def nudged(number, dtype=np.float32):
    """The next number of the type."""
    return float(np.nextafter(dtype(number), dtype(2)))


JOBS = {
    "embed": ("embed", [*ROWS, OWN, *REQUESTS], {}),
    "embed in float16": ("embed", [*ROWS, OWN], {"embedding_dtype": "float16"}),
    "embed short means": ("embed", ROWS, {"pooling": "mean", "dimensions": 24}),
    "embed unscaled": ("embed", ROWS, {"pooling": "cls", "normalize": False}),
    "classify": ("classify", [*ROWS, CLASS_REQUEST], {}),
    "rerank": ("rerank", [*PAIRS, RANK_REQUEST], {}),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_gives_the_same_bits_again(job, verified, name):
    task, lines, options = JOBS[name]
    job(task, lines, **options)
    assert verified(task) == f"{len(lines)} of {len(lines)} lines, the same bits"
    assert verified(task, sample=5, seed=1, alone=True) == "5 of 5 lines, the same bits"


@pytest.mark.parametrize("name", JOBS)
def test_so_does_one_in_parquet(job, verified, name, monkeypatch):
    pytest.importorskip("pyarrow", reason="needs the extra jobs")
    monkeypatch.setattr("nanovllm.jobs.part_writer.PART_LINES", 5)
    task, lines, options = JOBS[name]
    lines = [line for line in lines if "custom_id" not in line]
    job(task, lines, **options, format="parquet")
    assert verified(task) == f"{len(lines)} of {len(lines)} lines, the same bits"
    assert verified(task, sample=6) == "6 of 6 lines, the same bits"


def test_a_receipt_has_what_it_takes_to_ask_again(job, engines, answers):
    job("embed", [*ROWS, OWN, *REQUESTS], dimensions=24)
    rows = {row.get("custom_id", row["id"]): row for row in read_folder(answers)}
    llm = engines["embed"]
    receipt = rows["own"]["receipt"]
    assert rows["own"]["input_receipt"] == "paid"
    assert receipt["params"] == {"task": "embed", "dimensions": 24}
    assert receipt["inputs"][0]["prompt_token_ids"] == llm.get_tokenizer()("a table")["input_ids"]
    (output,) = llm.embed(["a table"], dimensions=24, use_tqdm=False)
    assert receipt["inputs"][0]["sha256"] == sha256(output["embedding"].tobytes()).hexdigest(), "LLM.embed's own bits"
    assert np.array(rows["own"]["embedding"], np.float32).tobytes() == output["embedding"].tobytes()
    assert [len(rows[name]["receipt"]["inputs"]) for name in ("floats", "base64")] == [1, 3]
    assert rows["short"]["receipt"]["params"]["dimensions"] == 10


def test_a_receipt_of_ranks_has_the_models_prompt(job, engines, answers):
    job("rerank", PAIRS)
    rows = {row["id"]: row for row in read_folder(answers)}
    expected = engines["rerank"].rank_prompts(QUERY, [*TEXTS[:4], TEXTS[0]])
    assert [each["prompt_token_ids"] for each in rows["all"]["receipt"]["inputs"]] == expected


def test_without_the_option_there_are_none(job, path, answers):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as plain:
        job("embed", [OWN], model=plain)
        assert read_folder(answers)[0]["receipt"] == "paid", "a column as any other"
        with pytest.raises(ValueError, match="the job was not deterministic"):
            verify_batch(answers)


# -- differences -------------------------------------------------------------------------------------------------------


def test_a_changed_bit_of_a_vector(job, verified, answers):
    job("embed", [*ROWS, *REQUESTS])
    change(answers, 3, lambda row: row["embedding"].__setitem__(7, nudged(row["embedding"][7])))
    assert verified("embed").startswith("line 3: number 7 of its embedding was ")
    job("embed", overwrite=True)

    def change_packed(row):
        data = row["response"]["body"]["data"][1]
        vector = np.frombuffer(base64.b64decode(data["embedding"]), "<f4").copy()
        vector[5] = nudged(vector[5])
        data["embedding"] = base64.b64encode(vector.tobytes()).decode()

    change(answers, "base64", change_packed)
    assert verified("embed").startswith("line 'base64': input 1, number 5 of its embedding was ")
    job("embed", overwrite=True)
    change(answers, "short", lambda row: row["response"]["body"]["data"][0]["embedding"].pop())
    assert verified("embed") == "line 'short': its embedding had 9 numbers and has 10"


def test_a_changed_bit_that_rounding_hides(job, verified, engines, answers, monkeypatch):
    """float16 of the file is the same: the receipt notices."""
    job("embed", ROWS, embedding_dtype="float16")
    llm = engines["embed"]
    deltas = llm.step_deltas

    def step_deltas():
        for each in (found := deltas()):
            vector = each["output"]["embedding"]
            place = int(np.argmax(vector.astype(np.float16) == np.nextafter(vector, np.float32(2)).astype(np.float16)))
            vector[place] = nudged(vector[place])
        return found

    monkeypatch.setattr(llm, "step_deltas", step_deltas, raising=False)
    assert "the receipt's SHA-256 of its vector in float32 was '" in verified("embed")
    monkeypatch.undo()
    change(answers, 3, lambda row: row["embedding"].__setitem__(7, nudged(row["embedding"][7], np.float16)))
    assert verified("embed").startswith("line 3: number 7 of its embedding was ")


def test_changed_classes(job, verified, answers):
    job("classify", [*ROWS, CLASS_REQUEST])
    change(answers, 3, lambda row: row["receipt"]["inputs"][0]["logits"].__setitem__(1, 0.5))
    assert verified("classify").startswith("line 3: the receipt's logits was [")
    job("classify", overwrite=True)
    change(answers, "request", lambda row: row["response"]["body"]["data"][1].update(label="LABEL_9"))
    assert verified("classify").startswith("line 'request': input 1, its label was 'LABEL_9' and is 'LABEL_")


def test_changed_ranks(job, verified, answers):
    job("rerank", [*PAIRS, RANK_REQUEST])
    change(answers, 3, lambda row: row.update(relevance_score=nudged(row["relevance_score"], np.float64)))
    assert verified("rerank").startswith("line 3: its relevance_score was ")
    results_of = {"all": lambda row: row["results"], "two": lambda row: row["response"]["body"]["results"]}
    for line_id, results in results_of.items():
        job("rerank", overwrite=True)
        change(answers, line_id, lambda row, results=results: results(row).reverse())
        assert verified("rerank").startswith(f"line {line_id!r}: its answers were of inputs [")


def test_changed_counts_and_damaged_rows(job, verified, answers):
    job("embed", [*ROWS, *REQUESTS])
    change(answers, 3, lambda row: row.update(num_prompt_tokens=99))
    assert verified("embed").startswith("line 3: it had 99 prompt tokens and has ")
    job("embed", overwrite=True)
    change(answers, 3, lambda row: row.pop("embedding"))
    assert verified("embed") == "line 3: its row is damaged: KeyError('embedding')"
    change(answers, 3, lambda row: row.pop("receipt"))
    with pytest.raises(ValueError, match="line 3 has no receipt"):
        verified("embed")


def test_other_weights(job, verified, answers, path, tmp_path):
    """The fingerprint samples each tensor. What it does not see, bits say."""
    job("embed", ROWS)
    seen = make_ascii_checkpoint(tmp_path / "seen")
    edit_tensors(seen, lambda tensors: tensors["model.norm.weight"].add_(1))
    with deterministic(seen) as llm, pytest.raises(ValueError, match=r"weights are others: model.safetensors differs"):
        verified("embed", model=llm)
    hidden = make_ascii_checkpoint(tmp_path / "hidden")
    edit_tensors(hidden, lambda tensors: tensors["model.embed_tokens.weight"][:40].mul_(2))
    with deterministic(hidden) as llm:
        assert "number 0 of its embedding was" in verified("embed", model=llm)


def test_another_quantization_is_refused(job, verified, path):
    job("embed", ROWS)
    with (
        deterministic(path, quantization="fp8") as llm,
        pytest.raises(ValueError, match="quantization: it was 'none' and is now 'fp8'"),
    ):
        verified("embed", model=llm)


# -- whole jobs --------------------------------------------------------------------------------------------------------


def test_a_job_that_goes_on_has_receipts_of_all_lines(job, verified, answers, path):
    with interrupted_after(4), pytest.raises(KeyboardInterrupt):
        job("embed", [*ROWS, *REQUESTS])
    assert 0 < len(read_folder(answers)) < 16
    with (
        make_llm(path, skip_tokenizer_init=False, max_model_len=200) as plain,
        pytest.raises(ValueError, match="deterministic was True and is now None"),
    ):
        job("embed", model=plain)
    assert job("embed").num_answered == 16
    assert verified("embed") == "16 of 16 lines, the same bits"


def test_an_engine_that_is_at_work_is_left_alone(job, verified, engines):
    job("embed", ROWS)
    llm = engines["embed"]
    llm.add_request("a block")
    with pytest.raises(ValueError, match="without requests under way"):
        verified("embed")
    llm.abort_request()
    while not llm.is_finished():
        llm.step()
    assert verified("embed") == "12 of 12 lines, the same bits"


def test_a_job_without_answers_has_nothing_to_verify(job, verified, answers):
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        job("embed", ["{", *ROWS])
    assert read_folder(answers) == []
    with pytest.raises(ValueError, match="holds no complete part of answers"):
        verified("embed")


def test_the_commands(tmp_path, answers, capsys, monkeypatch):
    """verify makes the engine again: of a model without a head, with a text before others, with weights that are
    rounded at the start, in another directory than the job's."""
    model = make_pooling_checkpoint(tmp_path / "model", tokenizer=True)
    add_sentence_files(model, prompts={"query": "a query: "}, default_prompt_name="query")
    lines = write_lines(tmp_path / "lines.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    job = ["run-batch", "model", "--task", "embed", "-i", str(lines), "-o", str(answers)]
    engine = ["--embedding-dtype", "float16", "--device", "cpu", "--max-model-len", "200", "--kvcache-gib", "0.01"]
    engine += ["--quantization", "fp8"]
    assert main([*job, *engine, "--deterministic", "-q"]) == 0
    capsys.readouterr()
    monkeypatch.chdir(answers)
    verify = ["verify", str(answers), "-q"]
    assert main([*verify, "--sample", "3"]) == 0
    assert capsys.readouterr().out == "3 of 3 lines, the same bits\n"
    (tmp_path / "model").rename(tmp_path / "moved")
    assert main(verify) == 2
    assert "model (--model) says where it is" in capsys.readouterr().err
    assert main([*verify, "--model", str(tmp_path / "moved"), "--sample", "3", "--seed", "2"]) == 0
    change(answers, 3, lambda row: row["receipt"]["inputs"][0]["prompt_token_ids"].append(7))
    capsys.readouterr()
    assert main([*verify, "--model", str(tmp_path / "moved"), "--all", "--alone"]) == 1
    assert "line 3: it had " in capsys.readouterr().out
    assert main(["verify", str(answers / "part-00000.jsonl")]) == 2
    assert "give the job's folder" in capsys.readouterr().err


def test_several_engines_share_a_job(engines, job, verified, monkeypatch):
    """The replicas are threads here. They verify, too."""
    monkeypatch.setattr(replicated_engine, "Replicas", ThreadReplicas)
    path = engines["rerank"].config.model
    with deterministic(path, data_parallel_size=2, max_num_seqs=4) as replicated:
        job("rerank", PAIRS, model=replicated)
        assert verified("rerank", model=replicated) == "13 of 13 lines, the same bits"
    assert verified("rerank", alone=True) == "13 of 13 lines, the same bits"
