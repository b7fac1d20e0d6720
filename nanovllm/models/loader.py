"""Weights: from safetensors files, or random ones, straight into the model's parameters."""

import difflib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from nanovllm.layers.formats.parameters import FLOATS, Index, Sliceable, StorageFormat, Unpacking, stored
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.models.expert_tensors import Splitter, stacked_experts
from nanovllm.models.lora import EMBEDDING, HEAD, merge_adapter
from nanovllm.models.model_files import open_safetensors, read_json
from nanovllm.models.other_formats import other_format
from nanovllm.utils.checks import quoted, require
from nanovllm.utils.interrupts import held_interrupt
from nanovllm.utils.threads import torch_threads

if TYPE_CHECKING:
    from nanovllm.models.decoder import DecoderForCausalLM
    from nanovllm.models.plain import PlainQwen3

    LoadedModel = DecoderForCausalLM | PlainQwen3

logger = logging.getLogger(__name__)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_OTHERS = ("adapter_", "consolidated", "scheduler", "optimizer", "training_")  # files beside a model's
# Checkpoints with a tied embedding may hold the head too, and older ones RoPE's frequencies. An fp8 KV cache reads the
# scales (`engine.start.kv_scales`).
_UNUSED = (
    *("rotary_emb.inv_freq", "lm_head.weight", ".q_scale", ".k_scale", ".v_scale"),
    *(".k_proj.output_scale", ".v_proj.output_scale"),
    *(".activation_scale", ".input_scale"),  # See `Fp8.declared`.
)
# Layers that predict further tokens, which we do not have.
_UNUSED_PARTS = ("mtp.",)
_ONES = ("norm.weight", "layer_scalar", "expert_scales")  # of random weights
_INTEGERS = ("I32", "I64", "U8")
_BARE_EMBEDDING = EMBEDDING.removeprefix("model.")
_HINT = "is config.json the same model's?"
_MAX_NAMED = 5
_ROWS_AT_ONCE = 4096
_MAX_THREADS = 8


class _Tensor(NamedTuple):
    """One tensor of a checkpoint."""

    content: Any  # a safetensors slice, not read yet
    file: Path


class _Scaled:
    """A safetensors slice, multiplied when it is read."""

    def __init__(self, content: Sliceable, factor: float):
        self._content, self._factor = content, factor

    def __getitem__(self, index: Index) -> torch.Tensor:
        return self._content[index].float() * self._factor


class _Wanted(NamedTuple):
    """What one tensor of a checkpoint fills."""

    param: Any  # nn.Parameter
    shard_id: object  # for the parameter's weight_loader
    shape: tuple[int, ...]  # on all ranks together

    @property
    def is_of_rank(self) -> bool:
        """Whether this rank holds anything of it. Other ranks may have some of the experts."""
        its, shard_id = stored(self.param), self.shard_id
        return its.num_experts is None or (isinstance(shard_id, tuple) and shard_id[0] in its.experts)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape may fill it. Scales may have dimensions of 1 more or less: [N] for [N, 1]."""
        if not stored(self.param).is_scale:
            return shape == self.shape
        return [n for n in shape if n != 1] == [n for n in self.shape if n != 1]


def load_model(model: "LoadedModel", directory: str, lora: str | None = None) -> None:
    """Fill every parameter from the safetensors files of a model directory, merged with the adapter in the folder
    `lora`.

    All names, shapes and dtypes are checked in the files' headers before the first byte is copied. A parameter's
    weight_loader reads only what its rank needs from the memory-mapped file.

    Raises:
        FileNotFoundError: no safetensors, or a file that the index names is missing.
        ValueError: a damaged file; or a missing or extra tensor, or one of a wrong shape or dtype, with its file.
    """
    with ExitStack() as stack:
        tensors = _tensors_of(model, directory, lora, stack)
        wanted = wanted_tensors(model)
        _check_all(wanted, tensors, directory)
        _log_unread_files(Path(directory))
        if lora is not None:
            logger.info("weights: merged with the adapter in %s", lora)
        # The largest first, so that no thread is left alone with one in the end.
        names = sorted(wanted, key=lambda name: -math.prod(wanted[name].shape))
        _load_all([(name, tensors[name], wanted[name]) for name in names])


class TensorFacts(NamedTuple):
    """What a rank must know of a tensor to receive it."""

    shape: torch.Size
    dtype: torch.dtype


def checked_tensors(model: "LoadedModel", pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """{our name: tensor} of those (name in the checkpoint, tensor) that the model reads. Tensors that it ignores in a
    checkpoint, such as a head that is tied, it ignores here as well. Experts may also come as transformers 5 holds them
    in memory, those of a layer in one tensor.

    Raises TypeError unless these are such pairs, and ValueError for a name that the model does not have, or that comes
    twice, and for a wrong shape or dtype.
    """
    wanted, found = wanted_tensors(model), {}
    for theirs, tensor in _split_experts(model, pairs, wanted):
        has_prefix = isinstance(theirs, str) and theirs.startswith(tuple(model.checkpoint_prefixes))
        name = _our_name(theirs, model.checkpoint_prefixes) if has_prefix else theirs
        if name not in wanted:
            if isinstance(name, str) and _is_unused(name):
                continue
            near = difflib.get_close_matches(str(theirs), wanted, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"weights: the model has no tensor {quoted(theirs)}{hint}")
        if name in found:
            raise ValueError(f"weights: {theirs!r} comes twice")
        if not wanted[name].fits(tuple(tensor.shape)):
            shapes = f"{list(tensor.shape)}, the model needs {list(wanted[name].shape)}"
            raise ValueError(f"weights: {theirs!r} has shape {shapes}")
        needed = "an integer" if stored(wanted[name].param).stored_dtypes[0] in _INTEGERS else "a float"
        if tensor.is_floating_point() != (needed == "a float"):
            raise ValueError(f"weights: {theirs!r} has dtype {tensor.dtype}: must be {needed}")
        found[name] = tensor
    return found


def _split_experts(
    model: "LoadedModel", pairs: Iterable[tuple[str, torch.Tensor]], wanted: Mapping[str, _Wanted]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs, with one for each expert and projection in place of those of all experts."""
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise TypeError(f"weights: must be pairs of a name in the checkpoint and a tensor, not {quoted(pair)}")
        name, tensor = pair
        parts = model.split_experts(name, tensor.detach()) if isinstance(name, str) else {}
        if not parts:
            yield name, tensor
            continue
        if next(iter(parts)).replace(".experts.0.", f".experts.{len(tensor)}.") in wanted:
            raise ValueError(f"weights: {name!r} has {len(tensor)} experts, the model has more")
        for part, content in parts.items():
            yield part, content[...]


def _is_unused(name: str) -> bool:
    return name.endswith(_UNUSED) or name.startswith(_UNUSED_PARTS)


def _says_nothing(name: str, tensor: _Tensor, formats: Mapping[str, StorageFormat]) -> bool:
    """Whether a tensor that no parameter reads may be left out. AutoGPTQ writes zeros for the biases of layers without
    any. formats: of the linear layers, by their names. Raises ValueError if it contradicts config.json."""
    layer, _, last = name.rpartition(".")
    if last == "bias":
        return not tensor.content[...].any()
    try:
        return layer in formats and formats[layer].says_nothing(last, tensor.content[...])
    except ValueError as error:
        raise ValueError(f"{tensor.file}: tensor {name!r} {error}") from None


def load_tensors(model: "LoadedModel", tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill the parameters that these tensors stand for, by our names (`checked_tensors`)."""
    wanted = wanted_tensors(model)
    for name, tensor in tensors:
        _load(name, _Tensor(tensor, Path("weights")), wanted[name])


def check_checkpoint(model: "LoadedModel", directory: str, lora: str | None = None) -> None:
    """Raise what `load_model` would raise for the headers. The model may be on the meta device."""
    with ExitStack() as stack:
        _check_all(wanted_tensors(model), _tensors_of(model, directory, lora, stack), directory)


def has_other_head(directory: str, prefixes: Mapping[str, str], lora: str | None = None) -> bool:
    """Whether a checkpoint, merged with an adapter, holds a head that is another matrix than its embedding, though it
    may say that they are tied. Raises as load_model does for damaged files."""
    with ExitStack() as stack:
        tensors = _with_adapter(open_tensors(directory, stack, prefixes), lora, stack, prefixes)
        if not {HEAD, EMBEDDING} <= set(tensors):
            return False
        head, embedding = tensors[HEAD].content, tensors[EMBEDDING].content
        num_rows = head.get_shape()[0]
        if head.get_shape() != embedding.get_shape():
            return True
        rows = (slice(i, i + _ROWS_AT_ONCE) for i in range(0, num_rows, _ROWS_AT_ONCE))
        return not all(torch.equal(head[some].float(), embedding[some].float()) for some in rows)


def has_tensor(directory: str, name: str) -> bool:
    """Whether a checkpoint holds a tensor of this name. Raises as load_model does for damaged files."""
    with ExitStack() as stack:
        return name in open_tensors(directory, stack, {})


def has_any_tensor(directory: str, beginnings: tuple[str, ...]) -> bool:
    """Whether a checkpoint holds a tensor whose name begins so. Raises as load_model does for damaged files."""
    with ExitStack() as stack:
        return any(name.startswith(beginnings) for name in open_tensors(directory, stack, {}))


def _load_all(tasks: list[tuple[str, _Tensor, _Wanted]]) -> None:
    """Load every tensor in several threads, at most as many as torch computes with. Raises the first error, or
    Ctrl-C's, when no thread is loading any more."""
    num_threads = min(_MAX_THREADS, torch.get_num_threads())
    # Several copies by one thread each are faster than one copy by several, as torch would make it.
    with torch_threads(1), ThreadPoolExecutor(num_threads) as pool:
        try:
            with held_interrupt():  # The pool would forget a thread whose start is interrupted.
                futures = [pool.submit(_load, *task) for task in tasks]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _load(name: str, tensor: _Tensor, wanted: _Wanted) -> None:
    param, its = wanted.param, stored(wanted.param)
    if not wanted.is_of_rank:
        return
    if its.is_scale and its.format is not None and not its.format.are_scales(tensor.content[...]):
        raise ValueError(f"{tensor.file}: tensor {name!r} must hold finite scales >= 0: download the file again")
    if its.check is not None and (fault := its.check(tensor.content[...], wanted.shard_id)) is not None:
        raise ValueError(f"{tensor.file}: tensor {name!r} {fault}")
    content = tensor.content
    if its.is_scale and (values := content[...]).shape != wanted.shape:
        content = values.reshape(wanted.shape)
    if its.is_one_number:
        content = content[...].expand(param.shards[wanted.shard_id])
    if its.loading_factor != 1:
        content = _Scaled(content, its.loading_factor)
    if its.packing is not None:
        content = Unpacking(content, its.packing, param.shards[wanted.shard_id])
    getattr(param, "weight_loader", default_weight_loader)(param, content, wanted.shard_id)


def num_checkpoint_params(model: nn.Module) -> int:
    """Numbers in the whole model, on all ranks."""
    found = ((wanted.shape, stored(wanted.param)) for wanted in wanted_tensors(model).values())
    return sum(math.prod(shape) * its.numbers_each for shape, its in found if not its.is_scale)


def forget_loaders(model: nn.Module) -> None:
    """Let the weights be freed as soon as nobody refers to the model. A parameter and its loader's layer refer to each
    other, so only the collector would free them."""
    for parameter in model.parameters():
        vars(parameter).pop("weight_loader", None)


def load_dummy(model: nn.Module, seed: int, rank: int = 0) -> None:
    """Fill every parameter with random numbers of a usual scale: norms and factors with ones, the rest N(0, 0.02^2).

    A parameter that every rank holds whole is the same on all of them."""
    device = next(model.parameters()).device
    of_all, of_rank = (torch.Generator(device=device).manual_seed(s) for s in (seed, seed + 1 + rank))
    for name, param in model.named_parameters():
        if name.endswith(_ONES):
            param.data.fill_(1.0)
        elif not stored(param).is_scale:  # Scales come with their weights.
            is_whole = tuple(param.shape) == getattr(param, "shards", {None: tuple(param.shape)}).get(None)
            format = stored(param).format or Unquantized()
            format.draw(param, of_all if is_whole else of_rank)


def default_weight_loader(param: nn.Parameter, loaded: Sliceable, shard_id: object) -> None:
    param.data.copy_(loaded[...])


def open_tensors(
    directory: str, stack: ExitStack, prefixes: Mapping[str, str], split_experts: Splitter = stacked_experts
) -> dict[str, _Tensor]:
    """{our name: tensor} over all files of a checkpoint. Reads only headers. prefixes, split_experts: the model's
    `checkpoint_prefixes` and `split_experts`."""
    tensors: dict[str, _Tensor] = {}
    for path in _checkpoint_files(Path(directory)):
        file = open_safetensors(path, stack)
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in tensors:
                raise ValueError(f"{path}: tensor {name!r} is in {tensors[name].file.name} as well")
            content = file.get_slice(name)
            parts = split_experts(name, content) or {name: content}
            tensors |= {part: _Tensor(its_content, path) for part, its_content in parts.items()}
    if not any(name.startswith(tuple(prefixes)) for name in tensors):
        return _with_prefix(tensors) if _BARE_EMBEDDING in tensors else tensors
    return {ours: tensor for name, tensor in tensors.items() if (ours := _our_name(name, prefixes))}


def _tensors_of(model: "LoadedModel", directory: str, lora: str | None, stack: ExitStack) -> dict[str, _Tensor]:
    tensors = open_tensors(directory, stack, model.checkpoint_prefixes, model.split_experts)
    return _with_adapter(tensors, lora, stack, model.checkpoint_prefixes)


def _with_adapter(
    tensors: dict[str, _Tensor], lora: str | None, stack: ExitStack, prefixes: Mapping[str, str]
) -> dict[str, _Tensor]:
    if lora is None:
        return tensors
    return tensors | {name: _Tensor(*each) for name, each in merge_adapter(tensors, lora, stack, prefixes).items()}


def _with_prefix(tensors: dict[str, _Tensor]) -> dict[str, _Tensor]:
    """The tensors of a decoder that was saved without a head, as embedding models are: its names are ours without their
    beginning."""
    return {
        name if name.startswith(("score.", "lm_head.")) else f"model.{name}": each for name, each in tensors.items()
    }


def _our_name(name: str, prefixes: Mapping[str, str]) -> str | None:
    """None for a tensor of another part of the model, such as a vision tower."""
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name if name == HEAD else None


def _checkpoint_files(directory: Path) -> list[Path]:
    """Those that transformers loads; if it finds none, all *.safetensors that are not known to hold something else."""
    source = _source(directory)
    if source is not None:
        return _indexed_files(source) if source.suffix == ".json" else [source]
    files = [file for file in sorted(directory.glob("*.safetensors")) if not file.name.startswith(_OF_OTHERS)]
    if not files:
        hint = other_format(directory) or " (load_format='dummy' needs none)"
        raise FileNotFoundError(f"{directory}: holds no *.safetensors file of a model{hint}")
    return files


def _log_unread_files(directory: Path) -> None:
    source, files = _source(directory), _checkpoint_files(directory)
    unread = [directory / _INDEX, *sorted(directory.glob("*.safetensors"))]
    names = [file.name for file in unread if file not in (source, *files) and file.exists()]
    if names:
        logger.info("weights: %s; not read: %s", (source or directory).name, _some(names))


def _source(directory: Path) -> Path | None:
    """The file of weights, or the index of several, that transformers reads: the one that config.json names, or else
    `model.safetensors`, or else the usual index. None if there is none of them."""
    config = directory / "config.json"
    name = read_json(config).get("transformers_weights") if os.path.lexists(config) else None
    if name is not None:
        is_name = isinstance(name, str) and name == os.path.basename(name)
        is_name = is_name and name.endswith((".safetensors", ".safetensors.index.json"))
        require(f"{config}: transformers_weights", name, is_name, "the name of a .safetensors file, or of an index")
        return directory / name
    return next((file for file in (directory / _SINGLE, directory / _INDEX) if os.path.lexists(file)), None)


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        paths = [index.parent / name for name in names]
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index}: not a safetensors index ({error!r}): download it again") from error
    for path in paths:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{path}: named by {index.name}, but not there: download it")
    return paths


def _check_all(wanted: dict[str, _Wanted], tensors: dict[str, _Tensor], directory: str) -> None:
    """Raises ValueError unless the checkpoint is complete, and has the right shapes and dtypes."""
    extra = [name for name in tensors if name not in wanted and not _is_unused(name)]
    formats = {name.rpartition(".")[0]: its for name, each in wanted.items() if (its := stored(each.param).format)}
    extra = [name for name in extra if not _says_nothing(name, tensors[name], formats)]
    # The dtypes first, because quantized checkpoints also have other names.
    for name in (*wanted, *extra):
        needed = stored(wanted[name].param).stored_dtypes if name in wanted else FLOATS
        if name in tensors and (dtype := tensors[name].content.get_dtype()) not in needed:
            raise ValueError(f"{tensors[name].file}: tensor {name!r} has dtype {dtype}: {_remedy(needed)}")
    files_of_extra = [f"{name!r} in {tensors[name].file.name}" for name in extra]
    missing = [name for name in wanted if name not in tensors]
    if missing:
        source = _source(Path(directory))
        named = read_json(source)["weight_map"] if source and source.suffix == ".json" else {}
        places = [
            f"{name!r}, which the index places in {named[name]}" if name in named else repr(name) for name in missing
        ]
        more = f"; it has {_some(files_of_extra)}" if extra else ""
        raise ValueError(f"{directory}: the checkpoint lacks {_some(places)}{more}; {_HINT}{other_format(directory)}")
    if extra:
        raise ValueError(
            f"{directory}: the checkpoint holds tensors that the model does not have: {_some(files_of_extra)}; {_HINT}"
        )
    for name, each in wanted.items():
        found = tuple(tensors[name].content.get_shape())
        if not each.fits(found):
            shapes = f"{list(found)}, the model needs {list(each.shape)}"
            raise ValueError(f"{tensors[name].file}: tensor {name!r} has shape {shapes}; {_HINT}")


def _remedy(needed: tuple[str, ...]) -> str:
    if needed != FLOATS:
        return f"config.json's quantization_config says {', '.join(needed)}; is it the same model's?"
    return (
        "quantized checkpoints do not load unless config.json names their format, and then only linear layers are in "
        f"it; all else must be {', '.join(needed)}; use the unquantized checkpoint"
    )


def wanted_tensors(model: nn.Module) -> dict[str, _Wanted]:
    """Everything that the model needs, once each, by its name in the checkpoint."""
    wanted = {}
    for name, param in model.named_parameters():
        shards, its = getattr(param, "shards", {None: tuple(param.shape)}), stored(param)
        if not shards:  # computed while others are loaded
            continue
        for ours, theirs in getattr(model, "checkpoint_places", {}).items():
            name = name.replace(ours, theirs)
        *parents, module, kind = name.split(".")
        kind = its.checkpoint_name or kind
        shapes = dict.fromkeys(shards, ()) if its.is_one_number else shards
        if its.packing is not None:
            shapes = {key: its.packing.shape(shape) for key, shape in shards.items()}
        parts = getattr(model, "checkpoint_parts", None) or getattr(model, "packed_modules_mapping", {})
        is_ours = not name.startswith("vision.")  # A vision tower has its own names, which may equal a layer's.
        part_names = (parts if is_ours else {}).get(module, {module: None})
        for part_name, shard_id in part_names.items():
            if its.num_experts is None:
                if shard_id not in shards:  # of values that keys serve as
                    continue
                wanted[".".join((*parents, part_name, kind))] = _Wanted(param, shard_id, shapes[shard_id])
                continue
            for expert in range(its.num_experts):
                key = expert, shard_id
                wanted[".".join((*parents, str(expert), part_name, kind))] = _Wanted(param, key, shapes[key])
    return wanted


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
