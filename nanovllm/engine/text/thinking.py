"""What requests with a form or a budget need to know of a model's thinking: its tags, and whether a prompt opens it."""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.features.logits.logit_edits import LogitEdits
from nanovllm.engine.features.logits.thinking import Thinking, ThinkingTags
from nanovllm.engine.text.detokenizer import Detokenizer
from nanovllm.engine.text.reasoning import CLOSING, OPENING, opens_reasoning
from nanovllm.layers.sampling.token_masks import unpack_mask
from nanovllm.sampling_params import FORMS, SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_TOKENS = 16  # of a prompt: more than a tag and the space after it can have
_MAX_HEADER = 32  # characters between the token that begins a turn and what is said in it, such as "assistant\n"


def find_tags(tokenizer: "PreTrainedTokenizerBase") -> tuple[tuple[str, str], bool]:
    """The tags between which a tokenizer's model thinks, and whether it does so by its chat template or vocabulary.
    Otherwise only prompts can say so, by ending in the first one."""
    template = getattr(tokenizer, "chat_template", None)
    known = str(template) if template else " ".join(tokenizer.get_added_vocab())
    return (OPENING, CLOSING), CLOSING in known


@dataclass(frozen=True)
class _Prompt:
    """What a prompt says of the thinking: it has opened it, or is the beginning of an answer, which may open it."""

    is_open: bool = False
    may_open: bool = False


class ThinkingReader:
    """Makes the `Thinking` of requests of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", detokenizer: Detokenizer, vocab_size: int, margin: int):
        """vocab_size: the model's. margin: tokens that a step may give a sequence beside the first."""
        self._tokenizer: Any = tokenizer  # Their types leave open what a call returns.
        self._detokenizer, self._vocab_size, self._margin = detokenizer, vocab_size, margin
        (opening, closing), self._is_known = find_tags(tokenizer)
        added = tokenizer.get_added_vocab()
        own = {added[tag]: tag for tag in (opening, closing) if added.get(tag, vocab_size) < vocab_size}
        texts = detokenizer.token_texts[False]
        self._tags = ThinkingTags(
            opening,
            closing,
            added[opening] if opening in own.values() else None,
            added[closing] if closing in own.values() else None,
            detokenizer.encode(closing),
            lambda token: own.get(token) or texts[token] or "",
            min(detokenizer.num_tokens, vocab_size),
        )
        bos = tokenizer.bos_token_id
        self._turn_tokens = np.array(sorted({*added.values()} - {*own, bos}), np.int64)

    def start(self, tokens: array, params: SamplingParams, edits: LogitEdits | None) -> Thinking | None:
        """What a request's samples begin with; None if nothing depends on their thinking. Raises ValueError for a budget
        that cannot be kept, or a form that could never begin."""
        form, budget = params.structured_outputs, params.thinking_token_budget
        if budget is None and (form is None or self._is_whole(form)):
            return None
        prompt = self._read_prompt(tokens)
        if budget is not None and not (self._is_known or prompt.is_open):
            raise ValueError(
                f"thinking_token_budget={budget}: this model does not think between tags: neither its chat template nor "
                f"the prompt has {self._tags.opening}"
            )
        is_forced = budget is not None and (prompt.is_open or prompt.may_open)
        ending = self._ending(params.thinking_end_text) if is_forced else []
        if prompt.is_open or is_forced:
            self._check_allowed(ending or self._tags.closing_ids, edits, is_forced)
        has_form = form is not None and not self._is_whole(form)
        if not prompt.is_open and (not prompt.may_open or (has_form and not self._can_open(edits))):
            return None
        options = {"budget": budget, "ending": ending, "has_form": has_form, "margin": self._margin}
        return Thinking(self._tags, len(tokens), prompt.is_open, **options)

    def _is_whole(self, form: StructuredOutputsParams) -> bool:
        """Whether a form describes the thinking too: it has the closing tag itself."""
        given = (
            next(value for name in FORMS if name != "json" and (value := getattr(form, name)) is not None)
            if (form.json is None)
            else ""
        )
        texts = [given] if isinstance(given, str) else given
        return any(self._tags.closing in text.replace("\\", "") for text in texts)

    def _read_prompt(self, tokens: array) -> _Prompt:
        tags, last = self._tags, tokens[-_TAIL_TOKENS:].tolist()
        if opens_reasoning(self._tokenizer, last):
            return _Prompt(is_open=True)
        if self._detokenizer.decode(last, False).rstrip().endswith(tags.closing):
            return _Prompt()
        turns = np.flatnonzero(np.isin(np.frombuffer(tokens, np.int32), self._turn_tokens))
        if not len(turns):  # a text, of which nobody knows where an answer begins
            return _Prompt()
        text = self._detokenizer.decode(tokens[turns[-1] + 1 :].tolist(), False)
        header, tag, rest = text.partition(tags.opening)
        if tag:  # An answer that is continued: its thinking may have ended.
            return _Prompt(is_open=len(header) <= _MAX_HEADER and tags.closing not in rest)
        return _Prompt(may_open=self._is_known and len(text) <= _MAX_HEADER)

    def _can_open(self, edits: LogitEdits | None) -> bool:
        """Whether the model may open its thinking before a form, which only one token can do."""
        needed = self._tags.opening_id, self._tags.closing_id
        return None not in needed and not self._excluded([token for token in needed if token is not None], edits)

    def _ending(self, text: str) -> list[int]:
        tags = self._tags
        ending = self._detokenizer.encode(text + tags.closing) if text else tags.closing_ids
        thinking = Thinking(tags, 0, is_open=True)
        thinking.read(array("i", ending), len(ending))
        if thinking.end != len(ending):
            raise ValueError(f"thinking_end_text={quoted(text)}: must be a text that is followed by {tags.closing}")
        return ending

    def _excluded(self, needed: list[int], edits: LogitEdits | None) -> list[int]:
        if edits is None:
            return []
        is_allowed = unpack_mask(edits.mask, self._vocab_size)
        found = [token for token in needed if not is_allowed[token]]
        written = array("i", needed)
        return found or [needed[i] for i in range(1, len(needed)) if needed[i] in edits.completing(written[:i], i)]

    def _check_allowed(self, needed: list[int], edits: LogitEdits | None, is_forced: bool) -> None:
        if excluded := self._excluded(needed, edits):
            option = "thinking_token_budget" if is_forced else "structured_outputs"
            text = self._detokenizer.decode(excluded[:1], False)
            raise ValueError(
                f"{option}: thinking ends with {self._tags.closing}, and allowed_token_ids or bad_words exclude token "
                f"{excluded[0]} of it, {quoted(text)}"
            )
