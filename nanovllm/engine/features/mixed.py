"""Mixed steps: which waiting prompts may be computed in spare rows of a decode step (Sarathi, Agrawal et al. 2023)."""

from collections.abc import Collection, Sized

from nanovllm.engine.features.images.image_sequence import ImageSequence
from nanovllm.engine.sequence import Sequence

# Longer prompts are prefilled: a mixed step reads a prompt's keys once for each token, a prefill once for many tokens.
_MAX_MIXED_PROMPT_TOKENS = 2048


class MixedAdmission:
    """Decides for one step which prompts are computed in spare rows of a decode step (Sarathi, Agrawal et al. 2023).

    A decode step of a wide model spends its time reading weights, so a few hundred rows take little longer than one. A
    prompt's token is cheaper there than in a prefill step, but the prompt starts slowly. So if all sequences generate
    their max_tokens, it must end no later than the longest running one. And all waiting sequences must find a place in
    the batch; otherwise a prefill fills it sooner.
    """

    def __init__(
        self, running: Collection[Sequence], waiting: Sized, num_rows: int, max_num_seqs: int, max_seq_len: int
    ):
        """num_rows: of a mixed step; 0 for no such steps."""
        self._num_rows, self._max_seq_len = num_rows, max_seq_len
        self._is_open = num_rows > 0 and len(waiting) > 0 and len(waiting) + len(running) <= max_num_seqs
        self._num_running = self._longest = 0
        if self._is_open:
            for seq in running:
                self.add_running(seq)

    def add_running(self, seq: Sequence) -> None:
        self._num_running += 1
        self._longest = max(self._longest, self._num_tokens_left(seq))

    def admits(self, seq: Sequence) -> bool:
        num_free = self._num_rows - self._num_running
        if not self._is_open or not self._num_running or num_free <= 0:
            return False
        # Log-probabilities of a prompt are a prefill's, and so are images.
        if seq.completion.first_needed_logits < seq.num_tokens or seq.num_tokens > _MAX_MIXED_PROMPT_TOKENS:
            return False
        if isinstance(seq, ImageSequence):
            return False
        num_steps = -(-(seq.num_tokens - seq.num_cached_tokens) // num_free)
        return num_steps + self._num_tokens_left(seq) <= self._longest

    def _num_tokens_left(self, seq: Sequence) -> int:
        """Tokens that the sequence may still generate."""
        return min(seq.max_tokens - seq.num_completion_tokens, self._max_seq_len - seq.num_tokens)
