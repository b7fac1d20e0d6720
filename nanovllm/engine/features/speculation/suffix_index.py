"""Proposals: where the last tokens of a text have occurred before, and what followed there."""

from array import array
from collections import OrderedDict
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence

GRAM = 2  # tokens that must agree before anything is proposed
MAX_MATCH = 16  # Longer matches count as this long.
_MAX_PLACES = 8  # earlier places that are compared, the newest first
_MAX_TOKENS = 2**20  # of finished samples; indexed, a token takes about 150 bytes
_TOKEN_BITS = 21  # of a token's number; no model has so many tokens
_SEPARATOR = 2**_TOKEN_BITS - 1  # between texts


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
        run = _as_number(self.tokens[max(0, self.length - GRAM + 1) : self.length])
        for i, token in enumerate(self.tokens[self.length : length], self.length):
            run = (run << _TOKEN_BITS | token) & (1 << _TOKEN_BITS * GRAM) - 1
            if i < GRAM - 1:
                before.append(-1)
                continue
            before.append(newest.get(run, -1))
            newest[run] = i
        self.length = length

    def propose(self, text: array, length: int, num_tokens: int) -> Proposal | None:
        """What may follow the first `length` tokens of a text, this one (read up to there) or another; None if their
        last run is not known. At most num_tokens."""
        if length < GRAM:
            return None
        is_own = text is self.tokens
        run = text[length - GRAM : length]
        place = self._before[length - 1] if is_own else self._newest.get(_as_number(run), -1)
        tokens, best = self.tokens, (0, -1)
        followers: list[int] = []
        while place >= 0 and len(followers) < _MAX_PLACES:
            if place + 1 < self.length:
                followers.append(tokens[place + 1])
                if best[0] < MAX_MATCH:
                    best = max(best, (self._match(place, text, length), place))
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

    def _match(self, place: int, text: array, length: int) -> int:
        """How many tokens up to this place are the last of the first `length` tokens of the text. Its last run is."""
        tokens, most = self.tokens, min(MAX_MATCH, place + 1, length)
        if tokens[place + 1 - most : place + 1] == text[length - most : length]:  # much faster than token by token
            return most
        match = GRAM
        while tokens[place - match] == text[length - 1 - match]:
            match += 1
        return match


class SuffixProposer:
    """Proposes what followed the same tokens earlier in a sequence's own text, or in finished samples of its prompt. It
    keeps the samples of the prompts that finished last."""

    def __init__(self) -> None:
        self._prompt_hashes: dict[int, int] = {}  # seq_id -> hash of its prompt; of sequences that were looked at
        self._texts: dict[int, SuffixIndex] = {}  # seq_id -> index, from the first repetition on
        self._samples: OrderedDict[int, SuffixIndex] = OrderedDict()  # hash of a prompt -> its completions
        self._num_tokens = 0  # in _samples

    def propose(self, seq: Sequence, length: int, num_tokens: int) -> Proposal | None:
        """What may follow the first `length` tokens of a sequence, at most num_tokens; None if nothing is likely."""
        found, index = None, self._texts.get(seq.seq_id)
        if index is None and _may_repeat(seq.token_ids, length):
            index = self._texts[seq.seq_id] = SuffixIndex(seq.token_ids)
        if index is not None:
            index.extend(length)
            found = index.propose(seq.token_ids, length, num_tokens)
        samples = self._samples.get(self._prompt_hash(seq))
        if samples is not None:
            samples.extend(len(samples.tokens))
            other = samples.propose(seq.token_ids, length, num_tokens)
            if other is not None and (found is None or other.match > found.match):
                found = other
        return found

    def finish(self, seq: Sequence) -> None:
        """Keep a finished sequence's completion for other samples. Nothing is indexed before one of them asks."""
        prompt_hash = self._prompt_hash(seq)
        samples = self._samples.setdefault(prompt_hash, SuffixIndex(array("i")))
        self._samples.move_to_end(prompt_hash)
        before = len(samples.tokens)
        # With the end of the prompt, after which it began.
        samples.tokens.extend(seq.token_ids[max(0, seq.num_prompt_tokens - GRAM) : seq.num_known_tokens])
        samples.tokens.append(_SEPARATOR)
        self._num_tokens += len(samples.tokens) - before
        while self._num_tokens > _MAX_TOKENS:
            self._num_tokens -= len(self._samples.popitem(last=False)[1].tokens)

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a sequence that has ended."""
        self._prompt_hashes.pop(seq.seq_id, None)
        self._texts.pop(seq.seq_id, None)

    def _prompt_hash(self, seq: Sequence) -> int:
        known = self._prompt_hashes.get(seq.seq_id)
        if known is None:
            known = self._prompt_hashes[seq.seq_id] = hash(seq.token_ids[: seq.num_prompt_tokens].tobytes())
        return known


def _as_number(run: array) -> int:
    number = 0
    for token in run:
        number = number << _TOKEN_BITS | token
    return number


def _may_repeat(tokens: array, length: int) -> bool:
    """Whether the last run occurs before: a look that costs less than an index, and errs on one side only."""
    text = tokens[:length].tobytes()
    return text.find(text[-GRAM * tokens.itemsize :], 0, -tokens.itemsize) >= 0
