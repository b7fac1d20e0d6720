"""What compressed-tensors (llm-compressor) says in config.json of the weights and inputs of linear layers."""

from collections.abc import Mapping
from typing import Any

METHOD = "compressed-tensors"


def only_group(method: str, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The one group of settings, if it is for all linear layers and leaves their outputs alone; else None."""
    groups = settings.get("config_groups")
    if method != METHOD or not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    return group if group.get("targets") == ["Linear"] and not group.get("output_activations") else None


def is_e4m3(scheme: Any) -> bool:
    """Whether a scheme of weights, inputs or a KV cache is e4m3."""
    is_symmetric = isinstance(scheme, Mapping) and scheme.get("symmetric", True) is True
    return is_symmetric and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


def described(settings: Mapping[str, Any]) -> str:
    """What the settings ask for, in their own words."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return f"config_groups={groups!r}"
    parts = []
    for name, group in groups.items():
        words = [f"targets {group.get('targets')}", f"format {group.get('format') or settings.get('format')!r}"]
        for part in ("weights", "input_activations", "output_activations"):
            scheme = group.get(part)
            if isinstance(scheme, Mapping):
                named = ("type", "num_bits", "strategy", "group_size", "block_structure", "dynamic", "symmetric")
                values = (f"{key} {scheme[key]!r}" for key in named if scheme.get(key) is not None)
                words.append(f"{part} of {', '.join(values)}")
        parts.append(f"{name!r} has {'; '.join(words)}")
    return ". ".join(parts)
