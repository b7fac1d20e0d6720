"""What requests with a form or a budget need to know of a model's thinking: its tags, and whether a prompt opens it."""

from array import array
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.features.logits.logit_edits import LogitEdits
from nanovllm.engine.features.logits.thinking import FormStart, Thinking, ThinkingTags
from nanovllm.engine.text.detokenizer import Detokenizer
from nanovllm.engine.text.formats.all_formats import FORMATS, find_format
from nanovllm.layers.sampling.token_masks import unpack_mask
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_TOKENS = 16  # of a prompt: more than a tag and the space after it can have
_MAX_HEADER = 32  # characters between the token that begins a turn and what is said in it, such as "assistant\n"
_USUAL = FORMATS["think"]  # of a checkpoint whose format has no thinking: a prompt may end in its tag all the same


class _Prompt(Enum):
    """What a prompt says of the thinking, by its end."""

    OPEN = auto()  # It goes on.
    CLOSED = auto()  # The answer follows.
    TURN = auto()  # The model's turn begins.
    TEXT = auto()  # anything else


class ThinkingReader:
    """Makes the `Thinking` of requests of one tokenizer."""

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase", detokenizer: Detokenizer):
        self._detokenizer, self._vocab_size = detokenizer, config.hf_config.vocab_size
        # Tokens that a step may give a sequence beside the first.
        self._margin = 0 if config.speculation is None else config.max_speculative_tokens
        found = find_format(tokenizer, name=config.chat_format, log=False)
        self._format = _USUAL if found.thinking is None else found
        opening, closing = cast(tuple[str, str], self._format.thinking)
        added, template = tokenizer.get_added_vocab(), getattr(tokenizer, "chat_template", None)
        vocab_size = self._vocab_size
        # By its chat template or its vocabulary. Otherwise only a prompt can say that the model thinks.
        known = str(template) if template else " ".join(added)
        is_named = config.chat_format is not None or opening in known or closing in known
        self._is_known = found.thinking is not None and is_named
        own = {added[tag]: tag for tag in (opening, closing) if added.get(tag, vocab_size) < vocab_size}
        texts = detokenizer.token_texts[False]
        self._tags = ThinkingTags(
            opening,
            closing,
            added[opening] if opening in own.values() else None,
            added[closing] if closing in own.values() else None,
            detokenizer.encode(closing),
            lambda token: own.get(token) or texts[token] or detokenizer.decode([token], False),
            min(detokenizer.num_tokens, vocab_size),
        )
        # A format with headers: a form needs that of the answer, and before it the thinking that has the first one.
        lead = detokenizer.encode(self._format.answer) if self._format.answer else []
        self._form_start = FormStart(detokenizer.encode(opening) if lead else [], lead)
        bos = tokenizer.bos_token_id
        self._turn_tokens = np.array(sorted({*added.values()} - {*own, bos}), np.int64)

    def start(self, tokens: array, params: SamplingParams, edits: LogitEdits | None) -> Thinking | None:
        """What a request's samples begin with; None if nothing depends on their thinking. Raises ValueError for what
        could not be kept."""
        form, budget = params.structured_outputs, params.thinking_token_budget
        is_whole = form is not None and self._is_whole(form)
        if budget is None and (form is None or is_whole):
            return None
        if is_whole:
            text = f"the form has {self._tags.closing} and so describes the thinking itself"
            raise ValueError(f"thinking_token_budget={budget}: {text}")
        prompt = self._read_prompt(tokens)
        is_open = prompt is _Prompt.OPEN
        if budget is not None and not (self._is_known or is_open):
            raise ValueError(
                f"thinking_token_budget={budget}: this model does not think between tags: neither its chat template "
                f"nor the prompt has {self._tags.opening}"
            )
        may_open = self._is_known and prompt in (_Prompt.TURN, _Prompt.TEXT)
        ending = self._ending(params.thinking_end_text) if budget is not None and (is_open or may_open) else []
        if is_open or ending:
            self._check_allowed(ending or self._tags.closing_ids, edits, bool(ending))
        if form is not None:  # That of a text begins at once: nobody knows whether it is a conversation.
            may_open = may_open and prompt is _Prompt.TURN and self._can_open(edits)
        if not is_open and not may_open:
            return None
        form_start = None if form is None else self._form_start
        return Thinking(self._tags, len(tokens), is_open, budget, ending, form_start, self._margin)

    def _is_whole(self, form: StructuredOutputsParams) -> bool:
        """Whether a form describes the thinking too: it has the closing tag itself."""
        texts = [text for text in (form.regex, form.grammar, *(form.choice or ())) if text is not None]
        return any(self._tags.closing in text.replace("\\", "") for text in texts)

    def _read_prompt(self, tokens: array) -> _Prompt:
        tags, last = self._tags, tokens[-_TAIL_TOKENS:].tolist()
        text = self._detokenizer.decode(last, False)
        if self._format.opens(text):
            return _Prompt.OPEN
        if text.rstrip().endswith(tags.closing):
            return _Prompt.CLOSED
        turns = np.flatnonzero(np.isin(np.frombuffer(tokens, np.int32), self._turn_tokens))
        if not len(turns):
            return _Prompt.TEXT
        text = self._detokenizer.decode(tokens[turns[-1] + 1 :].tolist(), False)
        header, tag, rest = text.partition(tags.opening)
        if len(header) > _MAX_HEADER:
            return _Prompt.TEXT
        if not tag:
            return _Prompt.TURN
        return _Prompt.CLOSED if tags.closing in rest else _Prompt.OPEN  # an answer that is continued

    def _can_open(self, edits: LogitEdits | None) -> bool:
        """Whether the model may open its thinking before a form: by one token, or because its format begins so."""
        tags, start = self._tags, self._form_start
        opening = start.opening or ([] if tags.opening_id is None else [tags.opening_id])
        needed = [*opening, *tags.closing_ids, *start.lead]
        return opening != [] and not self._excluded(needed, edits)

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
                f"{excluded[0]} of its end, {quoted(text)}"
            )
