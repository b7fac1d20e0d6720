"""Draws from the whole vocabulary by the sampler's kernels and by their twins."""

from nanovllm.kernels import HAS_TRITON
from nanovllm.layers.sampling.sampler import best_of_shard_torch, pick_best_torch

if HAS_TRITON:
    from nanovllm.kernels.sampling.sampler import best_of_shard, pick_best


def sample(logits, temperatures, seeds, positions, thresholds=None):
    return pick_best(best_of_shard(logits, temperatures, seeds, positions, thresholds).unsqueeze(0))


def sample_torch(logits, temperatures, seeds, positions, thresholds=None):
    return pick_best_torch(best_of_shard_torch(logits, temperatures, seeds, positions, thresholds).unsqueeze(0))
