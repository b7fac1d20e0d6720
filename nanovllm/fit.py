"""`nanovllm fit MODEL`: does a model fit a GPU, or this machine's CPU? From its shapes alone: no weights are read, and
no GPU is needed."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain, islice, product
from typing import Any, NamedTuple, cast

import torch

from nanovllm.config import CPU_KVCACHE_GIB, DTYPES, FP8_CAPABILITY, MAX_SLOTS, Config
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.fp8 import E4M3
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.all_formats import QUANTIZATIONS
from nanovllm.layers.formats.parameters import stored
from nanovllm.layers.stores.store import Store, count_blocks, count_cells, total_bytes
from nanovllm.layers.stores.windowed_kv_cache import WindowedKVCache
from nanovllm.models.decoder import layer_heads
from nanovllm.models.model_size import meta_model, model_bytes, packed_head_bytes
from nanovllm.models.registry import model_class
from nanovllm.utils.host_memory import host_memory
from nanovllm.utils.units import GIB

CARDS_GIB = (8, 12, 16, 24, 32, 48, 80, 141)
# What an engine uses beside its model and a step's activations: workspaces of libraries, compiled kernels, CUDA graphs.
_OTHER_BYTES = GIB // 4
_WIDTH = 80  # characters of a line

# What may make room, the least harmful value first. Answers do not depend on the first ones.
_SMALLER_STEPS = {"max_num_batched_tokens": (8192, 4096, 2048, 1024), "max_num_seqs": (256, 64, 16)}
_SMALLER_CPU_CACHES = 1.0, 0.5, 0.25
_SHORTER = 131072, 32768, 8192, 4096, 2048, 1024
_MORE_GPUS = 2, 4, 8

Change = dict[str, Any]


class Fit(NamedTuple):
    """What one place has room for.

    Attributes:
        num_tokens: that the KV cache holds, of all sequences together.
        num_sequences: of max_model_len tokens that run at once; 0 if the model does not fit.
    """

    num_tokens: int
    num_sequences: int


class Place(NamedTuple):
    """Where a model could run.

    Attributes:
        memory: bytes; of a CPU those that are free.
        is_cpu: this machine's CPU; else a GPU.
        capability: of a GPU that this machine has.
    """

    name: str
    memory: int
    is_cpu: bool = False
    capability: tuple[int, int] | None = None


class Needs(NamedTuple):
    """Bytes on each GPU, or on the CPU, for an engine with some `Config`.

    Attributes:
        weights: parameters, scales and RoPE's tables.
        activations: of the largest step; an estimate.
        stores: of keys and values, and of states.
    """

    weights: int
    activations: int
    stores: list[Store]

    @property
    def per_block(self) -> int:
        """Of a block of tokens: its keys and values, in all layers."""
        return sum(store.bytes_per_block for store in self.stores)

    @property
    def per_cell(self) -> int:
        """Of a cell of states, one for each running sequence, however long it is."""
        return sum(store.bytes_per_cell for store in self.stores)

    def on(self, place: Place, config: Config) -> Fit:
        """What a place has room for. On a CPU, or with kvcache_gib, the KV cache has the size that is asked for, or the
        model does not fit."""
        num_ranks = config.tensor_parallel_size if place.is_cpu else 1  # A CPU has them all.
        share = 1 if config.kvcache_gib or place.is_cpu else config.gpu_memory_utilization
        room = int(place.memory * share) // num_ranks - self.weights - self.activations - _OTHER_BYTES
        if config.kvcache_gib or place.is_cpu:
            asked = int((config.kvcache_gib or CPU_KVCACHE_GIB) * GIB)
            room = asked if asked <= room else 0
        num_cells = count_cells(self.per_cell, config.max_decode_rows, max(0, room))
        num_blocks = self.num_blocks(room, num_cells, config)
        num_seqs = min(num_cells, config.max_num_seqs) if num_cells else config.max_num_seqs
        num_seqs = min(num_seqs, self.num_sequences(num_blocks, blocks_each(config)))
        return Fit(num_blocks * config.kvcache_block_size, num_seqs)

    def num_blocks(self, room: int, num_cells: int, config: Config) -> int:
        """That the KV cache has in so many bytes, beside num_cells cells; 0 for none."""
        return max(0, count_blocks(self.stores, room, num_cells, MAX_SLOTS // config.kvcache_block_size))

    def num_sequences(self, num_blocks: int, blocks_each: int) -> int:
        """Of blocks_each blocks, in num_blocks."""
        return min(store.num_sequences(num_blocks, blocks_each) for store in self.stores)

    def bytes_of_one(self, config: Config) -> int:
        """Of a sequence of max_model_len tokens. At most half of the cache is states."""
        blocks = total_bytes(self.stores, blocks_each(config), 0)
        return max(blocks + self.per_cell, 2 * self.per_cell)


def blocks_each(config: Config) -> int:
    """Of a sequence of max_model_len tokens."""
    return -(-cast(int, config.max_model_len) // config.kvcache_block_size)


def step_tokens(config: Config) -> int:
    """Of the largest step."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * cast(int, config.max_model_len))


def needs(config: Config, model: Any = None, is_cpu: bool = False) -> Needs:
    """model: the `meta_model` of the same shapes and formats, if there is one already. Raises MemoryError for a model
    with a weight of 2**63 bytes or more."""
    model = model or meta_model(config)
    sizes = model_bytes(config, model)
    c, size = config.hf_config, config.tensor_parallel_size
    # The widest point of a step is an MLP: the residual stream, its norm, gate and up, and their product; or a token's
    # experts.
    spec = model_class(c).spec(c)
    of_layers = {layer_heads(c, spec, layer) for layer in range(c.num_hidden_layers)}
    heads = max((c.num_attention_heads + 2 * x.num_kv_heads) * x.head_dim for x in of_layers) // size
    values = 2 * c.hidden_size + max(heads, 3 * c.intermediate_size // size, _expert_values(model, c.hidden_size))
    logits = config.max_num_seqs * c.vocab_size // size
    images, kept = _image_values(config, model)
    values_of_step = step_tokens(config) * values + logits + _largest_packed(model)
    activations = (max(values_of_step + step_tokens(config) * _row_size(model), images) + kept) * config.dtype.itemsize
    weights = sizes.weights + sizes.tables + (packed_head_bytes(config, model) if is_cpu else 0)
    return Needs(weights, activations, sizes.stores)


def _row_size(model: Any) -> int:
    """Numbers that a placeholder token of an image has beside a token's."""
    return 0 if model.vision_spec is None else model.vision_spec.row_size


def _image_values(config: Config, model: Any) -> tuple[int, int]:
    """Numbers of the vision tower at work on as many patches as it computes at once, and of the rows that are kept."""
    spec = model.vision_spec
    if spec is None:
        return 0, 0
    num_rows, num_patches = spec.limits(cast(int, config.max_model_len))
    return num_patches * spec.values_per_patch(), num_rows * spec.row_size


def _expert_values(model: Any, hidden_size: int) -> int:
    """Numbers of a token's experts on a rank: hidden ones and results, also of experts that are on others."""
    mixtures = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
    return max((each.top_k * (len(each.experts.shards.columns) + hidden_size) for each in mixtures), default=0)


def _largest_packed(model: Any) -> int:
    """Numbers of the largest weight that is packed: a product of many tokens dequantizes it."""
    found: list[tuple[Any, Any]] = [(each, stored(each)) for each in model.parameters() if each.dtype == torch.uint8]
    return max((its.format.shape_of(each).numel() for each, its in found if not its.is_scale), default=0)


class Question:
    """Does this model fit with these options, and what would change the answer?"""

    def __init__(self, model: str, **options: Any):
        """Takes what LLM takes. Raises ValueError, TypeError and OSError as LLM."""
        self._model = model
        # On a CPU, where every format is possible: the GPU asked about is another one.
        fixed = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
        self._options = {"dtype": "auto", **options, **fixed}
        self._made: dict[tuple, tuple[Config, Any]] = {}
        self._needs: dict[tuple, Needs] = {}

    def config(self, is_cpu: bool = False, **change: Any) -> Config:
        return self._make(is_cpu, change)[0]

    def needs(self, is_cpu: bool = False, **change: Any) -> Needs:
        key = (is_cpu, *sorted(change.items()))
        if key not in self._needs:
            config, model = self._make(is_cpu, change)
            self._needs[key] = needs(config, model, is_cpu)
        return self._needs[key]

    def fit(self, place: Place, **change: Any) -> Fit:
        return self.needs(place.is_cpu, **change).on(place, self.config(place.is_cpu, **change))

    def what_helps(self, place: Place) -> Iterator[tuple[Change, Fit]]:
        """The least harmful change of options with which the model fits, then the smallest number of GPUs that do
        without it. Nothing if no change that is tried helps."""
        for changes in (self._changes(place), self._more_gpus(place)):
            tried = ((change, self._try(place, change)) for change in changes)
            yield from islice(((change, fit) for change, fit in tried if fit.num_sequences), 1)

    def _try(self, place: Place, change: Change) -> Fit:
        try:
            return self.fit(place, **change)
        except ValueError:  # The model's sizes, or its checkpoint's format, do not allow this option.
            return Fit(0, 0)

    def _changes(self, place: Place) -> Iterator[Change]:
        """From harmless to harmful, and few before many: smaller steps, then what changes answers, each alone and with
        smaller steps."""
        steps = self._smaller_steps(place)
        for answers in self._answer_changes(place):
            if self._can_run(place, answers) and self._try(place, answers | steps[-1]).num_sequences:
                yield from (answers | step for step in steps if answers or step)

    def _smaller_steps(self, place: Place) -> list[Change]:
        """None, those with one option, those with two; the smallest is the last. On a CPU the KV cache is smaller, or
        as large as one sequence."""
        config = self.config(place.is_cpu)
        ladders: dict[str, list[Any]] = {}
        now = config.kvcache_gib or (CPU_KVCACHE_GIB if place.is_cpu else None)
        if now is not None:
            one = self.needs(place.is_cpu).bytes_of_one(config) / GIB
            enough = math.ceil(one * 4) / 4
            smaller = [gib for gib in _SMALLER_CPU_CACHES if enough <= gib < now]
            ladders["kvcache_gib"] = [now, *([enough] if now < enough else smaller)]
        for name, values in _SMALLER_STEPS.items():
            now = getattr(config, name)
            ladders[name] = [now, *(value for value in values if value < now)]
        found = [
            [(index, {name: value} if index else {}) for index, value in enumerate(values)]
            for name, values in ladders.items()
        ]
        steps = [
            (tuple(index for index, _ in reversed(each)), dict(chain.from_iterable(step.items() for _, step in each)))
            for each in product(*found)
        ]
        return [step for _, step in sorted(steps, key=lambda each: (len(each[1]), each[0]))]

    def _answer_changes(self, place: Place) -> Iterator[Change]:
        yield {}
        config = self.config(place.is_cpu)
        formats = [{"quantization": name} for name in QUANTIZATIONS] if config.weight_format is None else []
        if place.is_cpu:
            half = {"dtype": "bfloat16"} if config.dtype.itemsize > 2 else {}
            yield from ([half] if half else [])
            yield from (half | format for format in formats)
            return
        cache = [{"kv_cache_dtype": "fp8"}] if config.kv_cache_dtype != E4M3 else []
        shorter = [{"max_model_len": length} for length in _SHORTER if length < cast(int, config.max_model_len)]
        yield from cache
        if "max_model_len" not in self._options:  # Else a caller wants sequences of this length.
            yield from shorter
        yield from formats
        yield from (each | format for each in cache for format in formats)
        yield from (format | length for format in [{}, *formats] for length in shorter)

    def _more_gpus(self, place: Place) -> Iterator[Change]:
        if not place.is_cpu:
            now = self.config().tensor_parallel_size
            yield from ({"tensor_parallel_size": number} for number in _MORE_GPUS if number > now)

    def _can_run(self, place: Place, change: Change) -> bool:
        """Whether this machine's GPU has the formats of a change; of others that is not known."""
        if place.capability is None:
            return True
        format = QUANTIZATIONS.get(change.get("quantization", ""))
        can_multiply = format is None or format.check_gpu(place.capability) is None
        return can_multiply and ("kv_cache_dtype" not in change or place.capability >= FP8_CAPABILITY)

    def _make(self, is_cpu: bool, change: Change) -> tuple[Config, Any]:
        """The options and the model's shapes. To make these takes a while, so they are made once for each set of
        formats."""
        shapes = {name: change[name] for name in ("dtype", "quantization", "tensor_parallel_size") if name in change}
        options = self._options | shapes
        if options["dtype"] == "auto" and not is_cpu:
            options["dtype"] = "bfloat16"
        key = is_cpu, str(options["dtype"]), options.get("quantization"), options.get("tensor_parallel_size")
        if key not in self._made:
            config = Config(self._model, **options)
            self._made[key] = config, meta_model(config)
        config, model = self._made[key]
        config = copy(config)
        for name, value in change.items():
            if name not in shapes:
                setattr(config, name, E4M3 if name == "kv_cache_dtype" else value)
        return config, model


def places(memory_gib: Sequence[float] = ()) -> list[Place]:
    """GPUs of these sizes. None: this machine's GPU, if it has one, common sizes, and this machine's CPU."""
    found = [Place(f"{gib:g} GiB", int(gib * GIB)) for gib in memory_gib or CARDS_GIB]
    if memory_gib:
        return found
    if torch.cuda.is_available():
        found.insert(0, gpu_place())
    return [*found, cpu_place()]


def gpu_place() -> Place:
    """This machine's GPU."""
    gpu = GpuFacts.of(torch.device("cuda", torch.cuda.current_device()))
    return Place(gpu.name, gpu.total_memory, capability=gpu.capability)


def cpu_place() -> Place:
    free = host_memory().available
    return Place(f"this CPU ({free / GIB:.1f} GiB free)", free, is_cpu=True)


def print_fit(model: str, memory_gib: Sequence[float] = (), **options: Any) -> bool:
    """Print what a model needs, what some GPUs and this machine's CPU have room for, and what would make it fit.

    Args:
        model, options: as LLM takes them.
        memory_gib: sizes of GPUs; none for this machine's GPU, if it has one, common sizes, and this machine's CPU.

    Returns:
        Whether it fits one of them: at least one sequence of max_model_len tokens.

    Raises ValueError, TypeError and OSError as LLM, and MemoryError as `needs`.
    """
    question = Question(model, **options)
    asked = places(memory_gib)
    _print_needs(model, question, options.get("max_model_len"))
    length = question.config().max_model_len
    print(f"\n{'GPU or CPU':>27}  fits  {'tokens in the cache':>19}  {f'sequences of {length:,}':>22}")
    fits = [(place, question.fit(place)) for place in asked]
    for place, fit in fits:
        name = textwrap.shorten(place.name, 27, placeholder="...")
        counts = f"{fit.num_tokens:>19,}  {fit.num_sequences:>22,}" if fit.num_tokens else ""
        print(f"{name:>27}  {'yes' if fit.num_sequences else 'no':4}  {counts}".rstrip())
    if any(place.is_cpu for place in asked):
        _print_cpu(question)
    too_small = [place for place, fit in fits if not fit.num_sequences]
    places_of: dict[str, list[str]] = {}  # what helps -> where
    for place in too_small:
        places_of.setdefault(advice(question, place), []).append(place.name)
    if places_of:
        print("\nWhat makes it fit:")
    for helps, names in places_of.items():
        text = f"{', '.join(names)}: {helps}"
        lines = textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        print(lines.replace("\xa0", " "))
    return len(too_small) < len(asked)


def _print_needs(model: str, question: Question, asked_length: int | None) -> None:
    config, needed = question.config(), question.needs()
    gpus = f"each of {config.tensor_parallel_size} GPUs" if config.tensor_parallel_size > 1 else "the GPU"
    length, supported = cast(int, config.max_model_len), config.supported_model_len
    kv_per_token = needed.per_block / config.kvcache_block_size
    print(f"{model} on {gpus}:")
    print(f"  weights          {needed.weights / GIB:8.2f} GiB")
    print(f"  activations      {needed.activations / GIB:8.2f} GiB (a step of {step_tokens(config):,} tokens, about)")
    windowed = [store for store in needed.stores if isinstance(store, WindowedKVCache)]
    of_one = length * kv_per_token
    for store in windowed:
        of_one -= max(0, blocks_each(config) - store.split.per_sequence) * store.bytes_per_block
    print(f"  KV cache         {kv_per_token / 1024:8.1f} KiB a token, ", end="")
    print(f"{of_one / GIB:.2f} GiB for {length:,} tokens")
    for store in windowed:
        size = config.kvcache_block_size
        print(f"    with a window  {store.bytes_per_block / size / 1024:8.1f} KiB of it, ", end="")
        print(f"for the last {store.split.per_sequence * size:,} tokens alone")
    if needed.per_cell:
        print(f"  states           {needed.per_cell / GIB:8.3f} GiB a running sequence, and as much a snapshot")
    if asked_length is not None and asked_length > supported:
        print(f"  longest sequence {length:8,} tokens, not {asked_length:,}: the model supports no more")
    else:
        more = f" (the model supports {supported:,}: --max-model-len)" if supported > length else ""
        print(f"  longest sequence {length:8,} tokens{more}")


def _print_cpu(question: Question) -> None:
    config, needed = question.config(is_cpu=True), question.needs(is_cpu=True)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == config.dtype)
    cache = config.kvcache_gib or CPU_KVCACHE_GIB
    print(f"On the CPU, in {dtype}: {needed.weights / GIB:.2f} GiB of weights, ", end="")
    print(f"{needed.activations / GIB:.2f} GiB of activations,\nand {cache:g} GiB of KV cache (--kvcache-gib).")


def advice(question: Question, place: Place) -> str:
    """What helps, in the words of a command. Where a line must not be broken it has no plain space."""
    return " or ".join(map(_in_words, question.what_helps(place))) or "none of the options that were tried"


def _in_words(helps: tuple[Change, Fit]) -> str:
    change, fit = helps
    options = (f"--{name.replace('_', '-')}\xa0{value}" for name, value in change.items())
    count = f"{fit.num_sequences:,}\xa0sequence{'s' * (fit.num_sequences > 1)}"
    return f"{' '.join(options)} ({count})"
