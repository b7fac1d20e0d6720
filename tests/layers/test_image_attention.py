"""Images that attend in both directions, in a fixed order of sums: against plain torch, and whatever is cached."""

from types import SimpleNamespace

import pytest
import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.layers.backends.fixed_order_images import fixed_order_images
from nanovllm.layers.backends.fixed_order_torch import FixedOrderTorchBackend
from nanovllm.layers.backends.fixed_order_triton import FixedOrderTritonBackend
from nanovllm.layers.backends.image_attention import ImageAttention, ImageSpan
from nanovllm.layers.backends.torch_backend import TorchBackend

needs_interpreter = pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
BLOCK, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 4, 2, 32
START, END, LENGTH = 40, 940, 970  # An image, and texts around it.


class Sequence:
    """Queries, keys and values of one sequence, all in the cache."""

    def __init__(self, dtype: torch.dtype, rounded_to: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn(LENGTH, heads, HEAD_DIM, generator=generator).to(rounded_to).to(dtype)
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        cached = torch.nn.functional.pad(torch.stack((self.k, self.v)), (0, 0, 0, 0, 0, -LENGTH % BLOCK))
        self.caches = cached.view(2, -1, BLOCK, NUM_KV_HEADS, HEAD_DIM)

    @staticmethod
    def ends(begin: int, end: int) -> torch.Tensor:
        """The position behind the last key that each token sees."""
        ends = torch.arange(begin + 1, end + 1, dtype=torch.int32)
        ends[max(0, START - begin) : max(0, END - begin)] = END
        return ends

    def attend(self, backend, window: int | None, begin: int, end: int = LENGTH) -> torch.Tensor:
        """Of the tokens from begin on, with those before them in the cache."""
        position = max(begin, START)
        span = ImageSpan(position - begin, END - position, position, 0, START)
        context = SimpleNamespace(
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, end], dtype=torch.int32),
            max_seqlen_q=end - begin,
            block_tables=torch.arange(self.caches.shape[1], dtype=torch.int32)[None] if begin else None,
            images=SimpleNamespace(spans=[span], ends=self.ends(begin, end)) if position < END else None,
        )
        fields = {"scale": HEAD_DIM**-0.5, "window": window, "sinks": None, "kv_scales": None}
        layer = SimpleNamespace(**fields, k_cache=self.caches[0], v_cache=self.caches[1])
        tokens = slice(begin, end)
        return backend.prefill(layer, self.q[tokens], self.k[tokens], self.v[tokens], context)


IN_FLOAT32 = FixedOrderTorchBackend, torch.float32, {"rtol": 2e-5, "atol": 2e-6}
IN_BFLOAT16 = FixedOrderTorchBackend, torch.bfloat16, {"rtol": 2**-8, "atol": 2e-6}
BY_KERNELS = FixedOrderTritonBackend, torch.float16, {"rtol": 2**-9, "atol": 2**-9}  # Weights are rounded too.


@pytest.mark.parametrize(
    ("window", "backend", "dtype", "close"),
    [
        (None, *IN_FLOAT32),
        (200, *IN_FLOAT32),  # For the image's last tokens many of its keys are outside.
        (None, *IN_BFLOAT16),
        (200, *IN_BFLOAT16),
        pytest.param(None, *BY_KERNELS, marks=[needs_interpreter, pytest.mark.nightly]),
        pytest.param(200, *BY_KERNELS, marks=[needs_interpreter, pytest.mark.slow]),
    ],
)
def test_an_image_has_the_same_bits_wherever_its_step_begins(window, backend, dtype, close):
    seq, backend = Sequence(dtype, dtype), fixed_order_images(backend())
    whole = seq.attend(backend, window, 0)
    plain = Sequence(torch.float32, dtype).attend(ImageAttention(TorchBackend()), window, 0)
    torch.testing.assert_close(whole.float(), plain, **close)
    for begin in (START, START + 400, END - 5, END - 1, END + 3):
        assert torch.equal(seq.attend(backend, window, begin), whole[begin:]), begin
    # A last layer computes last tokens alone: of a prompt that ends with an image, as those of one behind it.
    assert torch.equal(seq.attend(backend, window, END - 1, END)[0], whole[END - 1])
