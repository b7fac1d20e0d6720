"""Files as people have them: read as they mean it, or refused with the cause before work begins."""

import bz2
import gzip
import json
import logging
import lzma

import pytest
from job_files import by_id, read_folder, read_lines

from nanovllm.jobs import check_batch
from nanovllm.jobs.inputs import Inputs, find_files, scan

pa = pytest.importorskip("pyarrow", reason="needs the extra jobs")
pq = pytest.importorskip("pyarrow.parquet")

TWO = '{"id": "a", "prompt": "x = "}\n{"id": "b", "prompt": "import "}\n'
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools {% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.a }}{% endfor %} {% endfor %}{{ reasoning_effort }}"
)


@pytest.fixture
def written(tmp_path):
    """written(bytes): a file of the job."""

    def write(content, name="prompts.jsonl"):
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    "content",
    [
        TWO.encode("utf-16"),
        "\ufeff".encode("utf-16-be") + TWO.replace("\n", "\r\n").encode("utf-16-be"),
        TWO.encode("utf-32"),
        gzip.compress(TWO.encode()),
        TWO.replace("\n", "\r").encode(),
        TWO.replace("}\n{", "}\n\ufeff{").encode(),
        ("\ufeff" + TWO + "\ufeff").encode(),
    ],
    ids=["utf-16", "utf-16-be", "utf-32", "gzip", "cr", "bom in the middle", "bom at both ends"],
)
def test_files_by_another_name_or_encoding(written, content):
    lines = [line for _, line in Inputs(find_files(written(content))).lines()]
    assert [(line.id, line.number, line.row["prompt"]) for line in lines] == [("a", 1, "x = "), ("b", 2, "import ")]


def test_lines_that_cross_the_blocks_of_reading(written, monkeypatch):
    monkeypatch.setattr("nanovllm.jobs.inputs._BYTES_AT_ONCE", 7)
    ends = ("\n", "\r\n", "\r")
    text = "".join(f'{{"id": {i}, "prompt": "grün {i}"}}{ends[i % 3]}' for i in range(20))
    expected = [(i, i + 1, f"grün {i}") for i in range(20)]
    for content in (text.encode(), text.encode("utf-16"), gzip.compress(text.encode())):
        lines = [line for _, line in Inputs(find_files(written(content))).lines()]
        assert [(line.id, line.number, line.row["prompt"]) for line in lines] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            json.dumps([json.loads(line) for line in TWO.splitlines()], indent=1),
            "is a JSON array; one JSON object a line",
        ),
        ("[" + TWO.strip().replace("\n", ",\n") + "]\n", "is a JSON array; one JSON object a line"),
        (json.dumps({"prompt": "a"}, indent=1), "has no line that is a JSON object; its line 1 is not JSON"),
        ("id,prompt\na,x = \n", "has no line that is a JSON object; its line 1 is not JSON"),
        ("grün\n".encode("latin-1"), "has no line that is a JSON object; its line 1 is not UTF-8"),
        (TWO.encode("utf-16-le"), "is UTF-16 or UTF-32 without a byte order mark: save it as UTF-8"),
        (bz2.compress(TWO.encode()), "is no file of JSON lines, but compressed by bzip2: unpack it with bunzip2"),
        (lzma.compress(TWO.encode()), "is no file of JSON lines, but compressed by xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(9), "is no file of JSON lines, but compressed by zstd: unpack it with zstd -d"),
        (b"PAR1" + bytes(9), "is no file of JSON lines, but Parquet: give it a name that ends in .parquet"),
    ],
    ids=str,
)
def test_files_that_are_no_json_lines_are_refused_as_a_whole(written, content, message):
    with pytest.raises(ValueError, match=rf"prompts\.jsonl: {message}"):
        scan(Inputs(find_files(written(content))))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv", r"to make one: python -c .import pandas; pandas.read_csv\(.*a.jsonl"),
        ("a.jsonl.zst", "unpack it: zstd -d "),
        ("a.txt", "'prompt'"),
        ("a.doc", r"must be a file of JSON lines or Parquet: .*\.parquet$"),
        ("saved/dataset_info.json", r"is a saved dataset, not a file; .*load_from_disk\('.*saved'\).to_parquet"),
        ("saved/dataset_dict.json", r"is a saved dataset, not a file; .*\['train'\].to_parquet"),
    ],
)
def test_files_of_other_kinds_say_how_to_convert_them(tmp_path, name, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(ValueError, match=message.replace("'", "['\"\\\\]+")):
        find_files(file.parent if "saved" in name else file)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no route\nto host")

    monkeypatch.setattr("fsspec.get_fs_token_paths", fail)
    with pytest.raises(OSError, match=r"a/b.jsonl': cannot be reached: RuntimeError: no route to host"):
        find_files("hf://datasets/a/b.jsonl")


def test_two_columns_of_one_name(tmp_path, written):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: several columns are called 'prompt'"):
        scan(Inputs(find_files(tmp_path / "a.parquet")))
    lines = [line for _, line in Inputs(find_files(written('{"id": 1, "prompt": "a", "prompt": "b"}\n'))).lines()]
    assert lines[0].error == "is not JSON: 'prompt' is there twice"


def test_numbers_that_json_lacks(job, answers):
    """NaN and what overflows alike: null in the answer."""
    job(['{"id": "a", "prompt": "x = ", "score": NaN}', '{"id": "b", "prompt": "x = ", "score": 1e999}'])
    assert [row["score"] for row in by_id(read_folder(answers))] == [None, None]


def test_ids_of_a_table_with_a_missing_value(job, answers):
    job(['{"id": 1.0, "prompt": "x = "}', '{"id": 2.0, "prompt": "import "}', '{"id": NaN, "prompt": "y"}'])
    assert [row["id"] for row in by_id(read_folder(answers))] == [1, 2, "prompts.jsonl:3"]
    assert job()[1] == 3


def test_line_separators_of_unicode_end_no_line_of_answers(job, answers):
    row = {"id": "a", "prompt": "x = ", "note": "one\u2028two\u2029three\x85four"}
    job([json.dumps(row, ensure_ascii=False)])
    (part,) = answers.glob("part-*")
    assert len(part.read_text("utf-8").splitlines()) == 1
    assert read_folder(answers)[0]["note"] == row["note"]


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"format": "parquet"}], ids=str)
def test_a_line_that_is_nested_too_deep_is_an_error_of_its_own(job, answers, options):
    tree = "[" * 500 + "]" * 500
    hundred = '{"a":' * 99 + "[]" + "}" * 99
    rows = ['{"id": "a", "prompt": "x = "}', f'{{"id": "b", "prompt": "y", "tree": {tree}}}']
    rows += [
        f'{{"id": "c", "prompt": "z", "tree": {hundred}}}',
        '{"prompt": "y", "tree": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ]
    assert job(rows, **options)[:3] == (4, 2, 2)
    assert job(rows, **options)[:3] == (4, 2, 2)
    errors = read_lines(*answers.glob("*errors.jsonl"))
    assert [row["error"] for row in errors] == ["is nested more than 100 deep"] * 2
    assert [row["id"] for row in errors] == ["b", "prompts.jsonl:4"]


def test_conversations_that_are_texts(job, answers, path):
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    try:
        conversation = [{"role": "user", "content": "hi"}]
        tools = [{"type": "function", "function": {"name": "add"}}]
        rows = [{"id": "a", "messages": json.dumps(conversation)}, {"id": "b", "messages": "hello"}]
        rows += [{"id": "c", "messages": [5, 6, 7]}, {"id": "d", "prompt_token_ids": "abc"}]
        rows += [{"id": "e", "messages": conversation}, {"id": "f", "prompt_token_ids": "[5, 6, 7]"}]
        rows += [{"id": "g", "messages": conversation, "tools": json.dumps(tools)}]
        rows += [{"id": "h", "messages": conversation, "tools": tools}, {"id": "i", "messages": [conversation]}]
        assert job(rows)[1:3] == (5, 4)
        found = {row["id"]: row for row in read_folder(answers)}
        assert found["a"] == found["e"] | {"id": "a"}
        assert found["f"]["num_prompt_tokens"] == 3
        assert found["g"] == found["h"] | {"id": "g"}
        assert found["g"]["num_prompt_tokens"] > found["a"]["num_prompt_tokens"]
        errors = {row["id"]: row["error"] for row in read_lines(*answers.glob("*errors.jsonl"))}
        assert errors.keys() == {"b", "c", "d", "i"}
        assert errors["b"].startswith("messages='hello': must be a conversation")
        assert errors["d"] == "prompt_token_ids='abc': must be a list of integers"
    finally:
        (path / "chat_template.jinja").unlink()


def test_columns_that_are_called_as_parameters(job, answers, caplog, tmp_path, llm):
    rows = [{"id": "oslo", "city": "Oslo", "temperature": 4.0, "n": 2}]
    rows += [{"id": "cairo", "city": "Cairo", "temperature": 36.6, "n": 3}]
    with caplog.at_level(logging.WARNING):
        job(rows, template="{city} is")
    assert "Columns that are parameters of their lines: temperature, n (" in caplog.text
    found = by_id(read_folder(answers))
    assert [(row["temperature"], row["n"], len(row["samples"])) for row in found] == [(36.6, 3, 3), (4.0, 2, 2)]
    check = check_batch(tmp_path / "prompts.jsonl", llm, template="{city} is")
    assert (check.parameters, check.data) == (["temperature", "n"], [])
    caplog.clear()
    job(rows, tmp_path / "data", template="{city} is", line_parameters=False)
    assert "parameters" not in caplog.text
    found = by_id(read_folder(tmp_path / "data"))
    assert [(row["temperature"], row["n"], "samples" in row) for row in found] == [(36.6, 3, False), (4.0, 2, False)]
    with pytest.raises(ValueError, match="line_parameters"):
        job(rows, tmp_path / "data", template="{city} is")


def test_an_id_column(job, answers, tmp_path):
    rows = [{"key": "x", "id": 5, "prompt": "a"}, {"key": "y", "id": 5, "prompt": "b"}]
    with pytest.raises(ValueError, match="1 ids are given twice"):
        job(rows)
    assert job(rows, id_column="key")[1] == 2
    found = by_id(read_folder(answers))
    assert [(row["id"], row["input_id"], "key" in row) for row in found] == [("x", 5, False), ("y", 5, False)]
    assert job(rows, id_column="key")[1] == 2
    with pytest.raises(ValueError, match="id_column='kee': no line has this column; the columns are: 'key'"):
        job(rows, tmp_path / "other", id_column="kee")
    assert job(rows, tmp_path / "columns", id_column="key", format="parquet")[1] == 2
    assert pq.read_table(*(tmp_path / "columns").glob("*.parquet"))["input_id"].to_pylist() == ["5", "5"]


def test_a_prompt_of_megabytes_is_not_tokenized(job, answers, llm, monkeypatch):
    """Neither as a text nor in a conversation."""
    tokenizer = type(llm.tokenizer)
    encode, lengths = tokenizer.__call__, []

    def count(self, texts, *args, **options):
        lengths.extend(map(len, [texts] if isinstance(texts, str) else texts))
        return encode(self, texts, *args, **options)

    monkeypatch.setattr(tokenizer, "__call__", count)
    long = "a word " * 100_000
    rows = [
        {"id": 1, "prompt": long},
        {"id": 2, "messages": [{"role": "user", "content": long}]},
        {"id": 3, "prompt": "a"},
    ]
    assert job(rows, chat_template="{{ messages[0].content }}")[1:3] == (1, 2)
    assert max(lengths) == 10 * 200
    errors = [row["error"] for row in read_lines(*answers.glob("*errors.jsonl"))]
    assert all(error.startswith("the text has 700000 characters, of which the first 2000 have ") for error in errors)


def test_tool_calls_whose_arguments_are_texts(job, answers):
    """OpenAI's. They give the same prompt as with a mapping."""

    def row(line_id, arguments):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [{"role": "user", "content": "2 + 1?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"id": line_id, "messages": [*messages, {"role": "tool", "tool_call_id": "1", "content": "3"}]}

    rows = [row("text", '{"a": 2, "b": 1}'), row("mapping", {"a": 2, "b": 1})]
    job([*rows, row("wrong", "not json")], chat_template=CHAT_TEMPLATE)
    text, mapping = (row | {"id": None} for row in read_folder(answers))
    assert text == mapping
    (error,) = read_lines(*answers.glob("*errors.jsonl"))
    assert "arguments must be a JSON object" in error["error"]
