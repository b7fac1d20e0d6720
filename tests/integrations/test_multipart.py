"""Forms as they come, in pieces of any size."""

import random

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
multipart = pytest.importorskip("nanovllm.integrations.serving.batches.multipart")

KIND = 'multipart/form-data; boundary="b-1"'


def read(body: bytes, sizes, kind=KIND):
    """[(name, filename, content)]. sizes: of the pieces, again and again."""
    reader, parts, start, i = multipart.FormReader(kind), [], 0, 0
    while start < len(body):
        for each in reader.feed(body[start : start + sizes[i % len(sizes)]]):
            if isinstance(each, multipart.Part):
                parts.append([each.name, each.filename, b""])
            else:
                parts[-1][2] += each
        start, i = start + sizes[i % len(sizes)], i + 1
    return parts, reader.has_ended


def part(name, content, filename=None, more=""):
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'--b-1\r\n{more}Content-Disposition: form-data; name="{name}"{file}\r\nContent-Type: text/x\r\n\r\n'
    return head.encode() + content + b"\r\n"


CONTENTS = [b"", b"\r\n", b"\r\n--b-", b"--b-1", b"\r", b"a\r\n-\r\n--\r\n--b-", bytes(range(256)) * 3]


@pytest.mark.parametrize("content", CONTENTS, ids=repr)
@pytest.mark.parametrize("sizes", [[1], [2, 3], [7], [10**6]], ids=str)
def test_any_content_in_any_pieces(content, sizes):
    body = part("purpose", b"batch") + part("file", content, "a.jsonl", "X-More: 1\r\n") + b"--b-1--\r\nafter it"
    expected = [["purpose", None, b"batch"], ["file", "a.jsonl", content]]
    assert read(body, sizes) == (expected, True)
    assert read(b"before it\r\n" + body, sizes) == (expected, True)


def test_random_forms():
    rng = random.Random(0)
    for _ in range(50):
        contents = [b"".join(rng.choices([b"\r\n", b"--", b"b-", b"-", b"x"], k=rng.randint(0, 30))) for _ in range(3)]
        body = b"".join(part(f"n{i}", content) for i, content in enumerate(contents)) + b"--b-1--"
        sizes = [rng.randint(1, 9) for _ in range(5)]
        assert [found[2] for found in read(body, sizes)[0]] == contents


def test_nothing_of_a_large_file_is_kept():
    reader = multipart.FormReader(KIND)
    sizes = [sum(len(each) for each in reader.feed(part("file", b"", "a")[:-2]) if isinstance(each, bytes))]
    for _ in range(100):
        sizes += [len(each) for each in reader.feed(b"\r\n--b" * 1000)]
        assert len(reader._buffer) < 100
    assert sum(sizes) > 499_000


@pytest.mark.parametrize(
    ("quoted", "name"),
    [('a\\"b', 'a"b'), ("a%22b", 'a"b'), ("../a;b", "../a;b"), ("\u00fcber", "\u00fcber")],
)
def test_names_of_files(quoted, name):
    assert read(part("file", b"x", quoted) + b"--b-1--", [10**6])[0] == [["file", name, b"x"]]


@pytest.mark.parametrize(
    "body",
    [b"--b-1x\r\n", b"--b-1" + b" " * 1000, b"--b-1\r\n\r\nno name\r\n--b-1--", b"--b-1\r\n" + b"a: b\r\n" * 10_000],
    ids=["line", "padding", "no name", "headers"],
)
def test_damaged_forms(body):
    with pytest.raises(ValueError, match="the form is damaged"):
        read(body, [100])


def test_a_form_without_an_end():
    assert not read(part("file", b"x", "a"), [100])[1]


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "text/plain; boundary=b"])
def test_other_kinds_of_bodies(kind):
    with pytest.raises(ValueError, match="multipart/form-data"):
        multipart.FormReader(kind)
