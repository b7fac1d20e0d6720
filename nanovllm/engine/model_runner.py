"""ModelRunner: loads a model on its device, finds out how much memory is left for the KV cache, and runs steps."""

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import attrgetter
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.ranks.process_group import ABORT_SECONDS, abort_group
from nanovllm.engine.runner.cuda_graphs import DecodeGraphs, graph_batch_sizes, mixed_batch_sizes
from nanovllm.engine.runner.inputs import Batch, DecodeInputs, prefill_batch, send_prefill
from nanovllm.engine.runner.sampled_tokens import SampledTokens
from nanovllm.engine.runner.startup.kernel_compilation import warmup_kernels
from nanovllm.engine.runner.startup.kv_scales import choose_kv_scales
from nanovllm.engine.runner.startup.memory import allocate_kv_cache, free_memory, largest_prefill
from nanovllm.engine.runner.startup.model_check import check_model
from nanovllm.engine.runner.startup.model_setup import choose_backend, load_and_compile
from nanovllm.engine.runner.startup.package_kernels import PackageKernels
from nanovllm.engine.sampling.logit_steps import LogitSteps
from nanovllm.engine.sampling.logprobs import prompt_rows
from nanovllm.engine.sampling.sampling_pipeline import Forward
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention.attention import Attention
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.sampling.sampler import Sampler
from nanovllm.models.layer_facts import few_layers
from nanovllm.models.loader import load_dummy, load_model, num_checkpoint_params
from nanovllm.utils.context import step_context
from nanovllm.utils.progress import StartProgress
from nanovllm.utils.threads import StepThreads

logger = logging.getLogger(__name__)

_IS_PLAIN = attrgetter("is_plain")


class ModelRunner:
    """Holds a model and runs its steps, on one rank."""

    def __init__(self, config: Config, device: torch.device):
        self.config = config
        self.device = device
        self.block_size = config.kvcache_block_size
        self.model: Any = None
        self.sampler: Sampler | None = None
        self.num_kv_heads = 0  # of this rank
        self.num_layer_params = 0  # on this rank
        self.num_kvcache_blocks = 0
        self.kv_cache: torch.Tensor | None = None  # [2, layers, blocks, block_size, kv_heads, head_dim]: keys, values
        self.kv_scales: torch.Tensor | None = None  # float32 [layers, 2, kv_heads] of an fp8 cache: keys, values
        self.mixed_step_rows = 0  # most tokens of a mixed step; 0 for no mixed steps
        self.decode_inputs: DecodeInputs | None = None
        self.graphs: DecodeGraphs | None = None  # of decode steps; None without CUDA graphs
        self.mixed_graphs: DecodeGraphs | None = None
        self.logit_steps: LogitSteps | None = None
        self.tp = TensorParallel()
        self.check_workers: Callable[[], None] | None = None
        self._threads = StepThreads(config.tensor_parallel_size)
        self._free_at_start = free_memory(device)  # From the meeting of the ranks on they share memory.

    def check_model(self, rank: int = 0) -> None:
        """`model_check.check_model`, before anything is allocated for the model."""
        check_model(self.config, rank, self._free_at_start)

    def start(self, tp: TensorParallel, progress: StartProgress, check: Callable[[], None] | None = None) -> None:
        """Build everything, ready for `run`. All ranks do so at the same time. check: `Executor.check_workers`, on rank
        0 of several. A step would wait for ever for a rank that has died."""
        self.tp, self.check_workers = tp, check
        config = self.config
        backend, has_graphs = choose_backend(config)
        with PackageKernels(config, tp.rank, self.device) as packages:
            load_and_compile(self, backend, has_graphs, packages, progress)
        billions = num_checkpoint_params(self.model) / 1e9
        logger.info("model: %s, %.3f B parameters, %s", config.model, billions, config.dtype)
        logger.info("device: %s", self.device_name)
        logger.info("attention back end: %s", backend.description)
        if self.kv_scales is not None:
            choose_kv_scales(self)
        progress.tell("measuring memory")
        self.warmup_model()
        self.allocate_kv_cache()
        if has_graphs:
            self.capture_cudagraph(progress.count("capturing CUDA graphs"))
        else:
            logger.info("CUDA graphs: none")
        self.logit_steps = LogitSteps(self)
        if config.device == "cuda":
            warmup_kernels(self)

    @property
    def device_name(self) -> str:
        """The GPU's name, after the number of GPUs if there are several; or "CPU"."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return name if self.tp.size == 1 else f"{self.tp.size} x {name}"

    def load_weights(self) -> None:
        if self.config.load_format == "dummy":
            load_dummy(self.model, self.config.seed or 0, self.tp.rank)
        else:
            load_model(self.model, self.config.model)
        if self.device.type == "cpu":
            self.model.pack_weights()

    def synchronize(self) -> None:
        """Wait for the steps in flight: they need every rank and the host's memory."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # The next call raises it as well.
                torch.cuda.synchronize(self.device)

    def exit(self) -> None:
        """Give all memory back. Calling it again does nothing."""
        self.synchronize()
        if self.model is not None:
            for layer in self.attention_layers():
                layer.k_cache = layer.v_cache = layer.kv_scales = None
            # A parameter and its loader's layer refer to each other, so only the collector would free them.
            for parameter in self.model.parameters():
                vars(parameter).pop("weight_loader", None)
        self.model = self.sampler = self.kv_cache = self.kv_scales = self.graphs = self.mixed_graphs = None
        self.decode_inputs = self.logit_steps = None
        if self.device.type == "cuda":
            # CUDA graphs and the functions that they were captured from refer to each other.
            gc.unfreeze()  # See `collector.old_objects_set_aside`.
            gc.collect()
        if self.tp.size > 1:
            thread = abort_group(self.tp)
            if thread is not None:
                thread.join(ABORT_SECONDS)
            self.tp = TensorParallel()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- memory ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """One prefill at full size, to measure how much memory activations need. On a CPU the KV cache's size is an
        option and does not depend on it."""
        if self.device.type == "cpu":
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        inputs, context = largest_prefill(self.config, self.device)
        with step_context(context):
            self.run_model(*inputs)
        torch.cuda.synchronize(self.device)

    def allocate_kv_cache(self) -> None:
        """One tensor for all layers. Raises MemoryError, with the numbers, if there is no room for one block."""
        sizes = len(self.attention_layers()), self.num_kv_heads
        self.use_kv_cache(allocate_kv_cache(self.config, *sizes, self.device, self.tp, self._free_at_start))

    def use_kv_cache(self, kv_cache: torch.Tensor | None) -> None:
        """Give each layer its slices of the cache; None takes them away."""
        self.kv_cache = kv_cache
        self.num_kvcache_blocks = 0 if kv_cache is None else kv_cache.shape[2]
        for i, layer in enumerate(self.attention_layers()):
            layer.k_cache, layer.v_cache = (None, None) if kv_cache is None else kv_cache[:, i]
            layer.kv_scales = None if self.kv_scales is None else self.kv_scales[i]

    def attention_layers(self) -> list[Attention]:
        return [module for module in self.model.modules() if isinstance(module, Attention)]

    # -- one step ----------------------------------------------------------------------------------------------

    def prepare(self, seqs: list[Sequence], is_prefill: bool) -> Batch:
        """The step's inputs, on the host."""
        batch = self.prepare_prefill(seqs) if is_prefill else self.prepare_decode(seqs)
        if not all(map(_IS_PLAIN, seqs)):
            batch.needs_logits = True
            batch.waits_for_tokens = any(seq.is_constrained for seq in seqs)
            batch.prompt_rows = prompt_rows(seqs) if is_prefill else []
        return batch

    def prepare_prefill(self, seqs: list[Sequence]) -> Batch:
        """The flat batch of the sequences' scheduled tokens."""
        return prefill_batch(seqs, self.block_size)

    def prepare_decode(self, seqs: list[Sequence]) -> Batch:
        """A row for each sequence's last token. In a mixed step, the last sequences are prefilled and have more rows.
        Padded to the next batch size that has a CUDA graph."""
        is_mixed, num_seqs = seqs[-1].is_prefilling, len(seqs)
        graphs = self.mixed_graphs if is_mixed else self.graphs
        graph_size = graphs.padded(num_seqs) if graphs is not None and num_seqs <= graphs.max_batch_size else 0
        if is_mixed:
            num_rows = self.mixed_step_rows if graph_size else sum(seq.num_scheduled_tokens for seq in seqs)
        else:
            num_rows = self.decode_inputs.padded[graph_size or num_seqs]
        batch = self.decode_inputs.write(seqs, num_rows)
        batch.graph_size = graph_size
        return batch

    @torch.inference_mode()
    def run(self, batch: Batch) -> SampledTokens | Forward | None:
        """Start a step, and do not wait for it. The next step may be started before this one's tokens are read.

        Returns:
            The future tokens, one for each sequence (meaningless if its prefill goes on). Or a Forward, for `sample`,
            if the sampling needs the tokens of the step before. None on a worker if rank 0 samples.
        """
        with self._cpu_threads(batch.num_rows):
            if batch.needs_logits:
                forward = self.logit_steps.forward(batch)
                return forward if batch.waits_for_tokens else self.logit_steps.sample(forward)
            if batch.is_prefill:
                inputs, context = send_prefill(batch, self.device)
                with step_context(context):
                    self.run_model(*inputs)
            else:
                self.decode_inputs.send(batch)
                if batch.graph_size:
                    graphs = self.mixed_graphs if batch.is_mixed else self.graphs
                    graphs.replay(batch.graph_size)
                else:
                    self._decode(batch.num_seqs, batch.num_rows if batch.is_mixed else 0)
            sampled = self.decode_inputs.sampled[: batch.num_seqs]
            return SampledTokens(sampled, self.decode_inputs.tokens_on_host(batch.num_seqs), self.check_workers)

    @torch.inference_mode()
    def sample(self, forward: Forward | None = None) -> SampledTokens | None:
        """Sample the tokens of a Forward. A worker receives them from rank 0."""
        num_tokens = sum(seq.num_scheduled_tokens for seq in forward.seqs) if forward else 0
        with self._cpu_threads(num_tokens):
            return self.logit_steps.sample(forward)

    def _cpu_threads(self, num_tokens: int) -> AbstractContextManager:
        """On a CPU, a block with the number of threads that suits a step of num_tokens. On a GPU, nothing."""
        if self.device.type != "cpu":
            return nullcontext()
        return self._threads.computing(num_tokens * self.num_layer_params)

    def _decode(self, batch_size: int, mixed_rows: int = 0) -> None:
        """Compute the rows of decode_inputs, and sample from the first batch_size. This is what CUDA graphs capture.
        mixed_rows: rows of a mixed step; 0 for any other step."""
        num_rows = mixed_rows or self.decode_inputs.padded[batch_size]
        input_ids, positions, context = self.decode_inputs.for_layers(num_rows, batch_size if mixed_rows else None)
        names = ("temperatures", "seeds", "positions")
        sampling = (self.decode_inputs.rows[name][:batch_size] for name in names)
        with step_context(context):
            self.run_model(input_ids, positions, *sampling)

    def run_model(self, input_ids, positions, temperatures, seeds, sample_positions) -> None:
        """Model, head and sampler: a token for each temperature, into decode_inputs.sampled. Further rows are padding.
        sample_positions: those of the tokens from which they are sampled, which decide the sampler's noise."""
        logits = self.model.compute_logits(self.model(input_ids, positions)[: len(temperatures)])
        sampled = self.decode_inputs.sampled[: len(logits)]
        self.sampler(logits, temperatures, seeds, sample_positions, out=sampled)

    @torch.inference_mode()
    def capture_cudagraph(self, tell: Callable[[int, int], None]) -> None:
        """Capture `_decode` at every batch size of graph_batch_sizes. tell: called with the number of graphs captured
        so far, and of all."""
        sizes = graph_batch_sizes(self.config.max_num_seqs)
        self.graphs = DecodeGraphs(self._decode, self._run_padding, sizes, self.device)
        self.graphs.capture_all(tell)
        logger.info("CUDA graphs: %d, batch sizes 1 to %d", len(sizes), sizes[-1])
        rows = self.mixed_step_rows
        if rows:
            sizes = mixed_batch_sizes(rows, self.config.max_num_seqs)
            functions = (lambda n: self._decode(n, rows)), (lambda n: self._run_padding(n, rows))
            self.mixed_graphs = DecodeGraphs(*functions, sizes, self.device, self.graphs.pool)
            self.mixed_graphs.capture_all(tell)
            logger.info("CUDA graphs of mixed steps: %d, of %d rows", len(sizes), rows)

    def _run_padding(self, batch_size: int, mixed_rows: int = 0) -> None:
        """`_decode` of padding alone, through a few layers, which launch every kernel that all layers do."""
        self.decode_inputs.pad(mixed_rows or self.decode_inputs.padded[batch_size])
        with few_layers(self.model):
            self._decode(batch_size, mixed_rows)
