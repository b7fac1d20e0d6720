"""Where the last tokens of a text have occurred before, and what followed there."""

from array import array
from collections import OrderedDict
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence

GRAM = 3  # tokens that must agree before anything is proposed
MAX_MATCH = 16  # Longer matches count as this long.
_MAX_PLACES = 8  # earlier places that are compared, the newest first
_MAX_PROMPTS, _MAX_TOKENS_EACH = 256, 2**15  # of `FinishedSamples`
_SEPARATOR = 2**21 - 1  # between texts; no model has so many tokens


class Proposal(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    match: int  # how many tokens before them have occurred before, GRAM to MAX_MATCH
    agreement: int  # 0: there is one such place; 1: the same token followed at all of them; 2: others did at some


class SuffixIndex:
    """The places of every run of GRAM tokens of a text that grows.

    A run's newest place is in a dict, and each place knows the one before it. So a token costs one look-up, and the
    longest match is found among the newest places of the text's last run.
    """

    def __init__(self, tokens: array):
        """tokens: int32, the text itself. It may grow; `extend` says how far it is known."""
        self.tokens = tokens
        self.length = 0
        self._newest: dict[int, int] = {}  # run, as one number -> index of its last token
        self._before: list[int] = []  # of each token, the index of the last token of the same run before; -1 for none

    def extend(self, length: int) -> None:
        """Read the tokens up to this length."""
        newest, before = self._newest, self._before
        run = 0
        for token in self.tokens[max(0, self.length - GRAM + 1) : self.length]:
            run = run << 21 | token
        for i, token in enumerate(self.tokens[self.length : length], self.length):
            run = (run << 21 | token) & (1 << 21 * GRAM) - 1
            before.append(newest.get(run, -1) if i >= GRAM - 1 else -1)
            newest[run] = i
        self.length = length

    def propose(self, text: array, length: int, num_tokens: int) -> Proposal | None:
        """What may follow the first `length` tokens of a text, this one (read up to there) or another; None if their
        last run is not known. At most num_tokens."""
        if length < GRAM:
            return None
        is_own = text is self.tokens
        if is_own:
            place = self._before[length - 1]
        else:
            run = 0
            for token in text[length - GRAM : length]:
                run = run << 21 | token
            place = self._newest.get(run, -1)
        tokens, best = self.tokens, (0, -1)
        followers: list[int] = []
        while place >= 0 and len(followers) < _MAX_PLACES:
            match = GRAM
            while match < MAX_MATCH and match <= place and match < length:
                if tokens[place - match] != text[length - 1 - match]:
                    break
                match += 1
            if place + 1 < self.length:
                followers.append(tokens[place + 1])
                best = max(best, (match, place))
            place = self._before[place]
        if not followers:
            return None
        match, place = best
        found = tokens[place + 1 : min(place + 1 + num_tokens, self.length)].tolist()
        if is_own:  # A text that repeats itself goes on as it does.
            while len(found) < num_tokens:
                found.append(found[len(found) - (self.length - place - 1)])
        elif _SEPARATOR in found:
            found = found[: found.index(_SEPARATOR)]
        if not found:
            return None
        agreement = 0 if len(followers) == 1 else 1 if len(set(followers)) == 1 else 2
        return Proposal(found, match, agreement)


class FinishedSamples:
    """The completions of prompts that have come before, for other samples of the same prompt."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[int, SuffixIndex] = OrderedDict()  # hash of the prompt -> its completions

    def add(self, seq: Sequence, prompt_hash: int) -> None:
        """Keep a finished sequence's completion. Nothing is indexed before another sample asks."""
        index = self._indexes.setdefault(prompt_hash, SuffixIndex(array("i")))
        self._indexes.move_to_end(prompt_hash)
        if len(self._indexes) > _MAX_PROMPTS:
            self._indexes.popitem(last=False)
        if len(index.tokens) + len(seq.tokens) - seq.num_prompt_tokens <= _MAX_TOKENS_EACH:
            # With the end of the prompt, after which it began.
            index.tokens.extend(seq.tokens[max(0, seq.num_prompt_tokens - GRAM) : seq.num_known_tokens])
            index.tokens.append(_SEPARATOR)

    def index_of(self, prompt_hash: int) -> SuffixIndex | None:
        """Of this prompt's completions, all read; None if there is none."""
        index = self._indexes.get(prompt_hash)
        if index is not None:
            index.extend(len(index.tokens))
        return index
