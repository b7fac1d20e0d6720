"""Rotary embeddings against transformers: what a configuration means, the tables, and the rotation."""

import gc
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import needs_transformers
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3_rotary
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanovllm.layers.rope_parameters import RopeParameters, rope_parameters
from nanovllm.layers.rotary_embedding import RotaryEmbedding, apply_rotary_emb, get_rope
from nanovllm.models.presets import preset_config

HEAD_DIM = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SETTINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn, no original length": {"rope_type": "yarn", "factor": 8.0},
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor": {**YARN, "attention_factor": 0.77},
    "yarn, mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one mscale": {**YARN, "mscale": 0.7},
    "yarn, not truncated": {**YARN, "truncate": False},
}


# transformers 4 reads these settings under other names. tests/models/test_families.py has the installed one.
new_names = needs_transformers("5")


def qwen3(settings: dict, theta: float = 1e6) -> Qwen3Config:
    rope = {"rope_type": "default", **settings, "rope_theta": theta}
    return Qwen3Config(head_dim=HEAD_DIM, max_position_embeddings=4096, rope_parameters=rope)


@new_names
@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_frequencies_equal_transformers(settings, theta):
    reference = Qwen3RotaryEmbedding(qwen3(settings, theta))
    rope = rope_parameters(qwen3(settings, theta))
    torch.testing.assert_close(rope.inverse_frequencies(HEAD_DIM), reference.inv_freq, rtol=2e-7, atol=0)
    assert rope.attention_scaling == pytest.approx(reference.attention_scaling, rel=1e-12)


@new_names
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tables_and_rotation_equal_transformers(settings):
    config = qwen3(settings)
    positions = torch.randint(4096, (50,))
    q, k = torch.randn(50, 4, HEAD_DIM), torch.randn(50, 2, HEAD_DIM)
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions[None])
    embedding = RotaryEmbedding.of(rope_parameters(config), HEAD_DIM, 4096)
    # An angle of thousands of radians is itself rounded to some 1e-4: tight bounds hold for equal frequencies.
    halves = (cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2])
    table = torch.cat(halves, dim=-1)
    torch.testing.assert_close(embedding.cos_sin_cache[positions, 0], table, rtol=0, atol=1e-6)

    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for actual, reference in zip(embedding(positions, q, k), expected, strict=True):
        torch.testing.assert_close(actual, reference[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Llama-3.1-8B"])
def test_llama3_equals_transformers(name):
    config = preset_config(name)
    rope = rope_parameters(config)
    frequencies = rope.inverse_frequencies(config.head_dim)
    torch.testing.assert_close(frequencies, LlamaRotaryEmbedding(config).inv_freq, rtol=3e-7, atol=0)
    plain = replace(rope, type="default").inverse_frequencies(config.head_dim)
    # Fast pairs keep their frequency, slow ones lose the whole factor.
    assert frequencies[0] == plain[0]
    assert frequencies[-1] == plain[-1] / rope.factor


@pytest.mark.parametrize(("longest", "name"), [(4096, "short_factor"), (4097, "long_factor")])
def test_longrope_equals_transformers(longest, name):
    """By the longest sequence that the engine may hold, where transformers takes the longest of a batch."""
    config = preset_config("Phi-4-mini-instruct")
    rope, reference = rope_parameters(config), Phi3RotaryEmbedding(config)
    cos, sin = reference(torch.zeros(1), torch.tensor([[5, longest - 1]]))
    embedding = RotaryEmbedding.of(rope, 128, longest)
    table = embedding.cos_sin_cache[[5, longest - 1], 0]
    assert table.shape == (2, 96)
    torch.testing.assert_close(table, torch.cat((cos[0, :, :48], sin[0, :, :48]), dim=-1), rtol=0, atol=1e-6)
    assert len(getattr(rope, name)) == 48
    q = torch.randn(2, 3, 128)
    rotated, _ = embedding(torch.tensor([5, longest - 1]), q, q)
    expected, _ = phi3_rotary(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(rotated[..., 96:], q[..., 96:])


def test_old_and_new_configurations_agree():
    old_names = [{"rope_type": "yarn"}, {"type": "yarn"}, {"rope_type": "yarn", "type": "yarn"}]
    rest = {"factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": None}
    new = rope_parameters(
        SimpleNamespace(rope_parameters={"rope_theta": 5e5, "rope_type": "yarn", **rest}, max_position_embeddings=4096)
    )
    assert new == RopeParameters(5e5, "yarn", 4.0, 1024)
    for name in old_names:
        old = SimpleNamespace(rope_theta=5e5, rope_scaling={**name, **rest}, max_position_embeddings=4096)
        assert rope_parameters(old) == new
    assert rope_parameters(SimpleNamespace(rope_theta=5e5, rope_scaling=None)) == RopeParameters(base=5e5)


def test_yarn_derives_what_is_left_out():
    config = SimpleNamespace(
        rope_theta=1e4,
        max_position_embeddings=4096,
        rope_scaling={"type": "yarn", "original_max_position_embeddings": 1024, "beta_fast": 0},
    )
    assert rope_parameters(config) == RopeParameters(1e4, "yarn", 4.0, 1024)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs original_max_position_embeddings"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor must be in"),
        ({"rope_type": "linear"}, "needs a factor"),
        ({"rope_type": "linear", "factor": 0.0}, "must be positive"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, "'longrope' needs short_factor"),
    ],
)
def test_what_is_not_supported_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        rope_parameters(SimpleNamespace(rope_theta=1e4, rope_scaling=settings, max_position_embeddings=64))


def test_ignored_settings_are_named(caplog):
    config = SimpleNamespace(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2, "finetuned": True})
    with caplog.at_level(logging.WARNING):
        assert rope_parameters(config).factor == 2
    assert "finetuned" in caplog.text


def test_the_table_stays_out_of_checkpoints_and_in_float32():
    with_default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        embedding = RotaryEmbedding.of(RopeParameters(), 8, 16)
    finally:
        torch.set_default_dtype(with_default)
    assert embedding.cos_sin_cache.dtype == torch.float32
    assert not embedding.state_dict()
    q = torch.randn(3, 1, 8, dtype=torch.bfloat16)
    assert embedding(torch.arange(3, dtype=torch.int32), q, q)[0].dtype == torch.bfloat16


def test_odd_heads_are_refused():
    with pytest.raises(ValueError, match="head_dim must be even"):
        RotaryEmbedding.of(RopeParameters(), 7, 16)
    with pytest.raises(ValueError, match=r"head_dim must be even .*9 of 12: partial_rotary_factor=0.75"):
        RotaryEmbedding.of(RopeParameters(partial_rotary_factor=0.75), 12, 16)


def test_factors_that_do_not_fit_the_heads_are_refused():
    longrope = RopeParameters(
        type="longrope", original_max_position_embeddings=8, short_factor=(1.0,) * 4, long_factor=(2.0,) * 3
    )
    RotaryEmbedding.of(longrope, 8, 8)
    with pytest.raises(ValueError, match="long_factor must hold 4 numbers"):
        RotaryEmbedding.of(longrope, 8, 9)


def test_settings_of_a_kind_of_layer():
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = SimpleNamespace(rope_parameters=kinds, max_position_embeddings=64)
    assert rope_parameters(config, "full_attention") == RopeParameters(1e6, "linear", 8.0)
    assert rope_parameters(config, "sliding_attention") == RopeParameters(1e4)


def test_by_hand_it_is_su_et_al():
    rotary = RotaryEmbedding(8, 6, 32, 10000.0)
    assert rotary.head_size == 8
    assert rotary.cos_sin_cache.shape == (32, 1, 6)
    positions, q, k = torch.tensor([0, 5, 31]), torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    angles = positions[:, None] / 10000.0 ** (torch.arange(0, 6, 2) / 6)
    turns = torch.polar(torch.ones(3, 3), angles)[:, None]
    for x, found in zip((q, k), rotary(positions, q, k), strict=True):
        expected = torch.complex(x[..., :3], x[..., 3:6]) * turns
        torch.testing.assert_close(found, torch.cat((expected.real, expected.imag, x[..., 6:]), dim=-1))
    with pytest.raises(ValueError, match=r"must be even .* not 5"):
        RotaryEmbedding(8, 5, 32, 10000.0)
    with pytest.raises(ValueError, match="rotary_dim=10"):
        RotaryEmbedding(8, 10, 32, 10000.0)
    with pytest.raises(
        ValueError, match=r"rotary_dim=6, base=500.0: of heads of 8 the settings rotate 8, with base 500"
    ):
        RotaryEmbedding(8, 6, 32, 500.0, RopeParameters(500.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_alone_keeps_shape_and_dtype(dtype):
    rotary = RotaryEmbedding(8, 8, 32, 10000.0)
    x, positions = torch.randn(3, 4, 8).to(dtype), torch.tensor([7, 1, 0])
    cos, sin = rotary.cos_sin_cache[positions].chunk(2, dim=-1)
    rotated = apply_rotary_emb(x, cos, sin)
    assert rotated.shape == x.shape
    assert rotated.dtype == dtype
    assert torch.equal(rotated, rotary(positions, x, x)[1])
    assert torch.equal(rotated[2], x[2])


def test_layers_with_equal_settings_share_a_table():
    rope = get_rope(8, 8, 16, 1e4)
    assert get_rope(8, 8, 16, 1e4) is rope
    assert get_rope(8, 8, 16, 1e4, None) is rope
    others = [get_rope(8, 4, 16, 1e4), get_rope(8, 8, 17, 1e4), get_rope(8, 8, 16, 1e5)]
    with torch.device("meta"):
        others.append(get_rope(8, 8, 16, 1e4))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    others.append(get_rope(8, 8, 16, 1e4, yarn))
    assert get_rope(8, 8, 16, 1e4, dict(yarn)) is others[-1]
    assert get_rope(8, 8, 16, 1e4, RopeParameters(1e4, "yarn", 4.0, 8)) is others[-1]
    assert len({id(each) for each in [rope, *others]}) == 6
    expected = RotaryEmbedding.of(RopeParameters(1e4, "yarn", 4.0, 8), 8, 16)
    assert torch.equal(others[-1].cos_sin_cache, expected.cos_sin_cache)
    with pytest.raises(ValueError, match="'dynamic' is not supported"):
        get_rope(8, 8, 16, 1e4, {"rope_type": "dynamic", "factor": 2.0})


def test_a_table_that_was_moved_or_is_unused_is_not_handed_out():
    rope = get_rope(8, 8, 16, 3e4)
    rope.to(torch.bfloat16)
    other = get_rope(8, 8, 16, 3e4)
    assert other.cos_sin_cache.dtype == torch.float32
    assert get_rope(8, 8, 16, 3e4) is other
    module = sys.modules[RotaryEmbedding.__module__]
    num_ropes = len(module._ROPES)
    del rope, other
    gc.collect()
    assert len(module._ROPES) == num_ropes - 1
