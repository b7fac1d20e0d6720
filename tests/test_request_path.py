"""The reading list of docs/architecture.md is what a request passes through, and that does not grow unnoticed."""

import re

import pytest
import request_path

PAGE = (request_path.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

# What a reader has to hold in mind. Lower these when the path becomes shorter. The aim is 105 functions and 14 frames.
MOST_FUNCTIONS, MOST_LINES, MOST_FRAMES = 130, 1752, 19


@pytest.fixture(scope="module")
def path() -> request_path.RequestPath:
    return request_path.trace_request()


def test_the_reading_list_is_what_a_request_passes_through(path):
    table = PAGE.split("## The reading path")[1].split("\n## ")[0].split("Leave the rest")[0]
    listed = re.findall(r"^\| `(nanovllm/[\w/]+\.py)` \|", table, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(path.functions)


def test_lines_are_those_of_each_functions_definition(path):
    for file, functions in path.functions.items():
        text = (request_path.ROOT / file).read_text(encoding="utf-8").splitlines()
        for name, lines in functions.items():
            definition = "\n".join(text[number - 1] for number in lines)
            own_name = re.escape(name.split(".")[-1].split(":")[0])  # With Python 3.10 a line number follows.
            assert re.match(rf"( *@.*\n)* *def {own_name}\b", definition), name
        assert path.lines(file) <= min(len(text), sum(map(len, functions.values())))


def test_a_line_of_a_function_within_another_counts_once():
    def outer():
        def inner():
            return 1

        return inner

    path = request_path.RequestPath()
    path.add(outer.__code__)
    path.add(outer().__code__)
    (file,) = path.functions
    assert path.num_functions == 2
    assert path.lines(file) == path.num_lines == 5


def test_the_path_does_not_grow(path):
    assert path.num_functions <= MOST_FUNCTIONS
    assert path.num_lines <= MOST_LINES
    assert path.depth <= MOST_FRAMES
