"""What a model takes of memory, and whether it can be divided, from its shapes alone: nothing is allocated, and no file
is read."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.stores.store import Store, StoreLimits
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import get_head_dim
from nanovllm.models.make_model import make_model
from nanovllm.models.registry import find_vision, model_class
from nanovllm.models.spec import LayerHeads
from nanovllm.utils.units import GIB

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from nanovllm.models.loader import LoadedModel


class ModelOptions(Protocol):
    """What is read of a `Config`."""

    model: str
    hf_config: "PreTrainedConfig"
    device: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    kv_cache_dtype: torch.dtype | None
    weight_format: WeightFormat | None
    tensor_parallel_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kvcache_block_size: int


class ModelBytes(NamedTuple):
    """Bytes on one rank.

    Attributes:
        weights: all parameters and their scales, in the dtypes that they have in memory.
        tables: RoPE's, for max_model_len positions.
        stores: what sequences keep, which says what it takes.
    """

    weights: int
    tables: int
    stores: list[Store]

    @property
    def per_block(self) -> int:
        """What all stores take of a block of tokens that has given nothing back."""
        return sum(store.bytes_per_block for store in self.stores)


def make_meta_model(
    hf_config: "PreTrainedConfig",
    dtype: torch.dtype,
    format: WeightFormat | None = None,
    tp: TensorParallel | None = None,
    max_position: int = 1,
) -> DecoderForCausalLM:
    """A model on the meta device. format: of its weights; None: unquantized. Raises ValueError, naming a number of
    config.json, if the ranks cannot share its layers, or the format cannot store a rank's weights."""
    args = max_position, TorchBackend(), tp or TensorParallel(), Matmul()
    with weight_format(format):
        return make_model(hf_config, dtype, torch.device("meta"), *args)


def check_layers(config: ModelOptions) -> None:
    """Raises ValueError, as `make_meta_model` does, if the layers of a `Config` cannot be made."""
    format = config.weight_format
    if format is None and config.tensor_parallel_size == 1:
        return
    model = meta_model(config)
    if format is not None and not any(getattr(each, "format", None) == format for each in model.modules()):
        raise ValueError(
            f"quantization_config with quant_method {format.name!r}: is of experts alone, and this model has none; use "
            "the unquantized checkpoint"
        )


def meta_model(config: ModelOptions, rank: int = 0) -> DecoderForCausalLM:
    """The model of an engine with this `Config`, as a rank has it, on the meta device. Raises MemoryError
    for a tensor of 2**63 bytes or more, which torch cannot describe."""
    tp = TensorParallel(rank, config.tensor_parallel_size)
    try:
        # Before the limits are resolved, its length may be missing.
        return make_meta_model(config.hf_config, config.dtype, config.weight_format, tp, config.max_model_len or 1)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        c = config.hf_config
        raise MemoryError(
            f"model={config.model!r}: one of its weights takes more than {2**63 // GIB} GiB: config.json has "
            f"hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}, vocab_size={c.vocab_size}"
        ) from error


def model_bytes(config: ModelOptions, model: "LoadedModel") -> ModelBytes:
    """Counts the bytes of a rank's model, which may be a `meta_model`, in an engine with this `Config`."""
    tp = TensorParallel(0, config.tensor_parallel_size)
    shape, limits = attention_shapes(config, tp, torch.device("meta"))[0], store_limits(config)
    weights, tables = (sum(tensor.nbytes for tensor in each) for each in (model.parameters(), model.buffers()))
    return ModelBytes(weights, tables, model.make_stores(shape, config.state_dtype, limits))


def store_limits(config: ModelOptions) -> StoreLimits:
    max_model_len, vision = config.max_model_len or 1, find_vision(config.hf_config)
    whole_tokens = vision.limits(max_model_len)[0] if vision is not None and vision.is_bidirectional else 0
    return StoreLimits(max_model_len, config.max_num_seqs, config.max_num_batched_tokens, whole_tokens)


def packed_head_bytes(config: ModelOptions, model: "LoadedModel") -> int:
    """What a rank on a CPU holds beside `model_bytes`: of a head that is tied to the embedding, a packed copy
    (`layers.formats.packed`)."""
    head = model.lm_head
    return head.weight.nbytes if head is not None and config.hf_config.tie_word_embeddings else 0


def attention_shapes(config: ModelOptions, tp: TensorParallel, device: torch.device) -> list[AttentionShape]:
    """The shapes that the layers of a rank's attention have in an engine with this `Config`."""
    c = config.hf_config
    spec = model_class(c).spec(c)
    heads = spec.heads or [LayerHeads(c.num_key_value_heads, get_head_dim(c))]
    num_heads = tp.shard(c.num_attention_heads, "num_attention_heads")
    common = config.kvcache_block_size, config.dtype, device, config.kv_cache_dtype
    shapes = (AttentionShape(num_heads, tp.shard_kv_heads(x.num_kv_heads)[1], x.head_dim, *common) for x in heads)
    return list(dict.fromkeys(shapes))
