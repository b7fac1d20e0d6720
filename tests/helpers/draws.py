"""Draws from the whole vocabulary by the sampler's kernels and by their twins."""

from nanovllm.kernels.sampling.sampler import (
    best_of_shard_torch,
    best_of_shard_triton,
    pick_best_torch,
    pick_best_triton,
)


def sample_triton(logits, temperatures, seeds, positions, thresholds=None):
    return pick_best_triton(best_of_shard_triton(logits, temperatures, seeds, positions, thresholds).unsqueeze(0))


def sample_torch(logits, temperatures, seeds, positions, thresholds=None):
    return pick_best_torch(best_of_shard_torch(logits, temperatures, seeds, positions, thresholds).unsqueeze(0))
