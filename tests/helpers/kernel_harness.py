"""What every kernel is held to, said once: its twin's result, whatever was in memory before, from inputs that lie
inside longer rows, with no row's NaN in another row, and with the same bits in a second run.

A kernel's test names its inputs, its sizes, and what its tolerance comes from (`rounding`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

# Triton's interpreter multiplies bfloat16 as if it were integers. Products are tested in it on a GPU alone.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DTYPES = torch.float32, torch.float16, torch.bfloat16
_MARGIN = 8, 16  # numbers beside a row; with the first, rows begin at multiples of 16 bytes


def rounding(dtype: torch.dtype, roundings: float = 1, length: int = 1, terms: float = 1.0) -> dict[str, float]:
    """rtol and atol of a result.

    Args:
        roundings: how often a number on the way to it is rounded to dtype, each time to one of its two neighbours: the
            hardware rounds to the nearest, and Triton's interpreter cuts off.
        length: of the sums in float32 whose order the kernel is free to choose. A sum of n numbers is off by about the
            root of n halves of an epsilon, and the largest of some thousand sums by four times that. Few operations and
            elementary functions, which a GPU approximates, are off by less than 8 epsilons.
        terms: the size of the terms that may cancel in a result; 0 if it is a product, whose error is a part of it.
    """
    info, eps = torch.finfo(dtype), torch.finfo(torch.float32).eps
    off = roundings * info.eps + (8 + 2 * length**0.5) * eps
    return {"rtol": off, "atol": off * terms + roundings * info.eps * info.smallest_normal}


def nightly(*cases: Any) -> list:
    """Cases of `parametrize` that the default run leaves out: tuples, or the values of a single name."""
    marks = pytest.mark.nightly
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]


def launch_everywhere(monkeypatch: pytest.MonkeyPatch, *candidates: ModuleType) -> None:
    """These candidates' kernels are launched for CPU tensors too: Triton's interpreter runs them."""
    if torch.cuda.is_available():
        pytest.skip("the kernels would be compiled for a GPU")
    for module in candidates:
        monkeypatch.setattr(module, "use_kernels", lambda x: True)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer: an output that is not written can't pass for an older one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same rows inside longer ones, between NaN."""
    before, after = _MARGIN
    wide = x.new_full((*x.shape[:-1], before + x.shape[-1] + after), float("nan"))
    part = wide[..., before : before + x.shape[-1]]
    part.copy_(x)
    return part


def assert_untouched_around(part: torch.Tensor) -> None:
    """What `apart` has put around the rows is still there."""
    wide, before = part._base, _MARGIN[0]
    assert wide is not None
    assert wide[..., :before].isnan().all(), "it wrote before its rows"
    assert wide[..., before + part.shape[-1] :].isnan().all(), "it wrote behind its rows"


def _run(function: Callable, args: Sequence[Any], rows: Sequence[int], written: Sequence[int]) -> list[torch.Tensor]:
    """What a call returns, and then what it writes. It has copies of the rows, `apart`."""
    own = [apart(x) if i in (*rows, *written) and x is not None else x for i, x in enumerate(args)]
    with poisoned_memory():
        found = function(*own)
    for i in (*rows, *written):
        if args[i] is not None:
            assert_untouched_around(own[i])
            assert i in written or torch.equal(own[i].nan_to_num(), args[i].nan_to_num()), "it wrote to its input"
    outputs = [found] if isinstance(found, torch.Tensor) else list(found or ())
    return [*(x for x in outputs if not any(x is own[i] for i in written)), *(own[i] for i in written)]


def hold(
    kernel: Callable,
    twin: Callable,
    args: Sequence[Any],
    *,
    close: dict[str, float] | float,
    rows: Sequence[int] = (0,),
    written: Sequence[int] = (),
    keeps_nan: bool = True,
) -> list[torch.Tensor]:
    """Hold a kernel to its twin. Both take `args`. Returns the kernel's results: what it returns, then what it writes.

    Args:
        close: of its results and the twin's: from `rounding`; or how far apart they may be, relative to their norm.
        rows: the places in args of inputs with a row for each token.
        written: the places of those that are written in place.
        keeps_nan: whether a row of NaN must give one.
    """
    found, expected = (_run(function, args, rows, written) for function in (kernel, twin))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        if isinstance(close, float):
            assert (one.float() - other.float()).norm() <= close * other.float().norm()
        else:
            torch.testing.assert_close(one, other, **close)
    spoilt, num_rows = list(args), len(args[(*rows, *written)[0]])
    bad = num_rows // 2
    others = [row for row in range(num_rows) if row != bad]
    if others:  # Otherwise the second run is of the same numbers.
        for i in {*rows, *written}:
            if args[i] is not None:
                spoilt[i] = args[i].clone()
                spoilt[i][bad] = float("nan")
    for one, again in zip(found, _run(kernel, spoilt, rows, written), strict=True):
        assert torch.equal(one[others], again[others]) if others else torch.equal(one, again), "other bits"
        assert not (others and keeps_nan) or again[bad].isnan().all(), "NaN has become a number"
    return found


def assert_added_and_normed(total: torch.Tensor, norm: torch.Tensor, expected_total, expected_norm) -> None:
    """A sum in 16 bits and its norm. The sum is exact: the same numbers are rounded once, but for Triton's interpreter,
    which cuts bfloat16 off."""
    is_cut_off = not total.is_cuda and total.dtype == torch.bfloat16
    torch.testing.assert_close(
        total, expected_total, **(rounding(total.dtype) if is_cut_off else {"rtol": 0, "atol": 0})
    )
    torch.testing.assert_close(norm, expected_norm, **rounding(norm.dtype, 2, total.shape[-1]))


def assert_refused(call: Callable, given: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Each wrong argument alone is a ValueError that begins with its name. Values may be lists of wrong ones."""
    for name, values in wrong.items():
        for value in values if isinstance(values, list) else [values]:
            with pytest.raises(ValueError, match=rf"^{name} must"):
                call(**given | {name: value})
