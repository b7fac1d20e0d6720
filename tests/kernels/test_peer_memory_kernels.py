"""What reads another rank's memory or waits for it, with all "ranks" in one process."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from nanovllm.kernels import add_norm as kernels
from nanovllm.kernels.peer_embedding import peer_embedding
from nanovllm.layers.layernorm import rms_norm_torch

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rows", "hidden"), [(2, 64, 64), (3, 128, 100), (8, 64, 257)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_peer_embedding(size, rows, hidden, dtype, index_dtype, device):
    table = torch.randn(size, rows, hidden, device=device).to(dtype)
    shards = [shard.clone() for shard in table]  # each in memory of its own
    addresses = torch.tensor([shard.data_ptr() for shard in shards], device=device)
    edges = [rank * rows + row for rank in range(size) for row in (0, rows - 1)]
    token_ids = torch.tensor([*edges, *torch.randint(size * rows, (9,)).tolist()], dtype=index_dtype, device=device)
    abort = torch.zeros(1, dtype=torch.int32, device=device)
    y = peer_embedding(addresses, token_ids, abort, rows, hidden, dtype)
    assert torch.equal(y, F.embedding(token_ids, table.flatten(0, 1)))
    abort.fill_(1)
    token_ids[:2] = torch.tensor([-5, 2**31 - 1])  # nonsense, as whatever is computed then
    assert peer_embedding(addresses, token_ids, abort, rows, hidden, dtype).eq(0).all(), "it read what may be gone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 64), (3, 100), (20, 256)])
def test_add_norm_arrived(num_tokens, hidden, dtype, device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_PROGRAMS", 8)  # so that one has several tokens
    residual, first, second = torch.randn(3, num_tokens, hidden, device=device).to(dtype)
    weight = (1 + 0.3 * torch.randn(hidden, device=device)).to(dtype)
    total = (residual.float() + first.float() + second.float()).to(dtype)
    arrivals = torch.tensor([0, 7, 0, 0], dtype=torch.int32, device=device)
    abort = torch.zeros(1, dtype=torch.int32, device=device)
    y = kernels.add_norm_arrived(residual, first, second, weight, EPS, arrivals[1], 7, abort)
    # Triton's interpreter truncates to bfloat16 where the hardware rounds.
    loose = device == "cpu" and dtype == torch.bfloat16
    torch.testing.assert_close(residual, total, rtol=2.0**-7 if loose else 0, atol=1e-6 if loose else 0)
    tolerance = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
    torch.testing.assert_close(y, rms_norm_torch(total, weight, EPS), rtol=tolerance, atol=1e-3)
    assert arrivals.tolist() == [0, 7, 0, 0], "the next sum would be taken for arrived"


def test_what_never_arrives_is_not_waited_for_once_aborted(device):
    residual, first, second = torch.randn(3, 2, 64, device=device)
    arrival = torch.zeros(1, dtype=torch.int32, device=device)
    abort = torch.ones(1, dtype=torch.int32, device=device)
    kernels.add_norm_arrived(residual, first, second, torch.ones(64, device=device), EPS, arrival, 3, abort)
