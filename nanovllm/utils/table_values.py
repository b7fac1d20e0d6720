"""Values as the cells of tables hold them: pandas gives arrays for lists, Arrow gives pairs for maps, and a struct has
null for each key that only other rows have."""

from collections.abc import Mapping
from typing import Any

# Of a JSON schema: keys whose null is a value, and keys below which names stand.
_NULL_IS_A_VALUE = {"default", "const"}
_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions"}
_PLAIN = {str, int, float, bool, type(None)}


def as_list(value: Any) -> Any:
    """An array's elements. Anything else as it is."""
    return value if type(value) in _PLAIN or not hasattr(value, "tolist") else value.tolist()


def is_map(value: Any) -> bool:
    """Whether these are the pairs of a map, as Arrow gives them."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(p, tuple) and _is_pair(p) for p in value)


def as_mapping(value: Any) -> Any:
    """A dict of a map, where nothing but a mapping is right: pairs may be lists too. Anything else as it is."""
    if type(value) is dict or isinstance(value, Mapping):
        return value
    pairs = as_list(value)
    return dict(pairs) if isinstance(pairs, list | tuple) and all(map(_is_pair, pairs)) else value


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """Lists, dicts and Python's numbers all the way down. Null stays."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return plain(dict(value)) if is_map(value) else [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def plain_schema(value: Any, are_names: bool = False) -> Any:
    """`plain` of a tool or a JSON schema, without null where it is no value. are_names: the keys are names, not the
    standard's words."""
    if are_names:
        value = as_mapping(value)
    if isinstance(value, list | tuple):
        return plain_schema(dict(value)) if is_map(value) else [plain_schema(each) for each in value]
    if type(value) is dict or isinstance(value, Mapping):
        kept = () if are_names else _NULL_IS_A_VALUE
        return {
            # Most values are texts: a call for each would take a third of the time that the template takes.
            name: each if type(each) in _PLAIN else plain_schema(each, name in _OF_NAMES and not are_names)
            for name, each in value.items()
            if each is not None or name in kept
        }
    return plain_schema(value.tolist(), are_names) if hasattr(value, "tolist") else value
