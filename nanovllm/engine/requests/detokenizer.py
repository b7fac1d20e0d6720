"""Tokens to text, all at once or as they come, up to stop strings."""

from typing import Any

from tokenizers.decoders import DecodeStream

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # UTF-8 decoders write it for bytes that are no character, or not yet one.


def decode(tokenizer: Any, completions: list[list[int]], skip_special_tokens: bool) -> list[str]:
    return tokenizer.batch_decode(
        completions, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def set_texts(tokenizer: Any, seqs: list[Sequence]) -> None:
    """Give finished sequences their text."""
    for skip_special_tokens in (True, False):
        group = [s for s in seqs if s.text_stream is None and s.params.skip_special_tokens == skip_special_tokens]
        texts = decode(tokenizer, [seq.completion_token_ids for seq in group], skip_special_tokens) if group else []
        for seq, text in zip(group, texts, strict=True):
            seq.text = text
    for seq in seqs:
        if seq.text_stream is not None:
            read_new_tokens(seq)
            seq.text = seq.text_stream.finish()


class TextStream:
    """The text of one completion as its tokens come: whole characters, and nothing of a stop string.

    Text that may be the beginning of a stop string is held back until that is decided.

    Attributes:
        token_ids: read so far.
        stop_reason: the stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams):
        self.token_ids: list[int] = []
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)  # None for a tokenizer written in Python
        self._decoder = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._params = params
        self._pieces: list[str] = []
        self._held = ""
        self._num_taken = 0

    def push(self, token_id: int) -> bool:
        """Read the next token. True if it completes a stop string, which no token does within min_tokens."""
        self.token_ids.append(token_id)
        new = self._decode_next(token_id)
        stop = self._params.stop
        if not stop:
            self._pieces.append(new)
            return False
        num_held = len(self._held)
        self._held += new
        if len(self.token_ids) > self._params.min_tokens:
            # A match must end in the new text: what is held may contain a whole stop string from within min_tokens.
            found = [
                (start, len(s), s) for s in stop if (start := self._held.find(s, max(0, num_held - len(s) + 1))) >= 0
            ]
            if found:
                start, length, self.stop_reason = min(found)
                self._pieces.append(self._held[: start + length * self._params.include_stop_str_in_output])
                self._held = ""
                return True
        end = len(self._held) - self._num_undecided()
        self._pieces.append(self._held[:end])
        self._held = self._held[end:]
        return False

    def _decode_next(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._backend is None:
            whole = self._decode_all()
            return "" if whole.endswith(REPLACEMENT) else whole[len("".join(self._pieces) + self._held) :]
        try:
            return self._decoder.step(self._backend, token_id) or ""
        except Exception:  # A vocabulary with byte tokens takes characters back when a wrong byte follows.
            self._decoder = DecodeStream(skip_special_tokens=self._params.skip_special_tokens)
            return self._decoder.step(self._backend, token_id) or ""

    def _decode_all(self) -> str:
        return decode(self._tokenizer, [self.token_ids], self._params.skip_special_tokens)[0]

    def _num_undecided(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._params.stop)) - 1), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._params.stop):
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
            self._pieces.append(self._decode_all()[len("".join(self._pieces)) :])
        return "".join(self._pieces)


def read_new_tokens(seq: Sequence) -> bool:
    """Let a sequence's text stream read the new tokens. True if they complete a stop string, which becomes the
    stop_reason whatever else has ended the sequence."""
    stream = seq.text_stream
    if stream.stop_reason is None:
        for token_id in seq.tokens[seq.num_prompt_tokens + len(stream.token_ids) : seq.num_known_tokens]:
            if stream.push(token_id):
                seq.finish_reason, seq.stop_reason = "stop", stream.stop_reason
                return True
    return False
