"""The batch sizes of decode and mixed steps that have CUDA graphs."""

MAX_GRAPH_BATCH_SIZE = 512  # Larger batches run without a graph, as in nano-vLLM.


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... up to min(max_num_seqs, MAX_GRAPH_BATCH_SIZE), which is always the last."""
    largest = min(max_num_seqs, MAX_GRAPH_BATCH_SIZE)
    sizes = [size for size in (1, 2, 4, 8, *range(16, largest + 1, 16)) if size < largest]
    return [*sizes, largest]


def mixed_batch_sizes(num_rows: int, max_num_seqs: int) -> list[int]:
    """Numbers of sequences for which mixed steps have graphs: 64, 128, 192, ... up to the most that they may have."""
    largest = min(num_rows, max_num_seqs)
    return [*range(64, largest, 64), largest]
