"""A rank's model, and what goes with it, before there are weights or a KV cache."""

import logging
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from nanovllm.config import Config
from nanovllm.engine.deterministic import check_layers
from nanovllm.engine.features.columns import AttentionColumns, Columns
from nanovllm.engine.features.images.image_columns import ImageColumns
from nanovllm.engine.features.states.state_columns import StateColumns
from nanovllm.engine.features.windows.window_columns import WindowColumns
from nanovllm.engine.inputs import DecodeInputs
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape, StepSizes
from nanovllm.layers.backends.choice import select_backend, select_deterministic_backend
from nanovllm.layers.backends.fixed_order_images import fixed_order_images
from nanovllm.layers.backends.image_attention import ImageAttention
from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.fixed_order import FixedOrder
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidates import Quack, make_candidates
from nanovllm.layers.matmul.candidates.fixed_order import make_fixed_order_candidates
from nanovllm.layers.matmul.candidates.fixed_order_gpu import make_fixed_order_candidates_of_gpu
from nanovllm.layers.matmul.candidates.quack import load_quack
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.step_rows import mixed_step_rows
from nanovllm.layers.matmul.table import Key, Table, load_table
from nanovllm.layers.parallel.tensor_parallel import RankOrderParallel, TensorParallel
from nanovllm.layers.sampler import NoSampler, Sampler
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.layers.stores.store import Store
from nanovllm.layers.stores.windowed_kv_cache import WindowedKVCache
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.layer_facts import gate_up_weight, num_layer_params
from nanovllm.models.make_model import make_model, make_plain_model
from nanovllm.models.model_size import attention_shapes, store_limits
from nanovllm.models.plain import PlainQwen3
from nanovllm.models.seeing_decoder import SeeingDecoder
from nanovllm.utils.threads import threads_per_rank

logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What a ModelRunner computes steps with.

    Attributes:
        model: its weights are not filled yet.
        backend: of attention in the layers of kv_store; attention_shape: of that in the rank's first layers.
        has_graphs: whether decode steps are captured in CUDA graphs.
        quack: quack-kernels, if they are used.
        num_layer_params: parameters of a layer on this rank, of experts only those that a token uses.
        stores: what sequences keep on the device; one of them is `kv_store`, that of the layers which keep all tokens
            if there are some. Nothing is allocated yet.
        mixed_step_rows: most tokens of a mixed step; 0 for no mixed steps.
        decode_inputs: of decode and mixed steps.
        sampler: of the logits that the model gives on this rank.
    """

    model: DecoderForCausalLM | PlainQwen3
    backend: AttentionBackend
    attention_shape: AttentionShape
    has_graphs: bool
    quack: Quack | None
    num_layer_params: int
    stores: list[Store]
    kv_store: PagedKVCache
    mixed_step_rows: int
    decode_inputs: DecodeInputs
    sampler: Sampler | NoSampler


def build_model(config: Config, tp: TensorParallel, device: torch.device) -> Parts:
    if config.deterministic:
        tp = RankOrderParallel(**vars(tp))
    table = load_table(device)  # First, because a user's table may be broken.
    shapes = attention_shapes(config, tp, device)
    backend = choose_backend(config, shapes)
    generates = config.task == "generate"
    has_graphs = generates and config.device == "cuda" and not config.enforce_eager and backend.supports_cuda_graphs
    # With two GPUs it gained nothing.
    uses_quack = tp.size == 1 and not config.plain and not config.deterministic
    quack = load_quack(config.dtype, device, decodes=has_graphs) if uses_quack else None
    model: DecoderForCausalLM | PlainQwen3
    if config.plain:
        model = make_plain_model(config.hf_config, config.dtype, device, config.max_model_len, backend, tp)
        num_params = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    else:
        matmul = make_matmul(config, table, device, quack)
        with weight_format(config.weight_format, unquantized_format(config)):
            args = config.max_model_len, backend, tp, matmul
            model = make_model(config.hf_config, config.dtype, device, *args)
        if config.deterministic:
            check_layers(model, matmul)
        num_params = num_layer_params(model)
    if config.weight_format is not None:
        logger.info("weights of linear layers: %s", config.weight_format.name)
    stores: list[Store] = model.make_stores(shapes[0], config.state_dtype, store_limits(config))
    kv_stores = [store for store in stores if isinstance(store, PagedKVCache)]
    sampler: Sampler | NoSampler = Sampler()
    has_cells, num_mixed_rows = any(store.bytes_per_cell for store in stores), 0
    if not isinstance(model, PlainQwen3):
        if generates:
            num_mixed_rows = choose_mixed_step_rows(config, has_graphs, has_cells, gate_up_weight(model), table)
        head = model.lm_head
        if generates and head is not None:
            sampler = Sampler(tp, head.vocab_start_idx, head.num_embeddings_per_partition)
        else:
            sampler = NoSampler()
    max_model_len = cast(int, config.max_model_len)  # The checks made it a number.
    group_rows = 1 + config.max_speculative_tokens if config.speculation else 1
    max_rows = max(config.max_decode_rows, num_mixed_rows)
    sizes = StepSizes(config.max_num_batched_tokens, max_model_len, max_rows, num_params, group_rows)
    backends = [backend] if len(kv_stores) == 1 else [choose_backend(config, store.shapes) for store in kv_stores]
    max_blocks = -(-max_model_len // config.kvcache_block_size)
    columns: list[Columns] = []
    for store, of_store in zip(kv_stores, backends, strict=True):
        store.use_backend(of_store)
        for shape, windows in store.windows.items():
            of_store.prepare(shape, windows, sizes, table)
        is_windowed = isinstance(store, WindowedKVCache)
        sizes_of_tables = max_blocks, config.kvcache_block_size
        columns.append(WindowColumns(of_store, *sizes_of_tables) if is_windowed else AttentionColumns(of_store))
    if has_cells:
        columns.append(StateColumns(has_proposals=bool(config.speculation)))
    if isinstance(model, SeeingDecoder) and model.vision_spec is not None:
        columns.append(ImageColumns(model, config.dtype, device, max_model_len, config.deterministic))
        model.see_both_ways(fixed_order_images if config.deterministic else ImageAttention)
    columns += config.features
    sizes_of_inputs = config.max_decode_rows, max_blocks, config.kvcache_block_size
    decode_inputs = DecodeInputs(*sizes_of_inputs, device, columns, num_mixed_rows)
    of_attention = backends[0], kv_stores[0].shapes[0], has_graphs
    return Parts(model, *of_attention, quack, num_params, stores, kv_stores[0], num_mixed_rows, decode_inputs, sampler)


def check_backend(config: Config) -> None:
    """Raises ValueError, with the reason, if the attention back end that is asked for cannot run here."""
    tp = TensorParallel(0, config.tensor_parallel_size)
    choose_backend(config, attention_shapes(config, tp, torch.device(config.device)))


def choose_backend(config: Config, shapes: Sequence[AttentionShape]) -> AttentionBackend:
    """shapes: of the layers that it serves, in any number."""
    shapes = list(dict.fromkeys(shapes))
    if config.deterministic:
        return select_deterministic_backend(*shapes)
    return select_backend(config.attention_backend, *shapes)


def unquantized_format(config: Config) -> Unquantized:
    """Of layers whose weights are not quantized, when they are made."""
    return FixedOrder(threads_per_rank(config.tensor_parallel_size)) if config.deterministic else Unquantized()


def make_matmul(config: Config, table: Table, device: torch.device, quack: Quack | None) -> Matmul:
    """What computes the layers' products. quack: None without quack-kernels."""
    what_to_tune = f"{config.model} --quantization {config.quantization}" if config.quantization else config.model
    if not config.deterministic:
        candidates = make_candidates(device, quack)
    elif device.type == "cpu":
        candidates = make_fixed_order_candidates(threads_per_rank(config.tensor_parallel_size))
    else:
        candidates = make_fixed_order_candidates_of_gpu(device)
    return Matmul(table, candidates, what_to_tune)


def choose_mixed_step_rows(config: Config, has_graphs: bool, has_cells: bool, gate_up: Weight, table: Table) -> int:
    """config.mixed_step_rows; if that is None, the table's number for the model's shape. 0 for no mixed steps. A mixed
    step has at least two sequences. has_cells: whether a sequence keeps more than keys and values."""
    num_rows = config.mixed_step_rows
    if num_rows is None:
        # A state goes through a prompt in a mixed step token by token, where a prefill has products of 64 tokens.
        is_measured = has_graphs and not has_cells and config.tensor_parallel_size == 1
        key = Key.of("linear", False, gate_up)._replace(format=gate_up.format.settings_name(gate_up.dtype))
        measured = mixed_step_rows(table, key) if is_measured else 0
        num_rows = min(measured, config.max_num_batched_tokens)
    return num_rows if min(num_rows, config.max_num_seqs) > 1 else 0
