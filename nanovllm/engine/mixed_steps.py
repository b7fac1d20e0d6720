"""When a prompt is computed beside a decode step, in the rows that none of its sequences takes.

A decode step of a wide model reads weights for as long as it multiplies some 256 rows by them, so rows that no sequence
fills are to be had for less than a prefill step takes for them: on an H200 a prompt's token costs a layer of Qwen3-8B
0.4 us there and 0.6 us in a prefill step. But a prompt enters slowly that way, and all that wait behind it begin later.
So it goes beside only where that makes the batch no longer (benchmarks/mixed_steps.py, docs/performance.md).

Mixed batches of decode steps and pieces of prompts are Sarathi's (Agrawal et al. 2023).
"""

from collections.abc import Collection

from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence

# Up to where the products of Qwen3-8B, of 193 million parameters a layer, take little more for more rows. Those of
# Qwen3-0.6B and their launches are short, and it gained nothing.
_ROWS = 256
_MIN_LAYER_PARAMS = 150_000_000


def choose_num_rows(config: Config, has_graphs: bool, num_layer_params: int) -> int:
    """Rows of a mixed step, 0 for none: what config.mixed_step_rows says, or where that is None, where they pay."""
    if config.mixed_step_rows is not None:
        return config.mixed_step_rows
    pays = has_graphs and num_layer_params >= _MIN_LAYER_PARAMS and config.tensor_parallel_size == 1
    return min(_ROWS, config.max_num_batched_tokens) if pays else 0


def goes_beside(
    seq: Sequence, running: Collection[Sequence], num_waiting: int, num_rows: int, max_num_seqs: int, max_seq_len: int
) -> bool:
    """Whether the waiting sequence had better be computed beside the running ones than in a prefill step.

    It had where it would end before the longest of them does, in the rows that are free now; and where all that wait
    find a place in the batch, for else what counts is that the batch is full soon. As far as max_tokens tells.

    Args:
        seq: the first of num_waiting.
        num_rows: of a step.
    """
    num_free = num_rows - len(running)
    if num_free <= 0 or not running or num_waiting + len(running) > max_num_seqs:
        return False
    num_steps = -(-(seq.num_tokens - seq.num_cached_tokens) // num_free) + _num_left(seq, max_seq_len)
    if all(_num_left(other, max_seq_len) < num_steps for other in running):
        return False
    # The others' logits are wanted, and the steps that give these take no prompts along.
    return seq.is_plain and all(other.is_plain for other in running)


def _num_left(seq: Sequence, max_seq_len: int) -> int:
    """Tokens that the sequence may still generate."""
    return min(seq.max_tokens - seq.num_completion_tokens, max_seq_len - seq.num_tokens)
