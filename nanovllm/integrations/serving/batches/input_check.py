"""Whether a file can be the input of a batch. A wrong body of a line is the line's own error instead."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanovllm.integrations.serving.batches.records import Row
from nanovllm.jobs.inputs import Inputs, RawLine, hash_id
from nanovllm.utils.checks import quoted

MAX_ERRORS = 100  # that a batch shows
_GZIP = b"\x1f\x8b"


class Checked(NamedTuple):
    num_lines: int
    errors: list[Row]  # as a batch shows them


def check_input(path: Path, url: str, model: str, tell: Callable[[], object]) -> Checked:
    """
    Args:
        url: of the batch.
        model: that is served.
        tell: called after each line.

    Raises OSError if the file cannot be read.
    """
    hashes, numbers, errors = bytearray(), list[int](), list[Row]()
    inputs = Inputs([str(path)])
    try:
        with path.open("rb") as file:
            if file.read(len(_GZIP)) == _GZIP:  # It could be a thousand times as large.
                raise ValueError("is compressed: send the lines as they are")
        for _, line in inputs.lines():
            numbers.append(line.number)
            if len(errors) < MAX_ERRORS and (found := _error_of(line, url, model)) is not None:
                errors.append(found)
            hashes += hash_id(line.id)
            tell()
    except ValueError as error:  # No text, or no lines.
        if (of_disk := disk_error(error)) is not None:
            raise of_disk from error
        return Checked(len(numbers), [*errors, _error("invalid_file", _without_path(str(error), path))])
    if not numbers:
        return Checked(0, [_error("empty_file", "the file has no lines")])
    if not errors:
        errors += _duplicates(inputs, np.frombuffer(bytes(hashes), "S16"), numbers)
    return Checked(len(numbers), errors)


def disk_error(error: BaseException) -> OSError | None:
    """What has gone wrong with the disk, which may pass, if this error is of that or comes from it. None if the file is
    wrong, or not there."""
    for each in (error, error.__cause__):
        if isinstance(each, OSError) and each.errno is not None and not isinstance(each, FileNotFoundError):
            return each
    return None


def _without_path(text: str, path: Path) -> str:
    """Clients need not know where the server keeps files."""
    return text.removeprefix(f"{path}: ").replace(str(path), "FILE")


def _error(code: str, message: str, line: int | None = None, param: str | None = None) -> Row:
    return {"code": code, "message": message, "line": line, "param": param}


def _error_of(line: RawLine, url: str, model: str) -> Row | None:
    if line.row is None:
        return _error("invalid_json_line", f"the line {line.error}", line.number)
    row, missing = line.row, "missing_required_parameter"
    body = row.get("body")
    found: tuple[str, str, str] | None = None
    if row.get("custom_id") is None:
        found = missing, "custom_id", "the line has no custom_id"
    elif not isinstance(row["custom_id"], str):
        found = "invalid_custom_id", "custom_id", f"custom_id={quoted(row['custom_id'])}: must be a text"
    elif row.get("method") != "POST":
        found = "invalid_method", "method", f"method={quoted(row.get('method'))}: must be 'POST'"
    elif row.get("url") != url:
        found = "invalid_url", "url", f"url={quoted(row.get('url'))}: must be the batch's endpoint, {url!r}"
    elif not isinstance(body, dict):
        found = (missing if body is None else "invalid_body"), "body", "the line's body must be an object"
    elif body.get("model") is not None and body["model"] != model:
        found = "model_not_found", "body.model", f"model {quoted(body['model'])} is not served: this is {model!r}"
    return None if found is None else _error(found[0], found[2], line.number, found[1])


def _duplicates(inputs: Inputs, ids: np.ndarray, numbers: list[int]) -> Iterator[Row]:
    """Errors of lines whose custom_id an earlier line has."""
    order = np.argsort(ids, kind="stable")
    (repeated,) = np.nonzero(ids[order][1:] == ids[order][:-1])
    later = sorted(int(place) for place in order[repeated + 1])[:MAX_ERRORS]
    if not later:
        return
    wanted = set(later)
    is_done = np.ones(len(ids), bool)
    is_done[later] = False
    found: dict[int, Any] = {place: line.id for place, line in inputs.lines(is_done) if place in wanted}
    for place in later:
        message = f"custom_id={quoted(found[place])}: another line has it; each line must have its own"
        yield _error("duplicate_custom_id", message, numbers[place], "custom_id")
