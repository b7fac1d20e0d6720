"""`nanovllm fit MODEL`: does a model fit a GPU? From its shapes alone: no weights are read, and no GPU is needed."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from nanovllm.config import Config
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.formats.parameters import stored
from nanovllm.layers.stores.store import count_cells
from nanovllm.models.decoder import layer_heads
from nanovllm.models.model_size import GIB, meta_model, model_bytes
from nanovllm.models.registry import model_class

CARDS_GIB = (8, 12, 16, 24, 32, 48, 80, 141)
# What an engine uses beside its model and a step's activations: workspaces of libraries, compiled kernels, CUDA graphs.
_OTHER_BYTES = GIB // 4


class Fit(NamedTuple):
    """What one GPU has room for. Counts are 0 if the model does not fit.

    Attributes:
        memory: bytes of the GPU.
        num_tokens: that the KV cache holds, of all sequences together.
        num_sequences: of max_model_len tokens that run at once.
    """

    memory: int
    num_tokens: int
    num_sequences: int


class Needs(NamedTuple):
    """Bytes on each GPU, for an engine with some `Config`.

    Attributes:
        weights: parameters, scales and RoPE's tables.
        activations: of the largest step; an estimate.
        per_block: of each block of tokens: its keys and values, in all layers.
        per_cell: of each cell of states, one for each running sequence, however long it is.
    """

    weights: int
    activations: int
    per_block: int
    per_cell: int

    def on(self, memory: int, config: Config) -> Fit:
        """What a GPU of this many bytes has room for."""
        room = int(memory * config.gpu_memory_utilization) - self.weights - self.activations - _OTHER_BYTES
        num_cells = count_cells(self.per_cell, config.max_decode_rows, max(0, room))
        num_blocks = max(0, (room - self.per_cell * num_cells) // self.per_block)
        blocks_each = -(-cast(int, config.max_model_len) // config.kvcache_block_size)
        num_seqs = min(num_cells, config.max_num_seqs) if num_cells else config.max_num_seqs
        return Fit(memory, num_blocks * config.kvcache_block_size, min(num_blocks // blocks_each, num_seqs))


def needs(config: Config) -> Needs:
    """Raises MemoryError for a model with a weight of 2**63 bytes or more."""
    model = meta_model(config)
    sizes = model_bytes(config, model)
    c, size = config.hf_config, config.tensor_parallel_size
    # The widest point of a step is an MLP: the residual stream, its norm, gate and up, and their product.
    spec = model_class(c).spec(c)
    of_layers = {layer_heads(c, spec, layer) for layer in range(c.num_hidden_layers)}
    heads = max((c.num_attention_heads + 2 * x.num_kv_heads) * x.head_dim for x in of_layers) // size
    values = 2 * c.hidden_size + max(heads, 3 * c.intermediate_size // size)
    logits = config.max_num_seqs * c.vocab_size // size
    activations = (config.max_num_batched_tokens * values + logits + _largest_packed(model)) * config.dtype.itemsize
    return Needs(sizes.weights + sizes.tables, activations, sizes.per_block, sizes.per_cell)


def _largest_packed(model: Any) -> int:
    """Numbers of the largest weight that is packed: a product of many tokens dequantizes it."""
    found: list[tuple[Any, Any]] = [(each, stored(each)) for each in model.parameters() if each.dtype == torch.uint8]
    return max((its.format.shape_of(each).numel() for each, its in found if not its.is_scale), default=0)


def print_fit(model: str, memory_gib: Sequence[float] = (), **options: Any) -> bool:
    """Print what a model needs, and what GPUs of some sizes have room for.

    Args:
        model, options: as LLM takes them.
        memory_gib: sizes of GPUs; none for this machine's GPU, if it has one, and for common sizes.

    Returns:
        Whether it fits one of them.

    Raises ValueError, TypeError and OSError as LLM, and MemoryError as `needs`.
    """
    # On a CPU, where every format is possible: the GPU asked about is another one.
    options = {"dtype": "auto", **options, "device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    if options["dtype"] == "auto":
        options["dtype"] = "bfloat16"
    config = Config(model, **options)
    needed = needs(config)
    gpus = f"each of {config.tensor_parallel_size} GPUs" if config.tensor_parallel_size > 1 else "the GPU"
    step = f"a step of {config.max_num_batched_tokens} tokens, about"
    length = cast(int, config.max_model_len)
    print(f"{model} on {gpus}:")
    print(f"  weights          {needed.weights / GIB:8.2f} GiB")
    print(f"  activations      {needed.activations / GIB:8.2f} GiB ({step})")
    kv_per_token = needed.per_block / config.kvcache_block_size
    print(f"  KV cache         {kv_per_token / 1024:8.1f} KiB a token, ", end="")
    print(f"{length * kv_per_token / GIB:.2f} GiB for a sequence of {length} tokens")
    if needed.per_cell:
        print(f"  states           {needed.per_cell / GIB:8.3f} GiB a running sequence, and as much a snapshot")
    print(f"\n{'GPU':>26}  {'fits':4}  {'tokens in the KV cache':>22}  {f'sequences of {length} tokens':>24}")
    cards = [(f"{gib:g} GiB", int(gib * GIB)) for gib in memory_gib or CARDS_GIB]
    if torch.cuda.is_available() and not memory_gib:
        gpu = GpuFacts.of(torch.device("cuda", torch.cuda.current_device()))
        cards.insert(0, (gpu.name, gpu.total_memory))
    fits = [(name, needed.on(memory, config)) for name, memory in cards]
    for name, fit in fits:
        counts = f"{fit.num_tokens:>22,}  {fit.num_sequences:>24,}" if fit.num_tokens else ""
        print(f"{name:>26}  {'yes' if fit.num_tokens else 'no':4}  {counts}".rstrip())
    return any(fit.num_tokens for _, fit in fits)
