"""Thinking: where a completion's thinking begins and ends. A form begins behind it, and a budget ends it."""

from array import array
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from nanovllm.engine.features.logits.proposed_row import ProposedRow
from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, eq=False)
class ThinkingTags:
    """What opens and closes a model's thinking.

    A tag that the vocabulary has is that token and nothing else. Any other is found in the text of the tokens, because
    tokens may join its end with what follows.

    Attributes:
        opening, closing: the tags.
        opening_id, closing_id: the token that a tag is; None if it is several.
        closing_ids: the tokens that write the closing tag.
        text_of: the text of a token, as far as it has one of its own.
        num_tokens: how many tokens the tokenizer has.
    """

    opening: str
    closing: str
    opening_id: int | None
    closing_id: int | None
    closing_ids: list[int]
    text_of: Callable[[int], str]
    num_tokens: int

    @cached_property
    def _tokens_beyond(self) -> dict[str, list[int]]:
        """{the rest of a closing tag that has begun: the tokens that have it, and more than white space behind it}."""
        rests = [self.closing[i:] for i in range(1, len(self.closing))]
        found: dict[str, list[int]] = {rest: [] for rest in rests}
        for token in range(self.num_tokens):
            text = self.text_of(token)
            if self.closing[-1] not in text:
                continue
            for rest in rests:
                if text.startswith(rest) and text[len(rest) :].strip():
                    found[rest].append(token)
        return found

    def tokens_beyond(self, text: str) -> list[int]:
        """The tokens that would end a thinking whose text ends so, and begin the answer with what a form may forbid."""
        num = next((n for n in range(len(self.closing) - 1, 0, -1) if text.endswith(self.closing[:n])), 0)
        return self._tokens_beyond[self.closing[num:]] if num and self.closing_id is None else []


class FormStart(NamedTuple):
    """What is forced before an answer that has a form: in formats of channels its header, which is no content.

    Attributes:
        opening: tokens that open the thinking, in a format in which a completion begins with them.
        lead: tokens between the end of the thinking and the form.
    """

    opening: list[int]
    lead: list[int]


class Thinking:
    """What is known of one completion's thinking, read from its tokens. Nothing else changes it: however steps are cut,
    it is the same.

    It stands at the beginning of the completion or nowhere. The prompt may have opened it. Indices are the sequence's.

    Attributes:
        begin: of its first token; None as long as the model has not opened it.
        end: of the first token after it, also where there is none; None as long as it may go on.
    """

    def __init__(
        self,
        tags: ThinkingTags,
        num_prompt_tokens: int,
        is_open: bool,
        budget: int | None = None,
        ending: Iterable[int] = (),
        form_start: FormStart | None = None,
        margin: int = 0,
    ):
        """
        Args:
            is_open: whether the prompt has opened it.
            budget: after so many tokens of thinking its end is forced.
            ending: the tokens that are forced then; they end in the closing tag.
            form_start: if the answer has a form, what stands before it. Only the very first token may open the thinking
                then.
            margin: tokens that a step may give a sequence beside the first.
        """
        self._tags, self._first = tags, num_prompt_tokens
        self.begin = num_prompt_tokens if is_open else None
        self.end: int | None = None
        self._num_read = num_prompt_tokens
        self._text = ""  # in which a tag that is no token may have begun
        self._budget, self._ending = budget, list(ending)
        self._form_start, self._margin = form_start, margin

    @property
    def is_on(self) -> bool:
        return self.begin is not None and self.end is None

    @property
    def answer_start(self) -> int:
        """Index of the first token that a form describes, once it can be there."""
        if self.end is None or self.begin is None:
            return self._first
        return self.end if self._form_start is None else self.end + len(self._form_start.lead)

    @property
    def opening_id(self) -> int | None:
        """The token that may open it now."""
        return self._tags.opening_id if self.begin is None and self.end is None else None

    def read(self, tokens: array, length: int) -> None:
        """Read a sequence's first `length` tokens, all of them known."""
        while self.begin is None and self.end is None and self._num_read < length:
            self._look_for_opening(tokens[self._num_read])
        if self.is_on and self._num_read < length:
            self._look_for_closing(tokens, length)

    def _look_for_opening(self, token: int) -> None:
        self._num_read += 1
        tags = self._tags
        if tags.opening_id is not None:
            if token == tags.opening_id:
                self.begin = self._num_read
            elif self._form_start is not None or not tags.text_of(token).isspace():
                self.end = self._first
            return
        self._text = (self._text + tags.text_of(token)).lstrip()
        if self._text.startswith(tags.opening):
            self.begin, self._text = self._num_read, self._text[len(tags.opening) :]
        elif not tags.opening.startswith(self._text):
            self.end = self._first

    def _look_for_closing(self, tokens: array, length: int) -> None:
        closing = self._tags.closing
        if self._tags.closing_id is not None:
            try:
                self.end = tokens.index(self._tags.closing_id, self._num_read, length) + 1
            except ValueError:
                self._num_read = length
            return
        for token in tokens[self._num_read : length]:
            self._num_read += 1
            text = self._text + self._tags.text_of(token)
            if closing in text:
                self.end, self._text = self._num_read, ""
                return
            self._text = text[len(text) - len(closing) + 1 :] if len(text) >= len(closing) else text

    def at(self, row: Sequence | ProposedRow) -> "Thinking":
        """As it is at a row that is sampled from. Proposed tokens may turn out wrong, so they are read by a copy."""
        thinking = copy(self) if isinstance(row, ProposedRow) else self
        thinking.read(row.token_ids, row.num_known_tokens)
        return thinking

    def num_until_end(self, tokens: array, proposed: list[int]) -> int:
        """How many of the proposed tokens come before the answer. tokens: the sequence's, all known and read."""
        ahead, length = copy(self), len(tokens)
        text = tokens + array("i", proposed)
        ahead.read(text, len(text))
        return len(proposed) if ahead.end is None else max(ahead.end - length, 0)

    # -- the budget ------------------------------------------------------------------------------------------------

    def may_force(self, seq: Sequence) -> bool:
        """Whether the next step may have to force a token of the sequence. Its last token may be unknown."""
        if self._budget is None or self.end is not None:
            return False
        least = seq.num_tokens + self._margin - self._budget
        if least < self._first:  # The usual answer, which reads nothing.
            return False
        self.read(seq.token_ids, seq.num_known_tokens)
        # The token that is on its way may open it.
        return self.end is None and least >= (seq.num_tokens if self.begin is None else self.begin)

    def forced(self, row: Sequence | ProposedRow) -> int | None:
        """The token that has to come next at a row that `at` has read."""
        if self.end is not None:
            follows = self._form_start is not None and self.begin is not None
            return _item(cast(FormStart, self._form_start).lead, row.num_tokens - self.end) if follows else None
        if self.begin is None:
            return None if self._form_start is None else _item(self._form_start.opening, row.num_tokens - self._first)
        if self._budget is None:
            return None
        boundary = self.begin + self._budget
        if row.num_tokens < boundary:
            return None
        ending, closing = self._ending, self._tags.closing_ids
        for num in range(min(len(closing) - 1, self._budget), 0, -1):  # A tag that the model has begun is completed.
            if row.token_ids[boundary - num : boundary] == closing[:num]:
                ending = closing[num:]
                break
        return _item(ending, row.num_tokens - boundary)

    def before_form(self) -> list[int]:
        """The tokens that a form forbids while the model thinks: they would begin the answer at once."""
        return self._tags.tokens_beyond(self._text)


def _item(tokens: list[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


class ThinkingSequence(Sequence):
    """A sequence with a budget of thinking. It needs more than a temperature only where its budget may end."""

    @property
    def is_plain(self) -> bool:  # type: ignore[override]
        return self.request.params.is_plain and not cast(Thinking, self.completion.thinking).may_force(self)

    @is_plain.setter
    def is_plain(self, value: bool) -> None:
        pass

    def __reduce__(self) -> tuple[Any, ...]:
        return Sequence.__new__, (Sequence,), self.__getstate__()


def reads_tokens(seq: Sequence) -> bool:
    """Whether the tokens that a sequence may get next depend on its tokens so far, so that the host must know them."""
    request, thinking = seq.request, seq.completion.thinking
    if request.params.structured_outputs is not None:
        return True
    reads_completion = request.logit_edits is not None and request.logit_edits.reads_completion
    return reads_completion or (thinking is not None and thinking.may_force(seq))


def num_valid(seq: Sequence, proposed: list[int]) -> int:
    """How many of the proposed tokens a sequence's form allows. The host must know all tokens of the sequence."""
    grammar, thinking = seq.completion.grammar, seq.completion.thinking
    if grammar is None:
        return len(proposed)
    start = seq.num_prompt_tokens
    if thinking is not None:
        thinking.read(seq.token_ids, seq.num_known_tokens)
        if thinking.end is None:
            return thinking.num_until_end(seq.token_ids, proposed)
        start = thinking.answer_start
    if seq.num_tokens < start:
        return min(len(proposed), start - seq.num_tokens)
    return grammar.num_valid(seq.token_ids, seq.num_tokens - start, proposed)
