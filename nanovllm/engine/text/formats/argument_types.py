"""Arguments that a model writes as bare text, read as the types that the schema of their tool gives them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

_OF_JSON = frozenset({"integer", "number", "boolean", "object", "array", "null"})  # types whose values are no texts
_OF_PYTHON = {"True": True, "False": False, "None": None}  # as the templates write them
_MAX_DEPTH = 32  # of references and combinations; schemas may refer to themselves
_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_TYPES |= {dict: "object", list: "array"}

_KEYS_OF_TYPES = {"properties": "object", "items": "array"}  # of schemas that name no type

Types = frozenset[str]


class ArgumentTypes:
    """The types of all arguments of some tools."""

    def __init__(self, tools: Iterable[Any]):
        """tools: schemas as in `chat`."""
        functions = dict(pair for pair in map(_function, tools) if pair is not None)
        self.names = frozenset(functions)
        self._parameters = functions

    def value(self, function: str, key: str, text: str) -> Any:
        """The value that a text stands for. What its schema does not say to be something else is a text."""
        root = self._parameters.get(function, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        for value in _listed(schema, root, 0):
            if _is_written(value, text):
                return value
        types = _types(schema, root, 0)
        if "string" in types or not types & _OF_JSON:
            return None if text.strip() == "null" and "null" in types else text
        if text.strip() in _OF_PYTHON:
            return _OF_PYTHON[text.strip()]
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return text
        is_whole = isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types
        return int(value) if is_whole else value


def _function(tool: Any) -> tuple[str, Mapping[str, Any]] | None:
    """The name and the schema of the parameters of a tool."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    parameters = function.get("parameters")
    return function["name"], parameters if isinstance(parameters, Mapping) else {}


def _resolved(schema: Any, root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """The schema, or what it refers to; an empty one, which says nothing, if that is not known."""
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and depth < _MAX_DEPTH:
        reference, depth, others = schema["$ref"], depth + 1, schema
        schema = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) and part else schema
        if isinstance(schema, Mapping):
            schema = {**schema, **{key: value for key, value in others.items() if key != "$ref"}}
    return schema if isinstance(schema, Mapping) and depth < _MAX_DEPTH else {}


def _listed(schema: Any, root: Mapping[str, Any], depth: int) -> list[Any]:
    """All values that an enum or a const of the schema lists."""
    schema = _resolved(schema, root, depth)
    found = [schema["const"]] if "const" in schema else []
    enum = schema.get("enum")
    found += enum if isinstance(enum, list | tuple) else ()
    for each in _parts(schema, ("allOf", "anyOf", "oneOf"), depth):
        found += _listed(each, root, depth + 1)
    return found


def _is_written(value: Any, text: str) -> bool:
    """Whether a text is how a value of an enum is written: as it is, as JSON, or as Python."""
    if isinstance(value, str):
        return text == value
    if isinstance(value, bool) or value is None:
        return text.strip() in (json.dumps(value), str(value))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return not isinstance(found, bool) and found == value


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Types:
    """The types of JSON that a schema allows; none if it says nothing."""
    schema = _resolved(schema, root, depth)
    own = schema.get("type")
    if isinstance(own, str):
        types = frozenset([own])
    elif isinstance(own, list | tuple):
        types = frozenset(each for each in own if isinstance(each, str))
    elif "const" in schema or isinstance(schema.get("enum"), list | tuple):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types = frozenset(_TYPES[type(value)] for value in values if type(value) in _TYPES)
    else:
        types = frozenset(name for key, name in _KEYS_OF_TYPES.items() if key in schema)
    for name in ("anyOf", "oneOf"):
        choices = [_types(each, root, depth + 1) for each in _parts(schema, (name,), depth)]
        types = _both(types, frozenset().union(*choices))
    for each in _parts(schema, ("allOf",), depth):
        types = _both(types, _types(each, root, depth + 1))
    return types | {"null"} if schema.get("nullable") is True and types else types


def _both(first: Types, second: Types) -> Types:
    """What two schemas allow together."""
    return (first & second or first | second) if first and second else first | second


def _parts(schema: Mapping[str, Any], names: tuple[str, ...], depth: int) -> list[Any]:
    """The schemas that a schema combines."""
    lists = [schema.get(name) for name in names] if depth < _MAX_DEPTH else []
    return [each for found in lists if isinstance(found, list | tuple) for each in found]
