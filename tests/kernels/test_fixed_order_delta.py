"""The gated delta rule of deterministic=True: its twins' results, and of a token the same bits in each step."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import complete, make_checkpoint, make_llm, random_prompt, skip_unless_known
from delta_layers import Layer, assert_close, starts
from kernel_harness import nightly

from nanovllm import SamplingParams
from nanovllm.kernels.linear_attention import fixed_order
from nanovllm.kernels.linear_attention.fixed_order import fixed_order_decode, fixed_order_prefill
from nanovllm.layers import linear_attention

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Of outputs, which the twins round at other places, and of states, of which one may be rounded to the next number.
TOLERANCE = {F32: 5e-5, F16: 5e-3, BF16: 6e-2}
cases = pytest.mark.parametrize(
    ("heads", "state_dtype", "dtype"),
    [((2, 2), F32, F16), ((1, 3), F16, F32), *nightly(*product([(2, 2), (2, 4)], [F32, F16, BF16], [F32, F16]))],
)


def assert_like_twin(layer, function, inputs, *places, **options):
    expected = layer.run(function.twin, inputs, *places, **options)
    actual = layer.run(function.kernel, inputs, *places, **options)
    assert_close(actual[1:2], expected[1:2], 0)
    tolerance = max(TOLERANCE[layer.dtype], TOLERANCE[layer.states.dtype])
    assert_close(actual[::2], expected[::2], tolerance)


@cases
def test_kernels_equal_their_twins(heads, state_dtype, dtype, device, monkeypatch):
    """Decode steps with prompts, proposed tokens and padding; prefills from cells, to cells and to snapshots."""
    if device == "cpu":
        monkeypatch.setattr(fixed_order, "_SEQS", 4)  # More sequences than a program compares at a time.
    layer = Layer(*heads, 16, device, dtype, state_dtype=state_dtype, seed=heads[1])
    layer.fill(0, 2, 5)
    cells, lens = [0, 1, 1, 2, 3, 3, 3, 3, 5, 6, 7, -1, -1], [9, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 0, 0]
    is_proposed = [0] * 9 + [1, 1, 0, 0]
    inputs = layer.inputs(len(cells))
    assert_like_twin(layer, fixed_order_decode, inputs, cells, lens, is_proposed=is_proposed)
    assert_like_twin(layer, fixed_order_decode, [x[:9] for x in inputs], cells[:9], lens[:9])
    lens = [1, 3, 2, 0, 4, 7]
    places = starts(lens), [0, -1, 2, -1, -1, 5], [0, 1, 3, -1, -1, 5], [-1, -1, -1, -1, 7, 6], [0, 0, 0, 0, 4, 4]
    assert_like_twin(layer, fixed_order_prefill, layer.inputs(sum(lens)), *places)


def assert_same_bits(make_layer, length, firsts):
    """Of tokens alone and among others, whole, in chunks, as rows of a decode step, proposed, and one by one.

    firsts: tokens before the chunks; the last is where the snapshot is.
    """
    layer, last = make_layer(), firsts[-1]
    inputs = layer.inputs(length)
    whole, tails, states = layer.run(fixed_order_prefill.kernel, inputs, [0, length], [-1], [0], [1], [last])
    others = [torch.cat((one[:3], x, one[3:])) for one, x in zip(layer.inputs(4), inputs, strict=True)]
    places = starts([3, length, 1]), [-1] * 3, [4, 5, 6], [-1] * 3, [0] * 3
    among, *kept = layer.run(fixed_order_prefill.kernel, others, *places)
    assert torch.equal(among[3:-1], whole)
    assert torch.equal(kept[1][5], states[0])
    for first in firsts:
        before = [x[:first] for x in inputs]
        begun = make_layer()
        begun.keep(layer.run(fixed_order_prefill.kernel, before, [0, first], [-1], [0], [-1], [0]))
        if first == last:
            assert torch.equal(states[1], begun.states[0])
            assert torch.equal(tails[1], begun.tails[0])
        count = min(5, length - first)
        part, new = [x[first : first + count] for x in inputs], range(first + 1, first + count + 1)
        rest = begun.run(fixed_order_prefill.kernel, part, [0, count], [0], [2], [-1], [0])
        mixed = begun.run(fixed_order_decode.kernel, part, [0] * count, new)
        cells = [0, *range(10, 9 + count)]
        proposed = begun.run(fixed_order_decode.kernel, part, cells, new, is_proposed=[0] + [1] * (count - 1))
        single = []
        for i in range(count):
            row = [x[i : i + 1] for x in part]
            single.append(begun.keep(begun.run(fixed_order_decode.kernel, row, [0], [first + i + 1])))
            assert torch.equal(proposed[2][cells[i]], begun.states[0])
            assert torch.equal(proposed[1][cells[i]], begun.tails[0])
        for out in (rest[0], mixed[0], proposed[0], torch.cat(single)):
            assert torch.equal(out, whole[first : first + count]), first
        for kept, cell in ((rest, 2), (mixed, 0)):
            assert torch.equal(kept[1][cell], begun.tails[0])
            assert torch.equal(kept[2][cell], begun.states[0])


@pytest.mark.parametrize(("heads", "state_dtype", "dtype"), [((1, 1), F32, F16), ((1, 2), F16, F32)])
def test_a_token_has_the_same_bits_in_each_step(heads, state_dtype, dtype, device):
    def make_layer():
        return Layer(*heads, 16, device, dtype, num_cells=32, state_dtype=state_dtype)

    assert_same_bits(make_layer, 8, (2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("num_value_heads", [16, 32, 48])
@pytest.mark.parametrize("state_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_so_it_has_with_published_sizes(num_value_heads, state_dtype, dtype):
    def make_layer():
        return Layer(16, num_value_heads, 128, "cuda", dtype, num_cells=32, state_dtype=state_dtype)

    assert_same_bits(make_layer, 300, (1, 2, 3, 50, 128, 297, 256))


def test_wrong_sizes_are_refused(device):
    layer = Layer(2, 4, 24, device)
    for function, places in ((fixed_order_decode, ([0], [1])), (fixed_order_prefill, ([0, 1], [-1], [0], [-1], [0]))):
        with pytest.raises(ValueError, match="values of one size"):
            layer.run(function.kernel, layer.inputs(1), *places)


def test_an_engine_by_these_kernels_gives_the_tokens_of_another(tmp_path, device, monkeypatch):
    """On a CPU, in place of their twins: prompts, chunks and decode steps go through them."""
    if device != "cpu":
        pytest.skip("tests/gpu has engines on a GPU")
    skip_unless_known("qwen3_5_text")
    path = make_checkpoint(tmp_path, family="qwen3_5_text")
    prompts, params = [random_prompt(length, length) for length in (1, 6)], SamplingParams(0, 2, ignore_eos=True)
    with make_llm(path, deterministic=True) as llm:
        expected = complete(llm, prompts, params)
    for name in ("fixed_order_decode", "fixed_order_prefill"):
        monkeypatch.setattr(linear_attention, name, getattr(fixed_order, name).kernel)
    with make_llm(path, deterministic=True, max_num_batched_tokens=4, max_model_len=32) as llm:
        assert complete(llm, prompts, params) == expected
