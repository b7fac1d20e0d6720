"""A layer of linear attention with random weights, for the tests of its kernels."""

import torch

EPS = 1e-6
TAPS = 4


class Layer:
    """A layer's weights and random inputs, and a store of `num_cells` cells of which every free one holds NaN."""

    def __init__(self, num_key_heads, num_value_heads, dim, device="cpu", dtype=torch.float32, num_cells=8,
                 state_dtype=torch.float32, seed=0):  # fmt: skip
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.dim, self.device, self.dtype = (num_key_heads, num_value_heads), dim, device, dtype
        self.conv_dim = (2 * num_key_heads + num_value_heads) * dim
        self.conv_weight = self.random(self.conv_dim, TAPS) * 0.5
        self.A_log = self.random(num_value_heads, dtype=torch.float32) - 1
        self.dt_bias = self.random(num_value_heads, dtype=torch.float32)
        self.norm_weight = 1 + 0.2 * self.random(dim, dtype=torch.float32)
        options = {"device": device}
        self.tails = torch.full((num_cells, TAPS - 1, self.conv_dim), float("nan"), dtype=dtype, **options)
        self.states = torch.full((num_cells, num_value_heads, dim, dim), float("nan"), dtype=state_dtype, **options)

    def random(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def fill(self, *cells):
        """Slots of sequences that have begun."""
        for cell in cells:
            self.tails[cell] = self.random(*self.tails.shape[1:])
            self.states[cell] = self.random(*self.states.shape[1:], dtype=self.states.dtype)

    def inputs(self, num_tokens):
        """qkv, z, b, a: slices of one tensor, as a fused projection gives them."""
        num_value_heads = self.heads[1]
        sizes = self.conv_dim, num_value_heads * self.dim, num_value_heads, num_value_heads
        return self.random(num_tokens, sum(sizes) + 8).split((*sizes, 8), dim=1)[:4]

    def run(self, function, inputs, *places, is_proposed=None):
        """The output, and tails and states after it. The layer's own stay as they are."""
        tails, states = self.tails.clone(), self.states.clone()
        weights = self.conv_weight, self.A_log, self.dt_bias, self.norm_weight, EPS
        places = [torch.tensor(each, dtype=torch.int32, device=self.device) for each in places]
        if is_proposed is not None:
            places_of_rows = (*places, *self.heads, torch.tensor(is_proposed, dtype=torch.int32, device=self.device))
            return function(*inputs, *weights, tails, states, *places_of_rows), tails, states
        return function(*inputs, *weights, tails, states, *places, *self.heads), tails, states

    def keep(self, result):
        out, self.tails, self.states = result
        return out


def starts(lens):
    return [0, *torch.tensor(lens).cumsum(0).tolist()]


def assert_close(actual, expected, tolerance=2e-5):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
