"""The experts of a mixture as grouped products of MXFP4 weights on Hopper, whose warps share the work by kind.

As in `four_bit_hopper`, one warp asks for tiles by the tensor memory accelerator, and groups of four warps decode and
multiply rows of the weight each. While one group waits for its numbers or for tensor cores, others decode. A program
takes one tile after the other. A tile has as many tokens as its expert has pairs left, up to one of two widths, so that
weights are decoded once for most experts, and few products are wasted.

The accelerator cannot gather rows on Hopper, so inputs of `gate_up` have a row for each pair, in the order of the
experts (`arrange_pairs`). Of a group's rows in `gate_up`, each eight of the gate are followed by eight of the up
projection. So both are in the same thread, which computes the activation.

Arguments of both products: see `four_bit_experts`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl, prefetch_lines
from nanovllm.kernels.gluon_stub import (
    HAS_GLUON,
    SharedDescriptor,
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import UNIT, FourBit, check_four_bit
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated
from nanovllm.kernels.triton_stub import triton

_COLUMNS = 128  # of a step
_STEP = gl.constexpr(_COLUMNS)
_WORDS = gl.constexpr(32)  # of 16 bits in a row's step, and columns of x that are in the same place of their words
_PLACES = gl.constexpr(4)  # of numbers in a word
_GROUPS = gl.constexpr(2)  # of four warps
_REGISTERS = 168  # of a thread at the start, for 4 + 4 + 1 warps, which count as 12


class FourBitExpertsHopperConfig(NamedTuple):
    """Launch constants."""

    tokens: int  # pairs of a tile at most, a power of two from 16 to 128
    narrow: int  # widths of tiles below that: a power of two
    rows: int  # of the weight that each of two groups of warps has: 64 or 128
    num_stages: int  # of the load pipeline

    def fitted(self, device: torch.device) -> "FourBitExpertsHopperConfig | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two."""
        num_stages = fitting_stages(self.stage_bytes, self.num_stages, device)
        return self._replace(num_stages=num_stages) if num_stages else None

    @property
    def stage_bytes(self) -> int:
        return _COLUMNS // 2 * self.rows * 2 + _COLUMNS * 2 * self.tokens

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * self.stage_bytes


def can_multiply(weight: FourBit, dtype: torch.dtype) -> bool:
    """Whether the kernels take this weight, for inputs of a dtype: e2m1 numbers in groups of 32, for bfloat16 on
    Hopper."""
    is_here = HAS_GLUON and GpuFacts.of(weight.values.device).is_hopper and dtype == torch.bfloat16
    return is_here and weight.is_e2m1 and weight.group == UNIT and weight.shape[-1] % (2 * UNIT) == 0


# The same functions in Gluon.
_gated: Any = gluon.jit(gated.fn) if HAS_GLUON else None
_prefetch_lines: Any = gluon.jit(prefetch_lines.fn) if HAS_GLUON else None

_HIGH_BYTES = gl.constexpr("shr.u32 $0, $1, 8;")
# Of two bytes of exponents, 2^62 times what each stands for, in bfloat16, twice. At most infinite.
_FACTORS = gl.constexpr("""{
    .reg .b32 t, most;
    mov.b32 most, 0x00c100c1;
    prmt.b32 t, $2, 0, 0x4140;
    min.u16x2 t, t, most;
    mad.lo.u32 t, t, 128, 0x1f001f00;
    prmt.b32 $0, t, 0, 0x1010;
    prmt.b32 $1, t, 0, 0x3232;
}""")


@gluon.constexpr_function
def _scaled_numbers(place: int) -> str:
    """The e2m1 numbers at a place of two words, as in `four_bit.decode_small`, times a factor. $1: the words, or with
    their high bytes at the place of the low ones. $2, $3: the factor, for either."""
    mask, factor = (0x00F000F0, 2**2 + 2**8) if place % 2 else (0x000F000F, 2**6 + 2**12)
    return f"""{{
        .reg .b32 t;
        and.b32 t, $1, {mask:#x};
        mul.lo.u32 t, t, {factor};
        and.b32 t, t, 0x81c081c0;
        mul.bf16x2 $0, t, $2;
    }}"""


@gluon.jit
def _load_scales(pointers):
    """Two scales of each row. The load stays where it is, in front of the products, and comes from L1 in later steps,
    unlike a volatile one."""
    return gl.inline_asm_elementwise(
        "ld.global.ca.u16 $0, [$1];", "=r,l", [pointers.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _decode(words, factor, PLACE: gl.constexpr, dtype: gl.constexpr):
    """The weights of a tensor of words at PLACE, times 2^-64. factor: two of the same number in 32 bits."""
    if PLACE >= 2:
        words = gl.inline_asm_elementwise(_HIGH_BYTES, "=r,r", [words], gl.int16, is_pure=True, pack=2)
    ASSEMBLY: gl.constexpr = _scaled_numbers(PLACE)
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [words, factor], dtype.value, is_pure=True, pack=2)


@gluon.jit
def _factors(two):
    """From two scales, what numbers of either group are multiplied by, once in each half of 32 bits."""
    first, second = gl.inline_asm_elementwise(_FACTORS, "=r,=r,r", [two], (gl.int32, gl.int32), is_pure=True, pack=1)
    return gl.expand_dims(first, 1), gl.expand_dims(second, 1)


@gluon.jit
def _load_tile(
    x, tensors, expert, token, first_row, step, num_rows, K: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
    STAGES: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """Ask for all steps of a tile of W tokens. Returns the number of steps so far."""
    weight, weights, values, full, empty = tensors
    for k in range((K + _STEP - 1) // _STEP):
        stage = step % STAGES
        word = k * _WORDS
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), _GROUPS * ROWS * _WORDS * 2 + W * _WORDS * _PLACES * 2)
        for group in gl.static_range(_GROUPS):
            box = weights.index(stage * _GROUPS + group)
            if SILU:
                block = expert * (num_rows // 8) + (first_row + group * (ROWS // 2)) // 8
                async_load(weight, [block, 0, 0, word], full.index(stage), box.reshape([ROWS // 16, 2, 8, _WORDS]))
            else:
                async_load(weight, [expert * num_rows + first_row + group * ROWS, word], full.index(stage), box)
        for place in gl.static_range(_PLACES):
            box = values.index(stage * _PLACES + place).slice(0, W)
            async_load(x, [token, place * (K // _PLACES) + word], full.index(stage), box)
        step += 1
    return step


@gluon.jit
def _load_tiles(
    x, narrow_x, scale, tensors, starts, num_experts, num_rows, K: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, NARROW: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What the warp does that asks for tiles."""
    if PDL:
        gdc_wait()
    ROWS_OF_TILE: gl.constexpr = _GROUPS * (ROWS // 2 if SILU else ROWS)
    LANES: gl.constexpr = 128 if ROWS_OF_TILE <= 128 else 256
    num_columns = num_rows // 2 if SILU else num_rows
    row_tiles = gl.cdiv(num_columns, ROWS_OF_TILE)
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    tile, before, expert, step = gl.program_id(0), 0, 0, 0
    start = gl.load(starts)
    end = gl.load(starts + 1)
    while expert < num_experts:
        token_tiles = gl.cdiv(end - start, TOKENS)
        size = token_tiles * row_tiles
        while tile < before + size:
            token = start + (tile - before) % token_tiles * TOKENS
            first_row = (tile - before) // token_tiles * ROWS_OF_TILE
            # Those who multiply load scales later, each a few at a time.
            row = expert * num_rows + gl.minimum(first_row + lane, num_columns - 1)
            lines = scale + row.to(gl.int64) * (K // 32)
            _prefetch_lines(lines)
            if SILU:
                _prefetch_lines(lines + num_columns * (K // 32))
            if end - token <= NARROW:
                step = _load_tile(narrow_x, tensors, expert, token, first_row, step, num_rows, K, ROWS, NARROW,
                                  STAGES, SILU)  # fmt: skip
            else:
                step = _load_tile(x, tensors, expert, token, first_row, step, num_rows, K, ROWS, TOKENS,
                                  STAGES, SILU)  # fmt: skip
            tile += gl.num_programs(0)
        before += size
        expert += 1
        start = end
        end = gl.load(starts + gl.minimum(expert + 1, num_experts))


@gluon.jit
def _multiply_tile(
    tensors, expert, token, end, first_row, step, num_rows, GROUP: gl.constexpr, K: gl.constexpr, 
    ROWS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr, GELU: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A group's rows of a tile of W tokens. Returns the number of steps so far."""
    weights, values, full, empty, scale, bias, order, shares, y = tensors
    dtype: gl.constexpr = values.dtype
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    PAIRS: gl.constexpr = K // 64  # of a row's scales
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, operand))
    word = gl.expand_dims(gl.arange(0, _WORDS, gl.SliceLayout(0, operand)), 0)
    # Rows that do not exist repeat the last one.
    num_columns = num_rows // 2 if SILU else num_rows
    if SILU:
        column = gl.minimum(first_row + lane // 16 * 8 + lane % 8, num_columns - 1)
        row = expert * num_rows + column + lane // 8 % 2 * num_columns
    else:
        row = expert * num_rows + gl.minimum(first_row + lane, num_columns - 1)
    scales = scale + row.to(gl.int64) * PAIRS
    low = _load_scales(scales)
    high = _load_scales(scales + min(1, PAIRS - 1))
    acc = gl.zeros([ROWS, W], gl.float32, sums_layout)
    for k in range((K + _STEP - 1) // _STEP):
        # Words past the row's end are zeros, whatever is loaded for them.
        next_low = _load_scales(scales + gl.minimum(2 * k + 2, PAIRS - 1))
        next_high = _load_scales(scales + gl.minimum(2 * k + 3, PAIRS - 1))
        f0, f1 = _factors(low)
        f2, f3 = _factors(high)
        factor = gl.where(word < 16, gl.where(word < 8, f0, f1), gl.where(word < 24, f2, f3))
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        packed = weights.index(stage * _GROUPS + GROUP).load(operand)
        # The registers of a place are free when its product has ended, which is after the next one has begun.
        for place in gl.static_range(_PLACES):
            numbers = _decode(packed, factor, place, dtype)
            columns = values.index(stage * _PLACES + place).slice(0, W).permute((1, 0))
            acc = warpgroup_mma(numbers, columns, acc, is_async=True)
            if place > 0:
                acc = warpgroup_mma_wait(1 if place < _PLACES - 1 else 0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
        low = next_low
        high = next_high
    acc *= 18446744073709551616.0  # 2^64, which decoded numbers lack
    if SILU:
        # Of 16 rows, which a warp has, the first eight are the gate's.
        gate, up = acc.reshape([ROWS // 16, 2, 8, W]).permute((0, 2, 3, 1)).split()
        gate = gate.reshape([ROWS // 2, W])
        up = up.reshape([ROWS // 2, W])
        column = first_row + gl.arange(0, ROWS // 2, gl.SliceLayout(1, gate.type.layout))
        if bias is not None:
            biases = bias + expert * num_rows + gl.minimum(column, num_columns - 1)
            gate += gl.expand_dims(gl.load(biases).to(gl.float32), 1)
            up += gl.expand_dims(gl.load(biases + num_columns).to(gl.float32), 1)
        result = _gated(gate, up, GELU, ALPHA, LIMIT)
        within = column % 32
        y_column = (within % 2 * 2 + within // 16) * (num_columns // 4) + column // 32 * 8 + within % 16 // 2
    else:
        result = acc
        column = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, sums_layout))
        if bias is not None:
            biases = bias + expert * num_rows + gl.minimum(column, num_columns - 1)
            result += gl.expand_dims(gl.load(biases).to(gl.float32), 1)
        y_column = column
    pair_row = token + gl.arange(0, W, gl.SliceLayout(0, result.type.layout))
    is_row = pair_row < end
    y_row = pair_row
    if not SILU:
        y_row = gl.load(order + pair_row, mask=is_row, other=0)
        result *= gl.expand_dims(gl.load(shares + y_row), 0)
    inside = gl.expand_dims(column < num_columns, 1) & gl.expand_dims(is_row, 0)
    target = y + gl.expand_dims(y_row.to(gl.int64) * num_columns, 0) + gl.expand_dims(y_column, 1)
    gl.store(target, result.to(dtype), mask=inside)
    return step


@gluon.jit
def _multiply_tiles(
    tensors, starts, num_experts, num_rows, GROUP: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, NARROW: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr, GELU: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What each of the groups of warps does."""
    if PDL:
        gdc_wait()
    COLUMNS: gl.constexpr = ROWS // 2 if SILU else ROWS  # of the result, which a group computes
    row_tiles = gl.cdiv(num_rows // 2 if SILU else num_rows, COLUMNS * _GROUPS)
    tile, before, expert, step = gl.program_id(0), 0, 0, 0
    start = gl.load(starts)
    end = gl.load(starts + 1)
    while expert < num_experts:
        token_tiles = gl.cdiv(end - start, TOKENS)
        size = token_tiles * row_tiles
        while tile < before + size:
            token = start + (tile - before) % token_tiles * TOKENS
            first_row = ((tile - before) // token_tiles * _GROUPS + GROUP) * COLUMNS
            if end - token <= NARROW:
                step = _multiply_tile(tensors, expert, token, end, first_row, step, num_rows, GROUP, K, ROWS,
                                      NARROW, STAGES, SILU, GELU, ALPHA, LIMIT)  # fmt: skip
            else:
                step = _multiply_tile(tensors, expert, token, end, first_row, step, num_rows, GROUP, K, ROWS,
                                      TOKENS, STAGES, SILU, GELU, ALPHA, LIMIT)  # fmt: skip
            tile += gl.num_programs(0)
        before += size
        expert += 1
        start = end
        end = gl.load(starts + gl.minimum(expert + 1, num_experts))


@gluon.jit
def _four_bit_experts_hopper_kernel(
    x, narrow_x, weight, scale, scale_pairs, bias, order, starts, shares, y, num_experts, num_rows, K: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, NARROW: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr,
    GELU: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """SILU: y [sorted pairs, num_rows / 2], arranged, `gated`. Otherwise y [pairs, num_rows], times the shares. x
    [sorted pairs, K] is arranged. x, narrow_x, weight: descriptors. scale_pairs: two in 16 bits."""
    if PDL:
        gdc_launch_dependents()
    weights = gl.allocate_shared_memory(
        weight.dtype, [STAGES * _GROUPS, ROWS, _WORDS], gl.NVMMASharedLayout(64, 16, rank=2)
    )
    values = gl.allocate_shared_memory(x.dtype, [STAGES * _PLACES, TOKENS, _WORDS], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_GROUPS)
    fence_async_shared()
    boxes = (weight, weights, values, full, empty)
    tensors = (weights, values, full, empty, scale_pairs, bias, order, shares, y)
    gl.warp_specialize(
        [
            (_multiply_tiles, (tensors, starts, num_experts, num_rows, 0, K, ROWS, TOKENS, NARROW, STAGES,
                               SILU, GELU, ALPHA, LIMIT, PDL)),
            (_multiply_tiles, (tensors, starts, num_experts, num_rows, 1, K, ROWS, TOKENS, NARROW, STAGES,
                               SILU, GELU, ALPHA, LIMIT, PDL)),
            (_load_tiles, (x, narrow_x, scale, boxes, starts, num_experts, num_rows, K, ROWS, TOKENS,
                           NARROW, STAGES, SILU, PDL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def gate_up(
    x: Tensor,
    starts: Tensor,
    weight: FourBit,
    bias: Tensor | None,
    config: FourBitExpertsHopperConfig,
    activation: Activation = SWIGLU,
) -> Tensor:
    """`four_bit_experts.gate_up` of tokens in the order of the experts.

    x: bfloat16 `[num_pairs, hidden_size]`, from `arrange_pairs`.
    weight: `[num_experts, 2 * intermediate, hidden_size]` that `can_multiply` is True of; intermediate a
        multiple of 32.
    """
    _, rows, _ = weight.shape
    if rows % (2 * UNIT):
        raise ValueError(f"weight must have a multiple of {2 * UNIT} rows, not {rows}")
    y = torch.empty(len(x), rows // 2, dtype=x.dtype, device=x.device)
    return _launch(x, None, starts, None, weight, bias, config, y, activation)


def down(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    weight: FourBit,
    bias: Tensor | None,
    config: FourBitExpertsHopperConfig,
) -> Tensor:
    """`four_bit_experts.down`, of bfloat16 and a weight that `can_multiply` is True of."""
    y = torch.empty(*weights.shape, weight.shape[1], dtype=x.dtype, device=x.device)
    return _launch(x, order, starts, weights, weight, bias, config, y)


def _launch(
    x: Tensor,
    order: Tensor | None,
    starts: Tensor,
    shares: Tensor | None,
    weight: FourBit,
    bias: Tensor | None,
    config: FourBitExpertsHopperConfig,
    y: Tensor,
    activation: Activation = SWIGLU,
) -> Tensor:
    """y. order, shares: None for `gate_up`."""
    check_four_bit(weight, x.dtype)
    num_experts, num_rows, K = weight.shape
    if not can_multiply(weight, x.dtype):
        raise ValueError(
            f"weight must have e2m1 numbers in an even number of groups of {UNIT} columns, for bfloat16 on Hopper, not "
            f"{list(weight.shape)} in groups of {weight.group} for {x.dtype}"
        )
    if x.dim() != 2 or x.shape[1] != K or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [num_pairs, {K}], not {list(x.shape)} with strides {x.stride()}")
    if bias is not None and (bias.shape != (num_experts, num_rows) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{num_experts}, {num_rows}], not {list(bias.shape)}")
    if len(x) == 0:
        return y
    tokens, narrow, rows, num_stages = config
    is_gate_up = shares is None
    # There may be fewer tiles, but the host does not know.
    most = (len(x) // tokens + min(num_experts, len(x))) * triton.cdiv(num_rows, 2 * rows)
    num_programs = min(most, GpuFacts.of(x.device).num_multiprocessors)
    words = weight.values.view(torch.int16)
    if is_gate_up:
        # [block of eight rows, which are the gate's or the up projection's, whether half the rows later, row, word].
        # The last expert's up projection has nothing after it.
        half, width = num_rows // 2, K // 4
        shape, strides = ((2 * num_experts - 1) * half // 8, 2, 8, width), (8 * width, half * width, width, 1)
        boxes = _descriptor(words.as_strided(shape, strides), [rows // 16, 2, 8, 32])
    else:
        boxes = _descriptor(words.view(-1, K // 4), [rows, 32])
    launcher(_four_bit_experts_hopper_kernel, (num_programs,), has_pdl(x.device))(
        _descriptor(x, [tokens, 32]), _descriptor(x, [narrow, 32]), boxes, weight.scale,
        weight.scale.view(torch.int16), bias, order, starts, shares, y, num_experts, num_rows, K=K, ROWS=rows,
        TOKENS=tokens, NARROW=narrow, STAGES=num_stages, SILU=is_gate_up, **activation.constants, num_warps=4,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    return y


def _descriptor(tensor: Tensor, box: list[int]) -> Any:
    """Of boxes of 16-bit numbers, 64 bytes wide."""
    return SharedDescriptor.from_tensor(tensor, box, gl.NVMMASharedLayout(64, 16, rank=len(box)))
