"""Rotary embeddings against transformers: what a configuration means, the tables, and the rotation."""

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanovllm.layers.rotary_embedding import RopeParameters, RotaryEmbedding, rope_parameters

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


# transformers 4 reads these settings under other names; tests/test_parity.py holds us to whichever is installed.
new_names = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="needs transformers 5")


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
    embedding = RotaryEmbedding(HEAD_DIM, 4096, rope_parameters(config))
    # An angle of thousands of radians is itself rounded to some 1e-4: tight bounds hold for equal frequencies.
    halves = (cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2])
    table = torch.cat(halves, dim=-1)
    torch.testing.assert_close(embedding.cos_sin_cache[positions], table, rtol=0, atol=1e-6)

    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for actual, reference in zip(embedding(positions, q, k), expected, strict=True):
        torch.testing.assert_close(actual, reference[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


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
        embedding = RotaryEmbedding(8, 16, RopeParameters())
    finally:
        torch.set_default_dtype(with_default)
    assert embedding.cos_sin_cache.dtype == torch.float32
    assert not embedding.state_dict()
    q = torch.randn(3, 1, 8, dtype=torch.bfloat16)
    assert embedding(torch.arange(3, dtype=torch.int32), q, q)[0].dtype == torch.bfloat16


def test_odd_heads_are_refused():
    with pytest.raises(ValueError, match="head_dim must be even"):
        RotaryEmbedding(7, 16, RopeParameters())
