"""LoRA adapters (arXiv:2106.09685) in PEFT's folders, merged into the weights while these are loaded.

A merged weight is W + scaling * B A, in float32, rounded once, to the parameter's dtype or format. It is computed when
a rank reads its part of the weight.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.layers.formats.parameters import FLOATS, Index, Slice
from nanovllm.models.model_files import open_safetensors, read_json
from nanovllm.utils.checks import is_int, is_number, quoted, require

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG, WEIGHTS)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PREFIX = "base_model.model."
_OF_TEXT = ("model.layers.", "model.norm.", "model.embed_tokens.", "lm_head.")
_MAX_NAMED = 5
_LOAD = "AutoPeftModelForCausalLM.from_pretrained(ADAPTER)"
_BY_PEFT = f"merge it with peft: {_LOAD}.merge_and_unload().save_pretrained(NEW_FOLDER)"
# Settings with which the merged weight is another one than W + scaling * B A, or no weight can stand for the adapter.
_OTHER_METHODS = {
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "kasa_config", "monteclora_config"), _BY_PEFT),
    **dict.fromkeys(("lora_bias", "trainable_token_indices", "target_parameters"), _BY_PEFT),
    **dict.fromkeys(("layer_replication", "arrow_config"), _BY_PEFT),
    "alora_invocation_tokens": "it acts on a part of the tokens only, and cannot be merged: run it with peft",
}
# How training began. With others (PiSSA, OLoRA, CorDA, LoftQ, ...) it also changed the weights that are adapted.
_KEEP_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
_ENDINGS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "embedding A",
    ".lora_embedding_B": "embedding B",
}


class LoraSettings(NamedTuple):
    """What adapter_config.json says of all modules.

    Attributes:
        rank, alpha: of modules that no pattern names.
        rank_pattern, alpha_pattern: {regular expression of the end of a module's name: its rank or alpha}.
        is_rank_stabilized: whether the scaling is alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732), not alpha / rank.
        modules_to_save: names of modules that were trained whole.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    is_rank_stabilized: bool
    modules_to_save: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scaling(self, module: str) -> float:
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )

    def is_own(self, module: str) -> bool:
        """Whether the adapter has a copy of this module, which shares no weight with another one."""
        return any(module == name or module.endswith(f".{name}") for name in self.modules_to_save)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """As in PEFT, of the first pattern that matches the whole name, or its end after a dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


class Merged:
    """A weight of a checkpoint with its adapter, read like a safetensors slice: base + scaling * left @ right, in
    float32. Shapes: base [N, M], left [N, rank], right [rank, M]; both are stored transposed for an embedding."""

    def __init__(self, base: Slice, left: Slice, right: Slice, scaling: float, is_embedding: bool):
        self._base, self._left, self._right = base, left, right
        self._scaling, self._is_embedding = scaling, is_embedding

    def __getitem__(self, index: Index) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        left, right = self._left[...].float(), self._right[...].float()
        if self._is_embedding:
            left, right = left.t(), right.t()
        right = right[:, columns[0]] if columns else right
        return self._base[index].float() + (left[rows] @ right) * self._scaling

    def get_shape(self) -> list[int]:
        return self._base.get_shape()

    def get_dtype(self) -> str:
        return self._base.get_dtype()


class Content(NamedTuple):
    """What is read of one tensor, and the file that an error names."""

    content: Any
    file: Path


def read_settings(directory: str) -> LoraSettings:
    """Read and check a folder's adapter_config.json. Raises FileNotFoundError or ValueError, with the remedy, for a
    folder that is no adapter, or one that cannot be merged here."""
    file = Path(directory, CONFIG)
    if not file.is_file():
        raise FileNotFoundError(f"lora={quoted(directory)}: holds no {CONFIG}: must be a PEFT folder, or its hub id")
    config = read_json(file)
    kind = config.get("peft_type")
    require(f"{file}: peft_type", kind, kind == "LORA", f"'LORA'; {_BY_PEFT}, if it can be merged")
    for name, remedy in _OTHER_METHODS.items():
        if config.get(name):
            raise ValueError(f"{file}: {name}={quoted(config[name])}: not supported; {remedy}")
    init = config.get("init_lora_weights")
    convert = "save it with path_initial_model_for_weight_conversion, as PEFT's documentation shows"
    require(f"{file}: init_lora_weights", init, init in _KEEP_WEIGHTS, f"one that keeps the model's weights; {convert}")
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    require(f"{file}: r", rank, is_int(rank, 1), "an integer >= 1")
    require(f"{file}: lora_alpha", alpha, is_number(alpha), "a number")
    ranks = _patterns(file, config, "rank_pattern", lambda value: is_int(value, 1), "integers >= 1")
    alphas = _patterns(file, config, "alpha_pattern", is_number, "numbers")
    saved = config.get("modules_to_save") or []
    is_list = isinstance(saved, list) and all(isinstance(name, str) for name in saved)
    require(f"{file}: modules_to_save", saved, is_list, "a list of names")
    if not Path(directory, WEIGHTS).exists():
        raise FileNotFoundError(
            f"lora={quoted(directory)}: holds no {WEIGHTS}. An adapter_model.bin is a pickle, which can run any code "
            f"and is never opened. If you trust its author, convert it: {_LOAD}.save_pretrained(NEW_FOLDER)"
        )
    return LoraSettings(rank, alpha, ranks, alphas, bool(config.get("use_rslora")), tuple(saved))


def _patterns(
    file: Path, config: Mapping[str, Any], name: str, is_right: Callable[[Any], bool], allowed: str
) -> dict[str, Any]:
    found = config.get(name) or {}
    is_map = isinstance(found, dict) and all(map(is_right, found.values()))
    require(f"{file}: {name}", found, is_map, f"a map of regular expressions to {allowed}")
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{file}: {name}: {quoted(pattern)} is no regular expression ({error})") from None
    return found


def merge_adapter(
    tensors: Mapping[str, Any], directory: str, stack: ExitStack, prefixes: Mapping[str, str]
) -> dict[str, Content]:
    """What replaces tensors of a checkpoint.

    Where the head is tied to the embedding, the adapter's layer of one of them leaves the other as it is: there is a
    head of its own then. (PEFT adds both to the one matrix when it merges, which is not what was trained.)

    Args:
        tensors: by our names, with `content` and `file`. Only headers are read.
        directory: a folder that `read_settings` takes.
        prefixes: the model's `checkpoint_prefixes`.

    Raises ValueError, with the file, for a tensor that belongs to no weight of the checkpoint or does not fit it.
    """
    settings, path = read_settings(directory), Path(directory, WEIGHTS)
    file = open_safetensors(path, stack)
    matrices: dict[str, dict[str, Slice]] = {}  # A and B by the name of their module in transformers
    whole: dict[str, Slice] = {}
    for theirs in file.keys():  # noqa: SIM118 (not a dict)
        name, content = theirs.removeprefix(_PREFIX), file.get_slice(theirs)
        if ".original_module." in name or _is_of_other_part(name, prefixes):
            continue
        if content.get_dtype() not in FLOATS:
            raise ValueError(f"{path}: tensor {theirs!r} has dtype {content.get_dtype()}: must be {', '.join(FLOATS)}")
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        if ending is None:
            whole[name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")] = content
        else:
            matrices.setdefault(name.removesuffix(ending), {})[_ENDINGS[ending]] = content
    if not matrices and not whole:
        raise ValueError(f"{path}: holds no tensor of the language model")
    found = {name: Content(each.content, each.file) for name, each in tensors.items()}
    names = {name: _our_name(name, prefixes) for name in (*whole, *(f"{module}.weight" for module in matrices))}
    is_tied = HEAD not in found and EMBEDDING in found and not {HEAD, EMBEDDING}.isdisjoint(names.values())
    if is_tied:
        found[HEAD] = found[EMBEDDING]
    unknown = [name for name, ours in names.items() if ours not in found]
    if unknown:
        trained = read_json(path.with_name(CONFIG)).get("base_model_name_or_path")
        raise ValueError(
            f"{path}: the model has no {_some(map(repr, unknown))}; it was trained with {quoted(trained)}: is this the "
            "same model?"
        )
    changed: dict[str, Content] = {}
    for name, content in whole.items():
        ours = names[name]
        is_shared = is_tied and ours in (HEAD, EMBEDDING) and not settings.is_own(name.rpartition(".")[0])
        changed |= dict.fromkeys((HEAD, EMBEDDING) if is_shared else (ours,), Content(content, path))
    for module, parts in matrices.items():
        ours = names[f"{module}.weight"]
        base = changed.get(ours, found[ours])
        changed[ours] = Content(_merged(base.content, parts, settings, module, path), base.file)
    if is_tied:
        changed.setdefault(HEAD, found[EMBEDDING])
    return changed


def _merged(base: Slice, parts: Mapping[str, Slice], settings: LoraSettings, module: str, path: Path) -> Merged:
    """Raises ValueError unless there are an A and a B that fit each other and the weight."""
    kinds = set(parts)
    is_embedding = kinds == {"embedding A", "embedding B"}
    if not is_embedding and kinds != {"A", "B"}:
        raise ValueError(f"{path}: of {module!r} there is {', '.join(sorted(kinds))}: must be a lora_A and a lora_B")
    prefix = "embedding " if is_embedding else ""
    first, second = parts[f"{prefix}A"], parts[f"{prefix}B"]
    shapes = first.get_shape(), second.get_shape()
    rank, size = settings.rank_of(module), base.get_shape()
    needed = ([rank, size[-1]], [size[0], rank])
    if is_embedding:
        needed = ([rank, size[0]], [size[-1], rank])
    if len(size) != 2 or shapes != needed:
        found = f"{shapes[0]} and {shapes[1]}; for a weight of {size} and r={rank} they must have"
        raise ValueError(f"{path}: lora_A and lora_B of {module!r} have shapes {found} {needed[0]} and {needed[1]}")
    left, right = (first, second) if is_embedding else (second, first)
    return Merged(base, left, right, settings.scaling(module), is_embedding)


def _our_name(name: str, prefixes: Mapping[str, str]) -> str:
    """Of a name of transformers' model, which may be that of the text model alone."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)


def _is_of_other_part(name: str, prefixes: Mapping[str, str]) -> bool:
    """Whether it belongs to a vision tower, say, of a checkpoint whose text model is a part."""
    return bool(prefixes) and not name.startswith((*prefixes, *_OF_TEXT))


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_MAX_NAMED]) + (f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else "")
