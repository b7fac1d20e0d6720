"""What a ModelRunner's start chooses: the back end, the products' kernels, and how many rows mixed steps have."""

import torch

from nanovllm.config import Config
from nanovllm.layers.backends.choice import select_backend
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.candidates import Quack, make_candidates
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.step_rows import mixed_step_rows
from nanovllm.layers.matmul.table import Key, Table
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.model_size import attention_shapes


def check_backend(config: Config) -> None:
    """Raises ValueError, with the reason, if the attention back end that is asked for cannot run here."""
    tp = TensorParallel(0, config.tensor_parallel_size)
    select_backend(config.attention_backend, *attention_shapes(config, tp, torch.device(config.device)))


def make_matmul(config: Config, table: Table, device: torch.device, quack: Quack | None) -> Matmul:
    """What computes the layers' products. quack: None without quack-kernels."""
    what_to_tune = f"{config.model} --quantization {config.quantization}" if config.quantization else config.model
    return Matmul(table, make_candidates(device, quack), what_to_tune)


def choose_mixed_step_rows(config: Config, has_graphs: bool, has_slots: bool, gate_up: Weight, table: Table) -> int:
    """config.mixed_step_rows; if that is None, the table's number for the model's shape. 0 for no mixed steps. A mixed
    step has at least two sequences. has_slots: whether a sequence keeps more than keys and values."""
    num_rows = config.mixed_step_rows
    if num_rows is None:
        # A state goes through a prompt in a mixed step token by token, where a prefill has products of 64 tokens.
        is_measured = has_graphs and not has_slots and config.tensor_parallel_size == 1
        measured = mixed_step_rows(table, Key.of("linear", False, gate_up)) if is_measured else 0
        num_rows = min(measured, config.max_num_batched_tokens)
    return num_rows if min(num_rows, config.max_num_seqs) > 1 else 0
