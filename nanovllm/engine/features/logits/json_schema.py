"""JSON schemas as people mean them: formats that are remarks, and objects without keys that nobody has described."""

from collections.abc import Callable
from typing import Any

Schema = Any  # a dict, or True or False

_PARTS_BY_NAME = ("properties", "patternProperties")
_PARTS = ("additionalProperties", "items", "additionalItems")
_LISTS = ("prefixItems", "items")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
# With one of these an object says itself which other keys it takes.
_OF_OTHERS = ("additionalProperties", "unevaluatedProperties")
_OF_KEYS = ("properties", "patternProperties")


def as_meant(schema: Schema, is_known_format: Callable[[str], bool], additional_properties: bool) -> Schema:
    """A schema for llguidance, which refuses what is only a remark.

    - A `format` that it does not know is left out: by the standard it need not be checked.
    - An object that names its keys, and does not say whether it takes others, takes none, unless additional_properties.
      Where several schemas describe one object (allOf, or anyOf beside properties), all keys that they name together
      are its keys.

    Raises ValueError for a schema that is nested too deeply.
    """
    if not isinstance(schema, dict):
        return schema
    try:
        return _Rewriter(schema, is_known_format, additional_properties).rewrite()
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error


class _Names:
    """The keys of objects that some schemas name together.

    Attributes:
        keys, patterns: names in properties and in required, and those of patternProperties; in order.
        is_described: one of the schemas has properties or patternProperties.
        is_settled: one of them says whether there may be other keys.
    """

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.is_described = self.is_settled = False

    def add(self, others: "_Names") -> None:
        self.keys |= others.keys
        self.patterns |= others.patterns
        self.is_described |= others.is_described

    def identity(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self.keys), tuple(self.patterns)


class _Rewriter:
    """Rewrites one schema. Where it is needed both closed and open, or with the keys of others, a definition gets a
    variant beside it."""

    def __init__(self, root: dict[str, Any], is_known_format: Callable[[str], bool], additional_properties: bool):
        self._root, self._is_known_format, self._is_open = root, is_known_format, additional_properties
        self._variants: dict[Any, str] = {}  # (pointer, kind) -> name in $defs
        self._added: dict[str, Schema] = {}

    def rewrite(self) -> Schema:
        found = self._open(self._root) if self._is_open else self._closed(self._root)
        if self._added:
            known = found.get("$defs")
            found["$defs"] = (known if isinstance(known, dict) else {}) | self._added
        return found

    # -- one schema ------------------------------------------------------------------------------------------------

    def _closed(self, schema: Schema, others: _Names | None = None) -> Schema:
        """The schema, which takes no keys beside its own and others'."""
        if not isinstance(schema, dict):
            return schema
        if not _may_be_object(schema):
            return self._open(schema)
        names, own = _Names(), _Names()
        if others is not None:
            names.add(others)
        self._collect(schema, own, branches=False)
        kinds = [name for name in _BRANCHES if isinstance(schema.get(name), list)]
        if "$ref" in schema and not kinds and not _names_keys(schema):
            found = self._parts(schema)
            if names.is_described:
                found["$ref"] = self._variant(schema["$ref"], "closed", names)
            return found
        if own.is_settled:
            return self._open(schema)
        names.add(own)
        if kinds in (["anyOf"], ["oneOf"]) and "$ref" not in schema:
            # Each branch is closed, with the keys that stand beside it.
            found = self._parts(schema)
            found[kinds[0]] = [self._closed(branch, names) for branch in schema[kinds[0]]]
            return found
        if kinds == ["allOf"] and len(schema["allOf"]) == 1 and "$ref" not in schema and not _names_keys(schema):
            found = self._parts(schema)
            found["allOf"] = [self._closed(schema["allOf"][0], names)]
            return found
        if kinds or "$ref" in schema:
            whole = _Names()
            self._collect(schema, whole, branches=True)
            if whole.is_settled:
                return self._open(schema)
            names.add(whole)
        found = self._open(schema)
        if not names.is_described or _needs_others(schema, names):
            return found
        return _close(found, names)

    def _open(self, schema: Schema) -> Schema:
        """The schema with its parts rewritten, but itself open: something around it closes it, or nothing does."""
        if not isinstance(schema, dict):
            return schema
        found = self._parts(schema)
        if not self._is_open:
            for name in _BRANCHES:
                if isinstance(schema.get(name), list):
                    found[name] = [self._open(branch) for branch in schema[name]]
            if "$ref" in schema and _may_be_object(schema):
                found["$ref"] = self._variant(schema["$ref"], "open", _Names())
        return found

    def _parts(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema with rewritten values, definitions, and no unknown format; itself and its branches as they are."""
        rewrite = self._open if self._is_open else self._closed
        found = dict(schema)
        name = schema.get("format")
        if isinstance(name, str) and not self._is_known_format(name):
            del found["format"]
        for name in (*_PARTS_BY_NAME, *_DEFINITIONS):
            if isinstance(schema.get(name), dict):
                found[name] = {key: rewrite(part) for key, part in schema[name].items()}
        for name in _PARTS:
            if isinstance(schema.get(name), dict):
                found[name] = rewrite(schema[name])
        for name in _LISTS:
            if isinstance(schema.get(name), list):
                found[name] = [rewrite(part) for part in schema[name]]
        if self._is_open:
            for name in _BRANCHES:
                if isinstance(schema.get(name), list):
                    found[name] = [rewrite(part) for part in schema[name]]
        return found

    # -- the keys of one object ------------------------------------------------------------------------------------

    def _collect(self, schema: Schema, names: _Names, branches: bool, seen: frozenset[str] = frozenset()) -> None:
        """Add the keys that a schema names. branches: also those of allOf, anyOf, oneOf and $ref."""
        if not isinstance(schema, dict):
            return
        names.is_settled |= any(name in schema for name in _OF_OTHERS)
        for name, into in (("properties", names.keys), ("patternProperties", names.patterns)):
            if isinstance(schema.get(name), dict):
                into.update(dict.fromkeys(schema[name]))
                names.is_described = True
        if branches:
            for name in _BRANCHES:
                for branch in schema[name] if isinstance(schema.get(name), list) else ():
                    self._collect(branch, names, True, seen)
            pointer = schema.get("$ref")
            if isinstance(pointer, str) and pointer not in seen:
                self._collect(self._resolve(pointer), names, True, seen | {pointer})
        if isinstance(schema.get("required"), list):
            names.keys.update(dict.fromkeys(key for key in schema["required"] if isinstance(key, str)))

    # -- definitions -----------------------------------------------------------------------------------------------

    def _resolve(self, pointer: object) -> Schema:
        """What a reference to a place in the schema means; None if it is another one's, or nothing is there."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return None
        place: Any = self._root
        for part in pointer[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict):
                place = place.get(part)
            elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
                place = place[int(part)]
            else:
                return None
        return place

    def _variant(self, pointer: object, kind: str, names: _Names) -> object:
        """The reference to another form of a definition."""
        target = self._resolve(pointer)
        if not isinstance(target, dict):
            return pointer
        key = pointer, kind, names.identity()
        if key not in self._variants:
            taken, number = self._root.get("$defs"), len(self._variants) + 1
            while (name := f"variant-{number}") in self._variants.values() or (
                isinstance(taken, dict) and name in taken
            ):
                number += 1
            self._variants[key] = name
            target = {each: value for each, value in target.items() if each not in _DEFINITIONS}
            self._added[name] = self._open(target) if kind == "open" else self._closed(target, names)
        return f"#/$defs/{self._variants[key]}"


def _may_be_object(schema: dict[str, Any]) -> bool:
    """Whether it describes an object by its keys. Constants are described whole."""
    kind = schema.get("type", "object")
    return not {"const", "enum"} & schema.keys() and (kind == "object" or (isinstance(kind, list) and "object" in kind))


def _needs_others(schema: dict[str, Any], names: _Names) -> bool:
    """Whether an object of these keys alone would be too small."""
    least = schema.get("minProperties", 0)
    return not names.patterns and isinstance(least, int) and least > len(names.keys)


def _names_keys(schema: dict[str, Any]) -> bool:
    return any(name in schema for name in (*_OF_KEYS, *_OF_OTHERS, "required"))


def _close(schema: dict[str, Any], names: _Names) -> dict[str, Any]:
    """The same with these keys, and no others."""
    known = {name: schema[name] if isinstance(schema.get(name), dict) else {} for name in _OF_KEYS}
    # In the order of their names: that is the order in which a model writes them.
    properties = {key: known["properties"].get(key, {}) for key in names.keys}
    patterns = {key: known["patternProperties"].get(key, {}) for key in names.patterns}
    closed = schema | {"properties": properties, "additionalProperties": False}
    return closed | {"patternProperties": patterns} if patterns else closed
