"""Compile the kernels that engines launch, for cards that this machine does not have, and check their shared memory.

    python scripts/compile_for_cards.py --quick         what each test run compiles: kernels cut to a card's memory
    python scripts/compile_for_cards.py                 what the nightly tests compile: of each kernel the largest
    python scripts/compile_for_cards.py --all           every variant, which takes about a second each
    python scripts/compile_for_cards.py --cards 89 --models gemma-3-4b --all
    python scripts/compile_for_cards.py --later-steps   nothing, but says what later prefills would have to compile

For each card and each model family an engine's own start runs on tensors without memory (torch's FakeTensorMode): it
chooses its back end, tiles and table rows as on the card, and `kernel_compilation` goes through the launches of the
start and of later steps. A prefill of the plain model adds its kernels. No list of kernels is kept here. Triton
compiles for any card without having one.

Needs no GPU. It prints a line for each card, and exits with 1 if a launch does not compile or does not fit.
"""

import argparse
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

import nanovllm.kernels
from nanovllm.config import Config
from nanovllm.engine import model_runner
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.ranks.ranks import Ranks
from nanovllm.engine.start import build
from nanovllm.engine.start.kernel_compilation import compute_pretended, pretended_sequence, trace_steps
from nanovllm.engine.step import Step
from nanovllm.kernels import launch
from nanovllm.kernels.attention.hopper_prefill import HopperTiles
from nanovllm.kernels.attention.paged_prefill import PrefillTiles
from nanovllm.kernels.experts.experts import TileConfig
from nanovllm.kernels.experts.four_bit_experts import FourBitExpertTiles
from nanovllm.kernels.experts.four_bit_experts_hopper import FourBitExpertsHopperConfig
from nanovllm.kernels.experts.grouped import GroupedTile
from nanovllm.kernels.gluon_stub import SharedDescriptor
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.four_bit_hopper import FourBitHopperConfig
from nanovllm.kernels.matmul.four_bit_tiles import FourBitTileConfig
from nanovllm.kernels.shared_memory import fits, held_stages
from nanovllm.layers.backends.gpu_backend import GpuBackend
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.parallel import tensor_parallel as parallel
from nanovllm.layers.parallel.residual_reducer import make_reducer
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.hf_config import get_head_dim
from nanovllm.models.layer_facts import few_layers
from nanovllm.models.make_model import make_plain_model
from nanovllm.models.presets import PRESET_NAMES, preset_config
from nanovllm.models.qwen3_5 import has_linear_attention
from nanovllm.models.registry import ARCHITECTURES
from nanovllm.models.tower_parts import ImageRanges, RotaryTowerAttention
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.progress import StartProgress

# Compute capability -> KiB of shared memory that a program may have (CUDA C++ programming guide, "Technical
# Specifications per Compute Capability"). The device index of a pretended card is its place here.
CARDS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
_SPARE_BYTES = 2 * 1024  # as in `kernels.shared_memory`
_FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
_DETERMINISTIC: dict[str, Any] = {"deterministic": True}
_FP8_CARD = 89
# Triton has one code for sm_80, 86 and 89, apart from fp8.
_CODE_OF_OTHERS = (80, 86)
# Cards for which kernels are compiled that multiply no tiles by tensor cores: their code differs by dependent launches,
# from sm_90 on. Every test on a GPU runs that of sm_90.
_ALL_KERNELS = (89, 120)
_LAUNCHES_ALL = 90
_PLAIN = "Qwen3-0.6B"
# With --quick: experts in every format, and the widest heads. Their kernels need the most memory of those whose
# constants are cut to what a card has.
_QUICK = (
    *(("Qwen3-30B-A3B", options) for options in ({"quantization": "int4"}, {"dtype": "float32"}, _FP8)),
    *(("gemma-4-12B", {}), ("gemma-4-12B", {"dtype": "float32"}), ("gpt-oss-20b", {})),
    ("Qwen3-30B-A3B", {"dtype": "float32"} | _DETERMINISTIC),
)
# These have the code of another card and more memory: a model of each kind of layers and head_dim, as it is.
_FEWER_MODELS = (80, 86, 100)


class Launch(NamedTuple):
    """One variant of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(arg.dtype if isinstance(arg, _Pointer) else arg.base.dtype for arg in self.args if _is_data(arg))

    def size(self) -> int:
        """Numbers that the constants of the tile suggest, to find the launch with the largest one."""
        names = ("TILE", "TOKENS", "ROWS", "COLUMNS", "KEYS", "BLOCK", "PADDED", "LANES")
        size = self.options.get("num_stages", 1)
        for name, value in self.options.items():
            is_size = any(part in name for part in names) and name not in ("BLOCK_SIZE", "GROUP_ROWS")
            if is_size and isinstance(value, int):
                size *= max(1, value)
        return size

    def estimate(self, device: torch.device) -> int | None:
        """Bytes of shared memory, as the choice of the constants estimates them. None if nothing depends on them."""
        options = self.options
        if self.name in ("_paged_prefill_kernel", "_both_ways_kernel"):
            tiles = PrefillTiles(*(options[name] for name in ("TILE_ROWS", "TILE_KEYS", "num_warps", "num_stages")))
            padded_dim = options.get("PADDED_DIM") or options["MAIN"] + options["REST"]
            return tiles.shared_bytes(padded_dim, self.dtypes[1].itemsize, device)
        if self.name == "_hopper_prefill_kernel":
            of_hopper = HopperTiles(*(options[name] for name in ("KEYS", "STAGES", "GROUPS", "PERSISTENT")))
            return of_hopper.shared_bytes(options["HEAD_DIM"])
        if self.name == "_experts_kernel":
            config = TileConfig(*(options[name] for name in ("TOKENS", "COLUMNS", "K_TILE", "num_warps", "num_stages")))
            itemsize = self.args[0].dtype.itemsize
            stage = config.stage_bytes(2 if options["SILU"] else 1, itemsize)
            return max(stage * held_stages(config.num_stages, device), config.result_bytes(itemsize))
        if self.name == "_four_bit_experts_kernel":
            names: tuple[str, ...] = ("TOKENS", "COLUMNS", "K_TILE", "num_warps", "num_stages")
            tiles_of_experts = FourBitExpertTiles(*(options[name] for name in names))
            stage = tiles_of_experts.stage_bytes(2 if options["SILU"] else 1)
            return stage * held_stages(tiles_of_experts.num_stages, device)
        if self.name == "_four_bit_experts_hopper_kernel":
            names = ("TOKENS", "NARROW", "ROWS", "STAGES")
            return FourBitExpertsHopperConfig(*(options[name] for name in names)).shared_bytes
        if self.name == "_grouped_kernel":
            names = ("TOKENS", "COLUMNS", "K_TILE", "num_warps", "num_stages")
            grouped_tile = GroupedTile(*(options[name] for name in names))
            return grouped_tile.shared_bytes(2 if options["SILU"] else 1, self.dtypes[0].itemsize)
        if self.name == "_four_bit_tile_kernel":
            names = ("ROWS", "TOKENS", "K_TILE", "SPLITS", "num_warps", "num_stages")
            tile = FourBitTileConfig(*(options[name] for name in names))
            return tile.stage_bytes * held_stages(tile.num_stages, device)
        if self.name == "_four_bit_hopper_kernel":
            names = ("ROWS", "TOKENS", "SHARES", "STAGES")
            return FourBitHopperConfig(*(options[name] for name in names)).shared_bytes
        return None


class _Pointer:
    """A tensor, as Triton sees it when it chooses a variant."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self._offset = tensor.dtype, tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset  # Storages begin at multiples of 512.

    @staticmethod
    def ptr_range() -> int:
        return 0


def _is_data(arg: Any) -> bool:
    return isinstance(arg, _Pointer | TensorDescriptor | SharedDescriptor)


class _OnPretendedCards(TorchFunctionMode):
    """What torch refuses to do with fake tensors of a GPU where it is built without CUDA: indexing, copies between
    them and the host's real memory, and page-locked memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_fake = [isinstance(arg, FakeTensor) for arg in args if isinstance(arg, torch.Tensor)]
        if kwargs.pop("pin_memory", False) or func is torch.from_numpy or (is_fake and not any(is_fake)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.tensor:
            device = kwargs.pop("device", None)
            with unset_fake_temporarily():
                values = func(*args, **kwargs, device="cpu")
            on_card = device is not None and torch.device(device).type == "cuda"
            return torch.empty(values.shape, dtype=values.dtype, device=device) if on_card else values
        if func is torch.Tensor.copy_ and not all(is_fake):
            return args[0]
        if func is torch.Tensor.__setitem__:
            return None  # The results mean nothing.
        if func is torch.Tensor.__getitem__:
            return _indexed(*args)
        return func(*args, **kwargs)


def _indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    aten, dim = torch.ops.aten, 0
    index = index if isinstance(index, tuple) else (index,)
    for i, each in enumerate(index):
        if each is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif each is Ellipsis:
            dim = x.dim() - sum(later is not None for later in index[i + 1 :])
        elif isinstance(each, slice):
            x, dim = aten.slice(x, dim, each.start, each.stop, each.step or 1), dim + 1
        elif isinstance(each, int):
            x = aten.select(x, dim, each)
        else:
            x, dim = aten.index(x, [*[None] * dim, each]), dim + 1
    return x


class _Driver:
    """Triton's driver of one pretended card: what compiling asks of it."""

    launcher_cls = None

    def __init__(self, index: int):
        self._index = index

    def get_current_device(self) -> int:
        return self._index

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", list(CARDS)[self._index], 32)


class _Nothing:
    """Of streams and events, what is called of them."""

    def __init__(self, *args: Any):
        pass

    def record(self, *args: Any) -> None:
        pass

    wait_event = wait_stream = record


class _Peers:
    """Other ranks' memory."""

    def __init__(self, size: int, device: torch.device):
        self.rank, self.size, self.device = 0, size, device
        self.abort_flag = torch.zeros(1, dtype=torch.int32, device=device)

    def share(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> SimpleNamespace:
        addresses = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        return SimpleNamespace(tensor=tensor, address_table=addresses, addresses=[0] * self.size)


@contextmanager
def pretended_card(capability: int) -> Iterator[torch.device]:
    """A block in which torch and Triton have all cards, and this one is the current one."""
    names, of = list(CARDS), GpuFacts.of
    index = names.index(capability)

    def facts_of(device: torch.device) -> GpuFacts:
        if device.type != "cuda":
            return of(device)
        name = names[index if device.index is None else device.index]
        return GpuFacts(f"pretended sm_{name}", divmod(name, 10), CARDS[name] * 1024, 128, 192 * 2**30)

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(CARDS) + 3,  # for four ranks
        "current_device": lambda: index,
        "synchronize": lambda device=None: None,
        "current_stream": _Nothing,
        "Stream": _Nothing,
        "Event": _Nothing,
    }
    before = driver._active
    driver.set_active(_Driver(index))
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(GpuFacts, "of", facts_of))
            for name, answer in answers.items():
                stack.enter_context(patch.object(torch.cuda, name, answer))
            yield torch.device("cuda", index)
    finally:
        driver._active = before


class _HasTraced(Exception):
    pass


class _Meeting(Ranks):
    """The other ranks, which are not there."""

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self._tp = tp

    def meet(self, run: Any) -> TensorParallel:
        return self._tp


class _TracingStart:
    """A start that ends where the weights would be loaded."""

    free_at_start, progress = 0, StartProgress(is_wanted=False)
    found: dict[tuple, Launch]  # what has been recorded

    def __init__(self, runner: ModelRunner):
        self._runner = runner

    def __enter__(self) -> "_TracingStart":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def load_weights(self) -> None:
        with few_layers(self._runner.model):
            trace_steps(self._runner)
        raise _HasTraced


@contextmanager
def _recording(start: type[_TracingStart] = _TracingStart) -> Iterator[dict[tuple, Launch]]:
    """A block of tensors without memory, whose launches are recorded."""
    found: dict[tuple, Launch] = {}

    def record(_variants, kernel, grid, *args, **constants) -> None:
        args = tuple(_Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        found.setdefault((kernel, *map(_kind, args), *constants.items()), Launch(kernel, grid, args, constants))

    with ExitStack() as stack:
        for target, name, value in (
            (launch, "_compile", record),
            (model_runner, "Start", start),
            # Other packages' kernels are theirs to test.
            (build, "load_quack", lambda *args, **options: None),
            (GpuBackend, "use_flash_attn4", lambda *args, **options: None),
            (parallel, "_run", lambda *args: None),
        ):
            stack.enter_context(patch.object(target, name, value))
        for block in (FakeTensorMode(allow_non_fake_inputs=True), _OnPretendedCards(), torch.inference_mode()):
            stack.enter_context(block)
        token = launch._variants.set(set())
        try:
            yield found
        finally:
            launch._variants.reset(token)


def launches(
    model: str, options: dict[str, Any], device: torch.device, start: type[_TracingStart] = _TracingStart
) -> dict[tuple, Launch]:
    """The variants that an engine launches on a pretended card, from its start on."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "speculation": "suffix"} | options
    # Of a vision tower, `tower_launches` has our kernels.
    config = Config(model, device=str(device), text_only=True, **options)
    with _recording(start) as found:
        start.found = found
        tp = TensorParallel()
        if config.tensor_parallel_size > 1:
            sizes = config.max_num_batched_tokens, config.hf_config.hidden_size, config.dtype
            reducer = make_reducer(_Peers(config.tensor_parallel_size, device), *sizes)
            tp = TensorParallel(size=config.tensor_parallel_size, group=MagicMock(), reducer=reducer)
        with suppress(_HasTraced):
            ModelRunner(config, 0, _Meeting(tp))
    return found


# Prefills as requests ask for them: sequences, new tokens of each, and tokens that are cached. The new ones fit into a
# step of the default size.
_LATER_PREFILLS = (
    *((8, 2000, 0), (1, 2112, 0), (29, 550, 0), (64, 250, 0), (200, 80, 0), (3, 127, 0), (500, 32, 0), (7, 2, 0)),
    *((200, 64, 2048), (100, 100, 512), (17, 300, 256), (4, 2000, 2000), (2, 1, 300)),
)


class _LaterSteps(_TracingStart):
    """A start after which requests come. What these launch, and the start did not, is in `missed`."""

    missed: dict[tuple, Launch]

    def load_weights(self) -> None:
        runner, config = self._runner, self._runner.config
        with suppress(_HasTraced):
            super().load_weights()
        known = {_compiled_kind(key) for key in self.found}
        num_blocks = max(-(-(new + cached) // config.kvcache_block_size) for _, new, cached in _LATER_PREFILLS)
        for store in runner.stores:
            store.allocate(num_blocks, 1, is_shared=True)
        for num_seqs, num_new, num_cached in _LATER_PREFILLS:
            seq = pretended_sequence(num_new, config.kvcache_block_size, num_cached)
            compute_pretended(runner, Step([seq] * num_seqs, True, num_seqs))
        self.missed |= {key: each for key, each in self.found.items() if _compiled_kind(key) not in known}
        raise _HasTraced


def missed_by_start(model: str, options: dict[str, Any], device: torch.device) -> list[Launch]:
    """The variants of our kernels that later prefills launch, and the start does not: they compile in mid-run."""
    missed: dict[tuple, Launch] = {}
    with patch.object(_LaterSteps, "missed", missed, create=True):
        launches(model, options, device, _LaterSteps)
    return list(missed.values())


def _compiled_kind(key: tuple) -> tuple:
    """Of a recorded launch, what selects what is compiled: arguments that the kernel doesn't specialize on don't."""
    kernel, *rest = key
    kinds = list(rest[: len(kernel.params)])
    for i, (param, kind) in enumerate(zip(kernel.params, kinds, strict=False)):
        if param.do_not_specialize and isinstance(kind, tuple):
            kinds[i] = kind[-1]  # of a number, whether it has more than 31 bits
        elif param.do_not_specialize_on_alignment and isinstance(kind, tuple):
            kinds[i] = kind[0]
    return kernel, *kinds, *rest[len(kinds) :]


def plain_launches(model: str, dtype: torch.dtype, device: torch.device) -> dict[tuple, Launch]:
    """The variants that a prefill of the plain model launches, all but attention's, which are the fast decoder's."""
    config = preset_config(model)
    config.num_hidden_layers = 1
    with _recording() as found:
        plain = make_plain_model(config, dtype, device, 64, TorchBackend())
        attention = plain.model.layers[0].self_attn.attn
        heads = attention.num_kv_heads, attention.head_dim
        attention.k_cache = attention.v_cache = torch.zeros(1, 256, *heads, dtype=dtype, device=device)
        numbers = torch.zeros(16, dtype=torch.int64, device=device)
        with patch.object(TorchBackend, "prefill", lambda self, layer, q, k, v, context: torch.empty_like(q)):
            set_context(True, slot_mapping=numbers.int())
            plain(numbers, numbers)
            reset_context()
    return found


def tower_launches(model: str, dtype: torch.dtype, device: torch.device) -> dict[tuple, Launch]:
    """The variants that a layer of the model's vision tower launches, if it has some. The rest is transformers'."""
    tower, num_patches = getattr(preset_config(model), "vision", {}).get("vision_config", {}), 512
    num_heads, width = tower.get("num_heads") or tower.get("num_attention_heads"), tower.get("hidden_size")
    if not num_heads:
        return {}
    with _recording() as found:
        qkv = torch.zeros(num_patches, 3 * width, dtype=dtype, device=device)
        theirs = SimpleNamespace(qkv=lambda x: qkv, proj=lambda x: x, num_heads=num_heads, scaling=1.0)
        ends, angles = (
            torch.zeros(2, dtype=torch.int32, device=device),
            torch.zeros(num_patches, width, device=device),
        )
        options: dict[str, Any] = {"images": ImageRanges(ends, ends, num_patches)}
        options["position_embeddings"] = (angles[:, : width // num_heads],) * 2
        RotaryTowerAttention(theirs)(qkv, **options)
    return found


def _kind(arg: Any) -> Any:
    """What of an argument selects the variant."""
    if isinstance(arg, _Pointer):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, TensorDescriptor | SharedDescriptor):
        return arg.base.dtype, tuple(arg.block_shape)
    return launch._kind(arg)


def engines(models: list[str], capability: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model, options): each model, one of them over two and over four GPUs, one of each kind of layer and head_dim in
    float32, and in fp8 where the card has that, one with experts in int4, for one card also one without, and one with
    states in bfloat16; a model of each kind of layers with deterministic=True, in each format. For `_FEWER_MODELS` only
    one of each kind as it is, one with experts in int4, and one with such states."""
    has_fewer = capability in _FEWER_MODELS
    kinds: set[Any] = set()
    if not has_fewer:
        for size in (2, 4):  # More than two sum in another way.
            yield models[0], {"tensor_parallel_size": size}
    configs = {model: preset_config(model) for model in models}
    with_experts = [model for model, config in configs.items() if getattr(config, "num_experts", 0)]
    # The weights of others have a format.
    for model in [model for model in with_experts if not getattr(configs[model], "quantization_config", None)][:1]:
        yield model, {"quantization": "int4"}
    if capability == _LAUNCHES_ALL:  # A model without experts has products that one with experts has not.
        yield models[0], {"quantization": "int4"}
    if not has_fewer:
        hybrids = [model for model, config in configs.items() if has_linear_attention(config)]
        formats: list[dict[str, Any]] = [{}, {"dtype": "float32"}, {"quantization": "int4"}]
        formats += [{"quantization": "fp8"}] if capability >= _FP8_CARD else []
        for model in dict.fromkeys((models[0], *with_experts[:1], *hybrids[:1])):
            yield from ((model, _DETERMINISTIC | options) for options in formats)
    for model in models:
        config = configs[model]
        num_experts, global_head_dim = getattr(config, "num_experts", 0) or 0, getattr(config, "global_head_dim", None)
        if has_linear_attention(config) and "states" not in kinds:
            kinds.add("states")
            yield from ((model, {"state_dtype": dtype}) for dtype in ("float16", "bfloat16"))
        kind = global_head_dim or get_head_dim(config), num_experts > 0
        if kind not in kinds or not has_fewer:
            yield model, {}
        if kind not in kinds:
            kinds.add(kind)
            if has_fewer:
                continue
            yield model, {"dtype": "float32"}
            if capability >= _FP8_CARD:
                names = {*_FP8}
                if getattr(config, "quantization_config", None):  # Its weights have a format.
                    names.remove("quantization")
                yield model, {name: _FP8[name] for name in names}


def quick_engines(capability: int) -> list[tuple[str, dict[str, Any]]]:
    return [(model, options) for model, options in _QUICK if options is not _FP8 or capability >= _FP8_CARD]


def family_models() -> list[str]:
    """The first published size of each family's file."""
    files = {ARCHITECTURES[preset_config(name).architectures[0]]: name for name in reversed(PRESET_NAMES)}
    return list(files.values())[::-1]


def largest(variants: list[Launch], device: torch.device, capability: int) -> list[Launch]:
    """Of each kernel the launch that needs the most shared memory. Where constants depend on it, that of each set of
    dtypes. Other kernels with fp8 and without, for some cards."""
    found: dict[tuple, tuple[tuple[int, int], Launch]] = {}
    for each in variants:
        estimate = each.estimate(device)
        kind: Any = None
        if estimate is None:
            if capability not in _ALL_KERNELS:
                continue
            kind = torch.float8_e4m3fn in each.dtypes
        elif capability not in _CODE_OF_OTHERS:
            kind = frozenset(each.dtypes)
        size, key = (estimate or 0, each.size()), (each.name, kind)
        if key not in found or size > found[key][0]:
            found[key] = size, each
    return [each for _, each in found.values()]


def check(variants: list[Launch], device: torch.device, capability: int) -> tuple[int, list[str]]:
    """Compile them. Returns the most bytes of shared memory, and the errors."""
    most, errors = 0, []
    for each in variants:
        where = f"sm_{capability} {each.name} {each.dtypes} {each.options}"
        try:
            metadata = each.kernel.warmup(*each.args, grid=each.grid, **each.options).metadata
        except Exception as error:
            errors.append(f"{where}: {type(error).__name__}: {error}")
            continue
        most = max(most, metadata.shared)
        if metadata.shared > CARDS[capability] * 1024:
            errors.append(f"{where}: {metadata.shared} bytes of shared memory")
        estimate = each.estimate(device)
        if estimate is not None and metadata.shared > estimate + _SPARE_BYTES:
            errors.append(f"{where}: {metadata.shared} bytes of shared memory, estimated as {estimate}")
    return most, errors


def all_kernels() -> set[str]:
    """The names of the kernels in `nanovllm.kernels`."""
    modules = pkgutil.walk_packages(nanovllm.kernels.__path__, "nanovllm.kernels.")
    found = (value for module in modules for value in vars(import_module(module.name)).values())
    return {each.fn.__name__ for each in found if isinstance(each, JITFunction) and each.fn.__name__.endswith("kernel")}


def _cpu_seconds() -> float:
    """Of this process and of the assemblers that it has run."""
    return sum(os.times()[:4])


def print_missed(cards: list[int], models: list[str], quantization: str | None) -> bool:
    """Print what later prefills would compile. Returns whether there is anything."""
    has_missed = False
    for capability in cards:
        with pretended_card(capability) as device:
            for model in models:
                missed = missed_by_start(model, {"quantization": quantization}, device)
                has_missed |= bool(missed)
                for each in missed:
                    print(f"sm_{capability} {model}: {each.name} {each.options}")
                print(f"sm_{capability} {model}: {len(missed)} variants would be compiled in mid-run", flush=True)
    return has_missed


def main() -> None:
    parser = argparse.ArgumentParser(description="compile kernels for cards that are not here")
    parser.add_argument("--cards", type=int, nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--models", nargs="+", default=family_models(), choices=PRESET_NAMES)
    parser.add_argument("--all", action="store_true", help="every variant, not the largest of each kind")
    parser.add_argument("--quick", action="store_true", help="few models, and only what is cut to a card's memory")
    parser.add_argument("--later-steps", action="store_true", help="look for what would be compiled in mid-run")
    parser.add_argument("--quantization", help="of the models of --later-steps, as for LLM")
    arguments = parser.parse_args()
    if arguments.quantization and not arguments.later_steps:
        parser.error("--quantization: without --later-steps, all formats are compiled")
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    if arguments.later_steps:
        sys.exit(print_missed(arguments.cards, arguments.models, arguments.quantization))
    all_errors, never_launched = [], all_kernels()
    for capability in arguments.cards:
        start, errors = _cpu_seconds(), []
        with pretended_card(capability) as device:
            found: dict[tuple, Launch] = {}
            is_quick = arguments.quick
            for model, options in quick_engines(capability) if is_quick else engines(arguments.models, capability):
                found |= launches(model, options, device)
            for dtype in () if is_quick else (torch.bfloat16, torch.float32):
                found |= plain_launches(_PLAIN, dtype, device)
                for model in arguments.models:
                    found |= tower_launches(model, dtype, device)
            if is_quick:
                found = {key: each for key, each in found.items() if each.estimate(device) is not None}
            for each in found.values():
                estimate = each.estimate(device)
                if estimate is not None and not fits(estimate, device):
                    errors.append(f"sm_{capability} {each.name} {each.options}: estimated as {estimate} bytes")
            traced = _cpu_seconds() - start
            compiled = list(found.values()) if arguments.all else largest(list(found.values()), device, capability)
            most, more = check(compiled, device, capability)
        errors += more
        all_errors += errors
        kernels = {each.name for each in found.values()}
        never_launched -= kernels
        print(
            f"sm_{capability}: {len(kernels)} kernels in {len(found)} variants, {len(compiled)} compiled, "
            f"{most / 1024:.1f} of {CARDS[capability]} KiB, {len(errors)} errors, "
            f"{traced:.1f} + {_cpu_seconds() - start - traced:.1f} s",
            flush=True,
        )
    if _LAUNCHES_ALL in arguments.cards and arguments.models == family_models() and not arguments.quick:
        all_errors += [f"no engine launches {name}" for name in sorted(never_launched)]
    print(*all_errors, sep="\n", end="")
    sys.exit(bool(all_errors))


if __name__ == "__main__":
    main()
