"""The first part of a ModelRunner's start: the model with its weights, and every kernel that it will launch."""

import logging
from functools import partial
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.runner.inputs import DecodeInputs
from nanovllm.engine.runner.kernel_compilation import compiling_kernels
from nanovllm.engine.runner.package_kernels import PackageKernels
from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.layers.decode_constants import DecodeConstants
from nanovllm.layers.expert_candidates import expert_candidates
from nanovllm.layers.flash_attn4 import AttentionShape
from nanovllm.layers.kernel_matmul import our_candidates
from nanovllm.layers.matmul import Matmul
from nanovllm.layers.quack import load_quack
from nanovllm.layers.quantization import Weight, weight_format
from nanovllm.layers.sampler import Sampler
from nanovllm.models import make_model
from nanovllm.models.hf_config import get_head_dim
from nanovllm.models.layer_facts import gate_up_weight, num_layer_params
from nanovllm.tuning.table import Key, Table, load_table
from nanovllm.utils.progress import StartProgress

logger = logging.getLogger(__name__)


def set_up_model(runner: Any, backend: AttentionBackend, has_graphs: bool, progress: StartProgress) -> None:
    """Give a ModelRunner its model, with weights, its sampler and its decode_inputs. Kernels compile meanwhile."""
    with PackageKernels(runner.config, runner.tp.rank, runner.device) as packages:
        config, head_dim, tp, device = runner.config, get_head_dim(runner.config.hf_config), runner.tp, runner.device
        with weight_format(config.weight_format):
            model: Any = make_model(config.hf_config, config.dtype, device, config.max_model_len, backend, tp)
        if config.weight_format is not None:
            logger.info("weights of linear layers: %s", config.weight_format.table_name)
        runner.model = model
        _, runner.num_kv_heads = tp.shard_kv_heads(config.hf_config.num_key_value_heads)
        if config.kv_cache_dtype != config.dtype:
            sizes = len(model.model.layers), 2, runner.num_kv_heads
            runner.kv_scales = torch.ones(sizes, dtype=torch.float32, device=device)
        runner.sampler = Sampler(tp, model.lm_head.first, model.lm_head.shard_size)
        num_heads = tp.shard(config.hf_config.num_attention_heads, "num_attention_heads")
        # With two GPUs it gained nothing.
        quack = load_quack(config.dtype, device, decodes=has_graphs) if tp.size == 1 else None
        table = load_table(device)
        candidates = our_candidates(device) + expert_candidates(device) + ([] if quack is None else [quack])
        what_to_tune = f"{config.model} --quantization {config.quantization}" if config.quantization else config.model
        model.use_matmul(Matmul(table, candidates, what_to_tune))
        runner.mixed_step_rows = choose_mixed_step_rows(config, has_graphs, gate_up_weight(model), table)
        runner.num_layer_params = num_layer_params(model)
        constants = DecodeConstants(table)
        _make_decode_inputs(runner, backend, constants)
        shape = AttentionShape(num_heads, runner.num_kv_heads, head_dim, runner.block_size, config.dtype, device)
        backend.prepare(constants, runner.decode_inputs.max_rows, shape)
        backend.use_flash_attn4(
            config.dtype,
            head_dim,
            min_tokens=table.setting("flash_attn4", "min_layer_work") // runner.num_layer_params,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        )
        progress.tell("compiling kernels")
        with compiling_kernels(runner, progress.count("compiling kernels")):
            packages.compile(quack, backend.flash_attn4, shape)
            progress.tell("loading weights")
            runner.load_weights()
        packages.load(tp, progress.count("compiling kernels of packages"))
        if quack is not None and not quack.works:  # because steps were padded for it
            _make_decode_inputs(runner, backend, constants)


def choose_mixed_step_rows(config: Config, has_graphs: bool, gate_up: Weight, table: Table) -> int:
    """config.mixed_step_rows; if that is None, the table's number for the model's shape. 0 for no mixed steps. A mixed
    step has at least two sequences."""
    num_rows = config.mixed_step_rows
    if num_rows is None:
        row = table.find(Key.of("mixed_steps", False, gate_up))
        is_measured = row is not None and has_graphs and config.tensor_parallel_size == 1
        num_rows = max((choice.constants[0] for choice in row[1]), default=0) if is_measured else 0
        num_rows = min(num_rows, config.max_num_batched_tokens)
    return num_rows if min(num_rows, config.max_num_seqs) > 1 else 0


def padded_batch(matmul: Matmul, gate_up: Weight, num_seqs: int) -> int:
    """The number of rows, padding included, at which a decode step of num_seqs is fastest. gate_up: `gate_up_weight` of
    the model."""
    for candidate, (num_rows,) in matmul.choices("padding", gate_up, num_seqs):
        if candidate.serves(gate_up):
            return max(num_rows, num_seqs)
    return num_seqs


def _make_decode_inputs(runner: Any, backend: AttentionBackend, constants: DecodeConstants) -> None:
    config, gate_up = runner.config, gate_up_weight(runner.model)
    max_blocks = -(-config.max_model_len // runner.block_size)
    padded = [padded_batch(runner.model.matmul, gate_up, n) for n in range(config.max_num_seqs + 1)]
    windows = list(dict.fromkeys(layer.window for layer in runner.attention_layers()))
    runner.decode_inputs = DecodeInputs(
        config.max_num_seqs,
        max_blocks,
        runner.block_size,
        runner.device,
        partial(constants.num_pieces, num_kv_heads=runner.num_kv_heads),
        windows if backend.wants_plan else [],
        padded,
        runner.mixed_step_rows,
    )
