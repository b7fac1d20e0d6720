"""quack-kernels' `gemm_act` for launches that depend on each other: the next kernel is let in when a product begins.

The package's own products let it in when they have ended, and then a launch and the beginning of a kernel are in the
way of every one that follows: at 128 sequences 1.2 of the 25 us that a layer of Qwen3-0.6B takes without its attention,
at 256 1.9 of 31. Letting it in early is safe under the rule of `kernels.dependent_launch`, which the products follow:
they wait before they load, what they do afterwards follows from what they have loaded, and they end after that.

By what the package means for others to extend (`quack.epilogue`): an operation of a product's last step is told when
the kernel begins. Importing this takes the package.
"""

import cutlass
import cutlass.cute as cute
from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack
from quack.epilogue.ops import EpiOp, TileStore
from torch import Tensor


class _LetIn(EpiOp):
    """Lets the next kernel in where this one's shared memory is handed out. Its argument says nothing but that it is
    there, and is no argument of the compiled kernel."""

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
        # Asked for once, by every thread, before anything is loaded.
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
    """What `quack.gemm_interface.gemm_act` does, as far as `Quack` asks for it: `A B`, `swiglu(A B)`, or `C += A B`.

    The sum is made in L2, by the stores themselves: nothing waits for C to be loaded. So it is rounded twice, the
    product and then the sum, where the package's function rounds once.

    Args:
        A: `[M, K]`, bfloat16 or float16, rows packed.
        B: `[K, N]` of A's dtype, columns packed: a weight's transpose.
        C: None, or, without an activation, postact_out itself.
        activation: "swiglu" (Shazeer 2020) or None.
        postact_out: `[M, N]`, with "swiglu" `[M, N / 2]`: becomes the result.
        store_preact: False.
        tuned: as the package has it.
        config: a quack `GemmConfig`, known by its identity.
        concat_layout: ("B",) where B is the gate's columns and then the up's, not each pair side by side.

    Raises whatever the package does.
    """
    options = {"tuned": tuned, "config": config, "concat_layout": concat_layout, "let_in": 1}
    if activation == "swiglu":
        _linear_swiglu(A, B, out={"out": postact_out}, store_d=store_preact, **options)
    else:
        _linear(A, B, out={"D": postact_out}, add_to_output=C is not None, **options)
