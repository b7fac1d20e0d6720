"""Files of prompts: which are found, how they are read, and what is refused before work begins."""

import gzip
import sys

import numpy as np
import pytest

from nanovllm.jobs.inputs import Inputs, find_files, hash_id, scan
from nanovllm.jobs.lines import LineFormat

pa = pytest.importorskip("pyarrow", reason="needs the extra jobs")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [{"id": 1, "prompt": "grün"}, {"prompt": "b", "topic": "x"}]
TEXT = '{"id": 1, "prompt": "grün"}\n\n{"prompt": "b", "topic": "x"}'


def rows_of(*paths):
    return [(line.id, line.number, line.row) for _, line in Inputs(find_files(paths)).lines()]


@pytest.mark.parametrize("text", [TEXT, TEXT + "\n", "\ufeff" + TEXT, TEXT.replace("\n", "\r\n") + "\r\n \n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson.gz"])
def test_lines_of_json_are_read_plain_and_compressed(tmp_path, text, suffix):
    file = tmp_path / f"a{suffix}"
    file.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert rows_of(file) == [(1, 1, ROWS[0]), (f"{file.name}:3", 3, ROWS[1])]


def test_parquet_and_urls(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    expected = [(1, 1, ROWS[0] | {"topic": None}), ("a.parquet:2", 2, ROWS[1] | {"id": None})]
    rows = rows_of(tmp_path / "a.parquet")
    assert [(number, line_id) for line_id, number, _ in rows] == [(1, 1), (2, "a.parquet:2")]
    assert [row["prompt"] for *_, row in rows] == ["grün", "b"]
    assert rows_of(f"file://{tmp_path}/*.parquet") == rows
    assert len(rows) == len(expected)
    (tmp_path / "b.jsonl").write_text(TEXT)
    assert rows_of(f"file://{tmp_path}/b.jsonl")[0] == (1, 1, ROWS[0])


def test_parquet_as_lines_would_be(tmp_path):
    """A struct has the keys of all rows, and a map is a list of pairs, to Arrow."""
    calls = [{"function": {"name": "f", "arguments": {"city": "Oslo", "days": None}}}]
    rows = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}],
            "tools": [tool({"city": {"type": "string", "enum": ["Oslo", "Rome"]}})],
            "notes": {"a": None, "b": [{"c": 1}, {"d": 2}]},
            "max_tokens": 5.0,
            "prompt_token_ids": None,
        },
        {"messages": [{"role": "user", "content": "b", "name": "x"}], "tools": [tool({"days": {"type": "integer"}})]},
        {"prompt_token_ids": [5.0, 6.0]},
    ]
    variables = pa.array([[("enable_thinking", True)], None, []], pa.map_(pa.string(), pa.bool_()))
    biases = pa.array([[(5, -1.0)], None, []], pa.map_(pa.int64(), pa.float64()))
    table = pa.table({name: [row.get(name) for row in rows] for name in rows[0]})
    table = table.append_column("chat_template_kwargs", variables).append_column("logit_bias", biases)
    pq.write_table(table, tmp_path / "a.parquet")
    read = [row for *_, row in rows_of(tmp_path / "a.parquet")]
    first, second, third = [LineFormat().read(row, 1) for row in read]
    call = {"function": {"name": "f", "arguments": {"city": "Oslo"}}}
    assert first.prompt == [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    assert first.chat_options.tools == [tool({"city": {"type": "string", "enum": ["Oslo", "Rome"]}})]
    assert first.chat_options.kwargs == {"enable_thinking": True}
    assert (first.params.logit_bias, first.params.max_tokens) == (((5, -1.0),), 5)
    assert first.columns["notes"] == {"b": [{"c": 1}, {"d": 2}]}
    assert second.prompt == rows[1]["messages"]
    assert second.chat_options.tools == [tool({"days": {"type": "integer"}})]
    assert third.prompt == [5, 6]


def test_messages_that_are_maps(tmp_path):
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    messages = [{"role": "user", "content": "a"}]
    table = pa.table(
        {"messages": pa.array([[list(message.items()) for message in messages], None], kind), "prompt": [None, "b"]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert [LineFormat().read(row, 1).prompt for *_, row in rows_of(tmp_path / "a.parquet")] == [messages, "b"]


def tool(properties: dict) -> dict:
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def test_files_are_found_once_and_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "d/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a"}')
    found = find_files([tmp_path / "b.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/d/../b.jsonl"])
    assert found == [f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl"]
    assert [line_id for line_id, *_ in rows_of(*found)] == ["b.jsonl:1", "a.jsonl:1"]
    # Two files of one name are told apart by their folders.
    found = find_files(f"{tmp_path}/**/a.jsonl")
    assert [line_id for line_id, *_ in rows_of(*found)] == [f"{path}:1" for path in found]
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        find_files(f"{tmp_path}/*.parquet")
    with pytest.raises(ValueError, match=r"c.txt': must be a file of JSON lines or Parquet"):
        find_files(tmp_path / "c.txt")
    for pattern in (tmp_path / "d", "/dev/null"):
        with pytest.raises(ValueError, match=r"must name files, as 'folder/\*.jsonl' does"):
            find_files(pattern)
    with pytest.raises(ValueError, match="must name one file"):
        find_files([])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pyarrow is not installed: pip install pyarrow"):
        rows_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_damaged_file_is_named(tmp_path, name):
    file = tmp_path / name
    if name.endswith("gz"):
        whole = gzip.compress("".join(f'{{"prompt": "{i}"}}\n' for i in range(10_000)).encode())
    else:
        pq.write_table(pa.Table.from_pylist([{"prompt": str(i)} for i in range(10_000)]), file)
        whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:100] + bytes(100) + whole[200:], b"no such format"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name}: cannot be read after line "):
            scan(Inputs([str(file)]))


def test_a_scan_finds_lines_by_their_ids(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"id": {i}, "prompt": "a"}}\n' for i in range(0, 2000, 2)))
    found = scan(Inputs([str(file)]))
    assert (found.num_lines, found.columns, found.ids_are_integers) == (1000, ["id", "prompt"], True)
    places = found.find(b"".join(map(hash_id, range(2000))))
    assert places.tolist() == [i // 2 if i % 2 == 0 else -1 for i in range(2000)]
    is_done = np.arange(1000) != 7
    assert [(place, line.id) for place, line in Inputs([str(file)]).lines(is_done)] == [(7, 14)]


@pytest.mark.parametrize(("num_before", "message"), [(2, "has got more lines"), (4, "has lost lines")])
def test_an_input_that_changes_under_way(tmp_path, num_before, message):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(ValueError, match=f"input: a.jsonl: {message} while the job worked"):
        list(Inputs([str(tmp_path / "a.jsonl")]).lines(np.zeros(num_before, bool)))


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff"])
def test_an_empty_input(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text, "utf-8")
    found = scan(Inputs([str(tmp_path / "a.jsonl")]))
    assert found.num_lines == 0
    assert found.find(hash_id(1)).tolist() == [-1]


def test_duplicate_ids_are_named(tmp_path):
    lines = ['{"id": "a"}', '{"id": 7}', '{"custom_id": "a", "body": {}}', '{"id": "7"}', '{"id": "b"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="2 ids are given twice") as caught:
        scan(Inputs([str(tmp_path / "a.jsonl")]))
    assert "'a' in a.jsonl:1 and a.jsonl:3" in str(caught.value)
    assert "7 in a.jsonl:2 and a.jsonl:4" in str(caught.value)


def test_a_broken_line_has_a_place_and_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": \n{"id": [1]}\n')
    lines = [line for _, line in Inputs([str(tmp_path / "a.jsonl")]).lines()]
    assert [line.id for line in lines] == [1, "a.jsonl:2", "a.jsonl:3"]
    assert "is not JSON" in lines[1].error
    assert "must be a text or an integer" in lines[2].error
