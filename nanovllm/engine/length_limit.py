"""LengthLimit: the longest sequence of an engine, and what to do about a longer prompt."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import SimpleNamespace

    from nanovllm.config import Config


class LengthLimit:
    """
    Attributes:
        max_seq_len: tokens of the longest sequence that the engine can hold, prompt and completion.
    """

    def __init__(self, config: "Config | SimpleNamespace"):
        """config: an engine's Config, with the KV cache's num_kvcache_blocks; without max_model_len, that is all."""
        self.config, self.num_blocks = config, config.num_kvcache_blocks
        capacity = self.num_blocks * config.kvcache_block_size
        self._max_model_len: int = getattr(config, "max_model_len", capacity)
        self.max_seq_len: int = min(self._max_model_len, capacity)

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that leaves no room for one completion token."""
        if num_prompt_tokens >= self.max_seq_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, and with one token of completion it is longer than the "
                f"longest sequence of {self.max_seq_len} tokens, {self.remedy}"
            )

    @property
    def remedy(self) -> str:
        """What to do about a prompt that is longer."""
        config, supported = self.config, self.config.supported_model_len
        if self.max_seq_len < self._max_model_len:
            return (
                f"which is all that the KV cache holds ({self.num_blocks} blocks x {config.kvcache_block_size} "
                "tokens): shorten the prompt, or raise num_kvcache_blocks, kvcache_gib or gpu_memory_utilization"
            )
        if supported is not None and self._max_model_len == supported:
            is_chunk = supported < config.hf_config.max_position_embeddings
            source = "one chunk of dual_chunk_attention_config" if is_chunk else "max_position_embeddings"
            return f"which is all that the model supports ({source}): shorten the prompt"
        most = f", to at most {supported}" if supported is not None else ""
        return f"which is max_model_len: shorten the prompt, or raise max_model_len{most}"
