"""TextStream: a completion's text as its tokens come, up to stop strings."""

from bisect import bisect_right
from collections.abc import Sequence as Tokens
from typing import cast

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.detokenizer import (
    REPLACEMENT,
    Detokenizer,
    common_prefix,
    may_be_byte,
    text_after,
    text_end,
)
from nanovllm.sampling_params import SamplingParams

_FEW = 8  # stop strings that are looked for one by one
_MAX_WINDOW = 12  # tokens; then the window becomes as short as it can be


class StopStrings:
    """Finds any of several texts, in a time that hardly depends on their number."""

    def __init__(self, texts: tuple[str, ...]):
        self._texts = frozenset(texts)
        self._sorted = sorted(self._texts)
        self._lengths = sorted(set(map(len, texts)))
        self._beginnings = frozenset(text[0] for text in texts)

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """The first of them, and where it begins, among those that end after the first `start` characters."""
        if len(self._texts) <= _FEW:
            places = [(text.find(s, max(0, start - len(s) + 1)), s) for s in self._texts]
            found = [match for match in places if match[0] >= 0]
        else:
            found = [match for length in self._lengths if (match := self._find(text, start, length))]
        return min(found, key=lambda match: (match[0], len(match[1])), default=None)

    def _find(self, text: str, start: int, length: int) -> tuple[int, str] | None:
        for begin in range(max(0, start - length + 1), len(text) - length + 1):
            if (piece := text[begin : begin + length]) in self._texts:
                return begin, piece
        return None

    def begins_in(self, text: str) -> bool:
        """Whether one of them may begin in the text. A quick look, because nearly always none does."""
        return not self._beginnings.isdisjoint(text)

    def num_undecided(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of one."""
        for length in range(min(len(text), self._lengths[-1] - 1), 0, -1):
            if text[-length] not in self._beginnings:
                continue
            end = text[-length:]
            # Those that begin with `end` and are longer come right after it.
            i = bisect_right(self._sorted, end)
            if i < len(self._sorted) and self._sorted[i].startswith(end):
                return length
        return 0


class TextStream:
    """The text of one completion: whole characters that no later token changes, and nothing of a stop string.

    Stop strings are looked for in the text of the tokens so far, also where a later token may change it. Text that may
    be the beginning of one is held back until that is decided.

    The text of most tokens does not depend on their neighbours, see `TokenTexts`. Others, such as parts of characters,
    are decoded together with the tokens before them.

    Attributes:
        num_tokens: tokens of the completion that were read.
        stop_reason: the stop string that ended the text, or None.
    """

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, stops: StopStrings | None):
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._detokenizer = detokenizer
        self._params = params
        self._stops = stops  # None if there are none
        self._pieces: list[str] = []
        self._num_taken = 0
        self._token_texts = detokenizer.token_texts[params.skip_special_tokens]
        self._is_whole: bool | None = None  # all text so far is settled; None before the first
        # A context, and the tokens after it. They are decoded again with each new token, so they must be few. None if
        # it is to be made anew from the tokens so far.
        self._window: list[int] | None = None
        self._base = ""  # the part of the window's text that is the prompt's, or settled
        # The bytes after whole text, if only byte tokens follow it. There may be many, and stop strings are looked for
        # in the text of all of them after each.
        self._run: bytearray | None = None
        self._held = ""  # settled, but may be the beginning of a stop string
        self._searched = ""  # what stop strings were looked for in

    def read(self, seq: Sequence) -> bool:
        """Read the sequence's new tokens. True if they complete a stop string, which becomes the stop_reason whatever
        else has ended the sequence."""
        if self.stop_reason is not None:
            return False
        first, (end, _) = seq.num_prompt_tokens, text_end(seq)
        if self._is_whole is None:  # Not before, because thousands of sequences may be waiting.
            self._window, self._base = self._context(seq.token_ids, first)
            self._is_whole = _is_whole(self._base) and not may_be_byte(self._piece(self._window[-1]))
        for token_id in seq.token_ids[first + self.num_tokens : seq.num_known_tokens].tolist():
            # A token that has ended the sequence is left out of its text, but may complete a stop string.
            if self._push(seq, token_id, is_shown=first + self.num_tokens < end):
                seq.completion.finish_reason, seq.completion.stop_reason = "stop", self.stop_reason
                return True
        return False

    def _push(self, seq: Sequence, token_id: int, is_shown: bool) -> bool:
        """Read the next token. True if it completes a stop string, which no token does within min_tokens."""
        self.num_tokens += 1
        if self._is_whole and is_shown and (text := self._token_texts[token_id]) is not None:
            self._window = None
            return self._add(text)
        piece = self._piece(token_id)
        if piece is None:
            return False
        if self._window is None:
            self._window, self._base = self._context(seq.token_ids, seq.num_prompt_tokens + self.num_tokens - 1)
        byte = self._detokenizer.byte_tokens.get(token_id)
        if byte is None:
            self._run = None
        elif self._is_whole:
            self._run = bytearray([byte])
        elif self._run is not None:
            self._run.append(byte)
        self._is_whole = False
        self._window.append(token_id)
        end = len(self._window)
        if self._detokenizer.lookahead:
            end -= self._detokenizer.lookahead
            piece = self._piece(self._window[end - 1]) if end > 0 else None
        is_settled = is_shown and not may_be_byte(piece)
        if not is_settled and self._stops is None:
            return False
        if self._run is not None:
            return self._stop(_decode_run(self._run))
        whole = self._decode(self._window)
        if self._stops is not None and self._stop(text_after(self._base, whole).rstrip(REPLACEMENT)):
            return True
        if is_settled:
            self._settle(whole, end)
        return False

    def _add(self, text: str) -> bool:
        """Add the text of a token that does not depend on its neighbours."""
        if self._stops is None or not (self._held or self._stops.begins_in(text)):
            self._pieces.append(text)
            return False
        if self._stop(text):
            return True
        self._release(text)
        return False

    def _stop(self, new: str) -> bool:
        if self._stops is None:
            return False
        text = self._held + new
        # A match must end in what this token changed: there may be a whole stop string from within min_tokens.
        start = len(common_prefix(self._searched, text))
        self._searched = text
        if self.num_tokens <= self._params.min_tokens or (found := self._stops.find(text, start)) is None:
            return False
        begin, self.stop_reason = found
        self._pieces.append(text[: begin + len(self.stop_reason) * self._params.include_stop_str_in_output])
        return True

    def _settle(self, whole: str, end: int) -> None:
        """Take the new text that no later token can change.

        Args:
            whole: the window's text.
            end: that of its first tokens is settled, apart from a character that is not complete.
        """
        window = cast(list[int], self._window)
        first = self._decode(window[:end]) if end < len(window) else whole
        settled = common_prefix(first, whole).removesuffix(REPLACEMENT)
        self._is_whole = settled == whole and _is_whole(settled)
        if self._base.startswith(settled):
            return
        self._release(text_after(self._base, settled))
        self._base = settled
        if end > _MAX_WINDOW:
            context, text = self._context(window, end)
            num_open = len(first) - len(settled)
            if len(text) > num_open:
                window[:end] = context
                self._base = text[: len(text) - num_open]

    def _release(self, new: str) -> None:
        if self._stops is None:
            self._pieces.append(new)
            return
        text = self._held + new
        end = len(text) - self._stops.num_undecided(text)
        self._pieces.append(text[:end])
        self._held, self._searched = text[end:], self._searched[end:]

    def _piece(self, token_id: int) -> str | None:
        return self._detokenizer.piece(token_id, self._params.skip_special_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self._detokenizer.decode(token_ids, self._params.skip_special_tokens)

    def _context(self, tokens: Tokens[int], end: int) -> tuple[list[int], str]:
        return self._detokenizer.context(tokens, end, self._params.skip_special_tokens)

    def take(self) -> str:
        """The text since the last call."""
        new = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return new

    def finish(self, seq: Sequence) -> str:
        """The whole text, when no token will follow."""
        given = "".join(self._pieces)
        if self.stop_reason is not None:
            return given
        text = self._detokenizer.text(seq)
        self._pieces.append(text[len(given) :])
        return text


def _is_whole(text: str) -> bool:
    """Whether the text has begun, and does not end within a character."""
    return text != "" and not text.endswith(REPLACEMENT)


def _decode_run(run: bytearray) -> str:
    """Decode as ByteFallback does, which gives all bytes up if one is wrong, apart from what is no character at the
    end."""
    try:
        return run.decode().rstrip(REPLACEMENT)
    except UnicodeDecodeError:
        return ""
