"""Tests of splitting a JSON list into its items: all kinds of values, long texts, invalid JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.batch import json_list
from gateway.batch.json_list import JsonList, JsonListError


def items(text: bytes) -> list[Any]:
    return [json.loads(item) for item in JsonList(text, "requests").items()]


def value(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(5 if depth > 3 else 7)
    if kind < 3:
        return "".join(source.choice('ab"\\[]{},:é\n ') for _ in range(source.randrange(12)))
    if kind < 5:
        return source.choice([None, True, -1.5e3, 12345])
    parts = [value(source, depth + 1) for _ in range(source.randrange(4))]
    return parts if kind == 5 else {str(part): part for part in parts}


@pytest.mark.parametrize("window", [2, 3, 7, 65536])
@pytest.mark.parametrize("indent", [None, 1])
def test_items_are_those_that_a_decoder_finds(
    window: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_list, "WINDOW_BYTES", window)
    source = random.Random(7)
    for _ in range(60):
        expected = [value(source) for _ in range(source.randrange(5))]
        for is_ascii in (True, False):
            text = json.dumps({"requests": expected}, indent=indent, ensure_ascii=is_ascii)
            assert items(f" {text}\r\n".encode()) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "expected '{'"),
        (b"[]", "expected '{'"),
        (b"{}", "'requests' is missing"),
        (b'{"requests": "x"}', "must be a list"),
        (b'{"requests": null}', "must be a list"),
        (b'{"betas": [], "requests": []}', "only member that is permitted"),
        (b'{"requests": [], "requests": [1]}', "only member that is permitted"),
        (b'{"requests": [1] "x": 2}', "expected '}'"),
        (b'{"requests"', "expected ':'"),
        (b'{"requests":', "expected '['"),
        (b'{"requests": [1, 2', "followed by ',' or ']'"),
        (b'{"requests": [1,]}', "a value is missing"),
        (b'{"requests": [1 2]}', "followed by ',' or ']'"),
        (b'{"requests": [{"a": "b}]}', "ends within a string"),
        (b'{"requests": [{"a": "b\\', "ends within a string"),
        (b'{"requests": [[1}, 2]', "expected '}'"),
        (b'{"requests": [{"a": [1]', "ends within an object or a list"),
        (b'{"requests": []', "expected '}'"),
        (b'{"requests": []} x', "text after the end of the object"),
    ],
)
def test_a_malformed_text_is_refused_with_what_is_wrong(text: bytes, said: str) -> None:
    with pytest.raises(JsonListError) as caught:
        list(JsonList(text, "requests").items())
    assert said in str(caught.value)


def test_items_before_the_malformed_place_are_found() -> None:
    found = JsonList(b'{"requests": [1, {"a": "]"}, [2', "requests").items()
    assert [next(found), next(found)] == [b"1", b'{"a": "]"}']
    with pytest.raises(JsonListError):
        next(found)
