"""quack-kernels' products in the forms that `Quack` needs, by the package's own interface for the last step of a
product, `quack.epilogue`. Importing this module needs the package.

Products of e4m3 numbers have the scales of rows and columns in the last step, in float32.
"""

from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack
from quack.epilogue.ops import ColVecLoad, RowVecLoad, TileStore
from torch import Tensor


@gemm_epilogue()
def _linear(acc):
    return {"D": acc}


@gemm_epilogue(outputs=(TileStore("out", gated=True),), mode="acc_pair")
def _linear_swiglu(acc):
    gate, up = unpack(acc)
    return {"out": swiglu(gate, up)}


# Without these the package tells rows from columns by their lengths, which may be equal.
_SCALES = {"x_scale": ColVecLoad("x_scale"), "weight_scale": RowVecLoad("weight_scale")}


@gemm_epilogue(ops=_SCALES)
def _scaled(acc, x_scale, weight_scale):
    return {"D": acc * (x_scale * weight_scale)}


@gemm_epilogue(outputs=(TileStore("out", gated=True),), mode="acc_pair", ops=_SCALES)
def _scaled_swiglu(acc, x_scale, weight_scale):
    gate, up = unpack(acc * weight_scale * x_scale)
    return {"out": swiglu(gate, up)}


def gemm_act(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    *,
    activation: str | None = None,
    postact_out: Tensor,
    store_preact: bool,
    tuned: bool,
    config,
    concat_layout: tuple[str, ...] | None = None,
    cu_seqlens_m: Tensor | None = None,
    A_idx: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The part of `quack.gemm_interface.gemm_act` that `Quack` uses: `A B`, `swiglu(A B)`, or `C += A B`.

    Stores add to C in L2, so nothing waits until C is loaded. The sum is therefore rounded twice, the product and then
    the sum, while the package's function rounds once.

    Args:
        A: `[M, K]`, bfloat16, float16 or e4m3, rows packed.
        B: `[K, N]` of A's dtype, columns packed: a weight's transpose. With cu_seqlens_m `[num_groups, K, N]`.
        C: None, or, without an activation, postact_out itself.
        activation: "swiglu" (Shazeer 2020) or None.
        postact_out: `[M, N]`, with "swiglu" `[M, N / 2]`: becomes the result.
        config: a quack `GemmConfig`, known by its identity.
        concat_layout: ("B",) where B is the gate's columns and then the up's, not each pair side by side.
        cu_seqlens_m: int32 `[num_groups + 1]`, where the rows of each group begin and the last ones end, if each group
            has a B of its own. Nothing is added to C then. May be read before the wait.
        A_idx: int32 `[M]`, the rows of A to multiply; with cu_seqlens_m only. None: all in their order.
        scales: of e4m3 numbers: float32, of the rows `[M, 1]` and of B's columns `[N, 1]` or `[num_groups, N, 1]`.
    """
    groups = {"cu_seqlens_m": cu_seqlens_m, "A_idx": A_idx}
    if scales is not None:
        has_swiglu, adds = activation == "swiglu", C is not None
        _multiply_scaled(A, B, *scales, postact_out, config, groups, has_swiglu=has_swiglu, adds=adds)
        return
    options = {"tuned": tuned, "config": config, "concat_layout": concat_layout, **groups}
    if activation == "swiglu":
        _linear_swiglu(A, B, out={"out": postact_out}, store_d=store_preact, **options)
    else:
        _linear(A, B, out={"D": postact_out}, add_to_output=C is not None, **options)


def _multiply_scaled(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    out: Tensor,
    config,
    groups: dict[str, Tensor | None],
    *,
    has_swiglu: bool,
    adds: bool,
) -> None:
    operands = {"x_scale": A_scale.view(-1), "weight_scale": B_scale.view(-1, B_scale.shape[-2])}
    options = {"tile_M": config.tile_m, "tile_N": config.tile_n, "pingpong": config.pingpong}
    options |= {"cluster_M": config.cluster_m, "cluster_N": config.cluster_n, "add_to_output": adds, **groups}
    # Otherwise the package adds the tensor cores' sums to others in float32 after every 128 columns of K. That takes
    # twice the registers, and the tensor cores wait for it.
    options["post_init_attrs"] = (("fp8_slow_accum", False),)
    if has_swiglu:
        concat_layout = ("B", "weight_scale")
        _scaled_swiglu.gemm(A, B.mT, None, epi_args=operands | {"out": out}, concat_layout=concat_layout, **options)
    else:
        _scaled.gemm(A, B.mT, out, epi_args=operands, **options)
