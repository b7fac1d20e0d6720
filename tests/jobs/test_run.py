"""run_batch in this process: what ends up in the folder, what is refused, and that nothing is computed twice."""

import json
import os
import random
import shutil
import sys

import pytest
from checkpoints import edit_json
from job_files import by_id, interrupted_after, prompts, read_folder, read_lines, write_lines
from lora_adapters import write_adapter
from test_lines import OPENAI_LINE, VLLM_LINE

from nanovllm import SamplingParams
from nanovllm.jobs import JobError, check_batch, folder, job_status, part_writer, run, run_batch, writer
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.reader import Prepared, grouped
from nanovllm.jobs.writer import Writer

pa = pytest.importorskip("pyarrow", reason="needs the extra jobs")
pq = pytest.importorskip("pyarrow.parquet")
dataset = pytest.importorskip("pyarrow.dataset").dataset

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}"


@pytest.fixture
def chat(llm, path):
    """The checkpoint with a chat template, which the reader finds in its folder."""
    file = path / "chat_template.jinja"
    file.write_text(CHAT_TEMPLATE)
    yield
    file.unlink()


def completions(llm, texts, **options):
    return llm.generate(texts, SamplingParams(**{"temperature": 0, "max_tokens": 8} | options))


def test_every_line_is_answered_as_generate_does(job, llm, answers):
    rows = prompts(40)
    summary = job(rows)
    outputs = completions(llm, [row["prompt"] for row in rows])
    expected = [
        {
            "id": row["id"],
            "text": output["text"],
            "finish_reason": output["finish_reason"],
            "num_prompt_tokens": output["num_prompt_tokens"],
            "num_completion_tokens": len(output["token_ids"]),
            "topic": row["topic"],
        }
        for row, output in zip(rows, outputs, strict=True)
    ]
    assert by_id(read_folder(answers)) == by_id(expected)
    assert summary[:3] == (40, 40, 0)
    assert summary.num_completion_tokens == sum(len(output["token_ids"]) for output in outputs)
    manifest = json.loads((answers / "_manifest.json").read_text())
    job_of_it = {"model": llm.config.model, "temperature": 0, "max_tokens": 8, "ordered": False, "format": "jsonl"}
    assert manifest["job"] == job_of_it
    assert manifest["progress"]["answered"] == manifest["num_lines"] == 40
    status = job_status(answers)
    assert (status.is_running, status.num_lines, status.counts.answered) == (False, 40, 40)
    assert status.counts[2:] == summary[3:5]


def test_wrong_lines_do_not_stop_the_others(job, answers):
    """A thousand of every kind, and one of a megabyte. A good one has ten megabytes that are not the prompt."""
    bad = ["{", "[]", '{"id": [1], "prompt": "a"}', '{"text": "a"}', '{"prompt": "a", "temperature": -1}']
    bad += ['{"prompt": "a", "stop_token_ids": [100000]}', json.dumps({"prompt": "a " * 300})]
    bad += ['{"prompt": "\\ud800"}', '{"prompt": [1, 100000]}', '{"messages": [{"role": "user", "content": "a"}]}']
    good = prompts(5)
    good[3]["topic"] = "x" * 10_000_000
    rows = [*good, *(bad[i % len(bad)] for i in range(1000)), json.dumps({"prompt": "a" * 1_000_000})]
    random.Random(0).shuffle(rows)
    assert job(rows)[:3] == (1006, 5, 1001)
    assert [(row["id"], row["topic"]) for row in by_id(read_folder(answers))] == [(r["id"], r["topic"]) for r in good]
    errors = read_lines(answers / "_errors.jsonl")
    assert {row["line"] for row in errors} == {i for i, row in enumerate(rows, 1) if isinstance(row, str)}
    assert {row["file"] for row in errors} == {"prompts.jsonl"}
    starts = ["is not JSON", "must be a JSON object", "id=[1]: must be a text", "has no prompt", "temperature=-1"]
    starts += ["stop_token_ids: token id 100000", "the prompt has 301 tokens", "the text has 1000000 characters"]
    starts += ["holds half of a surrogate pair", "token id 100000 is outside", "chat_template: the model's tokenizer"]
    for start in starts:
        assert any(row["error"].startswith(start) for row in errors), start
    # A second call has nothing to do, and a retry tries these alone.
    assert job(rows)[:3] == (1006, 5, 1001)
    assert len(read_lines(answers / "_errors.jsonl")) == 1001
    assert job(rows, retry_errors=True)[:3] == (1006, 5, 1001)
    assert len(read_lines(answers / "_errors.jsonl")) == 1001


def test_a_retry_answers_what_can_be_answered_now(job, answers, path):
    rows = [{"id": 1, "prompt": "a " * 40}, {"id": 2, "prompt": "a"}]
    engine = {"model": path, "device": "cpu", "max_model_len": 100, "kvcache_block_size": 16}
    assert job(rows, num_kvcache_blocks=2, **engine)[1:3] == (1, 1)
    assert job(rows, num_kvcache_blocks=9, **engine)[1:3] == (1, 1)
    assert job(rows, num_kvcache_blocks=9, retry_errors=True, **engine)[1:3] == (2, 0)
    assert not (answers / "_errors.jsonl").exists()


def test_errors_repeat_their_lines_so_that_they_can_be_corrected(job, answers, tmp_path):
    rows = [*prompts(3), '{"id": 7, "prompt"', {"id": "x", "prompt": 3, "topic": "t"}, {"prompt": "a", "n": 0}, "{}"]
    assert job(rows)[1:3] == (3, 4)
    errors = {row["line"]: row for row in read_lines(answers / "_errors.jsonl")}
    assert [errors[i]["row"] for i in (4, 5, 6, 7)] == ['{"id": 7, "prompt"', *rows[4:6], {}]
    # A copy of the errors with changed rows. Two stay as they were.
    errors[4]["row"] = {"id": 7, "prompt": "a"}
    errors[5]["row"]["prompt"] = "a block"
    fixed = write_lines(tmp_path / "fixed.jsonl", list(errors.values()))
    with interrupted_after(2), pytest.raises(KeyboardInterrupt):
        job(retry_errors=fixed)
    fixed.unlink()
    assert job()[1:3] == (5, 2)  # The folder keeps them.
    # Lines with ids do as well.
    write_lines(fixed, [{"id": "prompts.jsonl:6", "prompt": "a"}])
    assert job(retry_errors=fixed)[1:3] == (6, 1)
    found = {row["id"]: row for row in read_folder(answers)}
    assert [*found][3:] == ["prompts.jsonl:4", "x", "prompts.jsonl:6"]
    assert found["x"]["topic"] == "t"
    assert [row["row"] for row in read_lines(answers / "_errors.jsonl")] == [{"id": "prompts.jsonl:7"}]
    with pytest.raises(FileNotFoundError, match=r"^retry_errors='nothing\.jsonl': there is no such file"):
        job(retry_errors="nothing.jsonl")
    for line, message in (({"id": "y"}, "line 1: no line of the job has the id 'y'"), ("{", "line 1: is not JSON")):
        write_lines(fixed, [line])
        with pytest.raises(ValueError, match=f"fixed.jsonl': {message}"):
            job(retry_errors=fixed)
    assert job()[1:3] == (6, 1)


def test_another_model_in_the_same_folder_is_refused(job, answers, tmp_path, path, caplog):
    model = shutil.copytree(path, tmp_path / "model")
    options = {"model": model, "device": "cpu", "max_model_len": 100}
    job(prompts(3), **options)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100:] = bytes(100)  # of the last tensor
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"another job: its model was another one: model.safetensors differs; choose"):
        job(**options)
    shutil.copy(path / "model.safetensors", weights)
    (model / "chat_template.jinja").touch()
    (model / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"another one: chat_template.jinja is new; choose"):
        job(**options)
    (model / "chat_template.jinja").unlink()
    assert job(**options)[1] == 3
    # So with its adapter.
    lora = write_adapter(tmp_path / "adapter", path)
    again = {"output": tmp_path / "with-adapter"} | options
    job(prompts(3), lora=str(lora), **again)
    edit_json(lora / "adapter_config.json", lora_alpha=1)
    with pytest.raises(ValueError, match=r"another one: the adapter's adapter_config\.json differs; choose"):
        job(lora=str(lora), **again)
    # A job of an earlier version goes on, with a warning.
    manifest = json.loads((answers / "_manifest.json").read_text())
    files = manifest.pop("model_files")
    (answers / "_manifest.json").write_text(json.dumps(manifest))
    assert job(**options)[1] == 3
    assert "was begun without a fingerprint of the model" in caplog.text
    assert json.loads((answers / "_manifest.json").read_text())["model_files"] == files


def test_a_glob_that_covers_the_output(job, answers, tmp_path):
    for output in (answers, tmp_path / "answers.jsonl"):
        for _ in range(2):
            assert job([*prompts(3), "{"], output=output, input=tmp_path / "**" / "*.jsonl")[:3] == (4, 3, 1)
        shutil.rmtree(answers, ignore_errors=True)
    with pytest.raises(ValueError, match=r"answers.jsonl': is a file of the job"):
        job(output=tmp_path / "answers.jsonl", input=tmp_path / "answers.jsonl")


def test_an_output_of_one_file(job, tmp_path):
    file = tmp_path / "answers.jsonl"
    with interrupted_after(2), pytest.raises(KeyboardInterrupt):
        job(prompts(5), output=file)
    assert not file.exists()
    for _ in range(2):
        assert job(output=file)[:3] == (5, 5, 0)
        assert len(read_lines(file)) == job_status(file).counts.answered == 5
        assert not list(tmp_path.glob("*/part-*"))
    assert job(prompts(3), output=file, overwrite=True)[:3] == (3, 3, 0)
    assert len(read_lines(file)) == 3
    assert job(output=tmp_path / "answers.parquet")[:3] == (3, 3, 0)
    assert len(pq.read_table(tmp_path / "answers.parquet")) == 3
    with pytest.raises(ValueError, match=r"format='parquet': must be that of answers.jsonl"):
        job(output=file, format="parquet")


def test_others_skip_what_is_no_answer(job, answers):
    job([*prompts(3), "{"])
    job([*prompts(3)], output=answers.with_name("parquet"), format="parquet")
    assert len(dataset(answers, format="json").to_table()) == 3
    assert len(pq.read_table(answers.with_name("parquet"))) == 3


def test_a_folder_that_is_deleted_under_a_job(job, answers, monkeypatch):
    monkeypatch.setattr(writer, "SYNC_SECONDS", 0)
    put = Writer.put

    def delete(self, item):
        put(self, item)
        shutil.rmtree(answers, ignore_errors=True)

    monkeypatch.setattr(Writer, "put", delete)
    with pytest.raises(JobError, match=r"answers: .*deleted, moved or replaced while the job w") as raised:
        job(prompts(60))
    assert not raised.value.goes_on
    assert not answers.exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"seed": 3, "temperature": 1.0}], ids=str)
def test_a_call_goes_on_where_the_last_one_stopped(job, answers, llm, options):
    rows, undisturbed = prompts(60), answers.with_name("undisturbed")
    job(rows, output=undisturbed, **options)
    with interrupted_after(40), pytest.raises(KeyboardInterrupt):
        job(rows, **options)
    num_before = len(read_folder(answers))
    assert 0 < num_before < 60
    assert not list(answers.glob("*.tmp"))
    num_finished = job_status(answers).counts.answered  # In order, some wait for others before them.
    assert num_finished == 40 if "ordered" in options else num_before
    finished = {row["id"] for row in read_lines(*answers.glob("part-*"), *answers.glob("_early.jsonl"))}
    assert len(finished) == num_finished
    before = llm.stats()["prompt_tokens"]
    assert job(rows, **options)[:2] == (60, 60)
    expected = read_folder(undisturbed)
    # What had an answer was not computed again.
    left = {row["id"] for row in rows} - finished
    num_tokens = sum(row["num_prompt_tokens"] for row in expected if row["id"] in left)
    assert llm.stats()["prompt_tokens"] - before == num_tokens
    assert not (answers / "_early.jsonl").exists()
    assert by_id(read_folder(answers)) == by_id(expected)
    if "ordered" in options:
        assert read_folder(answers) == expected
        assert [row["id"] for row in expected] == list(range(60))


def test_in_order_although_some_take_longer(job, answers, monkeypatch):
    monkeypatch.setattr(part_writer, "PART_LINES", 7)
    rng = random.Random(1)
    rows = [{"prompt": f"a {i}", "max_tokens": rng.randint(1, 30), "ignore_eos": True} for i in range(50)]
    rows[13] = "{"
    job(rows, ordered=True)
    numbers = [int(row["id"].removeprefix("prompts.jsonl:")) for row in read_folder(answers)]
    assert numbers == [i for i in range(1, 51) if i != 14]
    assert len(list(answers.glob("part-*.jsonl"))) == 7


def test_a_finished_job_needs_no_engine(job, answers, llm):
    job(prompts(3))
    assert job(model=llm.config.model)[1] == 3
    assert job(input=answers.with_name("prompts.jsonl"), overwrite=True, max_tokens=2)[1] == 3
    assert {row["num_completion_tokens"] for row in read_folder(answers)} <= {1, 2}


def test_another_job_in_the_same_folder_is_refused(job, answers, tmp_path):
    rows = prompts(3)
    job(rows)
    before = read_folder(answers)
    for options, message in (
        ({"temperature": 0.5}, "temperature was 0 and is now 0.5"),
        ({"max_tokens": 9, "top_k": 5}, "max_tokens was 8 and is now 9; top_k was None and is now 5"),
        ({"template": "{prompt}!"}, "template was None and is now '{prompt}!'"),
        ({"model": "some/model"}, "model was '.*' and is now 'some/model'"),
        ({"ordered": True}, "ordered was False and is now True"),
        ({"input": [tmp_path / "prompts.jsonl"] * 2, "seed": 1}, "seed was None and is now 1"),
    ):
        with pytest.raises(ValueError, match=message):
            job(rows, **options)
    with pytest.raises(ValueError, match=r"the input prompts.jsonl has changed: it had \d+ bytes and now has"):
        job([*rows, {"prompt": "more"}])
    with pytest.raises(ValueError, match=r"the input prompts.jsonl has changed: .*, others"):
        job([rows[0] | {"topic": "t9"}, *rows[1:]])
    (tmp_path / "prompts.jsonl").rename(tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match=r"the input was prompts.jsonl and is now other.jsonl"):
        job(input=tmp_path / "other.jsonl")
    (tmp_path / "other.jsonl").rename(tmp_path / "prompts.jsonl")
    assert job(rows)[1] == 3
    assert read_folder(answers) == before
    # An answer that the input does not have, such as one that was copied here.
    (answers / "part-00009.jsonl").write_text(json.dumps(before[0] | {"id": "from elsewhere"}) + "\n")
    with pytest.raises(ValueError, match="holds rows that are no answers of this input"):
        job(rows)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "csv"}, ValueError, "format='csv': must be"),
        ({"ordered": True, "retry_errors": True}, ValueError, "retry_errors: its answers would follow"),
        ({"output": "s3://bucket/answers"}, ValueError, "must be a local folder"),
        ({"input": "nowhere.jsonl"}, FileNotFoundError, "input='nowhere.jsonl': there is no such file"),
        ({"temperature": -1}, ValueError, "temperature=-1"),
        ({"max_token": 1, "model": "m"}, TypeError, "unknown option 'max_token': did you mean 'max_tokens'"),
        ({"skip_tokenizer_init": True, "model": "m"}, TypeError, "unknown option 'skip_tokenizer_init'"),
        ({"max_num_seqs": 7}, TypeError, "model is an LLM, which has its options already"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused_before_any_work(job, answers, options, error, message):
    with pytest.raises(error, match=message):
        job(prompts(2), **options)
    assert not answers.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structured_outputs": {"json": {"type": "no-such"}}}, "json"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "grammar"),
        ({"stop_token_ids": [100_000]}, "stop_token_ids: token id 100000"),
        ({"logit_bias": {"100000": 1}}, "logit_bias: token id 100000"),
        ({"thinking_token_budget": 5}, "thinking_token_budget=5"),
        ({"template": "Sum {promt}"}, "no line has the column 'promt'; there are: 'id', 'prompt', 'topic'"),
        ({"prompt_column": "text"}, "prompt_column='text': no line has this column"),
        ({"system": "Brief."}, "no line can be answered; the first one, prompts.jsonl:1: chat_template"),
    ],
    ids=str,
)
def test_what_every_line_would_fail_by_is_an_error_of_the_call(job, llm, answers, options, message):
    """Also where lines have options of their own."""
    pytest.importorskip("llguidance")
    rows = [*prompts(3), {"prompt": "a", "n": 2}]
    with pytest.raises(ValueError, match=message):
        job(rows, **options)
    assert not answers.exists()
    if "system" in options:
        assert check_batch(answers.with_name("prompts.jsonl"), llm, **options).num_failed == 4  # It names them all.
    else:
        with pytest.raises(ValueError, match=message):
            check_batch(answers.with_name("prompts.jsonl"), llm, **options)
    assert job(rows)[1] == 4


def test_a_missing_package_and_a_forgotten_column_write_nothing(job, answers, monkeypatch):
    pytest.importorskip("llguidance")
    rows = [row | {"structured_outputs": {"regex": "a+"}} for row in prompts(3)]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ImportError, match="pip install llguidance"):
            job(rows)
    assert not answers.exists()
    assert job(rows)[1] == 3  # after its installation
    with pytest.raises(ValueError, match=r"no line has a prompt: .*--prompt-column"):
        job([{"text": "a"}], output=answers.with_name("others"))


def test_a_missing_package_that_only_a_later_line_needs_stops_the_job(job, answers, monkeypatch):
    pytest.importorskip("llguidance")
    rows = prompts(5)
    rows[3] |= {"structured_outputs": {"regex": "a+"}}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ImportError, match=r"^structured_outputs need llguidance .*pip install llguidance$"):
            job(rows)
    assert not (answers / "_errors.jsonl").exists()
    assert job(rows)[1:3] == (5, 0)  # after its installation


def test_a_job_without_an_answer_may_change_its_options(job, answers):
    rows = prompts(3)
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        job(["{", *rows])
    for part in answers.glob("*part-*"):
        part.unlink()
    assert job(["{", *rows], temperature=0.5)[1:3] == (3, 1)
    assert json.loads((answers / "_manifest.json").read_text())["job"]["temperature"] == 0.5
    with pytest.raises(ValueError, match=r"temperature was 0.5 and is now 0"):
        job(["{", *rows])


def test_a_folder_on_which_another_process_works_is_refused(job, answers):
    with folder.JobFolder(answers), pytest.raises(ValueError, match="another process works on this folder"):
        job(prompts(2), overwrite=True)


def test_only_answers_are_overwritten(job, answers, tmp_path):
    job(prompts(3))
    before = read_folder(answers)
    with pytest.raises(ValueError, match=r"part-00000.jsonl': is a file of the job in"):
        job(input=answers / "part-00000.jsonl", prompt_column="text", overwrite=True)
    assert read_folder(answers) == before
    (answers / "_manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds 'part-00000.jsonl' and no _manifest.json"):
        job(prompts(2), overwrite=True)
    assert read_folder(answers) == before
    (answers / "_manifest.json").write_text('{"name": "somebody else\'s"}')
    with pytest.raises(ValueError, match=r"manifest.json: belongs to no job"):
        job(prompts(2), overwrite=True)
    with pytest.raises(ValueError, match=r"manifest.json: belongs to no job"):
        job_status(answers)
    assert read_folder(answers) == before


def test_duplicate_ids_are_refused_and_leave_the_old_answers(job, answers):
    job(prompts(3))
    with pytest.raises(ValueError, match="1 ids are given twice"):
        job([*prompts(3), {"id": 1, "prompt": "b"}], overwrite=True)
    assert len(read_folder(answers)) == 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"quantization": "int3"}, ValueError),
        ({"kv_cache_dtype": "int8"}, ValueError),
        ({"attention_backend": "flash_attn", "device": "cpu"}, ValueError),
        ({"model": "no/such/folder"}, FileNotFoundError),
    ],
    ids=str,
)
def test_wrong_options_of_the_engine_leave_the_old_answers_and_no_job(job, answers, path, tmp_path, options, error):
    job(prompts(3))
    before = read_folder(answers)
    for folder_of_answers in (answers, tmp_path / "other"):
        with pytest.raises(error, match=next(iter(options))):
            job(prompts(2), folder_of_answers, **{"model": path} | options, overwrite=folder_of_answers == answers)
    assert read_folder(answers) == before
    assert not (tmp_path / "other" / "_manifest.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(job, answers):
    answers.mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        job(prompts(2))


def test_a_folder_below_a_file(job, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        job(prompts(2), output=tmp_path / "file" / "answers")


def test_parquet_in_and_out(job, answers, tmp_path, monkeypatch):
    monkeypatch.setattr(part_writer, "PART_LINES", 10)
    rows = prompts(25)
    extra = {"score": 0.5, "flag": True, "tags": ["a", "b"], "nothing": None, "text": "mine"}
    pq.write_table(pa.Table.from_pylist([row | extra for row in rows]), tmp_path / "in.parquet")
    assert job(input=tmp_path / "in.parquet")[1] == 25
    assert len(list(answers.glob("part-*.parquet"))) == 3
    table = pq.read_table(sorted(answers.glob("*.parquet")))
    assert table.schema.field("id").type == pa.int64()
    found = by_id(table.to_pylist())
    job(rows, output=tmp_path / "as_json")
    for row, expected in zip(found, by_id(read_folder(tmp_path / "as_json")), strict=True):
        assert expected.items() <= row.items()
        assert (row["score"], row["flag"], row["tags"], row["input_text"]) == (0.5, True, '["a", "b"]', "mine")
    assert job(input=tmp_path / "in.parquet")[1] == 25
    with interrupted_after(12), pytest.raises(KeyboardInterrupt):
        job(rows, output=tmp_path / "again", format="parquet")
    assert job(rows, output=tmp_path / "again", format="parquet")[1] == 25
    again = pq.read_table(sorted((tmp_path / "again").glob("*.parquet")), columns=["id", "text"]).to_pylist()
    assert by_id(again) == [{"id": row["id"], "text": row["text"]} for row in found]


def test_half_of_a_surrogate_pair_in_parquet(job, answers):
    assert job([prompts(1)[0] | {"topic": "\ud800x"}], format="parquet")[:2] == (1, 1)
    assert pq.read_table(answers / "part-00000.parquet")["topic"].to_pylist() == ["?x"]


def test_requests_of_openais_format_are_answered_in_it(job, answers, chat, llm):
    rows = [VLLM_LINE, OPENAI_LINE, {"custom_id": "c", "body": {"prompt": "a block", "max_tokens": 4}}, {"prompt": "a"}]
    with pytest.raises(ValueError, match="which is answered in JSON"):
        job(rows, format="parquet")
    assert job(rows)[1] == 4
    found = {row.get("custom_id", row["id"]): row for row in read_folder(answers)}
    assert list(found) == ["request-1", "request-2", "c", "prompts.jsonl:4"] or len(found) == 4
    body = found["request-1"]["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", llm.config.model)
    (expected,) = completions(llm, ["system: Help.\nuser: Hello!\n"], max_tokens=10, top_k=5)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": expected["text"]}
    assert len(found["request-2"]["response"]["body"]["choices"]) == 2
    (expected,) = completions(llm, ["a block"], max_tokens=4)
    assert found["c"]["response"]["body"]["choices"][0]["text"] == expected["text"]
    assert job(rows)[1] == 4


def test_templates_system_messages_and_samples(job, answers, chat, llm):
    rows = [{"id": 1, "a": "x", "n": 2, "seed": 1, "temperature": 1, "logprobs": 1, "b": 5}]
    job(rows, template="Sum {a}", system="Brief.", chat_template_kwargs={"mood": "glad"})
    (row,) = read_folder(answers)
    text = "system: Brief.\nuser: Sum x\nglad"
    (expected,) = completions(llm, [text], n=2, seed=1, temperature=1, logprobs=1)
    assert [sample["text"] for sample in row["samples"]] == [sample["text"] for sample in expected["samples"]]
    assert len(row["logprobs"]) == len(expected["token_ids"])
    assert row["num_completion_tokens"] == sum(len(sample["token_ids"]) for sample in expected["samples"])
    assert row["b"] == 5
    assert "a" not in row


def test_an_input_without_lines(job, answers):
    assert job([])[:3] == (0, 0, 0)
    assert job_status(answers).num_lines == 0


def test_prompts_with_one_beginning_are_neighbours():
    def prepared(position, token_ids):
        line = LineFormat().read({"prompt": token_ids}, position)
        return Prepared(position, position, "a", position, line, None)

    prompts = [[1, 1, 1], [2, 2, 2, 5], [3], [1, 1, 7], [2, 2, 2, 4], [1, 1, 1, 3], [2, 9]]
    order = [each.position for each in grouped([prepared(i, ids) for i, ids in enumerate(prompts)], 2)]
    assert order == [0, 5, 3, 4, 1, 2, 6]


def test_a_dry_run_says_what_would_fail(job, llm, answers, tmp_path):
    rows = [*prompts(8), {"id": "long", "prompt": "a " * 300}, {"id": "bad", "prompt": "a", "max_tokens": 0}]
    rows += [{"id": "two", "prompt": "a", "n": 2, "max_tokens": 5}]
    job(rows, output=answers)
    input = tmp_path / "prompts.jsonl"
    for model, options in ((llm, {}), (llm.config.model, {"max_model_len": 200, "device": "cpu"})):
        check = check_batch(input, model, max_tokens=8, **options)
        assert [row["id"] for row in check.errors] == ["long", "bad"]
        errors = [{name: row[name] for name in row if name != "row"} for row in read_lines(answers / "_errors.jsonl")]
        assert by_id(check.errors) == by_id(errors)
        counts = [sum(row["num_prompt_tokens"] for row in read_folder(answers)), 8 * 8 + 2 * 5]
        assert list(check[:4]) == [11, 2, *counts]


def test_a_sample_estimates_the_whole_job(job, llm, answers, tmp_path):
    # Prompts shorter than a block, which the reader does not group.
    rows = [{"prompt": "a", "topic": i, "max_tokens": 2 if i < 30 else 6, "ignore_eos": True} for i in range(40)]
    input = write_lines(tmp_path / "prompts.jsonl", [*rows, "{", {"id": "two", "prompt": "a", "n": 2}])
    check = check_batch(input, llm, temperature=0, max_tokens=4, ignore_eos=True, sample=50, price_per_hour=3600)
    estimate = check.estimate
    assert estimate.sample[:2] == (41, 30 * 2 + 10 * 6 + 2 * 4)
    assert estimate.sample.max_num_seqs == llm.config.max_num_seqs
    assert estimate.num_completion_tokens == check.max_completion_tokens == estimate.sample.num_completion_tokens
    assert 0 < estimate.seconds == pytest.approx(estimate.sample.seconds) == pytest.approx(estimate.price)
    assert (check.parameters, check.data) == (["max_tokens", "ignore_eos", "n"], ["topic"])
    check = check_batch(input, llm, temperature=0, max_tokens=4, ignore_eos=True, sample=8, replicas=2)
    sample = check.estimate.sample
    assert sample.num_lines == 8
    assert 8 * 2 < sample.num_completion_tokens < 8 * 6, "lines of all of the input"
    assert check.estimate.num_completion_tokens == sample.num_completion_tokens * 41 / 8
    assert check.estimate.seconds == pytest.approx(sample.seconds * 41 / 8 / 2)
    assert check.estimate.price is None
    assert check_batch(input, llm).estimate is None
    for name, value in (("sample", 0), ("sample", 1.5), ("replicas", 0), ("price_per_hour", -1)):
        with pytest.raises(ValueError, match=f"{name}={value}: must be a positive"):
            check_batch(input, llm, **{name: value})
    assert not answers.exists()


def test_a_sample_finds_what_this_engine_cannot_answer(path, tmp_path):
    input = write_lines(tmp_path / "prompts.jsonl", [{"id": 1, "prompt": "a " * 40}, {"id": 2, "prompt": "a"}])
    engine = {"device": "cpu", "max_model_len": 100, "kvcache_block_size": 16, "num_kvcache_blocks": 2}
    assert check_batch(input, path, **engine).num_failed == 0
    check = check_batch(input, path, max_tokens=3, ignore_eos=True, sample=5, **engine)
    assert [row["id"] for row in check.errors] == [1]
    assert check[:4] == (2, 1, 1, 3)
    assert check.estimate.sample[:2] == (1, 3)
    assert check.estimate.num_completion_tokens == 3


def test_a_missing_package_is_an_error_of_the_dry_run_too(job, llm, tmp_path, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    rows = [*prompts(3), {"prompt": "a", "structured_outputs": {"regex": "a+"}}]
    with pytest.raises(ImportError, match="pip install llguidance"):
        check_batch(write_lines(tmp_path / "prompts.jsonl", rows), llm)


def test_speed_and_price_of_a_job(job, answers):
    for wrong in (0, -1, float("nan"), float("inf"), True, "2"):
        with pytest.raises(ValueError, match=r"price_per_hour=.*: must be a positive number"):
            job(prompts(20), price_per_hour=wrong)
    assert not answers.exists()
    with interrupted_after(5), pytest.raises(KeyboardInterrupt):
        job(price_per_hour=7200)
    before = json.loads((answers / "_manifest.json").read_text())["progress"]
    assert 0 < before["price"] == pytest.approx(2 * before["seconds"])
    summary = job(price_per_hour=3600)
    assert before["seconds"] < summary.total_seconds == pytest.approx(summary.price)
    progress = json.loads((answers / "_manifest.json").read_text())["progress"]
    names = ("tokens_per_second", "seconds", "price")
    assert [progress[name] for name in names] == list(summary[6:9])
    new = progress["num_completion_tokens"] - before["num_completion_tokens"]
    assert summary.tokens_per_second == pytest.approx(new / (progress["seconds"] - before["seconds"]))
    # A call with nothing to do has no speed, and leaves the last one.
    again = job()
    assert (again.tokens_per_second, again.price) == (summary.tokens_per_second, None)
    status = job_status(answers)
    assert (status.tokens_per_second, status.price) == (summary.tokens_per_second, None)


def test_the_status_of_no_job(tmp_path):
    with pytest.raises(ValueError, match="holds no job"):
        job_status(tmp_path)
    with pytest.raises(FileNotFoundError):
        job_status(tmp_path / "nowhere")


def test_on_ray_a_replica_is_one_engine(path, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda name: True)
    file = write_lines(tmp_path / "prompts.jsonl", prompts(2))
    says = "data_parallel_size=2: must be 1 on Ray, where replicas says how many engines"
    with pytest.raises(ValueError, match=says):
        run_batch(file, tmp_path / "answers", path, replicas=2, data_parallel_size=2)
