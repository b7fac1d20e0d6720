"""ModelRunner: one rank's model on its device: load it, find out how much memory there is, run steps."""

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.ranks.process_group import ABORT_SECONDS, abort_group
from nanovllm.engine.runner.cuda_graphs import DecodeGraphs, graph_batch_sizes, mixed_batch_sizes
from nanovllm.engine.runner.inputs import Batch, DecodeInputs, prefill_batch, send_prefill
from nanovllm.engine.runner.kernel_compilation import warmup_kernels
from nanovllm.engine.runner.memory import allocate_kv_cache, largest_prefill
from nanovllm.engine.runner.model_setup import set_up_model
from nanovllm.engine.runner.sampled_tokens import SampledTokens
from nanovllm.engine.sampling.logit_steps import LogitSteps
from nanovllm.engine.sampling.logprobs import prompt_rows
from nanovllm.engine.sampling.sampling_pipeline import Forward
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import select_backend
from nanovllm.layers.sampler import Sampler
from nanovllm.models.hf_config import get_head_dim
from nanovllm.utils.context import step_context
from nanovllm.utils.loader import load_dummy, load_model, num_checkpoint_params
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.progress import StartProgress
from nanovllm.utils.threads import StepThreads

logger = logging.getLogger(__name__)

_IS_PLAIN = attrgetter("is_plain")


class ModelRunner:
    """Holds a model and runs its steps, on one rank.

    Attributes:
        config: the engine's options.
        device: this rank's.
        tp: what this rank does together with the others.
        num_kvcache_blocks: blocks of the KV cache.
        kv_cache: [2, layers, blocks, block_size, kv_heads, head_dim]; 0 = keys, 1 = values.
        mixed_step_rows: tokens that a mixed step computes at most; 0 where there are to be none.
        graphs, mixed_graphs: CUDA graphs of decode steps and of mixed steps; None without.
    """

    def __init__(self, config: Config, device: torch.device, free_at_start: int = 0):
        """free_at_start: bytes of the device's memory that were free when this engine began."""
        self.config = config
        self.device = device
        self.block_size = config.kvcache_block_size
        self.model: Any = None
        self.sampler: Sampler | None = None
        self.kv_cache: torch.Tensor | None = None
        self.decode_inputs: DecodeInputs | None = None
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: DecodeGraphs | None = None
        self.logit_steps: LogitSteps | None = None
        self.tp = TensorParallel()
        self.mixed_step_rows = 0
        self.num_kv_heads = 0
        self._check: Callable[[], None] | None = None
        self._threads = StepThreads(config.tensor_parallel_size)
        self._free_at_start = free_at_start

    def start(self, tp: TensorParallel, progress: StartProgress, check: Callable[[], None] | None = None) -> None:
        """Build everything, ready for `run`. All ranks do so at the same time.

        Args:
            tp: this rank's place among them.
            progress: told what is going on.
            check: rank 0's with several ranks: raises where another rank has gone, for which the device would wait.
        """
        self.tp, self._check = tp, check
        self._build(progress)

    def _build(self, progress: StartProgress) -> None:
        config = self.config
        head_dim = get_head_dim(config.hf_config)
        backend = select_backend(config.attention_backend, config.device, config.dtype, head_dim, self.block_size)
        has_graphs = config.device == "cuda" and not config.enforce_eager and backend.supports_cuda_graphs
        set_up_model(self, backend, has_graphs, progress)
        billions = num_checkpoint_params(self.model) / 1e9
        logger.info("model: %s, %.3f B parameters, %s", config.model, billions, config.dtype)
        logger.info("device: %s", self.device_name)
        logger.info("attention back end: %s", backend.description)
        progress.tell("measuring memory")
        self.warmup_model()
        self.allocate_kv_cache()
        if has_graphs:
            self.capture_cudagraph(progress.count("capturing CUDA graphs"))
        else:
            logger.info("CUDA graphs: none")
        self.logit_steps = LogitSteps(config, self.model, self.tp, self.decode_inputs, self.graphs, self._check)
        if config.device == "cuda":
            warmup_kernels(self)

    def load_weights(self) -> None:
        """Fill the model's parameters as load_format says."""
        if self.config.load_format == "dummy":
            load_dummy(self.model, self.config.seed or 0, self.tp.rank)
        else:
            load_model(self.model, self.config.model)

    @property
    def device_name(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return name if self.tp.size == 1 else f"{self.tp.size} x {name}"

    def synchronize(self) -> None:
        """Wait for the steps in flight, which need every rank and the host's memory. A device that has failed says so
        at the next call."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.device)

    def exit(self) -> None:
        """Give all memory back. Harmless when called again."""
        self.synchronize()
        if self.model is not None:
            for layer in self._attention_layers():
                layer.k_cache = layer.v_cache = None
            # A parameter and its loader's layer refer to each other: their memory would wait for the collector.
            for parameter in self.model.parameters():
                vars(parameter).pop("weight_loader", None)
        self.model = self.sampler = self.kv_cache = self.graphs = self.mixed_graphs = None
        self.decode_inputs = self.logit_steps = None
        if self.device.type == "cuda":
            # CUDA graphs and the functions that they were captured from refer to each other. The collector has to look
            # at them once more where requests were under way (`collector.old_objects_set_aside`).
            gc.unfreeze()
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
        """One prefill at full size, so that the peak of the activations is known before the KV cache takes the
        rest. Nothing to learn on a CPU, where the cache's size is an option."""
        if self.device.type == "cpu":
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        inputs, context = largest_prefill(self.config, self.device)
        with step_context(context):
            self.run_model(*inputs)
        torch.cuda.synchronize(self.device)

    def allocate_kv_cache(self) -> None:
        """One tensor for all layers, each of which holds its slices of it.

        Raises MemoryError where there is no room for one block, with the numbers.
        """
        layers = self._attention_layers()
        sizes = len(layers), self.num_kv_heads
        self.use_kv_cache(allocate_kv_cache(self.config, *sizes, self.device, self.tp, self._free_at_start))

    def use_kv_cache(self, kv_cache: torch.Tensor | None) -> None:
        """Give each layer its slices of [2, layers, blocks, block_size, kv_heads, head_dim]; None takes them away."""
        self.kv_cache = kv_cache
        self.num_kvcache_blocks = 0 if kv_cache is None else kv_cache.shape[2]
        for i, layer in enumerate(self._attention_layers()):
            layer.k_cache, layer.v_cache = (None, None) if kv_cache is None else kv_cache[:, i]

    def _attention_layers(self) -> list[Attention]:
        return [module for module in self.model.modules() if isinstance(module, Attention)]

    # -- one step ----------------------------------------------------------------------------------------------

    def prepare(self, seqs: list[Sequence], is_prefill: bool) -> Batch:
        """The inputs of a step of these sequences, on the host."""
        batch = self.prepare_prefill(seqs) if is_prefill else self.prepare_decode(seqs)
        if not all(map(_IS_PLAIN, seqs)):
            batch.needs_logits = True
            batch.waits_for_tokens = any(seq.is_constrained for seq in seqs)
            batch.prompt_rows = prompt_rows(seqs) if is_prefill else []
        return batch

    def prepare_prefill(self, seqs: list[Sequence]) -> Batch:
        """The flat batch of the sequences' scheduled tokens."""
        return prefill_batch(seqs, self.block_size, self.device)

    def prepare_decode(self, seqs: list[Sequence]) -> Batch:
        """A row for each sequence's last token; in a mixed step, in which the last sequences are prefilled, also rows
        for the other tokens of prompts. Padded to the next batch size that has a CUDA graph."""
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
        """Start one step, without waiting for it. One more step may be started before its tokens are read; sequences
        whose last token is not known yet then take it from the device.

        Returns:
            The tokens to be: one per sequence, in order (that of a sequence whose prefill goes on means nothing). A
            step that waits for the tokens of the step before gives a Forward, for `sample`. None on a worker where
            rank 0 samples.
        """
        with self._computing(batch.num_rows):
            if batch.needs_logits:
                forward = self.logit_steps.forward(batch)
                return forward if batch.waits_for_tokens else self.logit_steps.sample(forward)
            sampled, host = self.decode_inputs.sampled[: batch.num_seqs], None
            if batch.is_prefill:
                inputs, context = send_prefill(batch, self.device)
                with step_context(context):
                    self.run_model(*inputs)
            else:
                self._run_decode(batch)
                host = self.decode_inputs.tokens_on_host(batch.num_seqs)
            return SampledTokens(sampled, check=self._check, host=host)

    def _run_decode(self, batch: Batch) -> None:
        self.decode_inputs.send(batch)
        if batch.graph_size:
            graphs = self.mixed_graphs if batch.is_mixed else self.graphs
            graphs.replay(batch.graph_size)
        else:
            self._decode(batch.num_seqs, batch.num_rows, batch.is_mixed)

    @torch.inference_mode()
    def sample(self, forward: Forward | None = None) -> SampledTokens | None:
        """Sample the tokens of a step that had to wait with it. A worker receives them from rank 0."""
        num_tokens = sum(seq.num_scheduled_tokens for seq in forward.seqs) if forward else 0
        with self._computing(num_tokens):
            return self.logit_steps.sample(forward)

    def _computing(self, num_tokens: int) -> AbstractContextManager:
        """On a CPU, a block with as many threads as suit a step of so many tokens."""
        if self.device.type != "cpu":
            return nullcontext()
        return self._threads.computing(num_tokens * self.model.num_layer_params)

    def _decode(self, batch_size: int, num_rows: int | None = None, is_mixed: bool = False) -> None:
        """Compute the first num_rows rows of decode_inputs, by default what this batch is padded to, and draw from the
        first batch_size into its `sampled`. Captured as it stands."""
        num_rows = num_rows or self.decode_inputs.padded[batch_size]
        input_ids, positions, context = self.decode_inputs.for_layers(num_rows, batch_size if is_mixed else None)
        names = ("temperatures", "seeds", "positions")
        sampling = (self.decode_inputs.rows[name][:batch_size] for name in names)
        with step_context(context):
            self.run_model(input_ids, positions, *sampling)

    def run_model(self, input_ids, positions, temperatures, seeds, sample_positions) -> None:
        """Model, head and sampler: one token a sequence, into decode_inputs.sampled; rows after those of the
        temperatures are padding. A token is drawn with the noise of the position that it follows."""
        logits = self.model.compute_logits(self.model(input_ids, positions)[: len(temperatures)])
        sampled = self.decode_inputs.sampled[: len(logits)]
        self.sampler(logits, temperatures, seeds, sample_positions, out=sampled)

    @torch.inference_mode()
    def capture_cudagraph(self, tell: Callable[[int, int], None] | None = None) -> None:
        """Capture `_decode`, sampling included, at every batch size of graph_batch_sizes. tell: called with how many
        are captured, and of how many."""
        sizes = graph_batch_sizes(self.config.max_num_seqs)
        self.graphs = DecodeGraphs(self._decode, self._run_padding, sizes, self.device)
        self.graphs.capture_all(tell)
        logger.info("CUDA graphs: %d, batch sizes 1 to %d", len(sizes), sizes[-1])
        rows = self.mixed_step_rows
        if rows:
            decode, prepare = (partial(f, num_rows=rows, is_mixed=True) for f in (self._decode, self._run_padding))
            sizes = mixed_batch_sizes(rows, self.config.max_num_seqs)
            self.mixed_graphs = DecodeGraphs(decode, prepare, sizes, self.device, self.graphs.pool)
            self.mixed_graphs.capture_all(tell)
            logger.info("CUDA graphs of mixed steps: %d, of %d rows", len(sizes), rows)

    def _run_padding(self, batch_size: int, num_rows: int | None = None, is_mixed: bool = False) -> None:
        """`_decode` of padding alone, through two layers: these launch whatever kernel all of them do."""
        self.decode_inputs.pad(num_rows or self.decode_inputs.padded[batch_size])
        with self.model.first_and_last_layer():
            self._decode(batch_size, num_rows, is_mixed)
