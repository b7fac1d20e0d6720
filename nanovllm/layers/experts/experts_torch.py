"""The plain twins of the experts' kernels; a CPU computes with them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.silu_and_mul import silu_and_mul_torch
from nanovllm.layers.formats.quantization import Weight, fp8_product_torch, quantize_input_torch


def route_torch(
    logits: Tensor, top_k: int, normalize: bool, context_lens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Twin of `kernels.experts.route`."""
    probabilities = logits.float().softmax(-1)
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if context_lens is not None:
        experts = experts.masked_fill((context_lens == 0)[:, None], logits.shape[1])
    return experts.short(), weights


def experts_torch(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Twin of `kernels.experts.gate_up`, `down` and `add_pairs`: the weighted sum of each token's experts, float32
    `[num_tokens, hidden_size]`. With weights in fp8 the inputs of both products are quantized."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if expert < len(gate_up):
            token, slot = (experts == expert).nonzero(as_tuple=True)
            hidden = silu_and_mul_torch(_linear(x[token], gate_up[expert]))
            y = _linear(hidden, down[expert]).float()
            total.index_add_(0, token, y * weights[token, slot, None])
    return total


def _linear(x: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    return fp8_product_torch(quantize_input_torch(x, weight.format), weight)
