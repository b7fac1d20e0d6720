"""ModelRunner: loads a model on its device, finds out how much memory is left for the KV cache, and runs steps."""

import gc
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import cast

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.ranks.process_group import ABORT_SECONDS, abort_group
from nanovllm.engine.runner.cuda_graphs import DecodeGraphs, graph_batch_sizes, mixed_batch_sizes
from nanovllm.engine.runner.inputs import DecodeInputs, ModelInputs, send_prefill
from nanovllm.engine.runner.sampled_tokens import send_tokens
from nanovllm.engine.sampling.logit_steps import LogitSteps
from nanovllm.engine.sampling.logprobs import prompt_rows
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.speculation.budget import StepTimes
from nanovllm.engine.start.kernel_compilation import compiling_kernels, warmup_kernels
from nanovllm.engine.start.kv_scales import choose_kv_scales
from nanovllm.engine.start.memory import allocate_stores, free_memory, free_stores, largest_prefill
from nanovllm.engine.start.model_check import check_model
from nanovllm.engine.start.model_setup import choose_mixed_step_rows, make_matmul
from nanovllm.engine.start.package_kernels import PackageKernels
from nanovllm.engine.start.step_times import measure_step_times
from nanovllm.engine.step import Step
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape, StepSizes
from nanovllm.layers.backends.choice import select_backend
from nanovllm.layers.backends.gpu_backend import GpuBackend
from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.matmul.candidates.quack import Quack, load_quack
from nanovllm.layers.matmul.table import load_table
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.layers.stores.store import Store
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.layer_facts import few_layers, gate_up_weight, num_layer_params
from nanovllm.models.loader import (
    TensorFacts,
    forget_loaders,
    load_dummy,
    load_model,
    load_tensors,
    num_checkpoint_params,
)
from nanovllm.models.make_model import make_model
from nanovllm.models.model_size import attention_shapes
from nanovllm.utils.context import reset_context, use_context
from nanovllm.utils.progress import StartProgress
from nanovllm.utils.threads import StepThreads, torch_threads

logger = logging.getLogger(__name__)

_IS_PLAIN = attrgetter("params.is_plain")


class ModelRunner:
    """Holds a model and runs its steps, on one rank.

    `start` sets the attributes below, in this order and once; `exit` deletes them.

    Attributes:
        tp: this rank's place among the ranks.
        attention_shape, backend: of the rank's attention in its first layers, and what computes it.
        has_graphs: whether decode steps are captured in CUDA graphs.
        quack: quack-kernels, if they are used.
        model: the model; its weights are loaded last.
        num_layer_params: parameters of a layer on this rank, of experts only those that a token uses.
        stores: what sequences keep on the device; the first is `kv_cache`.
        mixed_step_rows: most tokens of a mixed step; 0 for no mixed steps.
        decode_inputs: the inputs of decode steps.
        graphs, mixed_graphs, speculative_graphs: the CUDA graphs of decode steps, of mixed steps, and of speculative
            steps that share reads, if there are some.
        num_kvcache_blocks, num_slots: of the stores.
        logit_steps: runs steps whose requests ask for more than a temperature.
        step_times: how long decode steps take; None without speculation.
    """

    tp: TensorParallel
    attention_shape: AttentionShape
    backend: AttentionBackend
    has_graphs: bool
    quack: Quack | None
    model: DecoderForCausalLM
    num_layer_params: int
    stores: list[Store]
    kv_cache: PagedKVCache
    sampler: Sampler
    mixed_step_rows: int
    decode_inputs: DecodeInputs
    graphs: DecodeGraphs
    mixed_graphs: DecodeGraphs
    speculative_graphs: DecodeGraphs
    _graphs_of: dict[tuple[bool, bool], DecodeGraphs]
    num_kvcache_blocks: int
    num_slots: int
    logit_steps: LogitSteps
    step_times: StepTimes | None

    def __init__(self, config: Config, device: torch.device):
        self.config = config
        self.device = device
        self.block_size = config.kvcache_block_size
        # On a CPU, what chooses the number of threads of a step.
        self._threads = StepThreads(config.tensor_parallel_size) if device.type == "cpu" else None
        self._weight_shapes: list[torch.Size] = []  # of the parameters, while they sleep
        self._free_at_start = free_memory(device)  # From the meeting of the ranks on they share memory.

    # -- start and end -----------------------------------------------------------------------------------------

    def check_model(self, rank: int = 0) -> None:
        """`model_check.check_model`, before anything is allocated for the model."""
        check_model(self.config, rank, self._free_at_start)

    def start(self, tp: TensorParallel, progress: StartProgress) -> None:
        """Build everything, ready for `run`. All ranks do so at the same time."""
        config, self.tp = self.config, tp
        with PackageKernels(config, tp.rank, self.device) as packages:
            self.build_model(tp)
            progress.tell("compiling kernels")
            with compiling_kernels(self, progress.count("compiling kernels")):
                flash_attn4 = self.backend.flash_attn4 if isinstance(self.backend, GpuBackend) else None
                packages.compile(self.quack, flash_attn4, self.attention_shape)
                progress.tell("loading weights")
                self.load_weights()
            packages.load(tp, progress.count("compiling kernels of packages"))
        billions = num_checkpoint_params(self.model) / 1e9
        logger.info("model: %s, %.3f B parameters, %s", config.model, billions, config.dtype)
        logger.info("device: %s", self.device_name)
        logger.info("attention back end: %s", self.backend.description)
        choose_kv_scales(config, self.model, self.kv_cache)
        progress.tell("measuring memory")
        self.warmup_model()
        self.allocate_kv_cache()
        if self.has_graphs:
            self.capture_cudagraph(progress.count("capturing CUDA graphs"))
        else:
            logger.info("CUDA graphs: none")
        self.logit_steps = LogitSteps(config, self.model, self.decode_inputs, self.graphs, tp)
        if config.device == "cuda":
            warmup_kernels(self, self.num_kvcache_blocks)
        self.step_times = self.measure_step_times() if config.speculation else None

    def build_model(self, tp: TensorParallel) -> None:
        """The model without its weights, and what goes with it."""
        config, device, self.tp = self.config, self.device, tp
        table = load_table(device)  # First, because a user's table may be broken.
        shapes = attention_shapes(config, tp, device)
        self.attention_shape, self.backend = shapes[0], select_backend(config.attention_backend, *shapes)
        self.has_graphs = config.device == "cuda" and not config.enforce_eager and self.backend.supports_cuda_graphs
        # With two GPUs it gained nothing.
        self.quack = load_quack(config.dtype, device, decodes=self.has_graphs) if tp.size == 1 else None
        matmul = make_matmul(config, table, device, self.quack)
        with weight_format(config.weight_format):
            args = config.max_model_len, self.backend, tp, matmul
            self.model = make_model(config.hf_config, config.dtype, device, *args)
        if config.weight_format is not None:
            logger.info("weights of linear layers: %s", config.weight_format.name)
        self.num_layer_params = num_layer_params(self.model)
        self.stores = self.model.make_stores(self.attention_shape, config.state_dtype)
        self.kv_cache = next(store for store in self.stores if isinstance(store, PagedKVCache))
        head = self.model.lm_head
        self.sampler = Sampler(tp, head.vocab_start_idx, head.num_embeddings_per_partition)
        has_slots, gate_up = len(self.stores) > 1, gate_up_weight(self.model)
        self.mixed_step_rows = choose_mixed_step_rows(config, self.has_graphs, has_slots, gate_up, table)
        max_model_len = cast(int, config.max_model_len)  # The checks made them numbers.
        limits = config.max_num_batched_tokens, max_model_len
        group_rows = 1 + config.max_speculative_tokens if config.speculation else 1
        max_rows = max(config.max_decode_rows, self.mixed_step_rows)
        sizes = StepSizes(*limits, max_rows, self.num_layer_params, group_rows)
        for shape, windows in self.kv_cache.windows.items():
            self.backend.prepare(shape, windows, sizes, table)
        max_blocks = -(-max_model_len // self.block_size)
        places = config.max_decode_rows, max_blocks, self.block_size, device
        self.decode_inputs = DecodeInputs(*places, self.backend, self.mixed_step_rows, len(self.stores) > 1)
        self.graphs, self.mixed_graphs, self.speculative_graphs = (DecodeGraphs(device) for _ in range(3))
        self._graphs_of = {  # by whether a step is mixed, and whether it shares reads
            (False, False): self.graphs,
            (True, False): self.mixed_graphs,
            (False, True): self.speculative_graphs,
        }

    def load_weights(self) -> None:
        if self.config.load_format == "dummy":
            load_dummy(self.model, self.config.seed or 0, self.tp.rank)
        else:
            load_model(self.model, self.config.model)
        if self.device.type == "cpu":
            self.model.pack_weights()

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """One prefill at full size, to measure how much memory activations need. On a CPU the KV cache's size is an
        option and does not depend on it."""
        if self.device.type == "cpu":
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run_model(largest_prefill(self.config, self.device))
        torch.cuda.synchronize(self.device)

    def allocate_kv_cache(self) -> None:
        """All stores, as large as the budget allows. Raises MemoryError, with the numbers, if there is no room for one
        block."""
        args = self.stores, self.config, self.device, self.tp, self._free_at_start
        self.num_kvcache_blocks, self.num_slots = allocate_stores(*args)

    @torch.inference_mode()
    def capture_cudagraph(self, tell: Callable[[int, int], None]) -> None:
        """Capture `_decode` at every batch size of graph_batch_sizes. tell: called with the number of graphs captured
        so far, and of all."""
        sizes = graph_batch_sizes(self.config.max_decode_rows)
        self.graphs.use_sizes(sizes)
        self.graphs.capture_all(self._decode, self._run_padding, tell)
        logger.info("CUDA graphs: %d, batch sizes 1 to %d", len(sizes), sizes[-1])
        rows = self.mixed_step_rows
        if rows:
            sizes = mixed_batch_sizes(rows, self.config.max_num_seqs)
            self.mixed_graphs.use_sizes(sizes, self.graphs.pool)
            self.mixed_graphs.capture_all(
                partial(self._decode, mixed_rows=rows), partial(self._run_padding, mixed_rows=rows), tell
            )
            logger.info("CUDA graphs of mixed steps: %d, of %d rows", len(sizes), rows)
        if self.backend.shares_reads:
            sizes = [size for size in self.graphs.sizes if size > 1]
            self.speculative_graphs.use_sizes(sizes, self.graphs.pool)
            options = {"shares_reads": True}
            self.speculative_graphs.capture_all(
                partial(self._decode, **options), partial(self._run_padding, **options), tell
            )
            logger.info("CUDA graphs of speculative steps: %d", len(sizes))

    @torch.inference_mode()
    def measure_step_times(self) -> StepTimes:
        """Time decode steps of padding, of each size."""

        def compute(size: int) -> None:
            self.decode_inputs.pad(size)
            if self.has_graphs:
                self.graphs.replay(size)
            else:
                self._decode(size)

        return measure_step_times(compute, self.graphs.sizes, self.config.max_decode_rows, self.device)

    @property
    def device_name(self) -> str:
        """The GPU's name, after the number of GPUs if there are several; or "CPU"."""
        name = GpuFacts.of(self.device).name
        return name if self.tp.size == 1 else f"{self.tp.size} x {name}"

    def synchronize(self) -> None:
        """Wait for the steps in flight: they need every rank and the host's memory."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # The next call raises it as well.
                torch.cuda.synchronize(self.device)

    def exit(self) -> None:
        """Give all memory back, also after a start that has failed. Calling it again does nothing."""
        self.synchronize()
        fields = vars(self)
        if "stores" in fields:
            free_stores(self.stores)
        if "model" in fields:
            forget_loaders(self.model)
        tp = fields.get("tp", TensorParallel())
        for name in ModelRunner.__annotations__:
            fields.pop(name, None)
        if self.device.type == "cuda":
            # CUDA graphs and the functions that they were captured from refer to each other.
            gc.unfreeze()  # See `collector.old_objects_set_aside`.
            gc.collect()
        if tp.size > 1:
            thread = abort_group(tp)
            if thread is not None:
                thread.join(ABORT_SECONDS)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- weights that change, and memory that others need meanwhile ---------------------------------------------

    def update_weights(self, tensors: Mapping[str, torch.Tensor | TensorFacts]) -> None:
        """Overwrite the parameters that these tensors of a checkpoint stand for, by our names. Rank 0 has the tensors;
        a worker has facts about them, and gets them from rank 0. Addresses stay, so CUDA graphs do too."""
        self.model.unpack_weights()
        load_tensors(self.model, self._received(tensors))
        if self.device.type == "cpu":
            self.model.pack_weights()
        self.synchronize()  # The caller may change its tensors now.

    def _received(self, tensors: Mapping[str, torch.Tensor | TensorFacts]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor on this rank."""
        for name, given in tensors.items():
            tensor = given if isinstance(given, torch.Tensor) else torch.empty(given.shape, dtype=given.dtype)
            if self.tp.size > 1:
                tensor = self.tp.broadcast(tensor.to(self.device).contiguous())
            yield name, tensor

    def sleep(self, level: int) -> None:
        """Give the memory of the stores and of the CUDA graphs, which name its addresses, back to the device; at level
        2 that of the weights too."""
        self.synchronize()
        self.model.unpack_weights()
        free_stores(self.stores)
        for graphs in (self.graphs, self.mixed_graphs, self.speculative_graphs, *self.logit_steps.graphs.values()):
            graphs.clear()
        self.logit_steps.logits = None
        if level == 2:
            self._weight_shapes = [parameter.shape for parameter in self.model.parameters()]
            for parameter in self.model.parameters():
                parameter.data = parameter.data.new_empty(0)
            self.model.unpack_weights()  # A tied head lets go of the embedding.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Undo `sleep`, with empty stores. Weights come from the checkpoint again. Raises MemoryError, and sleeps on,
        if the memory is not free."""
        shapes = self._weight_shapes
        try:
            if shapes:
                for parameter, shape in zip(self.model.parameters(), shapes, strict=True):
                    parameter.data = parameter.data.new_empty(shape)
                self._weight_shapes = []
                self.model.unpack_weights()
                self.load_weights()
            elif self.device.type == "cpu":
                self.model.pack_weights()
            for store in self.stores:
                store.allocate(self.num_kvcache_blocks, self.num_slots)
            if self.has_graphs:
                self.capture_cudagraph(lambda done, total: None)
        except (torch.OutOfMemoryError, MemoryError) as error:
            free = free_memory(self.device) / 2**30
            self.sleep(2 if shapes else 1)
            self._weight_shapes = shapes  # Some parameters may have had no memory yet.
            raise MemoryError(
                f"wake_up(): no room for what sleep() gave back ({free:.2f} GiB are free): end what else takes memory "
                f"({error})"
            ) from error

    # -- one step ----------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Give the step its inputs, on the host."""
        if step.is_prefill:
            self.prepare_prefill(step)
        else:
            self.prepare_decode(step)
        if not all(map(_IS_PLAIN, step.seqs)):
            step.needs_logits = True
            step.waits_for_tokens = any(seq.is_constrained for seq in step.seqs)
            step.prompt_rows = prompt_rows(step.seqs) if step.is_prefill else []

    def prepare_prefill(self, step: Step) -> None:
        """The flat batch of the sequences' scheduled tokens."""
        seqs, block_size = step.seqs, self.block_size
        cached = np.array([seq.num_cached_tokens for seq in seqs])
        num_new = np.array([seq.num_scheduled_tokens for seq in seqs])
        num_keys = cached + num_new
        # No Python loop over tokens or blocks, because the device waits for the first step of a batch.
        tokens = array("i")
        for seq in seqs:
            tokens += seq.tokens[seq.num_cached_tokens : seq.num_cached_tokens + seq.num_scheduled_tokens]
        ends = np.cumsum(num_new)
        positions = np.arange(len(tokens)) + np.repeat(num_keys - ends, num_new)
        tables = self.prepare_block_tables(seqs)
        blocks = positions // block_size  # index in the sequence's table
        # Of each token's table in the flat tables.
        first_blocks = np.repeat(np.arange(len(seqs)) * tables.shape[1], num_new)
        # block * block_size + positions % block_size
        slots = (tables.ravel().take(first_blocks + blocks) - blocks) * block_size + positions
        step.num_sampled, step.num_rows = len(seqs), len(tokens)
        step.max_seqlen_q, step.max_seqlen_k = int(num_new.max()), int(num_keys.max())
        step.reads_cache = bool(cached.any())
        step.arrays = {
            "input_ids": np.frombuffer(tokens, np.int32).astype(np.int64),
            "positions": positions,
            "seeds": np.array([seq.seed for seq in seqs]),
            "sample_positions": num_keys - 1,
            "last_tokens": ends - 1,
            "temperatures": np.array([seq.params.temperature for seq in seqs], np.float32),
            "slot_mapping": slots.astype(np.int32),
            "cu_seqlens_q": np.concatenate(([0], ends)).astype(np.int32),
            "cu_seqlens_k": np.concatenate(([0], np.cumsum(num_keys))).astype(np.int32),
            "block_tables": tables,
        }
        if seqs[0].place is not None:
            slots = [seq.place.slots_of_step(seq.num_cached_tokens) for seq in seqs]
            step.arrays["slots"] = np.ascontiguousarray(np.array(slots, np.int32).T)

    @staticmethod
    def prepare_block_tables(seqs: list[Sequence]) -> np.ndarray:
        """The sequences' block tables, int32 [num_seqs, max_blocks], right-padded with -1."""
        lens = np.array([len(seq.block_table) for seq in seqs])
        tables = np.full((len(seqs), lens.max()), -1, np.int32)
        in_table = np.arange(lens.max()) < lens[:, None]
        tables[in_table] = list(chain.from_iterable([seq.block_table for seq in seqs]))
        return tables

    def prepare_decode(self, step: Step) -> None:
        """A row for each sequence's last token. In a mixed step, the last sequences are prefilled and have more rows.
        Padded to the next batch size that has a CUDA graph."""
        num_sampled = len(step.rows or step.seqs)
        step.shares_reads = bool(step.rows) and self.backend.shares_reads
        graphs = self._graphs_of[step.num_prefilled > 0, step.shares_reads]
        step.graph_size = graphs.size_for.get(num_sampled, 0)
        if not step.num_prefilled:
            num_rows = step.graph_size or num_sampled
        elif step.graph_size:
            num_rows = self.mixed_step_rows
        else:
            num_rows = sum(seq.num_scheduled_tokens for seq in step.seqs)
        self.decode_inputs.write(step, num_rows)
        if step.num_prefilled and len(self.stores) > 1:
            copies = (seq.place.copy_of_step(seq.num_cached_tokens) for seq in step.seqs if seq.is_prefilling)
            step.slot_copies = [copy for copy in copies if copy is not None]

    @torch.inference_mode()
    def run(self, step: Step) -> None:
        """Start a step, and do not wait for it. The next step may be started before this one's tokens are read.

        Its tokens are on their way to the host then, or, if it waits_for_tokens, to be sampled by `sample`. A worker
        keeps none.
        """
        num_threads = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads.choose(num_threads, step.num_rows * self.num_layer_params))
        try:
            if step.needs_logits:
                self.logit_steps.forward(step)
                if not step.waits_for_tokens:
                    self.logit_steps.sample(step)
                return
            if step.is_prefill:
                self.run_model(send_prefill(step, self.device))
            else:
                self.decode_inputs.send(step)
                for source, target in step.slot_copies:
                    for store in self.stores:
                        store.copy(source, target)
                if step.graph_size:
                    self._graphs_of[step.num_prefilled > 0, step.shares_reads].replay(step.graph_size)
                else:
                    sizes = step.num_sampled, step.num_rows, step.num_prefilled > 0, step.shares_reads
                    self.run_model(self.decode_inputs.for_model(*sizes))
            sampled = self.decode_inputs.sampled[: step.num_sampled]
            if self.device.type == "cuda":
                send_tokens(step, sampled, self.decode_inputs.tokens_on_host(step.num_sampled))
            else:
                step.tokens = sampled.clone()
        finally:
            if self._threads is not None:
                torch.set_num_threads(num_threads)

    @torch.inference_mode()
    def sample(self, step: Step | None = None) -> None:
        """Sample the tokens of a step that waited for those of the step before. A worker receives them from rank 0."""
        num_tokens = 0 if step is None else sum(seq.num_scheduled_tokens for seq in step.seqs)
        num_threads = torch.get_num_threads()
        if self._threads is not None:
            num_threads = self._threads.choose(num_threads, num_tokens * self.num_layer_params)
        with torch_threads(num_threads):
            self.logit_steps.sample(step)

    def run_model(self, inputs: ModelInputs) -> None:
        """Model, head and sampler: a token for each temperature, into decode_inputs.sampled."""
        use_context(inputs.context)
        try:
            hidden_states = self.model(inputs.input_ids, inputs.positions)[: len(inputs.temperatures)]
            logits = self.model.compute_logits(hidden_states)
            sampled = self.decode_inputs.sampled[: len(logits)]
            self.sampler(logits, inputs.temperatures, inputs.seeds, inputs.sample_positions, out=sampled)
        finally:
            reset_context()

    def _decode(self, batch_size: int, mixed_rows: int = 0, shares_reads: bool = False) -> None:
        """Compute the rows of decode_inputs, and sample from the first batch_size. This is what CUDA graphs capture.
        mixed_rows: rows of a mixed step; 0 for any other step. shares_reads: as of the step."""
        num_rows = mixed_rows or batch_size
        self.run_model(self.decode_inputs.for_model(batch_size, num_rows, mixed_rows > 0, shares_reads))

    def _run_padding(self, batch_size: int, mixed_rows: int = 0, shares_reads: bool = False) -> None:
        """`_decode` of padding alone, through a few layers, which launch every kernel that all layers do."""
        self.decode_inputs.pad(mixed_rows or batch_size, shares_reads)
        with few_layers(self.model):
            self._decode(batch_size, mixed_rows, shares_reads)
