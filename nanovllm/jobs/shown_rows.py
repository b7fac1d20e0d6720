"""What rows show of generated answers, compared with the same answers of now.

Tokens are compared by receipts. Texts, reasons, counts and the parts of a conversation's answer are made again, by
the function that has made the row.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.jobs.lines import ANSWER_KEYS, OPTIONAL_KEYS, Line, Row, Split, answer_row, from_json
from nanovllm.jobs.parquet import as_text
from nanovllm.jobs.receipts import RECEIPT, SPLIT, params_of, without_logprobs
from nanovllm.openai_format.openai_batch import CHAT, COMPLETION, Responder
from nanovllm.openai_format.request_names import ChatOptions
from nanovllm.utils.checks import quoted
from nanovllm.utils.text_json import to_json

_BODY = ("object", "choices", "usage", "prompt_logprobs")  # of an answer of OpenAI's; the rest are names and a time
_LONG = 60  # characters of a text: of a longer one a message shows what follows the first difference


class ShownRows:
    """Makes what the rows of a job show again."""

    def __init__(self, job: Row, responder: Responder):
        """job: of the manifest. responder: as the job's own."""
        self._responder = responder
        split = [name for name in ("reasoning", "tool_calls") if job.get(f"split_{name}")]
        self._names = (*ANSWER_KEYS[1:], *OPTIONAL_KEYS, *split)

    def difference(self, row: Row, receipt: Row, now: Mapping[str, Any]) -> str | None:
        """The first one in words, or None. now: the RequestOutput of the receipt's request."""
        try:
            before = _of_openai(row) if is_of_openai(row) else {name: row.get(name) for name in self._names}
            again = self._again(row, receipt, now)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            return f"its row is damaged: {error!r}"
        return _first_difference(before, again, "its ")

    def _again(self, row: Row, receipt: Row, now: Mapping[str, Any]) -> Row:
        """What the row should show, as it is read from the folder."""
        params, kind = params_of(receipt), None
        if is_of_openai(row):
            body = row["response"]["body"]
            kind = CHAT if body["object"] == CHAT.object else COMPLETION
            shows_logprobs = body["choices"][0]["logprobs"] is not None
        else:
            shows_logprobs = row.get("logprobs") is not None
        if not params.logprobs and not shows_logprobs:  # All lines of the job have them, 0 if they asked for none.
            params, now = replace(params, logprobs=None), without_logprobs(now)
        split = Split(**receipt[SPLIT]) if SPLIT in receipt else None
        line = Line(receipt["prompt_token_ids"], params, {}, ChatOptions(), kind, split)
        again = from_json(to_json(answer_row("", line, now, self._responder)).encode())
        if kind is not None:
            return _of_openai(again)
        shown = {name: again.get(name) for name in self._names}
        if not isinstance(row[RECEIPT], str):
            return shown
        # A table has texts and counts.
        return {name: value if isinstance(value, int) else as_text(value) for name, value in shown.items()}


def is_of_openai(row: Row) -> bool:
    """Whether a row is an answer in OpenAI's batch format."""
    return "response" in row and "num_prompt_tokens" not in row


def _of_openai(row: Row) -> Row:
    """What the answer says, without the names that each answer has of its own."""
    response = row["response"]
    shown = {"error": row["error"], "status_code": response["status_code"]}
    shown |= {name: response["body"].get(name) for name in _BODY}
    return shown | {"choices": [_without_call_ids(choice) for choice in shown["choices"]]}


def _without_call_ids(choice: Row) -> Row:
    message = choice.get("message", {})
    if not message.get("tool_calls"):
        return choice
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message["tool_calls"]]
    return choice | {"message": message | {"tool_calls": calls}}


def _first_difference(before: Any, now: Any, where: str) -> str | None:
    """where: what they are, before a name."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(name, before.get(name), now.get(name)) for name in dict.fromkeys((*now, *before))]
        found = (_first_difference(old, new, f"{where}{name} ") for name, old, new in pairs)
        return next(filter(None, found), None)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        found = (_first_difference(*pair, f"{where}{i} ") for i, pair in enumerate(zip(before, now, strict=True)))
        return next(filter(None, found), None)
    if before == now and isinstance(before, bool) == isinstance(now, bool):
        return None
    place = ""
    if isinstance(before, str) and isinstance(now, str) and max(len(before), len(now)) > _LONG:
        at = _first_place(before, now)
        place, before, now = f", from character {at} on,", before[at:], now[at:]
    return f"{where.rstrip()}{place} was {quoted(before)} and is {quoted(now)}"


def _first_place(before: str, now: str) -> int:
    """Of the first character that differs."""
    num_both = min(len(before), len(now))
    return next((i for i in range(num_both) if before[i] != now[i]), num_both)
