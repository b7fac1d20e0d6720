"""Jobs with deterministic=True keep receipts, and `verify` gives the same bits for them, or says what differs."""

import json
import re

import pytest
from checkpoints import edit_tensors, make_ascii_checkpoint, make_llm
from job_files import prompts, read_folder, write_lines

from nanovllm.cli import main
from nanovllm.jobs import bits, run_batch, verify, verify_batch

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


def change_rows(folder, edit):
    """edit: changes the list of rows of the one part."""
    (part,) = folder.glob("part-*.jsonl")
    rows = [json.loads(line) for line in part.read_text().splitlines()]
    edit(rows)
    part.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def change(folder, edit):
    """Edit the receipt of the first row."""
    change_rows(folder, lambda rows: edit(rows[0]["receipt"]["samples"][0]))


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


ROWS = {  # what is changed of which line, and what is said
    "text": ("plain", lambda row: row.update(text="no" * 99), r"its text, from character \d+ on, was 'n.* and is '"),
    "finish_reason": ("plain", lambda row: row.update(finish_reason="stop"), "its finish_reason was 'stop' and is 'l"),
    "count": ("plain", lambda row: row.update(num_completion_tokens=7), "its num_completion_tokens was 7 and is 8"),
    "sample": ("two", lambda row: row["samples"][1].update(text="no"), "its samples 1 text was 'no' and is '"),
    "logprobs": ("two", lambda row: row["logprobs"][1].popitem(), "its logprobs 1 .* was None and is -"),
    "added": ("plain", lambda row: row.update(samples=[]), r"its samples was \[\] and is None"),
    "removed": ("two", lambda row: row.pop("text"), "its text was None and is '"),
    "body": ("chatless", lambda row: choice(row).update(text="no"), "its choices 0 text was 'no' and is '"),
    "usage": ("chatless", lambda row: row["response"]["body"].update(usage={}), "its row is damaged|is no answer"),
    "refusal": ("chatless", lambda row: row.update(error="no"), "its error was 'no' and is None"),
}


def choice(row):
    return row["response"]["body"]["choices"][0]


@pytest.mark.parametrize("what", ROWS)
def test_a_changed_row_is_noticed(job, answers, llm, what):
    """Whoever reads answers reads rows, and not their receipts."""
    name, edit, said = ROWS[what]
    two = {"id": "two", "prompt": "twice", "n": 2, "logprobs": 1}
    job([{"id": "plain", "prompt": "once"}, two, OPENAI_LINE], temperature=1.0, ignore_eos=True)
    assert str(verify_batch(answers, model=llm, use_tqdm=False)) == "3 of 3 lines, the same bits"
    change_rows(answers, lambda rows: edit(next(row for row in rows if name in (row.get("custom_id"), row["id"]))))
    try:
        found = str(verify_batch(answers, model=llm, use_tqdm=False))
    except ValueError as error:  # no answer at all
        found = str(error)
    assert re.search(said, found)


def test_a_changed_row_of_parquet_is_noticed(job, answers, llm):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra jobs")
    from pyarrow import parquet

    job([{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b", "n": 2}], temperature=1.0, format="parquet")
    (part,) = answers.glob("part-*.parquet")
    table = parquet.read_table(part)
    rows = table.to_pylist()
    (two,) = (row for row in rows if row["id"] == 2)
    two["samples"] = two["samples"].replace('"text": "', '"text": "no', 1)
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), part)
    assert "line 2: its samples" in str(verify_batch(answers, model=llm, use_tqdm=False))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda rows: rows.clear(), "12 answers are gone: it had 12 and has 0"),
        (lambda rows: rows.pop(), "1 answers are gone: it had 12 and has 11"),
        (lambda rows: rows.__setitem__(3, rows[4]), "some of its 12 answers and errors are of the same line"),
        (lambda rows: rows.append(rows[0] | {"id": "new"}), "it has 13 answers and errors of 12 lines"),
    ],
)
def test_rows_that_are_gone_or_added_are_noticed(job, answers, llm, edit, said, capsys):
    job(prompts(12))
    change_rows(answers, edit)
    assert main(["verify", str(answers), "-q"]) == 1
    assert capsys.readouterr().out == f"{said}\n"


def test_a_part_that_is_gone_is_noticed(job, answers):
    job(prompts(3))
    (answers / "part-00000.jsonl").unlink()
    assert verify_batch(answers) == (0, 0, "3 answers are gone: it had 3 and has 0")


@pytest.mark.parametrize(
    ("receipt", "said"),
    [
        (None, "line 0 has no receipt"),
        ("{", "line 0 has a damaged receipt: it is not JSON: "),
        ([], "line 0 has a damaged receipt: it must be an object, not list"),
        ({"prompt_token_ids": [1], "params": {}}, "line 0 has a damaged receipt: it lacks 'samples', or has a wrong"),
        ({"params": {}, "inputs": [3]}, "it lacks 'prompt_token_ids', or has a wrong one"),
        ({"params": {"x": 1}, "prompt_token_ids": [1], "samples": []}, "it has wrong params: "),
        ({"params": {"x": 1}, "inputs": []}, "it has wrong params: "),
    ],
)
def test_a_damaged_receipt_is_named(job, answers, llm, receipt, said):
    job([{"id": 0, "prompt": "a"}])
    change_rows(answers, lambda rows: rows[0].update(receipt=receipt))
    with pytest.raises(ValueError, match=rf"part-00000\.jsonl: .*{said}"):
        verify_batch(answers, model=llm)


def test_parts_of_conversations_are_made_again(answers, path, tmp_path):
    """With reasoning and calls, whose arguments have the types of the tools."""
    pytest.importorskip("llguidance", reason="needs the extra structured")
    tool = {"type": "function", "function": {"name": "ab", "parameters": {"type": "object", "properties": {}}}}
    said = r'<think>[a-z]{4}</think>x<tool_call>\{"name": "ab", "arguments": \{\}\}</tool_call>'
    line = {"messages": [{"role": "user", "content": "a"}], "guided_regex": said, "tools": [tool]}
    file = write_lines(tmp_path / "chats.jsonl", [{"id": 1, **line}, {"custom_id": "openai", "body": line}])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}"
    options = {"split_reasoning": True, "split_tool_calls": True, "temperature": 0, "max_tokens": 90}
    with make_llm(path, skip_tokenizer_init=False, max_model_len=300, deterministic=True, chat_format="hermes") as llm:
        run_batch(file, answers, llm, **options, chat_template=template, use_tqdm=False)
        before = {row.get("custom_id", row["id"]): row for row in read_folder(answers)}
        assert [call["function"]["name"] for call in before[1]["tool_calls"]] == ["ab"]
        assert str(verify_batch(answers, model=llm, use_tqdm=False)) == "2 of 2 lines, the same bits"

        def found(edit):
            change_rows(answers, lambda rows: edit({row.get("custom_id", row["id"]): row for row in rows}))
            return str(verify_batch(answers, model=llm, use_tqdm=False))

        original = (answers / "part-00000.jsonl").read_text()
        for edit, difference in {
            (lambda rows: rows[1].update(reasoning="mine"), "line 1: its reasoning was 'mine' and is '"),
            (lambda rows: rows[1]["tool_calls"].clear(), r"line 1: its tool_calls was \[\] and is \["),
            (lambda rows: choice(rows["openai"])["message"].update(content="c"), "its choices 0 message content was"),
        }:
            assert re.search(difference, found(edit))
            (answers / "part-00000.jsonl").write_text(original)
