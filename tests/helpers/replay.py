"""Proposals whose correctness a test chooses."""

import random
from collections.abc import Mapping

from nanovllm.engine.features.speculation.suffix_index import Proposal
from nanovllm.engine.sequence import Sequence


class Replay:
    """Instead of a SuffixProposer: proposes the completions of an earlier run, in which some tokens are wrong."""

    def __init__(self, completions: Mapping[tuple[int, int], list[int]], wrong: float, vocab_size: int):
        """completions: by (index of the prompt, sample). wrong: the share of tokens that are."""
        self._completions, self._wrong, self._vocab_size = completions, wrong, vocab_size
        self._random = random.Random(0)

    def propose(self, seq: Sequence, length: int, num_tokens: int) -> Proposal | None:
        known = self._completions[seq.request.prompt_index, seq.completion.sample]
        tokens = known[length - seq.num_prompt_tokens :][: self._random.randint(0, num_tokens)]
        for i in range(len(tokens)):
            if self._random.random() < self._wrong:
                tokens[i] = self._random.randrange(self._vocab_size)
        return Proposal(tokens, 3, 0) if tokens else None

    def finish(self, seq: Sequence) -> None:
        pass

    forget = finish
