"""ProposedRow: a proposed token in a step, for all that looks at a step row by row."""

from array import array

from nanovllm.engine.sequence import Sequence


class ProposedRow:
    """What its sequence would be if this token and those proposed before it were accepted: the part that `DecodeInputs`
    and the `SamplingPipeline` look at. Names are the sequence's.

    Attributes:
        seq_id: as a key, that of no sequence and of no other row.
        error: of this row. The sequence gets it if the row is reached.
    """

    __slots__ = (
        *("block_table", "error", "grammar", "is_constrained", "logit_edits", "num_cached_tokens", "num_prompt_tokens"),
        *("num_proposed", "params", "place", "seed", "seq_id", "tokens"),
    )
    pending_row = -1
    num_scheduled_tokens = 1
    is_prefilling = False

    def __init__(self, seq: Sequence, tokens: array, num_proposed: int):
        """tokens: the sequence's, and after them num_proposed proposed ones, of which the last is this row's."""
        self.seq_id, self.num_proposed = (seq.seq_id, num_proposed), num_proposed
        self.tokens = tokens
        self.num_cached_tokens = len(tokens) - 1
        self.num_prompt_tokens, self.block_table = seq.num_prompt_tokens, seq.block_table
        self.place = None if seq.place is None else seq.place.of_proposed(num_proposed - 1)
        self.params, self.seed, self.error = seq.params, seq.seed, seq.error
        self.grammar, self.logit_edits, self.is_constrained = seq.grammar, seq.logit_edits, seq.is_constrained

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens
