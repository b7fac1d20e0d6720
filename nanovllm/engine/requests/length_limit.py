"""LengthLimit: the longest sequence of an engine, and what to do about a longer prompt."""

from typing import NamedTuple


class LengthLimit(NamedTuple):
    """max_model_len: longest sequence that the model may see. supported_model_len: that it could; None if unknown."""

    max_model_len: int
    supported_model_len: int | None
    num_blocks: int  # of the KV cache
    block_size: int

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that the engine can hold, prompt and completion."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that leaves no room for one completion token."""
        if num_prompt_tokens >= self.max_seq_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, and with one token of completion it is longer than the "
                f"longest sequence of {self.max_seq_len} tokens, {self._explain()}"
            )

    def _explain(self) -> str:
        if self.max_seq_len < self.max_model_len:
            return (
                f"which is all that the KV cache holds ({self.num_blocks} blocks x {self.block_size} tokens): shorten "
                "the prompt, or raise num_kvcache_blocks, kvcache_gib or gpu_memory_utilization"
            )
        if self.max_model_len == self.supported_model_len:
            return "which is all that the model supports (max_position_embeddings): shorten the prompt"
        most = f", to at most {self.supported_model_len}" if self.supported_model_len is not None else ""
        return f"which is max_model_len: shorten the prompt, or raise max_model_len{most}"
