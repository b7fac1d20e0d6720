"""The rotation alone: kernel against twin."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import DTYPES, hold, rounding

from nanovllm.kernels.attention.rotary_embedding import rotary_embedding

MAX_POSITION = 64


def of_rows(function, head_dim):
    """The function of heads side by side in a row."""

    def run(positions, q, k, table, scales):
        q, k = (x.unflatten(1, (x.shape[1] // head_dim, head_dim)) for x in (q, k))
        found = function(positions, q, k, table, scales)
        assert all(x.is_contiguous() for x in found)
        return found

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [
        (5, 16, 8, 128, 128),
        (3, 3, 1, 100, 100),
        (4, 12, 2, 80, 20),
        (2, 9, 9, 2, 2),
        (1, 1, 1, 96, 94),
        (0, 4, 2, 16, 16),
    ],
)
def test_kernel_equals_twin(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, has_scales, dtype, device):
    q, k = (torch.randn(num_tokens, n * head_dim, device=device).to(dtype) for n in (num_heads, num_kv_heads))
    positions = torch.randint(MAX_POSITION, (num_tokens,), device=device).to(torch.int32 if has_scales else torch.int64)
    table = torch.randn(MAX_POSITION, 1, rotary_dim, device=device)
    scales = 1 + torch.rand(MAX_POSITION, device=device) if has_scales else None
    functions = (of_rows(each, head_dim) for each in (rotary_embedding.kernel, rotary_embedding.twin))
    # A rotated value is a difference of products in float32, of numbers up to about 10, rounded once.
    close = rounding(dtype, terms=0) | {"atol": rounding(torch.float32, terms=10)["atol"]}
    hold(*functions, (positions, q, k, table, scales), rows=(1, 2), close=close)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, torch.zeros(6, 8, 32)[:, ::2], "packed"),
        (2, torch.zeros(6, 2, 16), "q and k must be"),
        (2, torch.zeros(5, 2, 32), "q and k must be"),
        (3, torch.zeros(MAX_POSITION, 1, 34), "cos_sin_cache must have an even number of columns up to 32, not 34"),
        (3, torch.zeros(MAX_POSITION, 1, 15), "not 15"),
    ],
)
def test_other_layouts_are_refused(index, value, message):
    table = torch.zeros(MAX_POSITION, 1, 32)
    case = [torch.zeros(6, dtype=torch.int64), torch.zeros(6, 4, 32), torch.zeros(6, 2, 32), table]
    case[index] = value
    with pytest.raises(ValueError, match=message):
        rotary_embedding.kernel(*case)
