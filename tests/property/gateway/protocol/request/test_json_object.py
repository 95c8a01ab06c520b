"""Property tests that the C search for an object's members finds what msgspec decodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.errors import GatewayError
from gateway.protocol.request import json_members
from gateway.protocol.request.json_members import (
    LONG_BODY_BYTES,
    SMALL_BODY_BYTES,
    decode_members,
    read_members,
)
from tests.c_forms import compile_module, needs_compiler

pytestmark = needs_compiler

decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

TEXTS = st.text(max_size=40).filter(str.isprintable) | st.sampled_from(
    ["a\nb", '"quoted"', "back\\slash", "\x7f", "\U0001f600", "é" * 20]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
NAMES = st.text("abcXYZ019_-", min_size=1, max_size=64)
OBJECTS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=6)
FORMS: list[Callable[[Any], str]] = [
    json.dumps,
    lambda value: json.dumps(value, separators=(",", ":")),
    lambda value: json.dumps(value, ensure_ascii=False),
    lambda value: json.dumps(value, indent=2),
]
PIECES = st.sampled_from(
    [
        *(b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b" ", b"\n", b"\t", b"\x0b", b"\x00"),
        *(b'"a":', b'"a"', b'"b":1', b"true", b"false", b"null", b"nul", b"0", b"-", b"-1", b"01"),
        *(b"1.5", b"1.", b".5", b"1e5", b"9" * 18, b"9" * 19, b"\\u00e9", b"\\ud83d", b"\\ude00"),
        *(
            b"\\n",
            b"\\q",
            b"\\",
            b'\\"',
            b"\xff",
            "é".encode(),
            b"plain text of a prompt ",
            b"\x1f",
        ),
    ]
)


def c_form() -> ModuleType:
    return compile_module("gateway/protocol/request/_json_object.c")


def check(text: bytes) -> bool:
    """Compare the search for members with msgspec's parser; return whether it found members."""
    found = c_form().find_members(text, msgspec.Raw)
    without_avx2 = compile_module("gateway/protocol/request/_json_object.c", "-DWITHOUT_AVX2")
    again = without_avx2.find_members(text, msgspec.Raw)
    assert (found is None) is (again is None)
    if found is None:
        return False
    assert (list(found[0].items()), found[1]) == (list(again[0].items()), again[1])
    members, is_ascii = found
    assert list(members.items()) == list(decode(text).items())
    assert all(type(value) is msgspec.Raw for value in members.values())
    assert is_ascii == text.isascii()
    return True


@given(OBJECTS, st.sampled_from(FORMS))
def test_members_are_found_in_objects_as_sdks_write_them(
    members: dict[str, Any], form: Callable[[Any], str]
) -> None:
    assert check(form(members).encode())


@given(st.lists(PIECES, max_size=20).map(b"".join))
@example(b'"a":1}')
@example(b'"a":1,"a":2}')
@example(b'"a":[}')
@example(b'"a":{]}')
@example(b'"a":[1,]}')
@example(b'"a":{"b":1,}}')
@example(b'"a":"\\ud83d"}')
@example(b'"a":1}{')
@example(b'"a":"')
@example(b'"a":"\\')
@example(b'"a":"\\u00')
def test_whatever_is_found_in_any_text_is_what_msgspec_decodes(text: bytes) -> None:
    check(b"{" + text)
    check(b'{"a":' + text + b"}")
    check(b'{"a":"' + text + b'"}')


@given(st.integers(0, 1400), st.lists(PIECES, max_size=8).map(b"".join), st.integers(0, 200))
def test_what_follows_a_long_plain_string_is_read_as_by_msgspec(
    before: int, text: bytes, after: int
) -> None:
    check(b'{"a":"' + b"x" * before + text + b"y" * after + b'"}')
    check(b'{"a":"' + b"x" * before + "\u00e9".encode() + b"y" * after + text + b'"}')


@given(OBJECTS, st.sampled_from(FORMS), st.data())
def test_damaged_objects_are_read_as_by_msgspec(
    members: dict[str, Any], form: Callable[[Any], str], data: st.DataObject
) -> None:
    text = form(members).encode()
    at = data.draw(st.integers(0, len(text)))
    to = data.draw(st.integers(at, min(len(text), at + 3)))
    check(text[:at] + data.draw(PIECES | st.just(b"")) + text[to:])
    check(text[:at])


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[1]",
        b"",
        b'{"a":' + b"[" * 33 + b"]" * 33 + b"}",
        b"{" + b",".join(b'"n%d":1' % number for number in range(257)) + b"}",
        b'{"' + b"n" * 65 + b'":1}',
        b'{"n\\u0061me":1}',
        b'{"a":1e5}',
        b'{"a":1,"b":2,"a":1}',
        b'{"a":' + b"1" * 19 + b"}",
    ],
)
def test_unusual_text_is_left_to_msgspec(text: bytes) -> None:
    assert c_form().find_members(text, msgspec.Raw) is None


def test_the_arguments_are_checked() -> None:
    for arguments in ((), (b"{}",), ("{}", msgspec.Raw)):
        with pytest.raises(TypeError):
            c_form().find_members(*arguments)


def outcome(text: bytes) -> object:
    """Return the members of a request body, or the error message if the body is refused."""
    try:
        return list(decode_members(text).items())
    except GatewayError as error:
        return error.status, error.message


@given(st.lists(PIECES, max_size=6).map(b"".join), st.booleans())
@example(b"\xff", False)
def test_long_bodies_are_read_or_refused_alike_in_both_forms(text: bytes, is_inside: bool) -> None:
    filling = b"x" * LONG_BODY_BYTES
    body = b'{"a":"%b%b"}' % (filling, text) if is_inside else b'{"a":"%b",%b}' % (filling, text)
    expected = outcome(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_members, "find_members", c_form().find_members)
        assert outcome(body) == expected


@pytest.mark.parametrize("size", [LONG_BODY_BYTES, SMALL_BODY_BYTES])
@pytest.mark.parametrize("blank", [b"", b" "])
@pytest.mark.parametrize("is_c", [False, True])
def test_a_duplicate_member_of_a_long_body_is_refused_in_both_forms(
    size: int, blank: bytes, is_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_c:
        monkeypatch.setattr(json_members, "find_members", c_form().find_members)
    body = b'{"a":%b"%b","b":1,"a":2}' % (blank, b"x" * size)
    with pytest.raises(GatewayError, match="the member 'a' twice"):
        read_members(body)
