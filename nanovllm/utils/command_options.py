"""Options of the command line, made from the fields of a dataclass."""

from argparse import BooleanOptionalAction
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args


def add_options(group: Any, declared: type, names: Iterable[str], has_defaults: bool = False) -> None:
    """Add an option for each of these fields to an argparse parser or group, with the field's name, type, choices and
    help. One that is True by default also has its opposite: --no-NAME.

    Args:
        declared: a dataclass. A field's metadata may have "help" and "choices".
        has_defaults: an option that is not given has the field's default; otherwise None.
    """
    known = {field.name: field for field in fields(declared)}
    for name in names:
        field = known[name]
        kind = (get_args(field.type) or (field.type,))[0]
        options: dict[str, Any] = {"default": field.default if has_defaults else None}
        if help := field.metadata.get("help"):
            default = "" if field.default is None or kind is bool else f" (default: {field.default})"
            options["help"] = (help + default).replace("%", "%%")
        if kind is bool:
            options["action"] = BooleanOptionalAction if field.default else "store_true"
        elif choices := field.metadata.get("choices"):
            options["choices"] = choices
        else:
            options |= {"type": kind, "metavar": "N"} if kind in (int, float) else {"metavar": "TEXT"}
        group.add_argument(f"--{name.replace('_', '-')}", **options)
