"""The order of a state's numbers in memory, and a state in the threads of a program.

A decode step reads and writes the states of all its sequences, which takes a large part of its time. So a state lies in
memory as warps load it: what a warp loads at once, 16 bytes a thread, is one piece of 512 bytes. A thread's numbers
belong to four value dims, because sums over key dims then need few exchanges between threads, and each warp has value
dims of its own.

A piece has 8 rows of STRIP value dims in float32, a key dim each. In 16 bits it has 16 rows, and of two rows that are 8
apart it has four numbers of one beside four of the other. A state is `value_dim // STRIP` strips, each of them the
pieces of all its key dims in order. Sizes for which there is no kernel are kept as `[key_dim, value_dim]`.
"""

from torch import Tensor

from nanovllm.kernels.triton_stub import tl, triton

DIMS = (16, 32, 64, 128)  # of keys and values alike, that the kernels have
STRIP = 16
_STRIP = tl.constexpr(STRIP)
_QUAD = tl.constexpr(4)  # value dims of a thread


def in_memory_order(states: Tensor) -> Tensor:
    """States by dims, `[..., key_dim, value_dim]`, in the order in which they are stored: a copy of the same shape. The
    dtype is that in which they are stored."""
    sizes = _sizes(states)
    if sizes is None:
        return states
    pieces, pair, rows, strips, quads, quad = sizes
    order = states.reshape(-1, pieces, pair, rows, strips, quads, quad).permute(0, 4, 1, 3, 5, 2, 6)
    return order.reshape(states.shape)


def by_dims(states: Tensor) -> Tensor:
    """The inverse of `in_memory_order`."""
    sizes = _sizes(states)
    if sizes is None:
        return states
    pieces, pair, rows, strips, quads, quad = sizes
    dims = states.reshape(-1, strips, pieces, rows, quads, pair, quad).permute(0, 2, 5, 3, 1, 4, 6)
    return dims.reshape(states.shape)


def _sizes(states: Tensor) -> tuple[int, ...] | None:
    key_dim, value_dim = states.shape[-2:]
    if key_dim != value_dim or key_dim not in DIMS:
        return None
    pair = 4 // states.element_size()
    return key_dim // (8 * pair), pair, 8, value_dim // STRIP, STRIP // 4, 4


@triton.jit
def _pieces_at(first, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """[pieces, numbers of a piece]. Warps take pieces in turn, so those of one strip go to the same warps."""
    NUMBERS: tl.constexpr = 512 * 8 // first.dtype.element_ty.primitive_bitwidth
    STRIPS: tl.constexpr = COLUMNS // _STRIP
    piece = tl.arange(0, DIM * COLUMNS // NUMBERS)[:, None]
    return first + piece % STRIPS * (DIM * _STRIP) + piece // STRIPS * NUMBERS + tl.arange(0, NUMBERS)[None, :]


@triton.jit
def load_state(first, is_there, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS value dims of a state, in float32: [DIM // 8, COLUMNS // STRIP, 8, STRIP]. The key dims are the first and
    the third dimension. Zeros if the state is not there. first: where they begin; COLUMNS: a multiple of STRIP."""
    STRIPS: tl.constexpr = COLUMNS // _STRIP
    PAIR: tl.constexpr = 32 // first.dtype.element_ty.primitive_bitwidth
    NUMBERS: tl.constexpr = 128 * PAIR
    is_read = tl.arange(0, NUMBERS)[None, :] < tl.where(is_there, NUMBERS, 0)
    state = tl.load(_pieces_at(first, DIM, COLUMNS), mask=is_read, other=0.0).to(tl.float32)
    if PAIR > 1:  # Only names change: a thread keeps its numbers.
        state = tl.reshape(state, [DIM // (8 * PAIR), STRIPS, 8, _STRIP // _QUAD, PAIR, _QUAD])
        state = tl.permute(state, [0, 4, 1, 2, 3, 5])
    return tl.reshape(state, [DIM // 8, STRIPS, 8, _STRIP])


@triton.jit
def store_state(first, state, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """first, state: as of `load_state`."""
    STRIPS: tl.constexpr = COLUMNS // _STRIP
    PAIR: tl.constexpr = 32 // first.dtype.element_ty.primitive_bitwidth
    NUMBERS: tl.constexpr = 128 * PAIR
    kept = state.to(first.dtype.element_ty)
    if PAIR > 1:
        kept = tl.reshape(kept, [DIM // (8 * PAIR), PAIR, STRIPS, 8, _STRIP // _QUAD, _QUAD])
        kept = tl.permute(kept, [0, 2, 3, 4, 1, 5])
    tl.store(_pieces_at(first, DIM, COLUMNS), tl.reshape(kept, [DIM * COLUMNS // NUMBERS, NUMBERS]))


@triton.jit
def load_matrix(first, is_there, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """As `load_state`, by dims: [DIM, COLUMNS]."""
    state = tl.permute(load_state(first, is_there, DIM, COLUMNS), [0, 2, 1, 3])
    return tl.reshape(state, [DIM, COLUMNS])


@triton.jit
def store_matrix(first, state, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    state = tl.reshape(state, [DIM // 8, 8, COLUMNS // _STRIP, _STRIP])
    store_state(first, tl.permute(state, [0, 2, 1, 3]), DIM, COLUMNS)
