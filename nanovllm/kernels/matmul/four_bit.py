"""Weights of 4 bits: decoded within a kernel, to 16-bit floats that tensor cores multiply, and by torch.

In each 32 columns of a weight `[N, K]`, byte j of 16 holds column j in its low half and column j + 16 in its high half.
So the low halves of 16 bytes are columns side by side, and the high halves are the next ones.

A half is an integer q of 0..15 that stands for `(q - zero) * scale`, or an e2m1 number (a sign, two bits of exponent,
one of mantissa: OCP Microscaling Formats, 2023) that stands for `number * 2^(scale - 127)`. A group of columns shares a
scale, and perhaps a zero.

One conversion a number would be too many instructions. The mantissa of a float is an integer already: 0x4300 | q is
128 + q in bfloat16, and 0x6400 | q is 1024 + q in float16. A register holds two, and one instruction computes both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.triton_stub import tl, triton

UNIT = 32  # columns that are stored together
CHUNK = 128  # columns whose scales the kernels load together
DTYPES = (torch.bfloat16, torch.float16)  # of the kernels' inputs

# Operands $0 and $1 are results, then comes a register of four bytes or two words, then constants in as many registers
# as there are numbers. The compiler folds them.
_INTEGERS_OF_BYTES = tl.constexpr("""{
    .reg .b32 t;
    shr.u32 t, $2, $3;
    and.b32 t, t, 0x0f0f0f0f;
    prmt.b32 $0, t, $7, 0x4140;
    prmt.b32 $1, t, $7, 0x4342;
}""")
_INTEGERS_OF_WORDS = tl.constexpr("""{
    .reg .b32 t;
    shr.u32 t, $1, $2;
    lop3.b32 $0, t, 0x000f000f, $4, 0xea;
}""")
# The three bits of exponent and mantissa become the lowest two of the float's exponent and the highest of its mantissa.
# The bias of the exponent is missing, for zero and 0.5 need a multiplication by it.
_E2M1_OF_BYTES = tl.constexpr("""{
    .reg .b32 t, u, v;
    shl.b32 t, $2, $3;
    prmt.b32 u, t, 0, 0x1404;
    shr.u32 v, u, $7;
    and.b32 u, u, 0x80008000;
    lop3.b32 $0, v, $11, u, 0xea;
    prmt.b32 u, t, 0, 0x3424;
    shr.u32 v, u, $7;
    and.b32 u, u, 0x80008000;
    lop3.b32 $1, v, $11, u, 0xea;
}""")
_E2M1_OF_WORDS = tl.constexpr("""{
    .reg .b32 t, u;
    shl.b32 t, $1, $2;
    shr.u32 u, t, $4;
    and.b32 t, t, 0x80008000;
    lop3.b32 $0, u, $6, t, 0xea;
}""")
# Multiplied by the sum of two powers of two, the four bits of a place come to two places at once.
_SMALL_E2M1_OF_WORDS = tl.constexpr("""{
    .reg .b32 t;
    and.b32 t, $1, $2;
    mul.lo.u32 t, t, $4;
    and.b32 $0, t, 0x81c081c0;
}""")
_HIGH_BYTES = tl.constexpr("shr.u32 $0, $1, 8;")
_ONES_OF_BYTES = tl.constexpr("{ mov.b32 $0, $3; mov.b32 $1, $3; }")


@triton.jit
def decode(packed, PLACE: tl.constexpr, E2M1: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """The numbers of a tensor of bytes, or of 16-bit words, at PLACE: 0 is the lowest four bits. Integers get 128 added
    in bfloat16, or 1024 in float16. COMPILED: False in Triton's interpreter."""
    BITS: tl.constexpr = packed.dtype.primitive_bitwidth
    OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    MAGIC: tl.constexpr = 0x43434343 if dtype == tl.bfloat16 else 0x64646464
    SHIFT: tl.constexpr = 6 if dtype == tl.bfloat16 else 3
    MASK: tl.constexpr = 0x01C001C0 if dtype == tl.bfloat16 else 0x0E000E00
    BIAS: tl.constexpr = 8.507059173023462e37 if dtype == tl.bfloat16 else 16384.0
    if not COMPILED:
        code = ((packed >> (4 * PLACE)) & 15).to(tl.float32)
        if E2M1:
            magnitude = code % 8
            exponent = tl.floor(magnitude / 2)
            mantissa = magnitude % 2
            value = tl.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * tl.exp2(exponent - 1))
            number = tl.where(code >= 8, -value, value).to(dtype)
        else:
            number = (code + OFFSET).to(dtype)
    elif E2M1:
        if BITS == 8:
            number = tl.inline_asm_elementwise(
                _E2M1_OF_BYTES, "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r", [packed, 4 - 4 * PLACE, SHIFT, MASK], dtype.value,
                is_pure=True, pack=4,
            )  # fmt: skip
        else:
            number = tl.inline_asm_elementwise(
                _E2M1_OF_WORDS, "=r,r,r,r,r,r,r,r", [packed, 12 - 4 * PLACE, SHIFT, MASK], dtype.value,
                is_pure=True, pack=2,
            )  # fmt: skip
        number = number * BIAS
    elif BITS == 8:
        number = tl.inline_asm_elementwise(
            _INTEGERS_OF_BYTES, "=r,=r,r,r,r,r,r,r,r,r,r", [packed, 4 * PLACE, MAGIC], dtype.value,
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        number = tl.inline_asm_elementwise(
            _INTEGERS_OF_WORDS, "=r,r,r,r,r,r", [packed, 4 * PLACE, MAGIC & 0xFF00FF00], dtype.value,
            is_pure=True, pack=2,
        )  # fmt: skip
    return number


@triton.jit
def decode_small(packed, PLACE: tl.constexpr):
    """e2m1 numbers times 2^-126, in bfloat16, of 16-bit words at PLACE: `decode` with an instruction of four less, and
    without its multiplication. Only compiled, not in Triton's interpreter."""
    words = packed
    if PLACE >= 2:
        words = tl.inline_asm_elementwise(_HIGH_BYTES, "=r,r", [packed], tl.int16, is_pure=True, pack=2)
    MASK: tl.constexpr = 0x00F000F0 if PLACE % 2 else 0x000F000F
    FACTOR: tl.constexpr = 2**2 + 2**8 if PLACE % 2 else 2**6 + 2**12
    return tl.inline_asm_elementwise(
        _SMALL_E2M1_OF_WORDS, "=r,r,r,r,r,r", [words, MASK, FACTOR], tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def small_scale_of(stored):
    """2^62 times a scale of e2m1 numbers, in bfloat16, for `decode_small`: their product lacks 2^64, and has room for
    scales from 2^-62 to 2^65. Larger ones become infinite."""
    return (tl.minimum(stored.to(tl.int32) + 62, 255) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def ones_like(packed, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Ones in the shape of a tensor of bytes, and in the registers where `decode` leaves its numbers. Otherwise what is
    multiplied by both would be loaded for each."""
    ONES: tl.constexpr = 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00
    if COMPILED:
        ones = tl.inline_asm_elementwise(
            _ONES_OF_BYTES, "=r,=r,r,r,r,r,r", [packed, ONES], dtype.value, is_pure=True, pack=4
        )
    else:
        ones = tl.full(packed.shape, 1, dtype)
    return ones


@triton.jit
def scale_of(stored, E2M1: tl.constexpr):
    """A scale in float32. With E2M1 it is stored as its exponent plus 127."""
    if E2M1:
        exponent = stored.to(tl.int32)
        # 2^-127 is subnormal.
        return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


class FourBit(NamedTuple):
    """A weight `[N, K]`, or `[num_experts, N, K]`, in 4 bits. K is a multiple of 32. Groups of columns share a scale,
    whose size is a power of two from 32 on, or all columns of a row do."""

    values: Tensor  # uint8 [..., N, K / 2]
    scale: Tensor  # [..., N, K / group], any float dtype; of e2m1 numbers uint8, the exponent plus 127
    zero: Tensor | None = None  # uint8 [..., N, K / group]; None: 8. Not of e2m1 numbers.

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def is_e2m1(self) -> bool:
        return self.scale.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], 2 * self.values.shape[-1])

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]


def check_four_bit(weight: FourBit, dtype: torch.dtype) -> None:
    """Raise ValueError, beginning with the argument's name, unless the kernels multiply such a weight with inputs of a
    dtype."""
    values, scale, zero = weight
    *rows, K = weight.shape
    if values.dtype != torch.uint8 or not values.is_contiguous() or K % UNIT or values.numel() == 0:
        raise ValueError(
            f"weight must be a contiguous uint8 [..., N, K / 2], K a multiple of {UNIT}, not {list(values.shape)} "
            f"{values.dtype}"
        )
    groups = scale.shape[-1] if scale.dim() == values.dim() else 0
    group = K // groups if groups > 0 and K % groups == 0 else 0
    is_group = group >= UNIT and (groups == 1 or group & (group - 1) == 0)
    if not is_group or list(scale.shape[:-1]) != rows or not scale.is_contiguous():
        raise ValueError(
            f"scale must be a contiguous {[*rows, 'K / group']} for K = {K} and groups of {UNIT}, {2 * UNIT}, ..., or "
            f"of all columns, not {list(scale.shape)}"
        )
    if zero is not None and (zero.shape != scale.shape or zero.dtype != torch.uint8 or not zero.is_contiguous()):
        raise ValueError(f"zero must be a contiguous uint8 {list(scale.shape)}, not {list(zero.shape)} {zero.dtype}")
    if weight.is_e2m1 and zero is not None:
        raise ValueError("zero must be None for e2m1 numbers")
    if dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16 or float16, not {dtype}")


def check_few_tokens(x: Tensor, weight: FourBit, bias: Tensor | None, max_tokens: int) -> None:
    """Raise ValueError, beginning with the argument's name, unless x is `[1..max_tokens, K]` with contiguous rows, and
    bias a contiguous `[N]` or None."""
    num_rows, K = weight.shape
    if x.dim() != 2 or not 1 <= len(x) <= max_tokens or x.shape[1] != K or x.stride(1) != 1:
        raise ValueError(
            f"x must be [1..{max_tokens}, {K}] with contiguous rows, not {list(x.shape)} with strides {x.stride()}"
        )
    if bias is not None and (bias.shape != (num_rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{num_rows}], not {list(bias.shape)}")


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_torch(codes: Tensor) -> Tensor:
    """uint8 `[..., N, K / 2]` of codes 0..15 in the order of their columns, uint8 `[..., N, K]`."""
    low, high = codes.unflatten(-1, (-1, 2, UNIT // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def codes_torch(values: Tensor) -> Tensor:
    """The codes 0..15 of `[..., N, K / 2]` in the order of their columns: uint8 `[..., N, K]`."""
    units = values.unflatten(-1, (-1, UNIT // 2))
    return torch.stack((units & 15, units >> 4), dim=-2).flatten(-3)


def dequantize_torch(weight: FourBit) -> Tensor:
    """float32, of the weight's shape."""
    groups = codes_torch(weight.values).unflatten(-1, (-1, weight.group))
    if weight.is_e2m1:
        numbers = torch.tensor([*_E2M1, *(-each for each in _E2M1)], device=groups.device)[groups.int()]
        scale = torch.exp2(weight.scale.double() - 127).float()
    else:
        zero = 8 if weight.zero is None else weight.zero.unsqueeze(-1)
        numbers, scale = groups.float() - zero, weight.scale.float()
    return (numbers * scale.unsqueeze(-1)).flatten(-2)
