"""The H200's table says what the rules in code say, for every published size on one and two GPUs."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fake_quack import H200, Package, make_config

from nanovllm.kernels import decode_linear_kernel, skinny_kernel
from nanovllm.layers import decode_linear
from nanovllm.layers.product import add_product, batch_with_padding, product, product_silu
from nanovllm.layers.quack import Quack
from nanovllm.models.presets import PRESET_NAMES, preset_config
from nanovllm.models.qwen3 import Qwen3Model
from nanovllm.tuning.table import Choice, Key, load_table
from nanovllm.utils.context import Context, step_context


class MetaQuack(Quack):
    def takes_weight(self, weight):
        return True

    def takes(self, x, weight):
        return True

    def _launch(self, method, x, weight, tile, out, **options):
        seen.append(Choice("quack-kernels", tuple(tile)))
        return out


seen: list[Choice] = []


def record_split_k(x, weight, *args, **options):
    (M, K), N = x.shape, len(weight)
    seen.append(Choice("split-k", tuple(decode_linear_kernel.choose_config(N, K, -(-M // 64)))))
    return x.new_empty(M, N)


@pytest.fixture
def on_a_hopper(monkeypatch):
    monkeypatch.setattr(decode_linear, "use_kernels", lambda x: True)
    monkeypatch.setattr(decode_linear, "_is_hopper", lambda device: True)
    monkeypatch.setattr(skinny_kernel, "_MIN_DOT_ROWS", 8)
    for name in ("linear", "linear_silu", "linear_add"):
        monkeypatch.setattr(decode_linear, name, record_split_k)


def weights(config, size):
    hidden, intermediate = config.hidden_size, config.intermediate_size // size
    q, kv = (n * config.head_dim // size for n in (config.num_attention_heads, config.num_key_value_heads))
    add = "linear_add" if size == 1 else "linear_sum"
    shapes = [("linear", q + 2 * kv, hidden), (add, hidden, q), ("linear_silu", 2 * intermediate, hidden)]
    return [(operation, torch.empty(N, K, dtype=torch.bfloat16, device="meta")) for operation, N, K in shapes] + [
        (add, torch.empty(hidden, intermediate, dtype=torch.bfloat16, device="meta"))
    ]


def by_rules(operation, M, weight, gate_up, size, quack, is_prefill) -> list[Choice]:
    seen.clear()
    N, K = weight.shape
    model = SimpleNamespace(
        tp=SimpleNamespace(size=size, reducer=size > 1 or None),
        layers=[SimpleNamespace(mlp=SimpleNamespace(gate_up_proj=SimpleNamespace(weight=gate_up)))],
    )
    if M <= 16 and not is_prefill and Qwen3Model._takes_skinny(model, M):
        config = skinny_kernel.choose_config(M, N, K, 2, operation in ("linear", "linear_silu"))
        return [Choice("gemv", tuple(config))]
    x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    out = torch.empty(M, N, dtype=torch.bfloat16, device="meta")
    if operation == "linear":
        product(x, weight, quack=quack)
    elif operation == "linear_sum":
        product(x, weight, out=out)
    elif operation == "linear_add":
        add_product(out, x, weight, quack=quack)
    else:
        product_silu(x, weight, quack=quack)
        if not seen and is_prefill and M >= 2048 and K <= 2048:  # prefill_kernel.can_fuse, on a GPU
            seen.append(Choice("fused-silu"))
    return list(seen)


@pytest.mark.parametrize("with_quack", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", PRESET_NAMES)
def test_table_and_rules_agree(on_a_hopper, name, size, with_quack):
    table, quack = load_table("NVIDIA H200"), None
    if with_quack and size == 1:
        quack = MetaQuack(Package(), make_config, H200)
    absent = () if quack else ("quack-kernels",)
    linears = weights(preset_config(name), size)
    gate_up = linears[2][1]
    for is_prefill, counts in ((False, range(1, 600)), (True, [*range(1, 20000, 501), 2047, 2048, 5461, 5462, 8191, 8192])):
        with step_context(Context(is_prefill=is_prefill)):
            for operation, weight in linears:
                row = table.find(Key.of(operation, is_prefill, weight))
                assert row is not None or is_prefill
                for M in counts:
                    choices = [c for c in (row[M] if row else ()) if c.candidate not in absent][:1]
                    assert choices == by_rules(operation, M, weight, gate_up, size, quack, is_prefill), (operation, M)
    if size == 1:
        padding = table.find(Key.of("padding", False, gate_up))
        for num_seqs in range(1, 600):
            choices = [c for c in padding[num_seqs] if c.candidate not in absent]
            expected = batch_with_padding(num_seqs, gate_up, quack)
            assert (choices[0].constants[0] if choices else num_seqs) == expected
