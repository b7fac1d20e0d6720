"""quack-kernels' `gemm_act` for dependent launches: the next kernel may start when a product starts.

The package's own products let the next kernel start only when they end. Each kernel then waits for a launch, which
costs about 5 % of a small model's layer. Starting it early is safe under the rule of `kernels.dependent_launch`, which
the products follow: they wait before they load, and everything else they do depends on what they have loaded.

This uses the package's own interface for extensions, `quack.epilogue`: an operation of a product's last step is called
when the kernel starts. Importing this module needs the package.
"""

import cutlass
import cutlass.cute as cute
from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack
from quack.epilogue.ops import EpiOp, TileStore
from torch import Tensor


class _LetIn(EpiOp):
    """Lets the next kernel start when this kernel's shared memory is handed out. Its argument carries no value and is
    not passed to the compiled kernel."""

    def host_arg_key(self, value):
        return value

    def host_fake_arg(self, key, fctx):
        return key

    def host_call_arg(self, value, key):
        return None

    def arg_spec_type(self, const=False):
        return cutlass.Constexpr[int]

    def param_fields(self):
        return [(self.name, object, None)]

    def to_params(self, gemm, args):
        return {self.name: getattr(args, self.name)}

    def get_smem_tensor(self, gemm, params, storage_epi):
        # Called once by every thread, before anything is loaded.
        cute.arch.griddepcontrol_launch_dependents()
        return None


@gemm_epilogue(extra_ops=(_LetIn("let_in"),))
def _linear(acc):
    return {"D": acc}


@gemm_epilogue(outputs=(TileStore("out", gated=True),), mode="acc_pair", extra_ops=(_LetIn("let_in"),))
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
    """The part of `quack.gemm_interface.gemm_act` that `Quack` uses: `A B`, `swiglu(A B)`, or `C += A B`.

    Stores add to C in L2, so nothing waits until C is loaded. The sum is therefore rounded twice, the product and then
    the sum, while the package's function rounds once.

    Args:
        A: `[M, K]`, bfloat16 or float16, rows packed.
        B: `[K, N]` of A's dtype, columns packed: a weight's transpose.
        C: None, or, without an activation, postact_out itself.
        activation: "swiglu" (Shazeer 2020) or None.
        postact_out: `[M, N]`, with "swiglu" `[M, N / 2]`: the result.
        store_preact: False.
        tuned: as in the package.
        config: a quack `GemmConfig`.
        concat_layout: ("B",) if B has all columns of the gate before those of the up.
    """
    options = {"tuned": tuned, "config": config, "concat_layout": concat_layout, "let_in": 1}
    if activation == "swiglu":
        _linear_swiglu(A, B, out={"out": postact_out}, store_d=store_preact, **options)
    else:
        _linear(A, B, out={"D": postact_out}, add_to_output=C is not None, **options)
