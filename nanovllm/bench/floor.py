"""What time can no engine of this kind beat? Computed from two measured ceilings of the machine."""

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.matmul.fp8 import E4M3
from nanovllm.layers.attention import Attention
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.layers.linear_attention import GatedDeltaNet
from nanovllm.models.loader import wanted_tensors
from nanovllm.models.model_size import make_meta_model

_NO_LIMIT = 2**31  # positions: more than any window has keys


class Ceilings(NamedTuple):
    """The rates of a machine."""

    bandwidth: float  # bytes a second of a large copy, read and written both counted
    flops: float  # of a large product of the model's dtype
    layer_flops: float  # of one in fp8 if the layers' weights are, else as `flops`


class AttentionSize(NamedTuple):
    """What a layer's attention reads and multiplies."""

    window: int | None  # how many keys a token sees; None for all
    num_heads: int
    head_dim: int
    kv_bytes_per_key: int


@dataclass(frozen=True)
class ModelSize:
    """What the floor needs to know of a model: counts of weights and of bytes, and the shapes of its attention."""

    layer_params: int  # of all layers, of experts only those that a token uses
    expert_params: dict[float, int]  # of all experts, by the share of a layer's experts that a token uses
    head_params: int
    attentions: dict[AttentionSize, int]  # the number of layers with each
    state_numbers: int  # of a sequence's states, of layers with linear attention
    tail_numbers: int  # of the last inputs of their convolutions
    itemsize: int
    state_itemsize: int
    layer_itemsize: float  # bytes of a number of the layers' weights
    expert_itemsize: float  # of the experts' weights

    @classmethod
    def of(
        cls,
        hf_config,
        dtype: torch.dtype,
        weight_format: WeightFormat | None = None,
        kv_cache_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> "ModelSize":
        """dtype: of the model, and of all that has no format or dtype of its own. weight_format: of the layers. Weights
        are the matrices of a checkpoint: what a layer holds twice, or for padding, need not be read."""
        model: Any = make_meta_model(hf_config, dtype, max_position=_NO_LIMIT)
        kinds = MixtureOfExperts, GatedDeltaNet, Attention
        found: Any = [[each for each in model.modules() if isinstance(each, kind)] for kind in kinds]
        mixtures, deltas, attentions = found
        shares = {id(weight): each.top_k / len(weight) for each in mixtures for weight in each.experts.parameters()}
        params: Counter[float | None] = Counter()  # by the share of a layer's experts; None for all else
        for name, (param, _, shape) in wanted_tensors(model).items():
            if name.startswith("model.layers.") and len(shape) > 1:
                params[shares.get(id(param))] += math.prod(shape)
        expert_params = {share: number for share, number in params.items() if share is not None}
        expert_itemsize = layer_itemsize = float(dtype.itemsize)
        if weight_format is not None and weight_format.bits is not None:
            expert_itemsize = weight_format.bits / 8
            layer_itemsize = layer_itemsize if weight_format.experts_only else expert_itemsize
        key_bytes = 2 * (kv_cache_dtype or dtype).itemsize
        sizes = [(x.window, x.num_heads, x.head_dim, key_bytes * x.num_kv_heads * x.head_dim) for x in attentions]
        return cls(
            layer_params=params[None] + sum(int(share * number) for share, number in expert_params.items()),
            expert_params=expert_params,
            head_params=model.model.embed_tokens.weight.numel(),
            attentions=dict(Counter(AttentionSize(*each) for each in sizes)),
            state_numbers=sum(math.prod(each.state_shapes[1]) for each in deltas),
            tail_numbers=sum(math.prod(each.state_shapes[0]) for each in deltas),
            itemsize=dtype.itemsize,
            state_itemsize=state_dtype.itemsize,
            layer_itemsize=layer_itemsize,
            expert_itemsize=expert_itemsize,
        )

    def _experts_read(self, batch_size: int) -> float:
        return sum((1 - (1 - share) ** batch_size) * number for share, number in self.expert_params.items())

    def params_read(self, batch_size: int) -> float:
        """How many weights a decode step reads on average, if each token's experts are as likely as any others."""
        others = self.layer_params - sum(share * number for share, number in self.expert_params.items())
        return others + self.head_params + self._experts_read(batch_size)

    def bytes_read(self, batch_size: int) -> float:
        """Bytes that a step reads of these weights."""
        experts = self._experts_read(batch_size)
        others = self.params_read(batch_size) - self.head_params - experts
        return experts * self.expert_itemsize + others * self.layer_itemsize + self.head_params * self.itemsize

    def state_bytes(self) -> int:
        """Of one sequence: states and tails."""
        return self.state_itemsize * self.state_numbers + self.itemsize * self.tail_numbers

    def cache_bytes(self, context: int) -> int:
        """Bytes of keys and values that a token with this context length reads in all layers."""
        return sum(
            layers * min(context, each.window or context) * each.kv_bytes_per_key
            for each, layers in self.attentions.items()
        )

    def attention_flops(self, n: int) -> float:
        """Of a prompt's n tokens in all layers, each to the keys up to its own."""
        flops = 0.0
        for each, layers in self.attentions.items():
            seen = min(n, each.window or n)
            keys = seen * seen / 2 + (n - seen) * seen  # The first ones see half of the window.
            flops += 4 * each.num_heads * each.head_dim * layers * keys
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


def multiplies_in_fp8(weight_format: WeightFormat | None) -> bool:
    """Whether the layers' products are in fp8. Weights in 4 bits are multiplied in the model's dtype."""
    return isinstance(weight_format, Fp8)


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
        layer_flops = _fp8_rate(device, 8192) if multiplies_in_fp8(weight_format) else flops
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
