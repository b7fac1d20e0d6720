"""What time can no engine of this kind beat? Computed from two measured ceilings of the machine."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.matmul.fp8 import E4M3
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.models.hf_config import get_head_dim, windows_of_layers
from nanovllm.models.qwen3_5 import delta_net_shape, has_linear_attention, linear_layers
from nanovllm.models.qwen3_moe import count_experts, expert_size, experts_per_token, has_experts, has_mlp_too


class Ceilings(NamedTuple):
    """The rates of a machine."""

    bandwidth: float  # bytes a second of a large copy, read and written both counted
    flops: float  # of a large product of the model's dtype
    layer_flops: float  # of one in the format of the layers' weights


@dataclass(frozen=True)
class ModelSize:
    """What the floor needs to know of a model: counts of weights, of bytes, and its attention's shape."""

    layer_params: int  # of all layers, of experts only those that a token uses
    expert_params: int  # of all experts
    expert_share: float  # the share of them that a token uses; 0 without experts
    head_params: int
    windows: dict[int | None, int]  # the number of layers with each sliding window, None for all keys
    state_numbers: int  # of a sequence's states, of layers with linear attention
    tail_numbers: int  # of the last inputs of their convolutions
    num_heads: int
    head_dim: int
    kv_bytes_per_key: int  # of one layer
    itemsize: int
    state_itemsize: int
    layer_itemsize: float  # bytes of a number of the layers' weights
    expert_itemsize: float  # of the experts' weights
    # (head_dim, kv_bytes_per_key) of the layers without a window, where they differ from the others'.
    global_heads: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        hf_config,
        dtype: torch.dtype,
        weight_format: WeightFormat | None = None,
        kv_cache_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> "ModelSize":
        """dtype: of the model, and of all that has no format or dtype of its own. weight_format: of the layers."""
        c = hf_config
        head_dim = get_head_dim(c)
        query_gates = 1 if has_linear_attention(c) else 0
        attention = c.hidden_size * head_dim * ((2 + query_gates) * c.num_attention_heads + 2 * c.num_key_value_heads)
        kv_itemsize, windows = (kv_cache_dtype or dtype).itemsize, windows_of_layers(c)
        global_heads, more_attention = None, 0
        if (global_dim := getattr(c, "global_head_dim", None)) is not None:
            num_kv_heads = c.num_global_key_value_heads
            global_heads = global_dim, 2 * num_kv_heads * global_dim * kv_itemsize
            num_heads = 2 * c.num_attention_heads + (1 if c.attention_k_eq_v else 2) * num_kv_heads
            more_attention = windows.count(None) * (c.hidden_size * global_dim * num_heads - attention)
        is_linear, linear_attention, states, tails = (False,) * c.num_hidden_layers, 0, 0, 0
        if has_linear_attention(c):
            is_linear, shape = linear_layers(c), delta_net_shape(c)
            outputs = shape.num_value_heads * shape.value_dim
            linear_attention = c.hidden_size * (sum(shape.sizes.values()) + outputs)
            linear_attention += shape.conv_dim * shape.num_taps
            states, tails = outputs * shape.key_dim, shape.conv_dim * (shape.num_taps - 1)
        num_linear = sum(is_linear)
        mlps, expert_params, expert_share = c.num_hidden_layers * 3 * c.hidden_size * c.intermediate_size, 0, 0.0
        if num_experts := count_experts(c):
            num_layers = sum(has_experts(c, layer) for layer in range(c.num_hidden_layers))
            expert_share = experts_per_token(c) / num_experts
            expert_params = num_layers * num_experts * 3 * c.hidden_size * expert_size(c)
            shared_size = getattr(c, "shared_expert_intermediate_size", 0)
            routers = num_layers * num_experts * c.hidden_size
            routers += num_layers * c.hidden_size * (3 * shared_size + (1 if shared_size else 0))
            num_mlps = c.num_hidden_layers - (0 if has_mlp_too(c) else num_layers)
            mlps = mlps // c.num_hidden_layers * num_mlps + routers
            mlps += int(expert_share * expert_params)
        expert_itemsize = layer_itemsize = float(dtype.itemsize)
        if weight_format is not None and weight_format.bits is not None:
            expert_itemsize = weight_format.bits / 8
            layer_itemsize = layer_itemsize if weight_format.experts_only else expert_itemsize
        attentions = (c.num_hidden_layers - num_linear) * attention + more_attention + num_linear * linear_attention
        return cls(
            layer_params=attentions + mlps,
            expert_params=expert_params,
            expert_share=expert_share,
            head_params=c.vocab_size * c.hidden_size,
            windows=dict(Counter(w for w, linear in zip(windows, is_linear, strict=True) if not linear)),
            state_numbers=num_linear * states,
            tail_numbers=num_linear * tails,
            num_heads=c.num_attention_heads,
            head_dim=head_dim,
            kv_bytes_per_key=2 * c.num_key_value_heads * head_dim * kv_itemsize,
            itemsize=dtype.itemsize,
            state_itemsize=state_dtype.itemsize,
            layer_itemsize=layer_itemsize,
            expert_itemsize=expert_itemsize,
            global_heads=global_heads,
        )

    def params_read(self, batch_size: int) -> float:
        """How many weights a decode step reads on average, if each token's experts are as likely as any others."""
        read = 1 - (1 - self.expert_share) ** batch_size
        return self.layer_params + self.head_params + (read - self.expert_share) * self.expert_params

    def bytes_read(self, batch_size: int) -> float:
        """Bytes that a step reads of these weights."""
        experts = (1 - (1 - self.expert_share) ** batch_size) * self.expert_params
        others = self.params_read(batch_size) - self.head_params - experts
        return experts * self.expert_itemsize + others * self.layer_itemsize + self.head_params * self.itemsize

    def state_bytes(self) -> int:
        """Of one sequence: states and tails."""
        return self.state_itemsize * self.state_numbers + self.itemsize * self.tail_numbers

    def of_window(self, window: int | None) -> tuple[int, int]:
        """(head_dim, kv_bytes_per_key) of the layers with this window."""
        own = self.head_dim, self.kv_bytes_per_key
        return own if window is not None else self.global_heads or own

    def cache_bytes(self, context: int) -> int:
        """Bytes of keys and values that a token with this context length reads in all layers."""
        return sum(
            layers * min(context, window or context) * self.of_window(window)[1]
            for window, layers in self.windows.items()
        )

    def attention_flops(self, n: int) -> float:
        """Of a prompt's n tokens in all layers, each to the keys up to its own."""
        flops = 0.0
        for window, layers in self.windows.items():
            seen = min(n, window or n)
            keys = seen * seen / 2 + (n - seen) * seen  # The first ones see half of the window.
            flops += 4 * self.num_heads * self.of_window(window)[0] * layers * keys
        return flops


def floor_seconds(
    size: ModelSize, ceilings: Ceilings, prompt_lens: list[int], output_lens: list[int], shared: int, num_gpus: int
) -> float:
    """Seconds for one pass: prefill FLOPs at the matrix rate; then for every decode step its keys and values
    and its weights read once at the copy bandwidth, or its matrix products where those take longer. A layer with a
    sliding window attends to no more keys than that. States of linear attention are read and written once a step, and a
    prefill multiplies three times with them for each token. All requests decode side by side from the start; `shared`
    prompt tokens are computed once.
    """
    layer_flops, flops = 0.0, 0.0
    for i, n in enumerate(prompt_lens):
        cached = shared if i else 0
        layer_flops += 2 * size.layer_params * (n - cached)
        flops += 2 * size.head_params + 6 * size.state_numbers * (n - cached)
        flops += size.attention_flops(n) - size.attention_flops(cached)
    seconds = layer_flops / ceilings.layer_flops + flops / ceilings.flops

    products_of_one = 2 * size.layer_params / ceilings.layer_flops + 2 * size.head_params / ceilings.flops
    for step in range(1, max(output_lens)):  # prefill yields the first token
        contexts = [n + step for n, out in zip(prompt_lens, output_lens, strict=True) if out > step]
        weights = size.bytes_read(len(contexts)) / ceilings.bandwidth
        products = len(contexts) * products_of_one
        cache = sum(map(size.cache_bytes, contexts)) / ceilings.bandwidth
        states = 2 * len(contexts) * size.state_bytes() / ceilings.bandwidth
        seconds += cache + states + max(weights, products)
    return seconds / num_gpus


def measure_ceilings(device: torch.device, dtype: torch.dtype, weight_format: WeightFormat | None = None) -> Ceilings:
    """Median of several: a copy of 4 GiB and a product of 8192^3 on a GPU, sizes of a second's work on a CPU, which has
    no products of fp8.

    On a GPU the best of five such medians, seconds apart: for some time after 120 GB have been given back copies are
    slower by a tenth there (H200: 3.83 TB/s instead of 4.28), it seems because the driver clears that memory.
    """
    if device.type == "cpu":
        flops = _matrix_rate(device, dtype, 1024)
        return Ceilings(_copy_bandwidth(device, 2**28), flops, flops)
    measured = []
    for pause in (0, 1, 1, 1, 1):
        time.sleep(pause)
        flops = _matrix_rate(device, dtype, 8192)
        layer_flops = _fp8_rate(device, 8192) if isinstance(weight_format, Fp8) else flops
        measured.append(Ceilings(_copy_bandwidth(device, 2**32), flops, layer_flops))
    return Ceilings(*map(max, zip(*measured, strict=True)))


def _copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _median_seconds(lambda: a @ b, device)


def _fp8_rate(device: torch.device, n: int) -> float:
    a, b = (torch.randn(n, n, device=device).to(E4M3) for _ in range(2))
    scale = torch.ones(n, 1, device=device)
    options: dict[str, Any] = {"scale_a": scale, "scale_b": scale.t(), "out_dtype": torch.bfloat16}
    return 2 * n**3 / _median_seconds(lambda: torch._scaled_mm(a, b.t(), use_fast_accum=True, **options), device)


def _median_seconds(work, device: torch.device, repeats: int = 10) -> float:
    """Seconds of one call. On a GPU each call by itself: several large products in a row lower its clock."""
    seconds = []
    for _ in range(repeats + 2):  # the first two warm up
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
    return sorted(seconds[2:])[repeats // 2]
