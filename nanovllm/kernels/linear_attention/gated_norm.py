"""The norm and the gate behind the gated delta rule: `rms_norm(x) * silu(gate)` of each head.

Its own operation in prefills, so that a product in fp8 can quantize what it gives in the same pass over memory. Decode
steps compute it in the rule's kernel.
"""

import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.linear_attention.causal_conv import load_float, silu
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.triton_stub import tl, triton

_TILE = 1024  # numbers of a program


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_norm_kernel(
    x, gate, weight, num_tokens, x_stride, gate_stride, eps,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    inside = (head < NUM_HEADS) & (dims >= 0)
    column = head * DIM + dims
    x_at = x + token * x_stride + column
    value = load_float(x_at, inside)
    gate_value = load_float(gate + token * gate_stride + column, inside)
    inverse_rms = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] / DIM + eps)
    value = value * inverse_rms * tl.load(weight + dims).to(tl.float32) * silu(gate_value)
    tl.store(x_at, value.to(x.dtype.element_ty), mask=inside)


@kernel_or_twin
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x, weight, eps) * silu(gate)` of each head, in float32 and rounded once, overwriting x.

    x, gate: `[num_tokens, num_heads * dim]`, any float dtype and row stride, contiguous in the last dimension.
    weight: `[dim]`, contiguous. The kernel's dim is a power of two. Returns x.
    """
    heads = x.float().view(len(x), -1, len(weight))
    normed = rms_norm.twin(heads, weight, eps) * F.silu(gate.reshape(heads.shape).float())
    return x.copy_(normed.flatten(1))


@kernel_of(gated_rms_norm)
def _launch_gated_rms_norm(x, gate, weight, eps):
    (num_tokens, size), dim = x.shape, len(weight)
    if gate.shape != x.shape or x.stride(1) != 1 or gate.stride(1) != 1 or size % dim:
        raise ValueError(
            f"x and gate must be alike, with contiguous rows of heads of {dim}, not {list(x.shape)} and "
            f"{list(gate.shape)}"
        )
    if num_tokens:
        heads, num_heads = max(1, _TILE // dim), size // dim
        launcher(_gated_norm_kernel, (num_tokens, triton.cdiv(num_heads, heads)), has_pdl(x.device))(
            x, gate, weight, num_tokens, x.stride(0), gate.stride(0), eps, NUM_HEADS=num_heads, DIM=dim, HEADS=heads,
            num_warps=4,
        )  # fmt: skip
    return x
