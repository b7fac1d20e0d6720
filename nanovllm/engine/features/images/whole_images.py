"""WholeImages: chunks of prompts that cut no image."""

from nanovllm.engine.cells import NoCells
from nanovllm.engine.features.images.image_sequence import ImageSequence
from nanovllm.engine.sequence import Sequence


class WholeImages(NoCells):
    """For a model whose images attend in both directions: a step computes all rows of an image that are not in the
    cache."""

    def __init__(self, num_rows: int):
        """num_rows: of the largest image. A prompt is only cut where so many tokens have room: so a chunk never ends
        where it begins."""
        self.chunk = num_rows

    def align_chunk(self, seq: Sequence) -> None:
        if not isinstance(seq, ImageSequence):
            return
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        start = next((each.start for each in seq.images.each if each.start < end < each.end), end)
        if start > seq.num_cached_tokens:
            seq.num_scheduled_tokens = start - seq.num_cached_tokens
