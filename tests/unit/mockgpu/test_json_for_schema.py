"""Tests that a mock engine's answer fits the JSON Schema which the request demands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockgpu.json_for_schema import ANY_OBJECT, frame_of

TEXT = {"type": "string"}


def written(schema: object) -> Any:
    frame = frame_of(schema)
    return json.loads(frame.before + ("two words" if frame.has_words else "") + frame.after)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (ANY_OBJECT, {"words": "two words"}),
        ({"type": "object", "properties": {}}, {}),
        ({"type": "object"}, {}),
        ({"properties": {"path": TEXT, "more": TEXT}}, {"path": "two words"}),
        (
            {"properties": {"n": {"type": "integer"}, "q": TEXT}, "required": ["q"]},
            {"q": "two words"},
        ),
        ({"type": "object", "required": ["unknown"]}, {"unknown": "two words"}),
        ({"type": "array", "items": TEXT}, ["two words"]),
        ({"type": "array", "items": TEXT, "minItems": 2}, ["two words", "word"]),
        ({"type": "array", "items": TEXT, "maxItems": 0}, []),
        ({"type": "array", "prefixItems": [{"const": 1}, TEXT]}, [1, "two words"]),
        ({"enum": ["deep", "shallow"]}, "deep"),
        ({"const": {"a": 1}}, {"a": 1}),
        ({"type": ["null", "boolean"]}, False),
        ({"type": "null"}, None),
        ({"type": "string", "format": "date"}, "2026-01-01"),
        ({"type": "string", "maxLength": 2}, "wo"),
        ({"type": "string", "minLength": 6, "maxLength": 8}, "xxxxxx"),
        ({"type": "string", "minLength": 2}, "xxtwo words"),
        ({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 3}]}, 3),
        ({"oneOf": [{"type": "boolean"}, TEXT]}, False),
        ({"type": "integer", "exclusiveMinimum": 0}, 1),
        ({"type": "number", "exclusiveMaximum": 0}, -0.5),
        ({"type": "integer", "minimum": 7, "multipleOf": 5}, 10),
        ({"type": "integer", "maximum": -3}, -3),
        ({}, "two words"),
        (True, "two words"),
    ],
)
def test_the_words_stand_in_the_smallest_value_that_fits(schema: object, value: object) -> None:
    assert written(schema) == value


def test_references_and_combinations_are_followed() -> None:
    schema = {
        "$defs": {
            "pump/a": {
                "type": "object",
                "properties": {"id": {"type": "integer"}},
                "required": ["id"],
            }
        },
        "allOf": [
            {"$ref": "#/$defs/pump~1a"},
            {"properties": {"note": TEXT}, "required": ["note"]},
        ],
    }
    assert written(schema) == {"id": 0, "note": "two words"}


def test_a_schema_that_contains_itself_ends() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    assert "next" in written(schema)


simple = st.sampled_from(
    [TEXT, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a"]}, {"type": "number"}]
)
schemas = st.recursive(
    simple,
    lambda inner: st.one_of(
        inner.map(lambda item: {"type": "array", "items": item, "minItems": 1}),
        st.dictionaries(st.text(max_size=5), inner, max_size=3).map(
            lambda members: {"type": "object", "properties": members, "required": list(members)}
        ),
    ),
    max_leaves=8,
)


def fits(schema: Any, value: Any) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        return set(value) == set(schema["required"]) and all(
            fits(schema["properties"][name], each) for name, each in value.items()
        )
    if kind == "array":
        return len(value) == 1 and fits(schema["items"], value[0])
    types = {"string": str, "integer": int, "boolean": bool, "number": int | float}
    return isinstance(value, types[kind])


@given(schemas)
def test_any_schema_is_met_with_the_words_in_one_place_at_most(schema: Any) -> None:
    value = written(schema)
    assert fits(schema, value)
    assert json.dumps(value).count("two words") <= 1
