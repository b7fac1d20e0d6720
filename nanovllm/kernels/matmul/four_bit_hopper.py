"""Linear layers of 16 tokens and more with weights of 4 bits on Hopper, whose warps share the work by kind.

As in `four_bit_tiles`, the weight is the first operand, and is decoded in the registers that tensor cores read. There
all warps of a program load, decode and multiply in step, so tensor cores wait while numbers are decoded. Here one warp
does nothing but ask for tiles, by the tensor memory accelerator. Two groups of four warps have rows of the weight each.
A group decodes its next numbers while tensor cores multiply the last ones, and does not wait for the other group. A
program takes one tile after the other, and the first warp asks for a tile while the sums of the last one are written.

It is written in Gluon, for Triton's own compiler gives all warps the same work. Triton's interpreter doesn't run it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.gluon_stub import (
    HAS_GLUON,
    SharedDescriptor,
    async_load,
    async_store,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import DTYPES, FourBit, check_four_bit
from nanovllm.kernels.matmul.linear_checks import check_result
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.kernels.triton_stub import triton

_STEP = 128  # columns of a step: a group
_WORDS = gl.constexpr(32)  # of 16 bits in a row's step, and columns of x that are in the same place of their words
_PLACES = gl.constexpr(4)  # of numbers in a word
_REGISTERS = 168  # of a thread at the start, for 4 + 4 + 1 warps, which count as 12


class FourBitHopperConfig(NamedTuple):
    """Launch constants."""

    rows: int  # weight rows of a tile: 128 or 256
    tokens: int  # of a tile: 16, 32, 64, 128 or 256; with 256 rows at most 128
    shares: bool  # whether programs have equal parts of all tiles' columns, or tiles as a whole
    num_stages: int  # of the load pipeline

    def fitted(self, device: torch.device) -> "FourBitHopperConfig | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two."""
        num_stages = fitting_stages(self.stage_bytes, self.num_stages, device, self.result_bytes)
        return self._replace(num_stages=num_stages) if num_stages else None

    @property
    def stage_bytes(self) -> int:
        return _STEP // 2 * self.rows + _STEP * 2 * self.tokens

    @property
    def result_bytes(self) -> int:
        """Of a tile's results, which leave by the accelerator if it is whole."""
        return 0 if self.shares else 2 * self.rows * self.tokens

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * self.stage_bytes + self.result_bytes


def can_multiply(weight: FourBit, dtype: torch.dtype) -> bool:
    """Whether the kernel takes this weight, for inputs of a dtype: integers in groups of 128 columns, of which a row
    has an even number, with scales of that dtype, on Hopper."""
    is_here = HAS_GLUON and GpuFacts.of(weight.values.device).is_hopper and dtype in DTYPES
    in_pairs = weight.group == _STEP and weight.shape[-1] % (2 * _STEP) == 0
    return is_here and in_pairs and weight.scale.dtype == dtype and not weight.is_e2m1


@gluon.constexpr_function
def _integers_of_words(place: int, magic: int) -> str:
    """128 + q in bfloat16, or 1024 + q in float16, for the integers q at a place in two words."""
    if place == 0:
        return f"lop3.b32 $0, $1, 0x000f000f, {magic:#x}, 0xea;"
    return f"{{ .reg .b32 t; shr.u32 t, $1, {4 * place}; lop3.b32 $0, t, 0x000f000f, {magic:#x}, 0xea; }}"


@gluon.jit
def _decode(packed, offset, factor, PLACE: gl.constexpr, dtype: gl.constexpr):
    """The weights of a tensor of words at PLACE. offset: None for integers without zeros."""
    MAGIC: gl.constexpr = 0x43004300 if dtype == gl.bfloat16 else 0x64006400
    ASSEMBLY: gl.constexpr = _integers_of_words(PLACE, MAGIC)
    number = gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [packed], dtype.value, is_pure=True, pack=2)
    if offset is None:
        number -= 136 if dtype == gl.bfloat16 else 1032
    else:
        number -= offset
    return number * factor


@gluon.jit
def _place_of_tile(tile, M, TOKENS: gl.constexpr, ROWS: gl.constexpr):
    """The first token of a tile, and its first row. Tiles of the same weights follow one another, so that L2 has these
    for all of them."""
    token_tiles = gl.cdiv(M, TOKENS)
    return tile % token_tiles * TOKENS, tile // token_tiles * ROWS


@gluon.jit
def _first_unit(program, M, N, units, TOKENS: gl.constexpr, ROWS: gl.constexpr, SHARES: gl.constexpr):
    """Where the work of a program begins, in units of two steps, of which each tile has as many."""
    tiles = gl.cdiv(M, TOKENS) * gl.cdiv(N, ROWS)
    if SHARES:
        first = (program.to(gl.int64) * (tiles * units) // gl.num_programs(0)).to(gl.int32)
    else:
        first = (program.to(gl.int64) * tiles // gl.num_programs(0)).to(gl.int32) * units
    return first


@gluon.jit
def _load_tiles(
    x, weight, weights, values, full, empty, M, N, units, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, SHARES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What the warp does that asks for tiles."""
    first = _first_unit(gl.program_id(0), M, N, units, TOKENS, ROWS, SHARES)
    count = 2 * (_first_unit(gl.program_id(0) + 1, M, N, units, TOKENS, ROWS, SHARES) - first)
    # Weights are no launch's result.
    for step in gl.static_range(STAGES):
        if step < count:
            _load_weights(weight, weights, full, step, step, first, M, units, ROWS, TOKENS)
    if PDL:
        gdc_wait()
    for step in gl.static_range(STAGES):
        if step < count:
            _load_values(x, values, full, step, step, first, M, units, ROWS, TOKENS)
    for step in range(STAGES, count):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        _load_weights(weight, weights, full, stage, step, first, M, units, ROWS, TOKENS)
        _load_values(x, values, full, stage, step, first, M, units, ROWS, TOKENS)


@gluon.jit
def _load_weights(weight, weights, full, stage, step, first, M, units, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    mbarrier.expect(full.index(stage), ROWS * _WORDS * 2 + TOKENS * _WORDS * _PLACES * 2)
    unit = first + step // 2
    _, row = _place_of_tile(unit // units, M, TOKENS, ROWS)
    word = (unit % units * 2 + step % 2) * _WORDS
    for half in gl.static_range(2):
        async_load(weight, [row + half * (ROWS // 2), word], full.index(stage), weights.index(stage * 2 + half))


@gluon.jit
def _load_values(x, values, full, stage, step, first, M, units, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    unit = first + step // 2
    token, _ = _place_of_tile(unit // units, M, TOKENS, ROWS)
    word = (unit % units * 2 + step % 2) * _WORDS
    for place in gl.static_range(_PLACES):
        column = place * (2 * units * _WORDS) + word
        async_load(x, [token, column], full.index(stage), values.index(stage * _PLACES + place))


@gluon.jit
def _multiply_tiles(
    weights, values, outputs, full, empty, scale, zero, bias, y, y_tiles, partial, arrivals, M, N, units, y_stride,
    GROUP: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr,
    ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What each of the two groups of warps does."""
    HALF: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = values.dtype
    OFFSET: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    lane = gl.arange(0, HALF, gl.SliceLayout(1, operand))
    unit = _first_unit(gl.program_id(0), M, N, units, TOKENS, ROWS, SHARES)
    end = _first_unit(gl.program_id(0) + 1, M, N, units, TOKENS, ROWS, SHARES)
    step = 0
    while unit < end:
        tile, first_pair = unit // units, unit % units
        num_pairs = gl.minimum(units - first_pair, end - unit)
        token, first_row = _place_of_tile(tile, M, TOKENS, ROWS)
        first_row += GROUP * HALF
        # Rows that do not exist repeat the last one. Scales are loaded in pairs, before their turn.
        pair = gl.minimum(first_row + lane, N - 1).to(gl.int64) * units + first_pair
        factors = gl.load(scale + pair)
        acc = gl.zeros([HALF, TOKENS], gl.float32, sums_layout)
        if zero is not None:
            zeros = gl.load(zero + pair).to(gl.int32)
        for of_pair in range(num_pairs):
            later = gl.minimum(of_pair + 1, num_pairs - 1)
            # A volatile load stays where it is, in front of the products.
            next_factors = gl.load(scale + pair + later, volatile=True)
            if zero is not None:
                next_zeros = gl.load(zero + pair + later, volatile=True).to(gl.int32)
            for part in gl.static_range(2):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                packed = weights.index(stage * 2 + GROUP).load(operand)
                factor = gl.expand_dims((factors >> 16 * part).to(gl.int16).to(dtype, bitcast=True), 1)
                if zero is not None:
                    of_zero = (zeros >> 8 * part & 255) + OFFSET
                    offset = gl.expand_dims(of_zero.to(gl.float32).to(dtype), 1)
                else:
                    offset = None
                # The registers of a place are free when its product has ended, which is after the next one has begun.
                for place in gl.static_range(_PLACES):
                    numbers = _decode(packed, offset, factor, place, dtype)
                    columns = values.index(stage * _PLACES + place).permute((1, 0))
                    acc = warpgroup_mma(numbers, columns, acc, is_async=True)
                    if place > 0:
                        acc = warpgroup_mma_wait(1 if place < _PLACES - 1 else 0, deps=[acc])
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
            factors = next_factors
            if zero is not None:
                zeros = next_zeros
        if PDL:
            gdc_wait()
        if SHARES:
            _share_sums(
                acc, bias, y, partial, arrivals, M, N, units, y_stride, tile, first_pair, num_pairs, token, first_row,
                GROUP, ROWS, TOKENS, ADD,
            )  # fmt: skip
        else:
            _write_sums(acc, outputs, bias, y, y_tiles, M, N, y_stride, token, first_row, GROUP, TOKENS, ADD)
        unit += num_pairs
    if y_tiles is not None:
        store_wait(0)


@gluon.jit
def _write_sums(
    acc, outputs, bias, y, y_tiles, M, N, y_stride, token, first_row, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """Of a whole tile. acc: [rows, tokens]."""
    HALF: gl.constexpr = acc.shape[0]
    dtype: gl.constexpr = y.dtype.element_ty
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, acc.type.layout))
    if bias is not None:
        acc += gl.expand_dims(gl.load(bias + gl.minimum(row, N - 1)).to(gl.float32), 1)
    if y_tiles is not None:
        output = outputs.index(GROUP)
        store_wait(0)  # of the last tile, which one thread has sent
        barrier()
        output.permute((1, 0)).store(acc.to(dtype))
        fence_async_shared()
        async_store(y_tiles, [token, first_row], output)
    else:
        of_token = token + gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout)), 0)
        row = gl.expand_dims(row, 1)
        inside = (row < N) & (of_token < M)
        target = y + of_token.to(gl.int64) * y_stride + row
        if ADD:
            acc += gl.load(target, mask=inside, other=0.0).to(gl.float32)
        gl.store(target, acc.to(dtype), mask=inside)


@gluon.jit
def _share_sums(
    acc, bias, y, partial, arrivals, M, N, units, y_stride, tile, first_pair, num_pairs, token, first_row,
    GROUP: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Of a tile's part. A program has a place for the tile that it ends, and one for the tile that it begins. Who comes
    last to a tile adds its parts, in the order of their columns. partial: [programs, 2, 2, TOKENS, ROWS / 2]."""
    HALF: gl.constexpr = ROWS // 2
    SIZE: gl.constexpr = TOKENS * HALF
    dtype: gl.constexpr = y.dtype.element_ty
    row = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, acc.type.layout)), 1)
    index = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout)), 0)
    begins = (first_pair == 0).to(gl.int32)
    mine = partial + ((gl.program_id(0) * 2 + begins) * 2 + GROUP).to(gl.int64) * SIZE
    gl.store(mine + index * HALF + row, acc, mask=token + index < M)
    # One thread does the atomic: it may release the stores of all only after all have made theirs.
    barrier()
    counter = arrivals + tile * 2 + GROUP
    if gl.atomic_add(counter, num_pairs, sem="acq_rel") + num_pairs == units:
        # Everyone has counted, so the counter can go back to zero for the next launch.
        gl.store(counter, 0)
        # The owner of a unit is the last program that begins at it or before it.
        all_units = gl.cdiv(M, TOKENS) * gl.cdiv(N, ROWS) * units
        first = (((tile * units + 1).to(gl.int64) * gl.num_programs(0) - 1) // all_units).to(gl.int32)
        last = (((tile + 1) * units).to(gl.int64) * gl.num_programs(0) - 1) // all_units
        # All at once would not fit the registers.
        CHUNK: gl.constexpr = TOKENS if SIZE <= 8192 else 8192 // HALF
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HALF, HALF // 4], [4, 1], [1, 0])
        lane = gl.arange(0, HALF, gl.SliceLayout(0, layout))
        of_row = gl.expand_dims(first_row + lane, 0)
        for start in range(0, TOKENS, CHUNK):
            of_token = gl.expand_dims(start + gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), 1)
            is_token = token + of_token < M
            parts = partial + GROUP * SIZE + of_token * HALF + gl.expand_dims(lane, 0)
            total = gl.zeros([CHUNK, HALF], gl.float32, layout)
            for program in range(first, last.to(gl.int32) + 1):
                begins = (program == first).to(gl.int32)
                part = parts + (program * 2 + begins).to(gl.int64) * (2 * SIZE)
                # ".cg" goes past L1, which need not know what other multiprocessors wrote.
                total += gl.load(part, mask=is_token, other=0.0, cache_modifier=".cg")
            if bias is not None:
                total += gl.load(bias + gl.minimum(of_row, N - 1)).to(gl.float32)
            inside = is_token & (of_row < N)
            target = y + (token + of_token).to(gl.int64) * y_stride + of_row
            if ADD:
                total += gl.load(target, mask=inside, other=0.0).to(gl.float32)
            gl.store(target, total.to(dtype), mask=inside)


@gluon.jit(do_not_specialize=["M", "units"])
def _four_bit_hopper_kernel(
    x, weight, scale, zero, bias, y, y_tiles, partial, arrivals, M, N, units, y_stride, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y [M, N] = x W^T + bias, y += that with ADD. x is arranged. x, weight, y_tiles: descriptors; y_tiles is None if y
    is written without one. scale: two numbers in 32 bits. zero: two in 16 bits. units: of two groups in a row."""
    if PDL:
        gdc_launch_dependents()
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * 2, ROWS // 2, _WORDS], weight.layout)
    values = gl.allocate_shared_memory(x.dtype, [STAGES * _PLACES, TOKENS, _WORDS], x.layout)
    outputs = values
    if y_tiles is not None:
        outputs = gl.allocate_shared_memory(x.dtype, [2, TOKENS, ROWS // 2], y_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_tiles, (weights, values, outputs, full, empty, scale, zero, bias, y, y_tiles, partial, arrivals,
                               M, N, units, y_stride, 0, ROWS, TOKENS, STAGES, SHARES, ADD, PDL)),
            (_multiply_tiles, (weights, values, outputs, full, empty, scale, zero, bias, y, y_tiles, partial, arrivals,
                               M, N, units, y_stride, 1, ROWS, TOKENS, STAGES, SHARES, ADD, PDL)),
            (_load_tiles, (x, weight, weights, values, full, empty, M, N, units, ROWS, TOKENS, STAGES, SHARES, PDL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def four_bit_hopper(
    x: Tensor,
    weight: FourBit,
    y: Tensor,
    bias: Tensor | None,
    config: FourBitHopperConfig,
    arrivals: Tensor | None,
    *,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """`y = x W^T + bias` of weights that are rounded to x's dtype, summed in float32 and rounded once.

    Args:
        x: from `four_bit_tiles.arrange`: `[M, K]`, bfloat16 or float16, contiguous.
        weight: `[N, K]` that `can_multiply` is True of.
        y: `[M, N]` of x's dtype, any row stride; shares no memory with x.
        bias: `[N]`, any float dtype, or None.
        config: from `fitted`. Programs have whole tiles if there are more tiles than `arrivals` has counters for.
        arrivals: from `split_k.make_arrivals`; None if programs have whole tiles.
        add: whether the result is added to y, before it is rounded.
        pdl: programmatic dependent launch (see `dependent_launch`). The first weights are loaded before the wait.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_four_bit(weight, x.dtype)
    (num_rows, K), M = weight.shape, len(x)
    if not can_multiply(weight, x.dtype):
        raise ValueError(
            f"weight must have integers in an even number of groups of {_STEP} columns and scales in {x.dtype} on "
            f"Hopper, not {list(weight.shape)} in groups of {weight.group} and {weight.scale.dtype}"
        )
    if x.shape != (M, K) or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [M, {K}], not {list(x.shape)} with strides {x.stride()}")
    if bias is not None and (bias.shape != (num_rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{num_rows}], not {list(bias.shape)}")
    check_result(y, x, weight.values, False)
    if M == 0:
        return
    rows, tokens, shares, num_stages = config
    tiles, partial = triton.cdiv(num_rows, rows) * triton.cdiv(M, tokens), None
    shares = shares and arrivals is not None and 2 * tiles <= arrivals.numel()
    units = K // (2 * _STEP)
    num_programs = min(tiles * (units if shares else 1), GpuFacts.of(x.device).num_multiprocessors)
    if shares:
        partial = torch.empty(num_programs * 2 * rows * tokens, dtype=torch.float32, device=x.device)
    half = rows // 2
    # A descriptor wants addresses and strides in units of 16 bytes.
    in_tiles = not config.shares and not add and y.data_ptr() % 16 == 0 and y.stride(0) % 8 == 0
    launcher(_four_bit_hopper_kernel, (num_programs,), pdl and has_pdl(x.device))(
        _descriptor(x, tokens, 32, 64), _descriptor(weight.values.view(torch.int16), half, 32, 64),
        weight.scale.view(torch.int32), None if weight.zero is None else weight.zero.view(torch.int16), bias, y,
        _descriptor(y, tokens, half, 128) if in_tiles else None, partial, arrivals if shares else None, M, num_rows,
        units, y.stride(0), ROWS=rows, TOKENS=tokens, STAGES=num_stages, SHARES=shares, ADD=add, num_warps=4,
        maxnreg=_REGISTERS,
    )  # fmt: skip


def _descriptor(tensor: Tensor, rows: int, columns: int, swizzled: int) -> Any:
    """Of tiles `[rows, columns]` of a tensor of 16-bit numbers. swizzled: bytes of a row that are stored together."""
    return SharedDescriptor.from_tensor(tensor, [rows, columns], gl.NVMMASharedLayout(swizzled, 16, rank=2))
