"""Writes JSON around a mock engine's words, so that the answer fits the requested schema.

A mock engine generates words, but a client that asked for structured output or a tool call parses
JSON. The words become the value of the first string in the schema that may hold any text. The JSON
text around them (the frame) counts no tokens. Not supported: `pattern`, `not`, `if`, regular
expressions and grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

MAX_DEPTH = 16
_WORDS = "\ue000words\ue000"  # stands for the words until the frame is split there
_FORMATS: Mapping[str, str] = {
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "date-time": "2026-01-01T00:00:00Z",
    "duration": "PT1S",
    "email": "mock@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


class JsonFrame(msgspec.Struct, frozen=True):
    """The JSON text to put around a mock engine's generated words.

    before     JSON text before the words
    after      JSON text after the words
    has_words  whether the JSON contains the words; False: `before` replaces the words
    """

    before: str
    after: str
    has_words: bool = True


ANY_OBJECT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"words": {"type": "string"}},
    "required": ["words"],
}
"""The schema that is used for a JSON object if the request gives none."""


def fixed_frame(text: str) -> JsonFrame:
    """Return a frame that replaces the generated words by this JSON text."""
    return JsonFrame(text, "", has_words=False)


def frame_of(schema: object) -> JsonFrame:
    """Return the JSON text to put around the generated words, so that it fits a JSON Schema.

    The JSON is the smallest that fits. Its first string that may hold any text gets the words.
    """
    value = _Sample(schema if isinstance(schema, dict) else {}).value(schema, 0)
    text = msgspec.json.encode(value).decode()
    before, mark, after = text.partition(_WORDS)
    return JsonFrame(before, after, bool(mark))


class _Sample:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._has_words = False

    def value(self, schema: object, depth: int) -> Any:
        if depth > MAX_DEPTH:
            return None
        if not isinstance(schema, dict):
            return self._text({})
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        if (other := self._other(schema)) is not None:
            return self.value(other, depth + 1)
        kind = _kind(schema)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("number", "integer"):
            return _number(schema, kind)
        return {"boolean": False, "null": None}[kind] if kind != "string" else self._text(schema)

    def _other(self, schema: Mapping[str, Any]) -> object | None:
        if isinstance(ref := schema.get("$ref"), str):
            return self._referenced(ref)
        for name in ("anyOf", "oneOf"):
            if options := schema.get(name):
                named = (option for option in options if _kind(option) != "null")
                first: object = next(named, options[0])
                return first
        if parts := schema.get("allOf"):
            merged = {name: member for name, member in schema.items() if name != "allOf"}
            for part in parts:
                target = self._referenced(part["$ref"]) if "$ref" in part else part
                merged = _merge(merged, target if isinstance(target, dict) else {})
            return merged
        return None

    def _referenced(self, ref: str) -> object:
        # Return the schema at a reference such as `#/$defs/name`; {} if there is none.
        found: Any = self._root
        for name in ref.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name, {}) if isinstance(found, dict) else {}
        return found

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        # Return an object with the required properties, or with the first one if none is.
        members = schema.get("properties") or {}
        names = schema.get("required") or list(members)[:1]
        return {name: self.value(members.get(name, {}), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        items = [*schema.get("prefixItems", ())]
        least = schema.get("minItems", min(1, schema.get("maxItems", 1)))
        items += [schema.get("items", {})] * (least - len(items))
        return [self.value(item, depth + 1) for item in items]

    def _text(self, schema: Mapping[str, Any]) -> str:
        # Return the placeholder of the words, or a fixed string.
        #
        # A string gets fixed text if its format or maximum length restricts it, or if the words are
        # already placed.
        least = "x" * schema.get("minLength", 0)
        if form := _FORMATS.get(str(schema.get("format"))):
            return form
        if self._has_words or "maxLength" in schema:
            return str(least or "word"[: schema.get("maxLength", 4)])
        self._has_words = True
        return str(least + _WORDS)


def _kind(schema: object) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind in ("object", "array", "number", "integer", "boolean", "null"):
        return str(kind)
    return "object" if isinstance(schema, dict) and "properties" in schema else "string"


def _number(schema: Mapping[str, Any], kind: str) -> float | int:
    step = schema.get("multipleOf", 1 if kind == "integer" else 0.5)
    lowest = schema.get("minimum", schema.get("exclusiveMinimum"))
    highest = schema.get("maximum", schema.get("exclusiveMaximum"))
    number: float | int = 0
    if lowest is not None and (lowest > 0 or (lowest == 0 and "exclusiveMinimum" in schema)):
        number = -(-lowest // step) * step
        number += step if number == lowest and "minimum" not in schema else 0
    elif highest is not None and (highest < 0 or (highest == 0 and "exclusiveMaximum" in schema)):
        number = highest // step * step
        number -= step if number == highest and "maximum" not in schema else 0
    return int(number) if kind == "integer" else number


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**first, **second}
    for name in ("properties", "required"):
        old, new = first.get(name), second.get(name)
        if old and new:
            merged[name] = {**old, **new} if isinstance(new, dict) else [*old, *new]
    return merged
