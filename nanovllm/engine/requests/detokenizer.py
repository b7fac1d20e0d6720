"""Detokenizer: tokens to text, all at once or as they come, up to stop strings."""

import codecs
from collections.abc import Callable, Set
from functools import partial
from typing import Any

from tokenizers.decoders import ByteLevel

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # UTF-8 decoders write it for bytes that are no character, or not yet one.
MAX_TOKENS_A_CHARACTER = 8  # Bytes that are no character after this many tokens will never be one.


class Detokenizer:
    """The text of token ids, by one tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = isinstance(getattr(backend, "decoder", None), ByteLevel)
        # Byte-level BPE writes each byte as one visible character (GPT-2, Radford et al. 2019): Latin-1's visible ones
        # stand for themselves, all others, in order, are the characters from 256 on.
        visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = sorted(set(range(256)) - set(visible))
        self._byte_of = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
        self._token_bytes: dict[int, bytes] = {}

    def decode(self, completions: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return self._tokenizer.batch_decode(
            completions, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def set_texts(self, seqs: list[Sequence]) -> None:
        """Give finished sequences their text."""
        for skip_special_tokens in (True, False):
            group = [s for s in seqs if s.text_stream is None and s.params.skip_special_tokens == skip_special_tokens]
            texts = self.decode([seq.completion_token_ids for seq in group], skip_special_tokens) if group else []
            for seq, text in zip(group, texts, strict=True):
                seq.text = text
        for seq in seqs:
            if seq.text_stream is not None:
                read_new_tokens(seq)
                seq.text = seq.text_stream.finish()

    def stream(self, params: SamplingParams) -> "TextStream":
        """The text of one completion that is about to begin."""
        skipped = self._special_ids if params.skip_special_tokens else frozenset()
        if self._is_byte_level:
            return TextStream(ByteCharacters(partial(self._bytes_of, skipped)), params)
        return TextStream(WindowCharacters(lambda ids: self.decode([ids], False)[0], skipped), params)

    def _bytes_of(self, skipped: Set[int], token_id: int) -> bytes:
        """Empty for an id that the tokenizer lacks."""
        if token_id in skipped:
            return b""
        if token_id not in self._token_bytes:
            token = self._tokenizer.backend_tokenizer.id_to_token(token_id) or ""
            try:
                self._token_bytes[token_id] = bytes(self._byte_of[char] for char in token)
            except KeyError:
                self._token_bytes[token_id] = token.encode()  # A special token is plain text.
        return self._token_bytes[token_id]


class ByteCharacters:
    """Whole characters of a byte-level vocabulary's tokens, exactly, in O(1) per token."""

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """The rest of a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class WindowCharacters:
    """The same for any other tokenizer. Each token is decoded together with the few before it, and what the text has
    grown by is new."""

    def __init__(self, decode: Callable[[list[int]], str], skipped: Set[int]):
        self._decode = decode
        self._skipped = skipped
        self._context: list[int] = []
        self._context_text = ""
        self._fresh: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._fresh.append(token_id)
        text = self._decode(self._context + self._fresh)
        if text.endswith(REPLACEMENT) and len(self._fresh) < MAX_TOKENS_A_CHARACTER:
            return ""
        return self._take_new(text)

    def flush(self) -> str:
        return self._take_new(self._decode(self._context + self._fresh)) if self._fresh else ""

    def _take_new(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._context, self._fresh = self._fresh, []
        self._context_text = self._decode(self._context)
        return new


class TextStream:
    """The text of one completion as its tokens come: whole characters, and nothing of a stop string.

    Text that may be the beginning of a stop string is held back until that is decided.

    Attributes:
        num_tokens: tokens read so far.
        stop_reason: the stop string that ended the text, or None.
    """

    def __init__(self, characters: ByteCharacters | WindowCharacters, params: SamplingParams):
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._characters = characters
        self._stop = params.stop
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._held = ""
        self._num_taken = 0

    def push(self, token_id: int) -> bool:
        """Read the next token. True if it completes a stop string, which no token does within min_tokens."""
        self.num_tokens += 1
        num_held = len(self._held)
        self._held += self._characters.push(token_id)
        if self._stop and self.num_tokens > self._min_tokens:
            # A match must end in the new text: what is held may contain a whole stop string from within min_tokens.
            found = [
                (start, len(s), s)
                for s in self._stop
                if (start := self._held.find(s, max(0, num_held - len(s) + 1))) >= 0
            ]
            if found:
                start, length, self.stop_reason = min(found)
                self._pieces.append(self._held[: start + length * self._keep_stop])
                self._held = ""
                return True
        end = len(self._held) - self._num_undecided()
        self._pieces.append(self._held[:end])
        self._held = self._held[end:]
        return False

    def _num_undecided(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0

    def take(self) -> str:
        """The text since the last call."""
        new = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return new

    def finish(self) -> str:
        """The whole text, when no token will follow."""
        if self.stop_reason is None:
            self._pieces.append(self._held + self._characters.flush())
            self._held = ""
        return "".join(self._pieces)


def read_new_tokens(seq: Sequence) -> bool:
    """Let a sequence's text stream read the new tokens. True if they complete a stop string, which becomes the
    stop_reason whatever else has ended the sequence."""
    stream = seq.text_stream
    if stream.stop_reason is None:
        for token_id in seq.tokens[seq.num_prompt_tokens + stream.num_tokens : seq.num_known_tokens]:
            if stream.push(token_id):
                seq.finish_reason, seq.stop_reason = "stop", stream.stop_reason
                return True
    return False
