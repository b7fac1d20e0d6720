"""How ranks find out together that they cannot share memory; what they share is tested on GPUs."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from nanovllm.layers.parallel.peer_memory import find_obstacle


@pytest.mark.parametrize("failing", [[], [0], [1], [0, 2]])
def test_ranks_agree(failing):
    """One that fails must not leave the others with memory that it will not use, nor waiting."""
    store = dist.HashStore()

    def ask(rank):
        def share(name, shape, dtype):
            if rank in failing:
                raise RuntimeError("cuIpcOpenMemHandle_v2 failed: operation not permitted")
            return object()

        return find_obstacle(SimpleNamespace(rank=rank, size=3, store=store, share=share))

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, range(3)))
    assert len(set(answers)) == 1
    if failing:
        assert f"rank {failing[0]}: " in answers[0]
        assert "not permitted" in answers[0]
    else:
        assert answers[0] is None
