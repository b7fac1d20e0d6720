"""quack-kernels' `gemm_act` for launches that depend on each other: the next kernel is let in when a product begins.

The package's own products let it in when they have ended, and then a launch and the beginning of a kernel are in the
way of every one that follows: at 128 sequences 1.2 of the 25 us that a layer of Qwen3-0.6B takes without its attention,
at 256 1.9 of 31. Letting it in early is safe under the rule of `kernels.dependent_launch`, which the products follow:
they wait before they load, what they do afterwards follows from what they have loaded, and they end after that.

By what the package means for others to extend (`quack.epilogue`): an output's operation is told when the kernel begins.
Importing this takes the package.
"""

import cutlass.cute as cute
from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack
from quack.epilogue.ops import TileStore
from torch import Tensor


class _EarlyStore(TileStore):
    """Stores the result, and lets the next kernel in where its shared memory is handed out."""

    def get_smem_tensor(self, gemm, params, storage_epi):
        # Asked for once, by every thread, before anything is loaded.
        cute.arch.griddepcontrol_launch_dependents()
        return super().get_smem_tensor(gemm, params, storage_epi)


@gemm_epilogue(outputs=(_EarlyStore("out"),))
def _linear(acc):
    return {"out": acc}


@gemm_epilogue(outputs=(_EarlyStore("out"),))
def _linear_add(acc, c):
    return {"out": acc + c}


@gemm_epilogue(outputs=(_EarlyStore("out", gated=True),), mode="acc_pair")
def _linear_swiglu(acc):
    gate, up = unpack(acc)
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
) -> None:
    """`quack.gemm_interface.gemm_act`, as far as `Quack` asks for it: `A B + C`, or `swiglu(A B)`, in float32.

    Args:
        A: `[M, K]`, bfloat16 or float16, rows packed.
        B: `[K, N]` of A's dtype, columns packed: a weight's transpose.
        C: `[M, N]`, without an activation; None adds nothing. postact_out may be the same.
        activation: "swiglu" (Shazeer 2020) or None.
        postact_out: `[M, N]`, with "swiglu" `[M, N / 2]`: becomes the result, rounded once.
        store_preact, tuned: as the package has them.
        config: a quack `GemmConfig`, known by its identity.
        concat_layout: ("B",) where B is the gate's columns and then the up's, not each pair side by side.

    Raises whatever the package does.
    """
    mod = _linear_swiglu if activation == "swiglu" else _linear if C is None else _linear_add
    options = {"tuned": tuned, "config": config, "concat_layout": concat_layout}
    mod(A, B, C, out={"out": postact_out}, store_d=store_preact, **options)
