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
from nanovllm.engine.runner.inputs import DecodeInputs, prefill_batch, send_prefill
from nanovllm.engine.runner.sampled_tokens import send_tokens
from nanovllm.engine.runner.startup.kernel_compilation import warmup_kernels
from nanovllm.engine.runner.startup.kv_scales import choose_kv_scales
from nanovllm.engine.runner.startup.memory import allocate_kv_cache, free_memory, largest_prefill
from nanovllm.engine.runner.startup.model_check import check_model
from nanovllm.engine.runner.startup.model_setup import attention_shape, choose_backend, load_and_compile
from nanovllm.engine.runner.startup.package_kernels import PackageKernels
from nanovllm.engine.sampling.logit_steps import LogitSteps
from nanovllm.engine.sampling.logprobs import prompt_rows
from nanovllm.engine.step import Step
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.attention.attention import Attention
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.sampling.sampler import Sampler
from nanovllm.models.layer_facts import few_layers
from nanovllm.models.loader import load_dummy, load_model, num_checkpoint_params
from nanovllm.utils.context import step_context
from nanovllm.utils.progress import StartProgress
from nanovllm.utils.threads import StepThreads

logger = logging.getLogger(__name__)

_IS_PLAIN = attrgetter("params.is_plain")


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
        self._threads = StepThreads(config.tensor_parallel_size)
        self._free_at_start = free_memory(device)  # From the meeting of the ranks on they share memory.

    def check_model(self, rank: int = 0) -> None:
        """`model_check.check_model`, before anything is allocated for the model."""
        check_model(self.config, rank, self._free_at_start)

    def start(self, tp: TensorParallel, progress: StartProgress) -> None:
        """Build everything, ready for `run`. All ranks do so at the same time."""
        self.tp, config = tp, self.config
        shape = attention_shape(config, tp, self.device)
        backend, has_graphs = choose_backend(config, shape)
        with PackageKernels(config, tp.rank, self.device) as packages:
            load_and_compile(self, backend, has_graphs, shape, packages, progress)
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
        name = GpuFacts.of(self.device).name
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

    def prepare(self, step: Step) -> Step:
        """Give the step its inputs, on the host, and return it."""
        if step.is_prefill:
            self.prepare_prefill(step)
        else:
            self.prepare_decode(step)
        if not all(map(_IS_PLAIN, step.seqs)):
            step.needs_logits = True
            step.waits_for_tokens = any(seq.is_constrained for seq in step.seqs)
            step.prompt_rows = prompt_rows(step.seqs) if step.is_prefill else []
        return step

    def prepare_prefill(self, step: Step) -> None:
        """The flat batch of the sequences' scheduled tokens."""
        prefill_batch(step, self.block_size)

    def prepare_decode(self, step: Step) -> None:
        """A row for each sequence's last token. In a mixed step, the last sequences are prefilled and have more rows.
        Padded to the next batch size that has a CUDA graph."""
        num_seqs = len(step.seqs)
        graphs = self.mixed_graphs if step.is_mixed else self.graphs
        if graphs is not None and num_seqs <= graphs.max_batch_size:
            step.graph_size = graphs.padded(num_seqs)
        if not step.is_mixed:
            num_rows = self.decode_inputs.padded[step.graph_size or num_seqs]
        elif step.graph_size:
            num_rows = self.mixed_step_rows
        else:
            num_rows = sum(seq.num_scheduled_tokens for seq in step.seqs)
        self.decode_inputs.write(step, num_rows)

    @torch.inference_mode()
    def run(self, step: Step) -> Step:
        """Start a step, and do not wait for it. The next step may be started before this one's tokens are read.

        Its tokens are on their way to the host then, or, if it waits_for_tokens, to be sampled by `sample`. A worker
        keeps none.
        """
        with self._cpu_threads(step.num_rows):
            if step.needs_logits:
                self.logit_steps.forward(step)
                if not step.waits_for_tokens:
                    self.logit_steps.sample(step)
                return step
            if step.is_prefill:
                inputs, context = send_prefill(step, self.device)
                with step_context(context):
                    self.run_model(*inputs)
            else:
                self.decode_inputs.send(step)
                if step.graph_size:
                    graphs = self.mixed_graphs if step.is_mixed else self.graphs
                    graphs.replay(step.graph_size)
                else:
                    self._decode(step.num_seqs, step.num_rows if step.is_mixed else 0)
            sampled = self.decode_inputs.sampled[: step.num_seqs]
            send_tokens(step, sampled, self.decode_inputs.tokens_on_host(step.num_seqs))
            return step

    @torch.inference_mode()
    def sample(self, step: Step | None = None) -> None:
        """Sample the tokens of a step that waited for those of the step before. A worker receives them from rank 0."""
        num_tokens = 0 if step is None else sum(seq.num_scheduled_tokens for seq in step.seqs)
        with self._cpu_threads(num_tokens):
            self.logit_steps.sample(step)

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
