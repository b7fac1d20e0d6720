"""ResidualReducer without GPUs: a step that its buffers have no room for. Its sums are tested on GPUs."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.layers.parallel.residual_reducer import ResidualReducer


@pytest.mark.parametrize("max_tokens", [4, 600])  # fewer than are pushed, and more
def test_a_step_that_has_no_room_is_refused(max_tokens):
    reducer = ResidualReducer.__new__(ResidualReducer)
    reducer._turn = 0
    reducer._buffers = [SimpleNamespace(tensor=torch.zeros(max_tokens, 8))]
    assert reducer.partial(max_tokens).shape == (max_tokens, 8)
    with pytest.raises(RuntimeError, match=f"step of {max_tokens + 1} tokens.* for {max_tokens}$"):
        reducer.partial(max_tokens + 1)
