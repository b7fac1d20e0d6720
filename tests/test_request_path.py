"""The reading list of docs/architecture.md is what a request passes through, and that does not grow unnoticed."""

import re

import pytest
import request_path

PAGE = (request_path.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

# What a reader has to hold in mind. Lower these when the path becomes shorter.
MOST_FUNCTIONS, MOST_FILES, MOST_FRAMES = 122, 37, 18


@pytest.fixture(scope="module")
def path() -> request_path.RequestPath:
    return request_path.trace_request()


def test_the_reading_list_is_what_a_request_passes_through(path):
    table = PAGE.split("## The reading path")[1].split("\n## ")[0].split("Leave the rest")[0]
    listed = re.findall(r"^\| `(nanovllm/[\w/]+\.py)` \|", table, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(path.functions)


def test_the_path_does_not_grow(path):
    assert path.num_functions <= MOST_FUNCTIONS
    assert len(path.functions) <= MOST_FILES
    assert path.depth <= MOST_FRAMES
