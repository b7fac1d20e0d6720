"""The first part of a ModelRunner's start: the model with its weights, and every kernel that it will launch."""

import logging
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.runner.inputs import DecodeInputs
from nanovllm.engine.runner.startup.kernel_compilation import compiling_kernels
from nanovllm.engine.runner.startup.package_kernels import PackageKernels
from nanovllm.layers.attention.attention import AttentionBackend, AttentionShape, StepSizes
from nanovllm.layers.attention.backends import select_backend
from nanovllm.layers.attention.gpu_backend import GpuBackend
from nanovllm.layers.experts.expert_candidates import expert_candidates
from nanovllm.layers.formats.quantization import Weight, weight_format
from nanovllm.layers.matmul.kernel_matmul import our_candidates
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.quack import Quack, load_quack
from nanovllm.layers.matmul.step_rows import mixed_step_rows, padded_rows
from nanovllm.layers.matmul.table import Table, load_table
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.sampling.sampler import Sampler
from nanovllm.models.hf_config import get_head_dim
from nanovllm.models.layer_facts import gate_up_weight, num_layer_params
from nanovllm.models.make_model import make_model
from nanovllm.utils.progress import StartProgress

logger = logging.getLogger(__name__)


def choose_backend(config: Config, shape: AttentionShape) -> tuple[AttentionBackend, bool]:
    """The attention back end, and whether steps are captured in CUDA graphs."""
    backend = select_backend(config.attention_backend, shape)
    return backend, config.device == "cuda" and not config.enforce_eager and backend.supports_cuda_graphs


def check_backend(config: Config) -> None:
    """Raises ValueError, with the reason, if the attention back end that is asked for cannot run here."""
    tp = TensorParallel(0, config.tensor_parallel_size)
    select_backend(config.attention_backend, attention_shape(config, tp, torch.device(config.device)))


def attention_shape(config: Config, tp: TensorParallel, device: torch.device) -> AttentionShape:
    """Of this rank's attention."""
    num_heads = tp.shard(config.hf_config.num_attention_heads, "num_attention_heads")
    _, num_kv_heads = tp.shard_kv_heads(config.hf_config.num_key_value_heads)
    sizes = num_heads, num_kv_heads, get_head_dim(config.hf_config), config.kvcache_block_size
    return AttentionShape(*sizes, config.dtype, device, config.kv_cache_dtype)


def build_model(runner: Any, backend: AttentionBackend, has_graphs: bool, shape: AttentionShape) -> Quack | None:
    """Give a ModelRunner its model, without weights, and what goes with it. Prepares the back end for the model too.
    Returns quack-kernels, or None if that is not used. shape: `attention_shape`."""
    config, tp, device = runner.config, runner.tp, runner.device
    table = load_table(device)  # First, because a user's table may be broken.
    with weight_format(config.weight_format):
        model: Any = make_model(config.hf_config, config.dtype, device, config.max_model_len, backend, tp)
    runner.model = model
    if config.weight_format is not None:
        logger.info("weights of linear layers: %s", config.weight_format.table_name)
    runner.num_kv_heads, runner.num_layer_params = shape.num_kv_heads, num_layer_params(model)
    if shape.is_fp8_cache:
        sizes = len(model.model.layers), 2, shape.num_kv_heads
        runner.kv_scales = torch.ones(*sizes, dtype=torch.float32, device=device)
    runner.sampler = Sampler(tp, model.lm_head.first, model.lm_head.shard_size)
    # With two GPUs it gained nothing.
    quack = load_quack(config.dtype, device, decodes=has_graphs) if tp.size == 1 else None
    candidates = [*our_candidates(device), *expert_candidates(device, quack), *([] if quack is None else [quack])]
    what_to_tune = f"{config.model} --quantization {config.quantization}" if config.quantization else config.model
    model.use_matmul(Matmul(table, candidates, what_to_tune))
    runner.mixed_step_rows = choose_mixed_step_rows(config, has_graphs, gate_up_weight(model), table)
    padded = padded_batches(model, table, config.max_num_seqs)
    limits = config.max_num_batched_tokens, config.max_model_len
    max_rows = max(padded[-1], runner.mixed_step_rows)
    windows = list(dict.fromkeys(layer.self_attn.attn.window for layer in model.model.layers))
    backend.prepare(shape, windows, StepSizes(*limits, max_rows, runner.num_layer_params), table)
    runner.decode_inputs = DecodeInputs(
        config.max_num_seqs,
        -(-config.max_model_len // config.kvcache_block_size),
        config.kvcache_block_size,
        device,
        backend,
        padded,
        runner.mixed_step_rows,
    )
    return quack


def load_and_compile(
    runner: Any,
    backend: AttentionBackend,
    has_graphs: bool,
    shape: AttentionShape,
    packages: PackageKernels,
    progress: StartProgress,
) -> None:
    """`build_model`, then load the weights. Every kernel that the ModelRunner will launch compiles meanwhile."""
    quack = build_model(runner, backend, has_graphs, shape)
    progress.tell("compiling kernels")
    with compiling_kernels(runner, progress.count("compiling kernels")):
        packages.compile(quack, backend.flash_attn4 if isinstance(backend, GpuBackend) else None, shape)
        progress.tell("loading weights")
        runner.load_weights()
    packages.load(runner.tp, progress.count("compiling kernels of packages"))
    if quack is not None and not quack.works:  # because steps were padded for it
        table = load_table(runner.device)
        runner.decode_inputs.padded = padded_batches(runner.model, table, runner.config.max_num_seqs)


def choose_mixed_step_rows(config: Config, has_graphs: bool, gate_up: Weight, table: Table) -> int:
    """config.mixed_step_rows; if that is None, the table's number for the model's shape. 0 for no mixed steps. A mixed
    step has at least two sequences."""
    num_rows = config.mixed_step_rows
    if num_rows is None:
        is_measured = has_graphs and config.tensor_parallel_size == 1
        num_rows = min(mixed_step_rows(table, gate_up) if is_measured else 0, config.max_num_batched_tokens)
    return num_rows if min(num_rows, config.max_num_seqs) > 1 else 0


def padded_batches(model: Any, table: Table, max_num_seqs: int) -> list[int]:
    """The rows of a decode step, padding included, for each number of sequences, 0 to max_num_seqs."""
    gate_up = gate_up_weight(model)
    return [padded_rows(table, gate_up, n, model.matmul.serves) for n in range(max_num_seqs + 1)]
