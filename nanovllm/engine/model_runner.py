"""ModelRunner: the model on one device, its memory, its inputs, its CUDA graphs."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter

import numpy as np
import torch

from nanovllm.config import CPU_KVCACHE_GIB, Config
from nanovllm.engine.cuda_graphs import DecodeGraphs, graph_batch_sizes
from nanovllm.engine.inputs import BlockTables, DecodeInputs, PackedArrays, SampledTokens
from nanovllm.engine.prompt_logprobs import prompt_logprobs
from nanovllm.engine.sampling_pipeline import Forward, SamplingPipeline
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import select_backend
from nanovllm.layers.sampler import Sampler
from nanovllm.models import model_class
from nanovllm.models.qwen3 import get_head_dim
from nanovllm.utils.context import Context, step_context
from nanovllm.utils.loader import load_dummy, load_model
from nanovllm.utils.parallel import TensorParallel

logger = logging.getLogger(__name__)

GIB = 2**30


class ModelRunner:
    """Runs steps of the model on one rank's device.

    Attributes:
        config: the engine's options.
        num_kvcache_blocks: blocks of the KV cache.
        kv_cache: [2, layers, blocks, block_size, kv_heads, head_dim]; 0 = keys, 1 = values.
    """

    def __init__(self, config: Config, rank: int = 0):
        """Build everything, ready for `run`. What was allocated is given back where a part of it fails."""
        self.config = config
        self.rank = rank
        self.tp = TensorParallel(rank, config.tensor_parallel_size)
        self.block_size = config.kvcache_block_size
        self._forget()
        try:
            self._build()
        except BaseException:
            self.exit()
            raise

    def _build(self) -> None:
        config = self.config
        self.device = torch.device("cpu")
        if config.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device() + self.rank)
        head_dim = get_head_dim(config.hf_config)
        backend = select_backend(config.attention_backend, config.device, config.dtype, head_dim, self.block_size)
        cls = model_class(config.hf_config)
        with self.device, _default_dtype(config.dtype):
            self.model = cls(config.hf_config, config.max_model_len, backend, self.tp)
        self.model.requires_grad_(False)
        if config.load_format == "dummy":
            load_dummy(self.model, config.seed or 0)
        else:
            load_model(self.model, config.model)
        self.sampler = Sampler()
        num_params = sum(p.numel() for p in self.model.parameters())
        logger.info("model: %s, %.3f B parameters, %s", config.model, num_params / 1e9, config.dtype)
        logger.info("device: %s; attention back end: %s", self.device_name, backend.description)
        num_heads = self.tp.shard(config.hf_config.num_attention_heads, "num_attention_heads")
        self.num_kv_heads = num_kv_heads = self.tp.shard(config.hf_config.num_key_value_heads, "num_key_value_heads")
        if backend.flash_attn4 is not None:
            backend.flash_attn4.warm_up(num_heads, num_kv_heads, head_dim, self.block_size, config.dtype, self.device)
        self.warmup_model()
        self.allocate_kv_cache()
        backend.prepare(config.max_num_seqs, num_heads, num_kv_heads, head_dim, self.device)
        max_blocks = -(-config.max_model_len // self.block_size)
        planned_heads = num_kv_heads if backend.wants_plan else None
        self.decode_inputs = DecodeInputs(config.max_num_seqs, max_blocks, self.block_size, self.device, planned_heads)
        if config.device == "cuda":
            if not config.enforce_eager and backend.supports_cuda_graphs:
                self.capture_cudagraph()
            self.warmup_kernels()

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def call(self, method: str, *args):
        """Run one method by name on every rank; the result is rank 0's."""
        return getattr(self, method)(*args)

    def exit(self) -> None:
        """Give all memory back. Harmless when called again."""
        if self.model is not None:
            for layer in self._attention_layers():
                layer.k_cache = layer.v_cache = None
        self._forget()
        # Parameters and their loaders refer to each other, so their memory waits for the collector.
        gc.collect()
        if self.config.device == "cuda":
            torch.cuda.empty_cache()

    def _forget(self) -> None:
        self.model = self.sampler = self.kv_cache = self.graphs = self.decode_inputs = None
        self.pipeline = self.logits = self.logits_graphs = None

    # -- memory ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """One prefill at full size, so that the peak of the activations is known before the KV cache takes the
        rest. Nothing to learn on a CPU, where the cache's size is an option."""
        if self.device.type == "cpu":
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        config = self.config
        # As many sequences as a step may hold, so that the logits are at their largest as well.
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        seq_len = min(config.max_num_batched_tokens // num_seqs, config.max_model_len)
        cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device) * seq_len
        input_ids = torch.randint(config.hf_config.vocab_size, (num_seqs * seq_len,), device=self.device)
        positions = torch.arange(seq_len, device=self.device).repeat(num_seqs)
        context = Context(True, cu_seqlens, cu_seqlens, seq_len, seq_len)
        sampling = [torch.zeros(num_seqs, dtype=d, device=self.device) for d in _SAMPLING_DTYPES]
        with step_context(context):
            self._forward(input_ids, positions, *sampling)
        torch.cuda.synchronize(self.device)

    def warmup_kernels(self) -> None:
        """Compile every variant of the Triton kernels that a prefill may need (seconds, the first time on a
        machine), so that none is compiled in the middle of a batch: short and long, with a cached prefix and
        without. They write to the cache's first slots, which nobody has been given yet."""
        config = self.config
        for num_cached, num_new in ((0, 1), (0, 17), (0, 512), (16, 1), (16, 17), (16, 512)):
            num_tokens = num_cached + num_new
            if num_tokens > min(config.max_model_len, self.num_kvcache_blocks * self.block_size):
                continue
            seq = Sequence(0, [0] * num_tokens, block_size=self.block_size)
            seq.block_table = list(range(seq.num_blocks))
            seq.num_cached_tokens, seq.num_scheduled_tokens = num_cached, num_new
            self.run([seq], True)
            if config.max_num_seqs > 1:
                self.run([seq, seq], True)
        seq.is_prefilling = False
        self.run([seq], False)

    def allocate_kv_cache(self) -> None:
        """One tensor for all layers, each of which holds its slices of it.

        Raises MemoryError where there is no room for one block, with the numbers.
        """
        config, hf_config = self.config, self.config.hf_config
        layers = self._attention_layers()
        shape = (self.block_size, self.num_kv_heads, get_head_dim(hf_config))
        block_bytes = 2 * len(layers) * int(np.prod(shape)) * config.dtype.itemsize
        blocks = config.num_kvcache_blocks
        if blocks == -1:
            budget, reason = self._kv_cache_budget()
            blocks = budget // block_bytes
            if blocks < 1:
                raise MemoryError(
                    f"no room for one KV cache block of {block_bytes / GIB:.3f} GiB: {reason}; raise "
                    "gpu_memory_utilization or kvcache_gib, or lower max_num_batched_tokens"
                )
        self.num_kvcache_blocks = blocks
        self.kv_cache = torch.zeros(2, len(layers), blocks, *shape, dtype=config.dtype, device=self.device)
        for i, layer in enumerate(layers):
            layer.k_cache, layer.v_cache = self.kv_cache[0, i], self.kv_cache[1, i]
        capacity = blocks * self.block_size
        bound = "max_model_len" if config.max_model_len <= capacity else "the KV cache"
        logger.info(
            "KV cache: %d blocks x %d = %d tokens, %.2f GiB; longest sequence: %d tokens (%s)",
            blocks,
            self.block_size,
            capacity,
            blocks * block_bytes / GIB,
            min(config.max_model_len, capacity),
            bound,
        )

    def _kv_cache_budget(self) -> tuple[int, str]:
        """Bytes for the KV cache, and in words where they come from."""
        config = self.config
        if config.kvcache_gib is not None or self.device.type == "cpu":
            gib = config.kvcache_gib or CPU_KVCACHE_GIB
            return int(gib * GIB), f"kvcache_gib is {gib}"
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats(self.device)
        peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
        budget = total * config.gpu_memory_utilization - (total - free) - (peak - current)
        return int(budget), (
            f"of {total / GIB:.2f} GiB x gpu_memory_utilization={config.gpu_memory_utilization}, "
            f"{(total - free) / GIB:.2f} GiB are in use (by other processes too) and a step's activations "
            f"take {(peak - current) / GIB:.2f} GiB"
        )

    def _attention_layers(self) -> list[Attention]:
        return [module for module in self.model.modules() if isinstance(module, Attention)]

    # -- one step ----------------------------------------------------------------------------------------------

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """Compute one step and sample: one token a sequence, in order (that of a sequence whose prefill goes on
        with the next chunk means nothing)."""
        return self.launch(seqs, is_prefill).wait()

    @torch.inference_mode()
    def launch(self, seqs: list[Sequence], is_prefill: bool) -> SampledTokens | Forward:
        """Start one step, as `run` does, without waiting for it. One more step may be launched before its tokens
        are read; sequences whose last token is pending then take it from the device.

        A step with a grammar in it comes back half-way, for launch_sampling: which tokens are allowed depends on the
        tokens of the step before, and the device has work until these are read."""
        if not all(map(_IS_PLAIN, seqs)):
            forward = self.launch_forward(seqs, is_prefill)
            return forward if any(seq.grammar is not None for seq in seqs) else self.launch_sampling(forward)
        if is_prefill:
            inputs, context = self.prepare_prefill(seqs)
            with step_context(context):
                self._forward(*inputs)
        else:
            use_graph = self.graphs is not None and len(seqs) <= self.graphs.max_batch_size
            batch_size = self.graphs.padded(len(seqs)) if use_graph else len(seqs)
            self.prepare_decode(seqs, batch_size)
            (self.graphs.replay if use_graph else self._decode)(batch_size)
        return SampledTokens(self.decode_inputs.sampled[: len(seqs)])

    @torch.inference_mode()
    def launch_forward(self, seqs: list[Sequence], is_prefill: bool) -> Forward:
        """The first half of a step that is not plain: model and head, and what prompts were asked for."""
        n = len(seqs)
        if is_prefill:
            (input_ids, positions, temperatures, seeds, sample_positions), context = self.prepare_prefill(seqs)
            with step_context(context):
                hidden_states = self.model(input_ids, positions)
                logits = self.model.compute_logits(hidden_states)
            prompts = prompt_logprobs(seqs, hidden_states, self.model.compute_logits)
            return Forward(seqs, True, logits, temperatures, seeds, sample_positions, prompts=prompts)
        inputs = self.decode_inputs
        use_graph = self.graphs is not None and n <= self.graphs.max_batch_size
        if use_graph:
            batch_size = self.graphs.padded(n)
            self._capture_logits(batch_size)
            self.prepare_decode(seqs, batch_size)
            self.logits_graphs.replay(batch_size)
            logits = self.logits[:n]
        else:
            self.prepare_decode(seqs, n)
            logits = self._decode_logits(n)
        rows = {name: inputs.rows[name][:n] for name in ("temperatures", "seeds", "positions", "token_source")}
        fed_tokens = inputs.tokens[rows.pop("token_source")]
        return Forward(seqs, False, logits, **rows, fed_tokens=fed_tokens)

    @torch.inference_mode()
    def launch_sampling(self, forward: Forward) -> SampledTokens:
        """The second half: draw the tokens."""
        if self.pipeline is None:
            config, vocab_size = self.config, self.config.hf_config.vocab_size
            self.pipeline = SamplingPipeline(vocab_size, config.max_num_seqs, config.eos, self.device)
        tokens, logprobs = self.pipeline.draw(forward)
        self.decode_inputs.sampled[: len(tokens)] = tokens
        return SampledTokens(tokens, logprobs)

    def prepare_prefill(self, seqs: list[Sequence]) -> tuple[tuple[torch.Tensor, ...], Context]:
        """The flat batch of the sequences' scheduled tokens: (input_ids, positions, temperatures, seeds, sample
        positions), and the context."""
        num_new = [seq.num_scheduled_tokens for seq in seqs]
        num_keys = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs]
        num_tokens, num_seqs = sum(num_new), len(seqs)
        # Without a cached prefix, keys and values are all in the batch itself, and no table is looked up.
        is_cached = sum(num_keys) > num_tokens
        max_blocks = max(len(seq.block_table) for seq in seqs)
        arrays = PackedArrays(
            {
                "input_ids": ((num_tokens,), np.int64),
                "positions": ((num_tokens,), np.int64),
                "seeds": ((num_seqs,), np.int64),
                "sample_positions": ((num_seqs,), np.int64),
                "temperatures": ((num_seqs,), np.float32),
                "slot_mapping": ((num_tokens,), np.int32),
                "cu_seqlens_q": ((num_seqs + 1,), np.int32),
                "cu_seqlens_k": ((num_seqs + 1,), np.int32),
                "block_tables": ((num_seqs, max_blocks), np.int32),
            },
            self.device,
        )
        host = arrays.host
        tables = BlockTables(host["block_tables"])
        start = 0
        for i, seq in enumerate(seqs):
            first, end = seq.num_cached_tokens, num_keys[i]
            tables.write(i, seq.block_table)
            positions = np.arange(first, end)
            tokens = slice(start, start + num_new[i])
            host["input_ids"][tokens] = np.frombuffer(seq.tokens, np.int32)[first:end]
            host["positions"][tokens] = positions
            blocks = tables.array[i, positions // self.block_size]
            host["slot_mapping"][tokens] = blocks * self.block_size + positions % self.block_size
            start += num_new[i]
        np.cumsum(num_new, out=host["cu_seqlens_q"][1:])
        np.cumsum(num_keys, out=host["cu_seqlens_k"][1:])
        host["sample_positions"][:] = host["cu_seqlens_k"][1:] - host["cu_seqlens_k"][:-1] - 1
        host["temperatures"][:] = [seq.temperature for seq in seqs]
        host["seeds"][:] = [seq.seed for seq in seqs]
        arrays.send()
        device = arrays.device
        context = Context(
            is_prefill=True,
            cu_seqlens_q=device["cu_seqlens_q"],
            cu_seqlens_k=device["cu_seqlens_k"],
            max_seqlen_q=max(num_new),
            max_seqlen_k=max(num_keys),
            slot_mapping=device["slot_mapping"],
            block_tables=device["block_tables"] if is_cached else None,
        )
        names = ("input_ids", "positions", "temperatures", "seeds", "sample_positions")
        return tuple(device[name] for name in names), context

    def prepare_decode(self, seqs: list[Sequence], batch_size: int) -> None:
        """Each sequence's last token, its position, its slot and its block table, into decode_inputs; padding in
        the rows from there to batch_size."""
        self.decode_inputs.write(seqs, batch_size)

    def _decode(self, batch_size: int) -> None:
        """Decode the first rows of decode_inputs into its `sampled`. Captured as it stands."""
        rows = {name: tensor[:batch_size] for name, tensor in self.decode_inputs.rows.items()}
        input_ids = self.decode_inputs.tokens[rows["token_source"]]
        with step_context(self._decode_context(batch_size)):
            self._forward(input_ids, rows["positions"], rows["temperatures"], rows["seeds"], rows["positions"])

    def _decode_logits(self, batch_size: int) -> torch.Tensor:
        """Model and head of the first rows of decode_inputs: [batch_size, vocab_size]."""
        rows = self.decode_inputs.rows
        input_ids = self.decode_inputs.tokens[rows["token_source"][:batch_size]]
        with step_context(self._decode_context(batch_size)):
            return self.model.compute_logits(self.model(input_ids, rows["positions"][:batch_size]))

    def _decode_context(self, batch_size: int) -> Context:
        rows = self.decode_inputs.rows
        return Context(
            slot_mapping=rows["slot_mapping"][:batch_size],
            context_lens=rows["context_lens"][:batch_size],
            block_tables=rows["block_tables"][:batch_size],
            decode_plan=self.decode_inputs.plan(batch_size),
        )

    def _forward(self, input_ids, positions, temperatures, seeds, sample_positions) -> None:
        """Model, head and sampler: one token a sequence, into decode_inputs.sampled. A token is drawn with the
        noise of the position that it follows."""
        logits = self.model.compute_logits(self.model(input_ids, positions))
        tokens = self.sampler(logits, temperatures, seeds, sample_positions)
        if self.decode_inputs is not None:  # The warm-up runs before there are any.
            self.decode_inputs.sampled[: len(tokens)] = tokens

    @torch.inference_mode()
    def capture_cudagraph(self) -> None:
        """Capture `_decode`, sampling included, at every batch size of graph_batch_sizes."""
        sizes = graph_batch_sizes(self.config.max_num_seqs)
        self.graphs = DecodeGraphs(self._decode, partial(self.prepare_decode, []), sizes, self.device)
        self.graphs.capture_all()
        logger.info("CUDA graphs: %d, batch sizes 1 to %d", len(sizes), sizes[-1])

    def _capture_logits(self, batch_size: int) -> None:
        """Have a graph of this size that ends at the logits. Captured when it is first needed, because a batch may
        well never need any; in the other graphs' memory, as a step runs one or the other."""
        if self.logits_graphs is None:
            rows, vocab_size = self.graphs.max_batch_size, self.config.hf_config.vocab_size
            self.logits = torch.empty(rows, vocab_size, dtype=self.config.dtype, device=self.device)
            prepare = partial(self.prepare_decode, [])
            sizes, pool = self.graphs.sizes, self.graphs.pool
            self.logits_graphs = DecodeGraphs(self._store_logits, prepare, sizes, self.device, pool)
        self.logits_graphs.capture(batch_size)

    def _store_logits(self, batch_size: int) -> None:
        self.logits[:batch_size] = self._decode_logits(batch_size)


_IS_PLAIN = attrgetter("is_plain")
_SAMPLING_DTYPES = (torch.float32, torch.int64, torch.int64)  # temperatures, seeds, positions


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.set_default_dtype for a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
