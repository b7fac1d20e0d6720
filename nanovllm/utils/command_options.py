"""Options of the command line, made from the fields of a dataclass."""

from argparse import BooleanOptionalAction
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_args


def add_options(
    group: Any,
    declared: type,
    names: Iterable[str],
    has_defaults: bool = False,
    other_defaults: Mapping[str, str] | None = None,
) -> None:
    """Add an option for each of these fields to an argparse parser or group, with the field's name, type, choices and
    help. One that is True by default also has its opposite: --no-NAME.

    Args:
        declared: a dataclass. A field's metadata may have "help" and "choices".
        has_defaults: an option that is not given has the field's default; otherwise None.
        other_defaults: what the help says of a default that is not the field's.
    """
    told = other_defaults or {}
    known = {field.name: field for field in fields(declared)}
    for name in names:
        field = known[name]
        kind = (get_args(field.type) or (field.type,))[0]
        options: dict[str, Any] = {"default": field.default if has_defaults else None}
        default = told.get(name, "" if field.default is None or kind is bool else str(field.default))
        default = f"default: {default}" if default else ""
        if help := field.metadata.get("help"):
            default = f"{help} ({default})" if default else help
        if default:
            options["help"] = default.replace("%", "%%")
        if kind is bool:
            options["action"] = BooleanOptionalAction if field.default else "store_true"
        elif choices := field.metadata.get("choices"):
            options["choices"] = choices
        else:
            options |= {"type": kind, "metavar": "N"} if kind in (int, float) else {"metavar": "TEXT"}
        group.add_argument(f"--{name.replace('_', '-')}", **options)
