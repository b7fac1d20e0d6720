"""Which back end computes attention."""

from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape
from nanovllm.layers.backends.fixed_order_torch import FixedOrderTorchBackend
from nanovllm.layers.backends.fixed_order_triton import FixedOrderTritonBackend
from nanovllm.layers.backends.flash_attn_backend import FlashAttnBackend
from nanovllm.layers.backends.several_shapes import SeveralShapes
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.backends.triton_backend import TritonBackend

# "auto" takes the first that can run. Triton's decode is faster than flash-attn 2's for every measured batch.
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonBackend, FlashAttnBackend, TorchBackend)
# Those that `deterministic=True` chooses from: each is batch-invariant.
DETERMINISTIC_BACKENDS: tuple[type[AttentionBackend], ...] = (FixedOrderTritonBackend, FixedOrderTorchBackend)
# Of layers that no engine drives. Triton's decode needs a plan of each step, which costs a copy from the device then.
_BY_HAND: tuple[type[AttentionBackend], ...] = (FlashAttnBackend, TritonBackend, TorchBackend)


def select_backend(name: str, shape: AttentionShape, *others: AttentionShape) -> AttentionBackend:
    """The back end that `attention_backend=name` selects, for a model with these shapes of layers. Raises ValueError,
    with the reason, if it cannot run."""
    if others:
        return SeveralShapes({each: select_backend(name, each) for each in (shape, *others)})
    if name == "auto":
        return next(backend for backend in BACKENDS if backend.obstacle(shape) is None)()
    backend = next(backend for backend in BACKENDS if backend.name == name)
    obstacle = backend.obstacle(shape)
    if obstacle is not None:
        raise ValueError(f"attention_backend={name!r}: {obstacle}")
    return backend()


def select_deterministic_backend(shape: AttentionShape, *others: AttentionShape) -> AttentionBackend:
    """The batch-invariant back end for a model with these shapes of layers. Raises ValueError if none can run."""
    if others:
        return SeveralShapes({each: select_deterministic_backend(each) for each in (shape, *others)})
    obstacles = {each: each.obstacle(shape) for each in DETERMINISTIC_BACKENDS}
    found = next((each for each, obstacle in obstacles.items() if obstacle is None), None)
    if found is None:
        reasons = "; ".join(f"{each.name} {obstacle}" for each, obstacle in obstacles.items())
        raise ValueError(f"deterministic=True: no attention back end keeps its order of sums here: {reasons}")
    return found()


def backend_by_hand(shape: AttentionShape) -> AttentionBackend:
    """The back end of a layer that is used without an engine. Nobody prepares it, and `Context.attention` is None."""
    return next(backend for backend in _BY_HAND if backend.obstacle(shape) is None)()
