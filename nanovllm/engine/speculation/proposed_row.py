"""ProposedRow: a proposed token in a step, for all that looks at a step row by row."""

from nanovllm.engine.request import Completion
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.token_ids import TokenIds


class ProposedRow:
    """What its sequence would be if this token and those proposed before it were accepted: the part that `DecodeInputs`
    and the `SamplingPipeline` look at. Names are the sequence's.

    Attributes:
        seq_id: as a key, that of no sequence and of no other row.
        completion: its error is this row's. The sequence gets it if the row is reached.
    """

    __slots__ = (
        *("block_table", "completion", "last_token", "num_cached_tokens", "num_prompt_tokens", "num_proposed"),
        *("num_tokens", "place", "request", "seed", "seq_id", "temperature", "token_ids"),
    )
    pending_row = -1
    num_scheduled_tokens = 1
    is_prefill = False

    def __init__(self, seq: Sequence, token_ids: TokenIds, num_proposed: int):
        """token_ids: the sequence's, and after them num_proposed proposed ones, of which the last is this row's."""
        self.seq_id, self.num_proposed = (seq.seq_id, num_proposed), num_proposed
        self.token_ids, self.last_token, self.num_tokens = token_ids, token_ids[-1], len(token_ids)
        self.num_cached_tokens = self.num_tokens - 1
        self.num_prompt_tokens, self.block_table = seq.num_prompt_tokens, seq.block_table
        self.place = None if seq.place is None else seq.place.of_proposed(num_proposed - 1)
        self.request, self.seed, self.temperature = seq.request, seq.seed, seq.temperature
        self.completion = Completion(grammar=seq.completion.grammar, error=seq.completion.error)

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens
