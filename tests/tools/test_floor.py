"""The time that no engine can beat: what of a model it counts."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from checkpoints import needs_family

from nanovllm.bench.floor import Ceilings, ModelSize, floor_seconds
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.models.presets import preset_config

CEILINGS = Ceilings(bandwidth=4e12, flops=8e14, layer_flops=8e14)


def size_of(name, **changes):
    config = preset_config(name)
    config.update(changes)
    return ModelSize.of(config, torch.bfloat16)


def windows(size):
    """The number of layers with each."""
    found = Counter()
    for attention, layers in size.attentions.items():
        found[attention.window] += layers
    return found


def kv_bytes_per_key(size):
    """Of one layer, where all are alike."""
    (attention,) = size.attentions
    return attention.kv_bytes_per_key


def test_a_dense_model_is_read_as_a_whole():
    size = size_of("Qwen3-8B")
    assert size.params_read(1) == size.params_read(300) == size.layer_params + size.head_params
    # Without the embedding, which is not read, and the norms.
    assert size.layer_params + size.head_params == pytest.approx(8.19e9 - 0.62e9, rel=1e-3)


def test_a_batch_reads_the_experts_that_it_uses():
    size = size_of("Qwen3-30B-A3B")
    assert size.params_read(1) == size.layer_params + size.head_params == pytest.approx(3.35e9 - 0.31e9, rel=2e-3)
    assert size.params_read(10**6) == pytest.approx(30.5e9 - 0.31e9, rel=2e-3)
    # Of two tokens, the second one shares a sixteenth of its experts with the first on average.
    once, twice, thrice = (size.params_read(n) for n in (1, 2, 3))
    assert twice - once == pytest.approx(48 * 8 * 3 * 2048 * 768 * 15 / 16)
    assert thrice - twice == pytest.approx((twice - once) * 15 / 16)


def test_layers_without_experts():
    size = size_of("Qwen3-30B-A3B", mlp_only_layers=[0, 5], decoder_sparse_step=2)  # 5 is one of those that have some.
    assert size.expert_params == {1 / 16: 23 * 128 * 3 * 2048 * 768}
    mlps = size.layer_params - 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    assert mlps == 25 * 3 * 2048 * 6144 + 23 * (8 * 3 * 2048 * 768 + 128 * 2048)


def test_the_number_of_experts_by_its_newer_name():
    """An older transformers reads a checkpoint of a newer one so."""
    assert size_of("Qwen3-30B-A3B", num_experts=4, num_local_experts=128) == size_of("Qwen3-30B-A3B")


def test_a_step_takes_as_long_as_its_bytes():
    size = size_of("Qwen3-30B-A3B")
    one_step = floor_seconds(size, CEILINGS, [1, 1], [2, 2], 0, 1) - floor_seconds(size, CEILINGS, [1, 1], [1, 1], 0, 1)
    assert one_step == pytest.approx((2 * size.params_read(2) + 4 * 48 * kv_bytes_per_key(size)) / 4e12)
    prefill = floor_seconds(size, CEILINGS, [1000], [1], 0, 1)
    flops = 2 * size.layer_params * 1000 + 2 * size.head_params + 2 * 48 * 32 * 128 * 1000**2
    assert prefill == pytest.approx(flops / 8e14)


def test_weights_in_fp8():
    config = preset_config("Qwen3-8B")
    size = ModelSize.of(config, torch.bfloat16, Fp8())
    assert size.bytes_read(1) == size.layer_params + 2 * size.head_params
    ceilings = Ceilings(bandwidth=4.27e12, flops=7.8e14, layer_flops=1.3e15)
    # The floors of fp8 that were computed by hand: 128 prompts of 2,000 tokens, and one stream.
    assert floor_seconds(size, ceilings, [2000] * 128, [1] * 128, 0, 1) == pytest.approx(2.93, abs=0.01)
    assert 512 / floor_seconds(size, ceilings, [128], [512], 0, 1) == pytest.approx(518, abs=2)


def test_keys_and_values_in_fp8():
    config = preset_config("Qwen3-8B")
    weights, ceilings = Fp8(), Ceilings(bandwidth=4.27e12, flops=7.8e14, layer_flops=1.3e15)
    size = ModelSize.of(config, torch.bfloat16, weights, torch.float8_e4m3fn)
    plain = ModelSize.of(config, torch.bfloat16, weights)
    assert kv_bytes_per_key(size) == kv_bytes_per_key(plain) / 2
    assert size == replace(plain, attentions=size.attentions)
    # Computed by hand, too: one stream reads few keys.
    assert 512 / floor_seconds(size, ceilings, [128], [512], 0, 1) == pytest.approx(520, abs=2)


# Of the six layers five have a window of 512.
GEMMA = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}


@pytest.mark.parametrize(
    ("context", "decode_keys", "prefill_keys"),
    [
        (100, 6 * 100, 6 * 5000),
        (512, 6 * 512, 6 * 131072),
        (513, 5 * 512 + 513, 5 * (131072 + 512) + 131584.5),
        (2000, 5 * 512 + 2000, 5 * (131072 + 1488 * 512) + 2000000),
    ],
)
def test_a_layer_with_a_window_reads_no_more_keys(context, decode_keys, prefill_keys):
    size = size_of("gemma-3-1b", **GEMMA)
    assert windows(size) == {512: 5, None: 1}
    assert size.cache_bytes(context) == decode_keys * 2 * 256 * 2
    assert size.attention_flops(context) == prefill_keys * 4 * 4 * 256


def test_seconds_with_windows():
    """Two prompts whose first 600 tokens are the same, all longer than the window."""
    size = size_of("gemma-3-1b", **GEMMA)  # 4 heads and 1 KV head of 256

    def seconds(outputs):
        return floor_seconds(size, CEILINGS, [601, 1000], outputs, 600, 1)

    keys = 2 * 5 * 512 + 602 + 1001  # of a step with contexts of 602 and 1001
    weights = 2 * size.params_read(2)
    assert seconds([2, 2]) - seconds([1, 1]) == pytest.approx((weights + keys * 2 * 256 * 2) / 4e12)
    pairs = 5 * (131072 + 89 * 512) + 601**2 / 2  # the whole first prompt
    pairs += 5 * 400 * 512 + (1000**2 - 600**2) / 2  # 400 tokens of the second, all beyond the window
    flops = 2 * size.layer_params * 1001 + 4 * size.head_params + 4 * 4 * 256 * pairs
    assert seconds([1, 1]) == pytest.approx(flops / 8e14)


@needs_family("gemma4_text")
def test_layers_with_other_heads():
    size = size_of("gemma-4-31B")
    assert windows(size) == {1024: 50, None: 10}
    assert size.cache_bytes(5000) == 2 * 2 * (50 * 1024 * 16 * 256 + 10 * 5000 * 4 * 512)
    assert size.attention_flops(100) == 4 * 32 * (50 * 256 + 10 * 512) * 100**2 / 2


def test_published_windows():
    assert windows(size_of("gemma-3-4b")) == {1024: 29, None: 5}
    assert windows(size_of("Qwen2.5-7B")) == {None: 28}  # use_sliding_window is false.
    assert windows(size_of("Phi-4-mini-instruct")) == {262144: 32}


@needs_family("qwen3_5_text")
def test_states_are_read_and_written_once_a_step():
    size = size_of("Qwen3.5-9B")
    assert windows(size) == {None: 8}
    assert size.state_bytes() == 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    one_step = floor_seconds(size, CEILINGS, [1, 1], [2, 2], 0, 1) - floor_seconds(size, CEILINGS, [1, 1], [1, 1], 0, 1)
    keys = 4 * 8 * kv_bytes_per_key(size)
    assert one_step == pytest.approx((2 * size.params_read(2) + 4 * size.state_bytes() + keys) / 4e12)
    prefill = floor_seconds(size, CEILINGS, [1000], [1], 0, 1)
    flops = 2 * size.layer_params * 1000 + 2 * size.head_params + 2 * 8 * 16 * 256 * 1000**2
    assert prefill == pytest.approx((flops + 6 * 24 * 32 * 128 * 128 * 1000) / 8e14)
    halved = ModelSize.of(preset_config("Qwen3.5-9B"), torch.bfloat16, state_dtype=torch.bfloat16)
    assert halved.state_bytes() == 24 * (2 * 32 * 128 * 128 + 2 * 3 * 8192)
