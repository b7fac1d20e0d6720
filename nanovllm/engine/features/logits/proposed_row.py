"""ProposedRow: a proposed token, for what looks at sequences that ask for more than a temperature."""

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.utils.token_ids import TokenIds


class ProposedRow:
    """What its sequence would be if this token and those proposed before it were accepted: the part that the
    `SamplingPipeline` looks at. Names are the sequence's.

    Attributes:
        seq_id: as a key, that of no sequence and of no other row.
        num_proposed: how many tokens are the proposal's.
    """

    __slots__ = (
        *("completion", "num_cached_tokens", "num_prompt_tokens", "num_proposed", "num_tokens", "request", "seq_id"),
        "token_ids",
    )
    num_scheduled_tokens = 1

    def __init__(self, seq: Sequence, token_ids: TokenIds, num_proposed: int):
        """token_ids: the sequence's, and after them num_proposed proposed ones, of which the last is this row's."""
        self.seq_id, self.num_proposed = (seq.seq_id, num_proposed), num_proposed
        self.token_ids, self.num_tokens = token_ids, len(token_ids)
        self.num_cached_tokens = self.num_tokens - 1
        self.num_prompt_tokens = seq.num_prompt_tokens
        self.request, self.completion = seq.request, seq.completion

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        return self.num_tokens


def sampled_rows(step: Step) -> list[Sequence | ProposedRow]:
    """Of each row that is sampled from, its sequence as it is there. Rows of a plain sequence need no more than that
    sequence itself."""
    if not step.proposed:
        return [*step.seqs]
    rows: list[Sequence | ProposedRow] = []
    for seq, tokens in zip(step.seqs, step.proposed, strict=True):
        rows.append(seq)
        if seq.is_plain:
            rows += [seq] * len(tokens)
        elif tokens:
            text, length = seq.token_ids + TokenIds("i", tokens), seq.num_tokens
            rows += [ProposedRow(seq, text[: length + i], i) for i in range(1, len(tokens) + 1)]
    return rows
