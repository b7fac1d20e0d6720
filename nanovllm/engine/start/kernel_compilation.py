"""An engine's start: compiling its Triton kernels while the weights load, and launching each once at the end."""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch

from nanovllm.config import Config
from nanovllm.engine.batch_sizes import graph_batch_sizes
from nanovllm.engine.inputs import DecodeInputs
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.launch import compile_ahead
from nanovllm.kernels.sampling.logsumexp import logsumexp
from nanovllm.kernels.sampling.sampling_thresholds import sampling_thresholds
from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.stores.store import Store
from nanovllm.models.layer_facts import few_layers, layer_products, one_of_each_kind
from nanovllm.utils.context import Context, step_context
from nanovllm.utils.interrupts import held_interrupt

_NUM_SLOTS = 1024  # of the KV cache for tracing; more than warmup_kernels needs
_LONG_PREFILL = 2048  # tokens; longer prefills need no other variants, except for the table's products


class StepRunner(Protocol):
    """What of a ModelRunner computes steps before the first request."""

    config: Config
    device: torch.device
    model: Any
    stores: list[Store]
    decode_inputs: DecodeInputs
    backend: AttentionBackend
    mixed_step_rows: int
    tp: TensorParallel
    graph_bs: list[int]

    def prepare(self, step: Step) -> None: ...

    def launch(self, step: Step) -> None: ...


@contextmanager
def compiling_kernels(runner: StepRunner, tell: Callable[[int, int], None]) -> Iterator[None]:
    """A block in which threads compile what a ModelRunner will launch. It ends when they have finished, and must launch
    no kernel of ours. tell: as for `compile_ahead`.

    The model's weights need not be loaded yet, and its stores have no memory. On a CPU nothing happens, nor for a plain
    model, which has few kernels.
    """
    if not HAS_TRITON or runner.device.type != "cuda" or runner.config.plain:
        yield
        return
    with compile_ahead(tell, held_interrupt):
        with few_layers(runner.model):
            trace_steps(runner)
        yield


def telling_batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes whose decode steps launch every variant of our kernels, except of the table's products. Variants
    depend on ranges of the batch size, and each range holds a power of two, the largest batch of all, or the largest
    batch with a graph. (Without graphs the GEMV kernel has a variant for each number of tokens, which its first step
    compiles.)"""
    sizes = {1 << i for i in range(max_num_seqs.bit_length())}
    return sorted(sizes | {max_num_seqs, graph_batch_sizes(max_num_seqs)[-1]})


@torch.inference_mode()
def trace_steps(runner: StepRunner) -> None:
    """Run steps like those of the start and of later requests, on small stores that all layers share. So no list of
    kernels and shapes has to be kept up to date. The results mean nothing."""
    config, block_size = runner.config, runner.config.kvcache_block_size
    most_tokens, longest = config.max_num_batched_tokens, cast(int, config.max_model_len)
    num_tokens = min(_LONG_PREFILL, most_tokens, longest)
    # Without a cache, as warmup_model does.
    compute_pretended(runner, Step([pretended_sequence(num_tokens, block_size)], True, 1))
    trace_products(runner.model, runner.decode_inputs.max_rows, most_tokens)
    num_blocks = -(-_NUM_SLOTS // block_size)
    for store in runner.stores:
        store.allocate(num_blocks, 1, is_shared=True)
    seq = _decoding_sequence(block_size)
    # An engine that only makes vectors has no decode steps.
    for size in telling_batch_sizes(config.max_decode_rows) if config.task == "generate" else ():
        compute_pretended(runner, Step([seq] * size, False))
        if runner.backend.shares_reads and size > 1:
            compute_pretended(runner, _speculative_step(seq, size, 1 + config.max_speculative_tokens))
        _trace_options(torch.empty(size, config.hf_config.vocab_size, dtype=config.dtype, device=runner.device))
    num_tokens = min(runner.mixed_step_rows, longest, _NUM_SLOTS) - 1
    if num_tokens > 0:
        compute_pretended(runner, Step([seq, pretended_sequence(num_tokens, block_size)], False, 1))
    warmup_kernels(runner, num_blocks)
    for store in runner.stores:
        store.free()


def _speculative_step(seq: Sequence, num_rows: int, most_rows: int) -> Step:
    """A step with num_rows rows, as many of each sequence as most_rows allows: its first block has room for them."""
    counts = [min(most_rows, num_rows - first) for first in range(0, num_rows, most_rows)]
    return Step([seq] * len(counts), False, proposed=[[0] * (count - 1) for count in counts])


def warmup_kernels(runner: StepRunner, num_blocks: int) -> None:
    """Launch every variant of the Triton kernels that a prefill may need, so that none is compiled or loaded in
    mid-run: short and long, with a cached prefix and without. They write to the first of num_blocks
    blocks, which no sequence has yet."""
    for seqs in warmup_batches(runner.config, num_blocks):
        compute_pretended(runner, Step(seqs, True, len(seqs)))
    compute_pretended(runner, Step([_decoding_sequence(runner.config.kvcache_block_size)], False))


def compute_pretended(runner: StepRunner, step: Step) -> None:
    """Launch a step of sequences that no request has asked for."""
    for columns in runner.decode_inputs.columns:
        columns.pretend(step)
    runner.prepare(step)
    runner.launch(step)


def trace_products(model, most_decode_tokens: int, most_prefill_tokens: int) -> None:
    """Launch what the table names for the layers' products, at every number of tokens that a step may have."""
    layers, matmul = model.model.layers, model.matmul
    products = [make for i in one_of_each_kind(layers) for make in layer_products(layers[i])]
    for is_prefill, most_tokens in ((False, most_decode_tokens), (True, most_prefill_tokens)):
        with step_context(Context(is_prefill=is_prefill)):
            for make in products:
                # One in every bucket of the product's row.
                first = make(1)
                bounds = matmul.row(first.key, first.weight).bounds
                for num_tokens in [*(bound for bound in bounds if bound < most_tokens), most_tokens]:
                    matmul.run(make(num_tokens))


def _trace_options(logits: torch.Tensor) -> None:
    """Top-k, top-p and min-p, which most model cards recommend, and log-probabilities. Other options have no kernels of
    ours."""
    floats = torch.zeros(len(logits), device=logits.device)
    numbers = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    thresholds = sampling_thresholds(logits, floats, numbers.int(), floats, floats)
    Sampler()(logits, floats, numbers, numbers, thresholds)
    logsumexp(logits)


def warmup_batches(config: Config, num_blocks: int) -> Iterator[list[Sequence]]:
    """Prefills that together need every variant of the kernels: one sequence and two, short and as long as a variant
    and a step allow, with a cached prefix and without, in the cache's first blocks. The last layer has a row for each
    sequence; so there are as many sequences, too, as kernels of few tokens take."""
    most_tokens = config.max_num_batched_tokens
    longest = min(cast(int, config.max_model_len), num_blocks * config.kvcache_block_size)
    # 100 are too few for Hopper's own kernel of attention, and many rows for the other one. 256 are the most that our
    # kernels are given without a cached prefix where flash-attn-4 has the rest of a long step.
    lengths = *((0, num_new) for num_new in (1, 17, 100, 256, 512)), *((16, num_new) for num_new in (1, 17, 100, 512))
    for num_cached, num_new in lengths:
        for num_seqs in (1, 2, 4, 8, 16) if num_new == 1 else (1, 2):
            if num_seqs > config.max_num_seqs:
                break
            num_scheduled = min(num_new, longest - num_cached, most_tokens // num_seqs)
            if num_scheduled >= 1:
                yield [pretended_sequence(num_scheduled, config.kvcache_block_size, num_cached)] * num_seqs


def pretended_sequence(num_scheduled: int, block_size: int, num_cached: int = 0) -> Sequence:
    """A sequence that prefills num_scheduled tokens after num_cached ones, in the cache's first blocks."""
    seq = Sequence(array("i", [0]) * (num_cached + num_scheduled), seed=0)
    seq.block_size = block_size
    seq.block_table = list(range(seq.num_blocks))
    seq.num_cached_tokens, seq.num_scheduled_tokens = num_cached, num_scheduled
    return seq


def _decoding_sequence(block_size: int) -> Sequence:
    seq = pretended_sequence(1, block_size)
    seq.is_prefill = False
    return seq
