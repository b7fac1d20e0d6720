"""Jobs with deterministic=True keep receipts, and `verify` gives the same bits for them, or says what differs."""

import json

import pytest
from checkpoints import edit_tensors, make_ascii_checkpoint, make_llm
from job_files import prompts, read_folder

from nanovllm.cli import main
from nanovllm.jobs import bits, verify, verify_batch

BODY = {"prompt": "a line of OpenAI's", "max_tokens": 5}
OPENAI_LINE = {"custom_id": "chatless", "method": "POST", "url": "/v1/completions", "body": BODY}
LINES = [
    *prompts(20),
    {"id": "two samples", "prompt": "twice", "n": 2, "logprobs": 1},
    {"id": "of its own", "prompt": "mine", "seed": 3, "top_p": 0.8, "logit_bias": {"40": 2}, "stop": ["x"]},
    {"id": "an object", "prompt": "json", "structured_outputs": {"choice": ["yes", "no"]}},
    OPENAI_LINE,
]


@pytest.fixture(scope="module")
def llm(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200, seed=0, deterministic=True) as llm:
        yield llm


@pytest.fixture(params=["jsonl", "parquet"])
def done(request, job, answers):
    """The folder of a job that is done."""
    pytest.importorskip("pyarrow")
    lines = LINES if request.param == "jsonl" else LINES[:-1]
    job(lines, temperature=1.0, format=request.param)
    return answers


def change(folder, edit):
    """Edit the first row with a receipt of ten lines or more."""
    part = next(folder.glob("part-*.jsonl"))
    rows = [json.loads(line) for line in part.read_text().splitlines()]
    edit(rows[0]["receipt"]["samples"][0])
    part.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_job_gives_the_same_bits_again(done, llm):
    num_lines = len(LINES) if any(done.glob("part-*.jsonl")) else len(LINES) - 1
    assert str(verify_batch(done, model=llm, use_tqdm=False)) == f"{num_lines} of {num_lines} lines, the same bits"
    few = verify_batch(done, sample=5, seed=1, alone=True, model=llm, use_tqdm=False)
    assert few == (5, num_lines, None)


def test_receipts_are_beside_what_an_answer_has_anyway(job, answers):
    job(LINES, temperature=1.0)
    rows = {row["id"]: row for row in read_folder(answers) if "id" in row}
    assert "logprobs" not in rows[LINES[0]["id"]]
    assert len(rows["two samples"]["samples"]) == len(rows["two samples"]["receipt"]["samples"]) == 2
    own = rows["of its own"]["receipt"]["params"]
    assert (own["seed"], own["top_p"], own["logit_bias"]) == (3, 0.8, {"40": 2.0})
    receipts = [row["receipt"] for row in rows.values()]
    assert all(len(each["token_ids"]) == len(each["logprobs"]) for row in receipts for each in row["samples"])
    assert len({row["params"]["seed"] for row in receipts}) == len(receipts)  # A line without one gets its own.


def test_the_first_difference_is_reported(job, answers, llm):
    job(prompts(12), temperature=1.0)
    change(answers, lambda sample: sample["logprobs"].__setitem__(3, sample["logprobs"][3] * (1 + 2**-20)))
    found = verify_batch(answers, sample=None, model=llm, use_tqdm=False)
    assert "the log-probability of token 3 was" in str(found)
    change(answers, lambda sample: sample["token_ids"].__setitem__(2, 7))
    assert "token 2 was 7 and is" in str(verify_batch(answers, sample=None, model=llm, use_tqdm=False))


@pytest.mark.parametrize("fact", ["torch", "processor", "kernels and tables"])
def test_another_machine_or_version_is_refused(job, answers, llm, monkeypatch, fact):
    job(prompts(3))
    facts = bits.machine_facts()
    monkeypatch.setattr(verify, "machine_facts", lambda: facts | {fact: "another"})
    with pytest.raises(ValueError, match=rf"cannot be verified here.*{fact}: it was .* and is now 'another'"):
        verify_batch(answers, model=llm)
    monkeypatch.undo()


def test_other_weights_are_refused(job, answers, tmp_path):
    job(prompts(3))
    other = make_ascii_checkpoint(tmp_path / "other")
    edit_tensors(other, lambda tensors: tensors["model.norm.weight"].add_(1))
    with (
        make_llm(other, skip_tokenizer_init=False, max_model_len=200, deterministic=True) as llm,
        pytest.raises(ValueError, match=r"cannot be verified here.*weights are others"),
    ):
        verify_batch(answers, model=llm)


def test_a_job_does_not_go_on_with_other_bits(job, answers, monkeypatch):
    job(prompts(3))
    manifest = answers / "_manifest.json"
    content = json.loads(manifest.read_text())
    content["bits"]["processor"] = "another"
    manifest.write_text(json.dumps(content))
    (answers / "part-00000.jsonl").write_text("")
    with pytest.raises(ValueError, match="its bits depend on what has changed: processor"):
        job()


def test_jobs_of_another_kind_are_refused(job, answers, path, tmp_path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as plain:
        job(prompts(3), model=plain)
    assert not any("receipt" in row for row in read_folder(answers))
    with pytest.raises(ValueError, match="the job was not deterministic"):
        verify_batch(answers)
    with pytest.raises(ValueError, match="no job has begun here"):
        verify_batch(tmp_path / "nothing")


def test_the_command_makes_the_engine_again(job, answers, path, capsys):
    job(prompts(4), temperature=1.0, model=path, deterministic=True, max_model_len=200, device="cpu", kvcache_gib=0.01)
    assert main(["verify", str(answers), "--sample", "3", "-q"]) == 0
    assert capsys.readouterr().out == "3 of 3 lines, the same bits\n"
    change(answers, lambda sample: sample["token_ids"].__setitem__(0, 7))
    assert main(["verify", str(answers), "--all", "-q"]) == 1
    assert "token 0 was 7 and is" in capsys.readouterr().out
