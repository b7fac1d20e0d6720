"""Published shapes, for `load_format="dummy"`, which reads no file. presets.json names the source of each family."""

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.models.hf_config import text_config, with_layer_types
from nanovllm.utils.checks import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _merged(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A family's fields with those of one size. A model that sees has them in parts: text_config and vision_config."""
    names = {"text_config", "vision_config"} & common.keys() & own.keys()
    return common | own | {name: common[name] | own[name] for name in names}


_FAMILIES = json.loads(Path(__file__).with_suffix(".json").read_text())
# Name -> (organization of the hub, fields of its config.json in the spelling of transformers 4, which 5 reads too)
_PRESETS = {
    name: (family["organization"], _merged(family["common"], fields))
    for family in _FAMILIES
    for name, fields in family["sizes"].items()
}

PRESET_NAMES = tuple(_PRESETS)
# Name -> the hub id of what talks, which some families publish beside a base model of the same shape
_CHAT_MODELS = {
    name: f"{family['organization']}/{family.get('chat', {}).get(name, name)}"
    for family in _FAMILIES
    for name in family["sizes"]
}


def find_preset(model: str) -> str | None:
    """The one of PRESET_NAMES that a name or hub id means; None if there is none."""
    organization, _, name = model.rpartition("/")
    known = _PRESETS.get(name)
    return name if known is not None and organization in ("", known[0]) else None


def similar_presets(model: str) -> list[str]:
    """Those of PRESET_NAMES that a mistyped name or hub id may mean, the most similar first: the only one where it
    differs in capitals alone. None of another organization's model."""
    organization, _, name = model.lower().rpartition("/")
    names = {each.lower(): each for each, (owner, _) in _PRESETS.items() if organization in ("", owner.lower())}
    if name in names:
        return [names[name]]
    return [names[each] for each in difflib.get_close_matches(name, names, n=3, cutoff=0.8)]


def find_chat_model(model: str) -> tuple[str, str] | None:
    """The hub id of the model to talk to that a name means, in any capitals and with or without its organization, and
    the one of PRESET_NAMES that has its shape; None if there is none."""
    for name, hub_id in _CHAT_MODELS.items():
        chat_name = hub_id.split("/")[1]
        if model.lower() in (each.lower() for each in (name, chat_name, hub_id)):
            return hub_id, name
    return None


def meant_chat_model(model: str) -> tuple[str, str] | None:
    """As find_chat_model. Raises FileNotFoundError, with similar names, for one that is mistyped."""
    found = find_chat_model(model)
    if found is None and "/" not in model:
        similar = map(find_chat_model, similar_presets(model))
        if names := [each[0] for each in similar if each is not None]:
            raise FileNotFoundError(f"model={quoted(model)}: no such directory; did you mean {' or '.join(names)}?")
    return found


def preset_config(name: str) -> "PreTrainedConfig":
    """The published transformers configuration of one of PRESET_NAMES, as `read_hf_config` returns it. Raises KeyError
    for another name, ValueError if the installed transformers is older than the model."""
    _, fields = _PRESETS[name]
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    if fields["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"{name}: transformers {__version__} does not know {fields['model_type']}: upgrade it")
    return text_config(AutoConfig.for_model(**with_layer_types(fields)), fields)
