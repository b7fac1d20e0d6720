"""ModelRunner: loads a model on its device, finds out how much memory is left for the KV cache, and runs steps."""

import logging
import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.batch_sizes import graph_batch_sizes, mixed_batch_sizes
from nanovllm.engine.features.logits.thinking import reads_tokens
from nanovllm.engine.features.pooling.pooled_steps import PooledSteps
from nanovllm.engine.inputs import ModelInputs, padded_block_tables, send_prefill, write_prefill
from nanovllm.engine.ranks.ranks import ENDED, Ranks, device_of_rank
from nanovllm.engine.runner.cuda_graphs import StepGraphs
from nanovllm.engine.runner.sampled_tokens import send_tokens
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.start.build import Parts, build_model
from nanovllm.engine.start.give_back import give_back
from nanovllm.engine.start.kv_scales import calibrate_again
from nanovllm.engine.start.memory import allocate_stores, largest_prefill
from nanovllm.engine.start.sleep import fall_asleep, wake_up
from nanovllm.engine.start.start import Start
from nanovllm.engine.start.weights import overwrite_weights
from nanovllm.engine.step import Rows, Step, StepKind
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.models.layer_facts import few_layers
from nanovllm.models.loader import TensorFacts
from nanovllm.utils.context import reset_context, use_context
from nanovllm.utils.threads import step_threads, threads_of_steps

_IS_PLAIN = attrgetter("is_plain")
logger = logging.getLogger(__name__)


class ModelRunner:
    """Holds a model and runs its steps, on one rank.

    An engine `prepare`s a step and calls `launch` on all ranks, which waits for nothing. By hand, `call("run", seqs,
    is_prefill)` does all of a step, and gives its tokens.

    Attributes:
        rank, world_size, event: this rank, how many there are, and how they call each other.
        model, backend, stores, decode_inputs, has_graphs, mixed_step_rows, ...: see `start.build.Parts`.
        sampler: all ranks draw, each from its part of the logits, and get the same tokens.
        graph_bs, graphs, graph_pool, graph_vars: of decode steps with one token a sequence: batch sizes, {batch size:
            CUDA graph}, their memory, and the tensors that they read and write. Tokens are drawn inside.
        step_graphs: the graphs of all kinds of steps.
        num_cells: places in the stores beside the KV cache.
        step_times: how long decode steps take; None without speculation.
    """

    def __init__(self, config: Config, rank: int = 0, event: Ranks | None = None):
        """event: the engine's `Workers` or, in a worker, its `WorkerSide`; None with one rank. Raises ValueError,
        MemoryError or WorkerError, and gives everything back then."""
        self.config, self.rank, self.event = config, rank, event or Ranks()
        self.world_size = config.tensor_parallel_size
        self.block_size = config.kvcache_block_size
        self.enforce_eager = config.enforce_eager
        self.device = device_of_rank(config, rank)
        # A block with this rank's GPU as the current one. It is used again and again, and never inside itself.
        self.on_device: AbstractContextManager = (
            torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        )
        self.graph_bs: list[int] = []
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.weight_shapes: list[torch.Size] = []  # of the parameters, while they sleep
        self._threads = threads_of_steps(self.device.type, self.world_size, config.deterministic)
        with Start(self) as start:
            self._free_at_start, self._progress = start.free_at_start, start.progress
            self.tp = self.event.meet(type(self))
            self._use_parts(build_model(config, self.tp, self.device))
            self.step_graphs = StepGraphs(self.device)
            self.logit_steps = PooledSteps(config, self.model, self.decode_inputs, self.step_graphs, self.tp)
            start.load_weights()
            self.warmup_model()
            self.allocate_kv_cache()
            self.capture_cudagraph()
            self.step_times = start.warm_up()

    def _use_parts(self, parts: Parts) -> None:
        self.model, self.backend, self.attention_shape, self.has_graphs, self.quack = parts[:5]
        self.num_layer_params, self.stores, self.kv_store, self.mixed_step_rows = parts[5:9]
        self.decode_inputs, self.sampler = parts[9:]

    def exit(self) -> None:
        """End all ranks and give all memory back. Harmless when called again. Ctrl-C kills ranks that do not end."""
        with self.event.leaving():
            self.synchronize()
            self.event.end(farewell=pickle.dumps(["exit"]))
        self.give_back()

    def give_back(self) -> None:
        """This rank's memory, also after a start that has failed."""
        self.synchronize()
        give_back(
            vars(self), ("config", "rank", "event", "device", "world_size", "on_device", "block_size"), self.device
        )

    # -- calls to all ranks --------------------------------------------------------------------------------------------

    def call(self, method_name: str, *args: object, for_workers: tuple | None = None) -> Any:
        """Run a method on every rank; the result is this rank's. for_workers: the others' arguments, if they differ."""
        with self.on_device:
            if self.world_size == 1 or self.rank:
                return getattr(self, method_name)(*args)
            with self.event.calling(self.give_back):
                self.write_shm(method_name, *(args if for_workers is None else for_workers))
                return getattr(self, method_name)(*args)

    def check_workers(self) -> None:
        """Raises WorkerError, and ends the engine, if another rank has died or failed, and RuntimeError if it has ended
        before."""
        try:
            self.event.check()
            if self.event.has_ended:
                raise RuntimeError(ENDED)
        except RuntimeError as error:
            self.event.end_after(error, self.give_back)

    def loop(self) -> None:
        """Do what rank 0 calls, until it calls exit."""
        method_name = ""
        while method_name != "exit":
            method_name, *args = self.read_shm()
            getattr(self, method_name)(*args)

    @property
    def shm(self) -> SharedMemory | None:
        """The segment in which calls lie; None with one rank."""
        return self.event.shm

    def write_shm(self, method_name: str, *args: object) -> None:
        """Send a call to the workers."""
        self.event.write(pickle.dumps([method_name, *args], pickle.HIGHEST_PROTOCOL))

    def read_shm(self) -> list[Any]:
        """Wait for the next call of rank 0: [method_name, *args]."""
        return pickle.loads(self.event.read())

    # -- the start -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """One prefill at full size, to measure how much memory activations need. On a CPU the KV cache's size is an
        option and does not depend on it."""
        if self.device.type == "cpu":
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._compute(largest_prefill(self.config, self.device, self.decode_inputs.columns))
        torch.cuda.synchronize(self.device)

    def allocate_kv_cache(self) -> None:
        """All stores, as large as the budget allows; config.num_kvcache_blocks becomes the KV cache's size. Raises
        MemoryError, with the numbers, if there is no room for one block."""
        args = self.stores, self.config, self.device, self.tp, self._free_at_start
        self.config.num_kvcache_blocks, self.num_cells = allocate_stores(*args)

    @property
    def kv_cache(self) -> Tensor:
        """[2, layers, blocks, block_size, kv_heads, head_dim]; of the first kind of layers, if heads differ."""
        return self.kv_store.tensors[0] if self.kv_store.tensors else torch.tensor([])

    @torch.inference_mode()
    def capture_cudagraph(self) -> None:
        """Capture `_decode` at every batch size of graph_batch_sizes, and of the other kinds of steps that there are;
        none without CUDA graphs."""
        config, rows = self.config, self.mixed_step_rows
        if not self.has_graphs:
            logger.info("CUDA graphs: none")
            return
        self.graph_bs = graph_batch_sizes(config.max_decode_rows)
        sizes = {StepKind(): self.graph_bs}
        if rows:
            sizes[StepKind(is_mixed=True)] = mixed_batch_sizes(rows, config.max_num_seqs)
        if self.backend.shares_reads:
            sizes[StepKind(shares_reads=True)] = [size for size in self.graph_bs if size > 1]
        for kind, of_kind in sizes.items():
            self.step_graphs.use_sizes(kind, of_kind)
            tell = self._progress.count("capturing CUDA graphs")
            for i, size in enumerate(reversed(of_kind)):  # The smaller ones fit into the memory of the largest.
                tell(i, len(of_kind))
                self._capture(kind, size)
            logger.info("CUDA graphs%s: %d, batch sizes %d to %d", kind.text, len(of_kind), of_kind[0], of_kind[-1])
        self.graphs = self.step_graphs[StepKind()].graphs
        inputs, self.graph_pool = self.decode_inputs, self.step_graphs.pool
        names = "positions", "slot_mapping", "context_lens", "block_tables"
        self.graph_vars = {name: inputs.rows[name] for name in names} | {"input_ids": inputs.input_ids}
        self.graph_vars["outputs"] = inputs.sampled

    @property
    def device_name(self) -> str:
        """The GPU's name, after the number of GPUs if there are several; or "CPU"."""
        name = GpuFacts.of(self.device).name
        return name if self.world_size == 1 else f"{self.world_size} x {name}"

    def synchronize(self) -> None:
        """Wait for the steps in flight: they need every rank and the host's memory."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # The next call raises it as well.
                torch.cuda.synchronize(self.device)

    def update_weights(self, tensors: Mapping[str, Tensor | TensorFacts]) -> None:
        """`start.weights.overwrite_weights`."""
        overwrite_weights(self.model, tensors, self.tp, self.device)
        calibrate_again(self.config, self.model, self.stores)
        self.synchronize()  # The caller may change its tensors now.

    def sleep(self, level: int) -> None:
        fall_asleep(self, level)

    def wake_up(self) -> None:
        wake_up(self)

    # -- a step by hand ------------------------------------------------------------------------------------------------

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int] | None:
        """Compute a step, and wait for its tokens: one for each sequence, on rank 0. Log-probabilities are not kept."""
        step = Step(seqs, is_prefill, sum(seq.is_prefill for seq in seqs))
        self.prepare(step)
        self.launch(step)
        if step.waits_for_tokens:
            self.sample(step)
        return step.wait() if self.rank == 0 else None

    def prepare_prefill(self, seqs: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Token ids and positions of the sequences' scheduled tokens, int64 [num_tokens], and the step's context."""
        return self._use(Step(seqs, True, len(seqs)))

    def prepare_decode(self, seqs: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Token ids and positions of the sequences' last tokens, int64 [num_seqs], and the step's context."""
        return self._use(Step(seqs, False, sum(seq.is_prefill for seq in seqs)))

    def _use(self, step: Step) -> tuple[Tensor, Tensor]:
        self.prepare(step)
        inputs = self._send(step) or self.decode_inputs.for_model(step.num_sampled, step.num_rows, step.kind)
        use_context(inputs.context)
        num_rows = len(cast(Rows, step.rows).positions)  # without padding
        return inputs.input_ids[:num_rows], inputs.positions[:num_rows]

    def prepare_sample(self, seqs: list[Sequence]) -> Tensor:
        """Temperatures, float32 [num_seqs]."""
        return torch.tensor([seq.temperature for seq in seqs]).to(self.device)

    def prepare_block_tables(self, seqs: list[Sequence]) -> Tensor:
        """The sequences' block tables, int32 [num_seqs, max_blocks], right-padded with -1."""
        return torch.from_numpy(padded_block_tables(seqs)).to(self.device)

    # -- a step of an engine -------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Give the step its inputs, on the host.

        A decode step has a row for each sequence's last token. In a mixed step, the last sequences are prefilled and
        have more rows. Decode steps are padded to the next batch size that has a CUDA graph.
        """
        rows = step.rows = Rows.of(step)
        if not all(map(_IS_PLAIN, step.seqs)):
            step.needs_logits = True
            step.waits_for_tokens = self.rank == 0 and any(map(reads_tokens, step.seqs))
            step.extras |= self.logit_steps.rows_of_prompts(step)
        if step.is_prefill:
            write_prefill(step, rows, self.block_size, self.decode_inputs.columns)
            return
        is_mixed = step.num_prefilled > 0
        step.kind = StepKind(is_mixed, bool(step.proposed) and self.backend.shares_reads, step.needs_logits)
        step.graph_size = self.step_graphs[step.kind].size_for.get(rows.num_sampled, 0)
        num_rows = step.graph_size or len(rows.positions)
        self.decode_inputs.write(step, rows, self.mixed_step_rows if is_mixed and step.graph_size else num_rows)

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Start a step, and do not wait for it. The next step may be started before this one's tokens are read.

        Its tokens are on their way to the host then, or, if it waits_for_tokens, to be sampled by `sample`. A worker
        keeps none.
        """
        with step_threads(self._threads, step.num_rows * self.num_layer_params):
            if step.graph_size and step.needs_logits:
                self._capture(step.kind, step.graph_size)
            inputs = self._send(step)
            if inputs is None:
                self.step_graphs[step.kind].replay(step.graph_size)
            elif not step.needs_logits:
                self._compute(inputs)
            if step.needs_logits:
                self.logit_steps.take(step, inputs)
                if not step.waits_for_tokens:
                    self.logit_steps.sample(step)
                return
            sampled = self.decode_inputs.sampled[: step.num_sampled]
            if self.device.type == "cuda":
                send_tokens(step, sampled, self.decode_inputs.tokens_on_host(step.num_sampled))
            else:
                step.tokens = sampled.clone()

    @torch.inference_mode()
    def sample(self, step: Step | None = None) -> None:
        """Sample the tokens of a step that waited for those of the step before. A worker receives them from rank 0."""
        num_tokens = 0 if step is None else sum(seq.num_scheduled_tokens for seq in step.seqs)
        with step_threads(self._threads, num_tokens * self.num_layer_params):
            self.logit_steps.sample(step)

    def _send(self, step: Step) -> ModelInputs | None:
        """The step's inputs on the device; None where a CUDA graph has them."""
        if step.is_prefill:
            return send_prefill(step, self.device, self.decode_inputs.columns)
        self.decode_inputs.send(step)
        for source, target in step.extras.get("state copies", ()):
            for store in self.stores:
                store.copy(source, target)
        if step.graph_size:
            return None
        return self.decode_inputs.for_model(step.num_sampled, step.num_rows, step.kind)

    def _compute(self, inputs: ModelInputs) -> None:
        """Model, head and sampler: a token for each temperature, into decode_inputs.sampled."""
        use_context(inputs.context)
        try:
            logits = self.run_model(inputs.input_ids, inputs.positions, inputs.context.is_prefill)
        finally:
            reset_context()
        num_sampled = len(inputs.temperatures)
        sampled = self.decode_inputs.sampled[:num_sampled]
        noise = inputs.seeds, inputs.sample_positions
        self.sampler(logits[:num_sampled], inputs.temperatures, *noise, out=sampled)

    @torch.inference_mode()
    def run_model(self, input_ids: Tensor, positions: Tensor, is_prefill: bool) -> Tensor:
        """Logits [num_seqs, vocab_size] of a step whose context is set; with several ranks, of this rank's tokens."""
        return self.model.compute_logits(self.model(input_ids, positions))

    def _capture(self, kind: StepKind, batch_size: int) -> None:
        """Have the graph of one size. All ranks come here at the same step, and capture together."""
        functions = partial(self._decode, kind=kind), partial(self._run_padding, kind=kind)
        self.step_graphs[kind].capture(batch_size, *functions)

    def _decode(self, batch_size: int, kind: StepKind) -> None:
        """Compute the rows of decode_inputs, and sample from the first batch_size, or keep their logits. This is what
        CUDA graphs capture."""
        num_rows = self.mixed_step_rows if kind.is_mixed else batch_size
        inputs = self.decode_inputs.for_model(batch_size, num_rows, kind)
        if kind.gives_logits:
            self.logit_steps.store_logits(inputs)
        else:
            self._compute(inputs)

    def _run_padding(self, batch_size: int, kind: StepKind) -> None:
        """`_decode` of padding alone, through a few layers, which launch every kernel that all layers do."""
        self.decode_inputs.pad(self.mixed_step_rows if kind.is_mixed else batch_size, kind.shares_reads)
        with few_layers(self.model):
            self._decode(batch_size, kind)

    def compute_padding(self, batch_size: int) -> None:
        """A whole decode step of padding, for `step_times`."""
        self.decode_inputs.pad(batch_size)
        if self.has_graphs:
            self.step_graphs[StepKind()].replay(batch_size)
        else:
            self._decode(batch_size, StepKind())
