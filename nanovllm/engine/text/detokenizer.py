"""Detokenizer: tokens to text, where a completion's text is what it adds to the text of its prompt."""

import json
from collections.abc import Sequence as Tokens
from functools import cached_property
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # UTF-8 decoders write it for bytes that are no character, or not yet one.

# A context has at least this many tokens, and at least this many characters. UTF-8 writes a character in 4 bytes.
_CONTEXT = 4

# Decoders of the tokenizers library that look at one token at a time, or at one and whether it is the first.
_DECODERS_OF_TOKENS = ("Replace", "ByteFallback", "Strip", "Metaspace", "WordPiece")


class TokenTexts(dict[int, str | None]):
    """{token id: the text that it adds to any text that has begun and ends with a whole character}, filled when read.

    None for tokens whose text depends on their neighbours: bytes, parts of characters, and tokens that are left out.
    All are None if the decoder is unknown.
    """

    def __init__(self, detokenizer: "Detokenizer", skip_special_tokens: bool):
        super().__init__()
        self._detokenizer = detokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        self[token_id] = text = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        if self._before is None or may_be_byte(self._detokenizer.piece(token_id, self._skip)):
            return None
        before, base = self._before
        text = self._detokenizer.decode([before, token_id], self._skip)
        return text[len(base) :] if text.startswith(base) and REPLACEMENT not in text else None

    @cached_property
    def _before(self) -> tuple[int, str] | None:
        """Any token that has a text by itself, and that text."""
        detokenizer = self._detokenizer
        for token_id in range(0 if detokenizer.lookahead else detokenizer.num_tokens):
            if not may_be_byte(detokenizer.piece(token_id, True)):
                text = detokenizer.decode([token_id], True)
                if text and REPLACEMENT not in text:
                    return token_id, text
        return None


class Detokenizer:
    """Decodes with one tokenizer.

    A completion's text is what decode(prompt + completion) adds to decode(prompt). Decoded alone it would lack a space
    that some decoders take from the beginning of a text, or the beginning of a character in which the prompt ends. But
    the end of the prompt is enough for that, see `context`.

    Attributes:
        special_tokens: {text: token id} of the tokens that skip_special_tokens leaves out.
        lookahead: how many tokens later a token's text is certain. 0 for decoders that are known to decode a token
            without its successors, apart from bytes of a character. 4 for others, such as those written in Python.
        token_texts: by skip_special_tokens.
        byte_tokens: {token id: byte} of those that ByteFallback decodes together. Empty for decoders without it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer: Any = tokenizer  # Their types leave open what a call returns.
        backend = getattr(tokenizer, "backend_tokenizer", None)  # None for a tokenizer written in Python
        self._backend = backend if backend is not None and _decodes_by_backend(tokenizer) else None
        steps = [] if self._backend is None else _steps(self._backend.decoder)
        self.lookahead = 0 if _is_local(steps) else _CONTEXT
        self.num_tokens = len(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        ids = tokenizer.all_special_ids if self._backend is None else self.special_tokens.values()
        self._special_ids = frozenset(ids)
        self.token_texts = (TokenTexts(self, False), TokenTexts(self, True))
        self.byte_tokens: dict[int, int] = {}
        if backend is not None and self.lookahead == 0 and ("ByteFallback", "Fuse") in pairwise(steps):
            found = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
            self.byte_tokens = {token_id: byte for token_id, byte in found.items() if token_id is not None}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Ids that the tokenizer does not have stand for nothing."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode(
            [token_id for token_id in token_ids if token_id < self.num_tokens],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )

    def added_text(self, tokens: Tokens[int], end: int, token_ids: list[int], skip_special_tokens: bool) -> str:
        """The text that token_ids add to that of tokens[:end]."""
        context, base = self.context(tokens, end, skip_special_tokens)
        whole = self.decode(context + token_ids, skip_special_tokens)
        return whole[len(base) :] if whole.startswith(base) else text_after(base, whole)

    def text(self, seq: Sequence) -> str:
        """The text of a completion, up to the token that ended it."""
        end, ending = text_end(seq)
        tokens = seq.token_ids[seq.num_prompt_tokens : end].tolist()
        skip_special_tokens = seq.request.params.skip_special_tokens
        return self.added_text(seq.token_ids, seq.num_prompt_tokens, tokens, skip_special_tokens) + ending

    def context(self, tokens: Tokens[int], end: int, skip_special_tokens: bool) -> tuple[list[int], str]:
        """The last tokens of tokens[:end], and their text. Tokens that follow add to it what they would add to the text
        of all of tokens[:end].

        Why a few tokens suffice: the decoders of the tokenizers library decode each token alone, with three exceptions.
        - At the beginning they drop a space (Strip, Metaspace) or add none (WordPiece). A context that has text is past
          its beginning.
        - UTF-8 needs up to 4 bytes for a character. A context may begin within one. But the first byte of a character
          is unlike all others, and no character reaches beyond 4 bytes, so that after 4 characters or invalid bytes
          both texts are divided alike.
        - ByteFallback decodes adjacent byte tokens together, and gives all of them up if one is wrong. So a context
          begins with another token. Special tokens that are left out do not separate bytes.
        """
        num = _CONTEXT
        while True:
            start = max(0, end - num)
            while start > 0 and may_be_byte(self.piece(tokens[start], skip_special_tokens)):
                start -= 1
            context = list(tokens[start:end])
            text = self.decode(context, skip_special_tokens)
            if start == 0 or len(text) >= _CONTEXT:
                return context, text
            num = 2 * len(context)

    def piece(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token as the vocabulary spells it; None if it is left out of texts."""
        if skip_special_tokens and token_id in self._special_ids:
            return None
        if self._backend is not None:
            return self._backend.id_to_token(token_id)
        return self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self.num_tokens else None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in the middle of another. Alone, many tokenizers would write a space before it."""
        alone, before = self._tokenizer.encode(text, add_special_tokens=False, verbose=False), self._line_feed
        if not before or self.added_text(before, len(before), alone, False) == text:
            return alone
        both = self._tokenizer.encode("\n" + text, add_special_tokens=False, verbose=False)
        inside = both[len(before) :]
        is_same = both[: len(before)] == before and self.added_text(before, len(before), inside, False) == text
        return inside if is_same else alone

    @cached_property
    def _line_feed(self) -> list[int]:
        return self._tokenizer.encode("\n", add_special_tokens=False)


def may_be_byte(piece: str | None) -> bool:
    """Whether the text of a token may depend on that of its neighbours: it is a byte, or none at all."""
    return piece is None or (len(piece) == 6 and piece.startswith("<0x"))


def text_after(base: str, whole: str) -> str:
    """What `whole` has after the text that both begin with. Usually that is all of base; it is not where base ends
    within a character."""
    return whole[len(common_prefix(base, whole)) :]


def common_prefix(first: str, second: str) -> str:
    if second.startswith(first):
        return first
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def text_end(seq: Sequence) -> tuple[int, str]:
    """Where the tokens end that have text: before the token that ended the completion, unless it is asked for. And the
    stop string for which that token stands, if it is asked for: decoded, special tokens may be left out."""
    end, completion = seq.num_tokens - (seq.pending_row >= 0), seq.completion
    stream = completion.text_stream
    is_ended_by_token = completion.finish_reason == "stop" and (stream is None or stream.stop_reason is None)
    if not is_ended_by_token:
        return end, ""
    if not seq.request.params.include_stop_str_in_output:
        return end - 1, ""
    return (end - 1, completion.stop_reason) if isinstance(completion.stop_reason, str) else (end, "")


def _decodes_by_backend(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether its class leaves decoding to the tokenizers library."""
    from transformers import PreTrainedTokenizerFast

    names = ("decode", "_decode")
    return all(getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in names)


def _steps(decoder: "Decoder | None") -> list[str]:
    """The decoders of the tokenizers library that a decoder applies in turn. Empty if it is written in Python."""
    try:
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "Fuse"}
    except Exception:
        return []
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return ["StripEnd" if part.get("stop") else part["type"] for part in parts]


def _is_local(steps: list[str]) -> bool:
    """Whether later tokens leave the text of earlier ones alone, once it is whole characters."""
    joined = next((i for i, name in enumerate(steps) if name in ("Fuse", "ByteLevel")), len(steps))
    rest = steps[joined + 1 :]  # What they do with the whole text is known of Strip alone.
    return steps != [] and set(steps[:joined]) <= set(_DECODERS_OF_TOKENS) and set(rest) <= {"Fuse", "Strip"}
