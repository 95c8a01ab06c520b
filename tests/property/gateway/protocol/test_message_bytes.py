"""Property tests that the C version and the Python version of message_bytes.py have equal results."""

from __future__ import annotations

import json
from array import array
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol import python_message_bytes as python_form
from tests.c_forms import compile_module, needs_compiler

pytestmark = needs_compiler


# Header values may have any byte: those that are not UTF-8 are surrogates.
TEXTS = st.binary(max_size=20).map(lambda value: value.decode("utf-8", "surrogateescape"))


def c_form() -> ModuleType:
    return compile_module("gateway/protocol/_message_bytes.c")


@given(st.binary(max_size=40), TEXTS, st.integers(0, 2**62), TEXTS)
@example(b"", "", 0, "")
@example(b"POST / HTTP/1.1\r\n", "req_1", 9223372036854775807, "x: \udcff\r\n")
def test_the_head_of_a_request_is_the_same_in_c(
    start: bytes, request_id: str, length: int, lines: str
) -> None:
    head = c_form().request_head(start, request_id, length, lines)
    assert head == python_form.request_head(start, request_id, length, lines)
    first = start + b"x-request-id: " + request_id.encode("utf-8", "surrogateescape")
    last = lines.encode("utf-8", "surrogateescape") + b"\r\n"
    assert head == first + b"\r\ncontent-length: " + str(length).encode() + b"\r\n" + last


@given(TEXTS, TEXTS, TEXTS)
@example("date: now\r\n", "req_1", "endpoint-ü")
def test_the_lines_of_a_response_are_the_same_in_c(
    first: str, request_id: str, endpoint: str
) -> None:
    lines = c_form().response_lines(first, request_id, endpoint)
    assert lines == python_form.response_lines(first, request_id, endpoint)
    assert lines.startswith(first.encode("utf-8", "surrogateescape") + b"x-request-id: ")


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=200))
def test_a_whole_response_is_the_same_in_c(start: bytes, lines: bytes, payload: bytes) -> None:
    response = c_form().whole_response(start, lines, payload)
    assert response == python_form.whole_response(start, lines, payload)
    length = str(len(payload)).encode()
    assert response == start + lines + b"content-length: " + length + b"\r\n\r\n" + payload


@given(st.lists(st.integers(0, 2**64 - 1)))
@example([0, 2**64 - 1])
def test_a_list_of_numbers_is_the_same_in_c(numbers: list[int]) -> None:
    text = c_form().json_numbers(array("Q", numbers))
    assert text == python_form.json_numbers(array("Q", numbers))
    assert json.loads(text) == numbers


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("request_head", (b"", "id", 1)),
        ("request_head", ("", "id", 1, "")),
        ("request_head", (b"", b"id", 1, "")),
        ("request_head", (b"", "\udcff", 1, b"")),
        ("request_head", (b"", "id", "1", "")),
        ("response_lines", ("", "id")),
        ("response_lines", (b"", "id", "endpoint")),
        ("response_lines", ("\udcff", b"id", "endpoint")),
        ("response_lines", ("\udcff", "\udcff", b"endpoint")),
        ("whole_response", (b"", b"")),
        ("whole_response", ("", b"", b"")),
        ("whole_response", (b"", "", b"")),
        ("whole_response", (b"", b"", bytearray())),
        ("json_numbers", ("1",)),
    ],
)
def test_arguments_of_another_type_are_an_error(name: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        getattr(c_form(), name)(*arguments)


def test_a_negative_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        c_form().request_head(b"", "id", -1, "")


def test_a_text_that_no_header_can_have_is_an_error() -> None:
    for form in (python_form, c_form()):
        with pytest.raises(UnicodeEncodeError):
            form.request_head(b"", "id", 1, "\ud800")
        with pytest.raises(UnicodeEncodeError):
            form.response_lines("\ud800", "id", "endpoint")
