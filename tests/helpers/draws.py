"""Draws from the whole vocabulary by the sampler's kernels and by their twins."""

from nanovllm.kernels.sampling.sampler import best_of_shard, pick_best


def sample_triton(logits, temperatures, seeds, positions, thresholds=None):
    return pick_best.kernel(best_of_shard.kernel(logits, temperatures, seeds, positions, thresholds).unsqueeze(0))


def sample_torch(logits, temperatures, seeds, positions, thresholds=None):
    return pick_best.twin(best_of_shard.twin(logits, temperatures, seeds, positions, thresholds).unsqueeze(0))
