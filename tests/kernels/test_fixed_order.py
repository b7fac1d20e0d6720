"""The kernels of deterministic=True: their twins' results, and of a row the same bits in any company."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import complete, generate, make_llm, random_prompt
from kernel_harness import HALF, assert_refused, hold, rounding
from linear_inputs import make_linear

from nanovllm import SamplingParams
from nanovllm.kernels.attention import fixed_order
from nanovllm.kernels.attention.fixed_order import FixedOrderWorkspace, fixed_order_decode, fixed_order_prefill
from nanovllm.kernels.matmul import fixed_order as products
from nanovllm.kernels.matmul.fixed_order import Tile, fixed_order_linear, fixed_order_linear_on_hopper
from nanovllm.layers.backends.fixed_order_triton import FixedOrderTritonBackend
from nanovllm.layers.backends.torch_backend import prefill_attention_torch


@pytest.mark.parametrize(("M", "N", "K", "dtype"), [(5, 40, 200, HALF), (70, 33, 100, torch.float32)])
def test_products_equal_the_twin(M, N, K, dtype, device):
    x, (weight, _) = torch.randn(M, K, device=device).to(dtype), make_linear(N, K, dtype, device)
    hold(fixed_order_linear.kernel, fixed_order_linear.twin, (x, weight), close=rounding(dtype, 1, K))


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_rows_product_has_the_same_bits_among_any_others(dtype, device):
    x, (weight, _) = torch.randn(130, 192, device=device).to(dtype), make_linear(48, 192, dtype, device)
    whole = fixed_order_linear.kernel(x, weight)
    for size in (1, 3, 16, 64):
        parts = [fixed_order_linear.kernel(x[start:][:size], weight) for start in (0, 7, 66)]
        assert all(torch.equal(part, whole[start:][:size]) for start, part in zip((0, 7, 66), parts, strict=True)), size


@pytest.mark.parametrize(("M", "N", "K"), [(5, 40, 72), (70, 136, 128)])
def test_hoppers_products_equal_the_twin(M, N, K, device):
    """Of several tiles a program, and parts of tiles."""
    x, (weight, _) = torch.randn(M, K, device=device).to(HALF), make_linear(N, K, HALF, device)
    y = torch.full((M, N), float("nan"), device=device).to(HALF)
    fixed_order_linear_on_hopper(x, weight, y, Tile(64, 64, 64, 4, 3))
    torch.testing.assert_close(y, fixed_order_linear.twin(x, weight), **rounding(HALF, 1, K))


def test_a_tile_is_as_large_as_the_rows_and_the_multiprocessors_allow():
    sizes = {
        (1, 4096): 0,
        (64, 151936): 0,
        (128, 4096): 0,
        (128, 6144): 1,
        (256, 4096): 1,
        (256, 6144): 2,
        (512, 24576): 2,
    }
    for (num_tokens, N), i in sizes.items():
        assert products._tile(num_tokens, N, 132) == products._TILES[i][0], (num_tokens, N)
    assert products._tile(16384, 4096, 132) == products._LARGEST_TILE


def test_wrong_products_are_refused(device):
    given = {"x": torch.zeros(2, 32, device=device), "weight": torch.zeros(8, 32, device=device)}
    wrong = {"x": [given["x"][:, :16], given["x"].half().T], "weight": [given["weight"].half(), given["weight"].T]}
    assert_refused(lambda x, weight: fixed_order_linear.kernel(x, weight), given, wrong)


class Case:
    """Sequences whose keys are in a cache of blocks that are not in order."""

    def __init__(self, dtype, device, lens=(1, 40, 150, 83), heads=(4, 2), head_dim=32, block_size=16):
        torch.manual_seed(0)
        num_heads, num_kv_heads = heads
        self.lens, self.device = lens, device
        total, num_blocks = sum(lens), sum(-(-length // block_size) for length in lens)
        draw = {"device": device}
        self.q = torch.randn(total, num_heads, head_dim, **draw).to(dtype)
        self.k, self.v = (torch.randn(total, num_kv_heads, head_dim, **draw).to(dtype) for _ in "kv")
        order = torch.randperm(num_blocks).tolist()
        self.tables = torch.full((len(lens), num_blocks), -1, dtype=torch.int32)
        shape = num_blocks, block_size, num_kv_heads, head_dim
        self.k_cache, self.v_cache = (torch.full(shape, float("nan"), **draw).to(dtype) for _ in "kv")
        self.starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        for seq, length in enumerate(lens):
            for position in range(length):
                if position % block_size == 0:
                    self.tables[seq, position // block_size] = order.pop()
                at = int(self.tables[seq, position // block_size]), position % block_size
                self.k_cache[at], self.v_cache[at] = (x[self.starts[seq] + position] for x in (self.k, self.v))
        self.tables = self.tables.to(device)
        self.scale = head_dim**-0.5

    def lengths(self, lens):
        return torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32, device=self.device)

    def prefill(self, function, num_cached=None, **options):
        """Of the tokens from num_cached on; None: of all, without the cache."""
        lens = [length - (num_cached or 0) for length in self.lens]
        rows = [self.starts[seq] + (num_cached or 0) + i for seq, length in enumerate(lens) for i in range(length)]
        q, k, v = (x[rows] for x in (self.q, self.k, self.v))
        tables = None if num_cached is None else self.tables
        args = self.lengths(lens), self.lengths(self.lens), max(lens), tables, self.scale
        return rows, function(q, k, v, self.k_cache, self.v_cache, *args, **options)

    def decode(self, rows, **options):
        """The tokens of these rows, each as a row of one decode step."""
        seqs = [next(seq for seq, end in enumerate(self.starts[1:]) if row < end) for row in rows]
        lens = [row - self.starts[seq] + 1 for row, seq in zip(rows, seqs, strict=True)]
        heads = self.q.shape[1], self.q.shape[2]
        workspace = FixedOrderWorkspace(len(rows), *heads, max(self.lens), self.device)
        context_lens = torch.tensor(lens, dtype=torch.int32, device=self.device)
        args = self.q[rows], self.k_cache, self.v_cache, context_lens, self.tables[seqs]
        return fixed_order_decode(*args, self.scale, workspace, **options)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that short sequences have several."""
    monkeypatch.setattr(fixed_order, "CHUNK", 64)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_token_has_the_same_bits_in_prefill_chunk_and_decode(name, dtype, device):
    case, options = Case(dtype, device), OPTIONS[name]
    if "sinks" in options:
        options = {"sinks": options["sinks"].to(device)}
    rows, whole = case.prefill(fixed_order_prefill, **options)
    _, expected = case.prefill(prefill_attention_torch, **options)
    close: Any = rounding(dtype, 4, max(case.lens))
    torch.testing.assert_close(whole, expected, **close)
    chosen = [0, 1, 40, 41, 103, 104, 105, 168, 190, 191, 273]
    assert torch.equal(case.decode(chosen, **options), whole[chosen])
    for row in chosen[-3:]:  # alone
        assert torch.equal(case.decode([row], **options), whole[row : row + 1])
    short = Case(dtype, device, lens=(90, 150))
    _, all_new = short.prefill(fixed_order_prefill, **options)
    for num_cached in (1, 37, 64, 89):
        rows, chunk = short.prefill(fixed_order_prefill, num_cached, **options)
        assert torch.equal(chunk, all_new[rows]), num_cached


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("head_dim", "block_size", "tma"), [(32, 16, False), (128, 64, True), (256, 16, False)])
def test_so_it_has_by_hoppers_kernels(name, head_dim, block_size, tma, device, monkeypatch):
    """Which multiply a decode step's queries as columns. Only on such a card are their bits those of a prefill."""
    is_hopper = device != "cpu" and torch.cuda.get_device_capability()[0] == 9
    if device == "cpu":
        monkeypatch.setattr(fixed_order, "sums_by_dot", lambda q: True)
        monkeypatch.setattr(fixed_order, "has_tma", lambda *args: tma)
    elif not is_hopper:
        pytest.skip("needs a card of Hopper's")
    monkeypatch.setattr(fixed_order, "CHUNK", 128)
    case = Case(HALF, device, lens=(1, 40, 300, 83), head_dim=head_dim, block_size=block_size)
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    _, whole = case.prefill(fixed_order_prefill, **options)
    _, expected = case.prefill(prefill_attention_torch, **options)
    close: Any = rounding(HALF, 4, max(case.lens))
    torch.testing.assert_close(whole, expected, **close)
    chosen = [0, 1, 40, 41, 103, 104, 105, 168, 190, 191, 273, 340, 341, 423]
    decoded = case.decode(chosen, **options)
    if is_hopper:
        assert torch.equal(decoded, whole[chosen])
    else:
        torch.testing.assert_close(decoded, expected[chosen], **close)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_an_image_attends_in_both_directions_with_the_same_bits_wherever_a_step_begins(dtype, window, device):
    """Tokens 30 to 119 see each other. Those around them are as without it."""
    case, (start, end) = Case(dtype, device, lens=(200,)), (30, 120)
    ends = torch.arange(1, 201, dtype=torch.int32, device=device)
    ends[start:end] = end
    _, whole = case.prefill(fixed_order_prefill, window=window, ends=ends)
    _, causal = case.prefill(fixed_order_prefill, window=window)
    assert torch.equal(whole[:start], causal[:start])
    assert torch.equal(whole[end - 1 :], causal[end - 1 :])
    for num_cached in (start, 101, end - 1):
        rows, chunk = case.prefill(fixed_order_prefill, num_cached, window=window, ends=ends[num_cached:])
        assert torch.equal(chunk, whole[rows]), num_cached
    at = torch.arange(200, device=device)
    is_seen = at[None] < ends[:, None]
    if window is not None:
        is_seen &= at[None] > at[:, None] - window
    queries, keys, values = (x.float().transpose(0, 1) for x in (case.q, case.k, case.v))
    options = {"attn_mask": is_seen, "scale": case.scale, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(queries[None], keys[None], values[None], **options)
    torch.testing.assert_close(whole, expected[0].transpose(0, 1).to(dtype), **rounding(dtype, 4, 200))


def test_padding_of_a_decode_step_is_zero(device):
    case = Case(HALF, device, lens=(20,))
    context_lens = torch.zeros(2, dtype=torch.int32, device=device)
    workspace = FixedOrderWorkspace(2, 4, 32, 20, device)
    tables = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    found = fixed_order_decode(case.q[:2], case.k_cache, case.v_cache, context_lens, tables, 1.0, workspace)
    assert not found.any()


def test_an_engine_by_these_kernels_gives_the_tokens_of_another(path, device, monkeypatch):
    """On a CPU, in place of torch's back end: chunks, cached beginnings, and decode steps go through the kernels."""
    if device != "cpu":
        pytest.skip("tests/gpu has engines on a GPU")
    monkeypatch.setattr(FixedOrderTritonBackend, "obstacle", classmethod(lambda cls, shape: None))
    monkeypatch.setattr(fixed_order, "CHUNK", 16)
    prompts = [random_prompt(length, length) for length in (1, 20, 37)]
    prompts += [[*prompts[-1][:33], 5]]
    params = SamplingParams(0, 3, ignore_eos=True, logprobs=0)
    with make_llm(path, deterministic=True, max_num_batched_tokens=30, max_model_len=64) as llm:
        assert isinstance(llm.model_runner.backend, FixedOrderTritonBackend)
        together = generate(llm, prompts, params)
        alone = [generate(llm, [prompt], params)[0] for prompt in prompts[1:3]]
    for one, other in zip(alone, together[1:3], strict=True):
        assert (one["token_ids"], one["logprobs"]) == (other["token_ids"], other["logprobs"])
    with make_llm(path) as llm:
        assert [output["token_ids"] for output in together] == complete(llm, prompts, params)
