"""Property tests that the C version and the Python version of byte_scan.py have equal results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol import python_byte_scan as python_form
from gateway.protocol.response import http_response_parser, relay, usage_and_error_search
from gateway.protocol.response.usage_and_error_search import (
    EVENT_ENDS,
    FINISH_REASON,
    SPACED_FINISH_REASON,
    find_finish_reason,
    find_usage,
)
from tests.c_forms import compile_module, needs_compiler
from tests.property.gateway.protocol.response.relay_feed import (
    CUTS,
    HEAD,
    TEXTS,
    chunked,
    feed,
    whole_stream,
)

pytestmark = needs_compiler

_CHUNK = re.compile(rb"([1-9a-f][0-9a-f]{0,2})\r\n")
_SPECIAL = (b'"usage":', b'"error"', b"[DONE]")

# Texts that begin like what the scan looks for, and the text between them.
PIECES = st.sampled_from(
    [
        *(b'"usage":', b'"usage"', b'"error"', b"[DONE]", b"\ndata:", b"data:", b"[D", b'"e'),
        *(b"\n\n", b"\r\n\r\n", b"\r\n", b"\n", FINISH_REASON, SPACED_FINISH_REASON),
        *(
            b'"finish_reason":null',
            b"{",
            b"}",
            b'"',
            b"word ",
            b"a longer piece of text, ",
            b"\xff",
        ),
    ]
)
EVENTS = st.lists(PIECES, max_size=12).map(lambda pieces: b"data:" + b"".join(pieces) + b"\n\n")
MARKERS = st.sampled_from([FINISH_REASON, SPACED_FINISH_REASON])


def c_form() -> ModuleType:
    return compile_module("gateway/protocol/_byte_scan.c")


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def events_of(data: bytes, marker: bytes) -> int:
    # Return what count_events() must return for any number of chunks, found step by step.
    at, events = 0, 0
    while at < len(data):
        line = _CHUNK.match(data, at)
        if line is None:
            return 0
        end = line.end() + int(line[1], 16)
        payload = data[line.end() : end]
        if len(data) < end + 2 or data[end : end + 2] != b"\r\n":
            return 0
        if not payload.startswith(b"data:") or not payload.endswith(EVENT_ENDS):
            return 0
        if any(text in payload for text in (*_SPECIAL, marker)):
            return 0
        events += 1 + payload.count(b"\ndata:")
        at = end + 2
    return events


@contextmanager
def using(form: ModuleType) -> Iterator[None]:
    """Let all modules that parse responses use the given form of the search: in C or in Python."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("finish_reason", "usage_counts"):
            patch.setattr(usage_and_error_search, name, getattr(form, name))
        patch.setattr(usage_and_error_search, "IS_C_FORM", True)
        patch.setattr(usage_and_error_search, "has_error_name", form.has_error_name)
        for name in ("body_span", "whole_body"):
            patch.setattr(http_response_parser, name, getattr(form, name))
        patch.setattr(relay, "count_events", form.count_events)
        yield


@given(st.lists(EVENTS, max_size=4), MARKERS)
def test_events_of_whole_chunks_are_counted_unless_one_is_special(
    payloads: list[bytes], marker: bytes
) -> None:
    data = b"".join(map(chunk, payloads))
    assert c_form().count_events(data, marker) == events_of(data, marker)
    if len(payloads) == 1:
        assert python_form.count_events(data, marker) == events_of(data, marker)


@given(st.lists(EVENTS, min_size=1, max_size=3), MARKERS, st.data())
def test_bytes_that_are_no_whole_chunks_have_no_ordinary_events(
    payloads: list[bytes], marker: bytes, draw: st.DataObject
) -> None:
    data = bytearray(b"".join(map(chunk, payloads)))
    at = draw.draw(st.integers(0, len(data) - 1))
    if draw.draw(st.booleans()):
        data[at] = draw.draw(st.sampled_from(b"\r\n0af1Fg:d \xff"))
    else:
        del data[at:]
    text = bytes(data)
    assert c_form().count_events(text, marker) == events_of(text, marker)
    assert python_form.count_events(text, marker) in (0, events_of(text, marker))


@given(st.integers(1, 5000), MARKERS)
def test_chunks_of_up_to_4095_bytes_are_recognised(size: int, marker: bytes) -> None:
    payload = b"data:".ljust(size, b"x") + b"\n\n"
    data = chunk(payload)
    expected = 1 if len(payload) < 4096 else 0
    assert c_form().count_events(data, marker) == python_form.count_events(data, marker) == expected


@given(
    st.lists(PIECES, max_size=4).map(b"".join),
    st.sampled_from([b"0", b"7", b"10", b"007", b"123456789", b"1234567890", b"", b"-1", b"+1"]),
    st.lists(PIECES, max_size=4).map(b"".join),
    st.integers(0, 9),
    st.booleans(),
)
def test_the_span_of_a_body_is_found_alike(
    before: bytes, digits: bytes, after: bytes, offset: int, cut: bool
) -> None:
    data = b"x" * offset + before + digits + after + b"body"
    data = data[:-6] if cut else data
    offset = min(offset, len(data))
    expected = python_form.body_span(data, offset, before, after)
    assert c_form().body_span(data, offset, before, after) == expected
    if not cut and digits in (b"0", b"7", b"123456789") and not after[:1].isdigit():
        start = len(data) - 4
        assert expected == (start, start + int(digits))


HEAD_LINES = st.lists(
    st.sampled_from([b"Host: a\r\n", b"Content-Length: 7\r\n", b"X: 12\r\n"]), max_size=3
).map(b"".join)


@given(
    HEAD_LINES,
    HEAD_LINES,
    st.sampled_from([b"", b"a", b"seven b", b"\r\n\r\n", b"\r\n\r\n12345678"]),
    st.sampled_from([b"%d", b"0%d", b"%d0", b"+%d", b" %d", b"x%d"]),
    st.integers(-2, 2),
)
def test_a_whole_body_is_found_alike(
    first: bytes, last: bytes, body: bytes, digits: bytes, more: int
) -> None:
    before, after = b"POST / HTTP/1.1\r\n" + first + b"Content-Length: ", b"\r\n" + last + b"\r\n"
    announced = max(0, len(body) + more)
    data = before + digits % announced + after + body
    expected = body if announced == len(body) and digits == b"%d" else None
    assert python_form.whole_body(data, before, after) == expected
    assert c_form().whole_body(data, before, after) == expected
    span = python_form.body_span(data, 0, before, after)
    if expected is not None:
        assert span == (len(data) - len(body), len(data))
    else:
        assert span is None or span[1] != len(data)


def test_a_body_is_whole_only_below_its_own_head() -> None:
    before, after = b"POST / HTTP/1.1\r\nContent-Length: ", b"\r\nHost: a\r\n\r\n"
    data = before + b"4" + after + b"body"
    for form in (python_form, c_form()):
        assert form.whole_body(data, before, after) == b"body"
        assert form.whole_body(data, b"X" + before, after) is None
        assert form.whole_body(data, before, b"X" + after) is None
        for cut in range(len(data)):
            assert form.whole_body(data[:cut], before, after) is None
        assert form.whole_body(data + b"P", before, after) is None


MEMBER_PIECES = st.sampled_from(
    [*(b'"messages":', b'"messages"', b'"m', b'"', b'{"model":"m",', b"[1]", b",", b"}", b"\xff")]
)


@given(
    st.lists(MEMBER_PIECES, max_size=8).map(b"".join),
    st.integers(0, 40),
    st.integers(0, 60),
    st.integers(0, 60),
)
@example(b'{"messages":', 0, 12, 12)
@example(b'{"messages":', 0, 11, 12)
@example(b'{"messages":[1],"a":2}', 3, 60, 19)
@example(b'{"messages":[1],"a":2}', 3, 60, 18)
@example(b'{"messages":[1],"a":2}', 40, 60, 60)
def test_the_bytes_around_a_value_are_found_alike(
    text: bytes, length: int, most_before: int, most: int
) -> None:
    expected = python_form.around_value(text, b'"messages":', length, most_before, most)
    assert c_form().around_value(text, b'"messages":', length, most_before, most) == expected
    at = text.find(b'"messages":')
    if expected is None:
        assert at < 0 or at + 11 > most_before or len(text) - length > most
    else:
        assert expected == (text[: at + 12], text[at + 11 + length :])


@given(st.lists(PIECES, max_size=8).map(b"".join), st.integers(0, 60), st.integers(0, 60))
@example(b'{"error"', 0, 8)
@example(b'{"error"', 0, 7)
@example(b'{"error"', 1, 7)
@example(b'{"error"', 2, 7)
def test_the_name_of_an_error_is_found_alike(text: bytes, start: int, length: int) -> None:
    expected = b'"error"' in text[start : start + length]
    assert python_form.has_error_name(text, start, length) is expected
    assert c_form().has_error_name(text, start, length) is expected


def test_a_negative_number_is_an_error_for_the_searches_in_c() -> None:
    for numbers in ((-1, 1, 1), (1, -1, 1)):
        with pytest.raises(ValueError, match="negative"):
            c_form().around_value(b"abc", b"ab", *numbers)
    for offset, length in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match="negative"):
            c_form().has_error_name(b"abc", offset, length)
    with pytest.raises(TypeError):
        c_form().has_error_name(b"abc", "1", 1)
    with pytest.raises(TypeError):
        c_form().around_value(b"abc", b"ab", 1, 1, "1")


def test_an_offset_outside_the_text_is_an_error() -> None:
    for offset in (-1, 4):
        with pytest.raises(ValueError, match="outside"):
            c_form().body_span(b"abc", offset, b"", b"")
    with pytest.raises(TypeError):
        c_form().body_span(bytearray(b"abc"), 0, b"", b"")
    with pytest.raises(TypeError):
        c_form().count_events(b"abc")


NAMES = st.sampled_from(
    ["prompt_tokens", "completion_tokens", "cached_tokens", "total_tokens", "prompt_tokens_details"]
)
VALUES = st.sampled_from(
    [
        *("0", "7", "12", "null", "007", "-1", "1.5", "1e3", '"7"', "true", "{}", " 7", ""),
        *('{"cached_tokens":5}', "999999999999999", "1000000000000000"),
    ]
)


@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=5),
    st.sampled_from([("", ":", ","), (" ", ":", ","), ("", ": ", ", "), (" ", ": ", ", ")]),
    st.sampled_from(['{"choices":[],', '{"usage":{"prompt_tokens":3},', ""]),
    st.sampled_from(["}}", "}", ',"prompt_tokens":4}}', "", "}}\n\ndata: [DONE]\n\n"]),
)
@example([("prompt_tokens", "5"), ("prompt_tokens", "6")], ("", ":", ","), "", "}")
@example([("prompt_tokens", "5"), ("prompt_tokens", "6")], (" ", ": ", ", "), "", "}")
def test_token_counts_are_read_alike(
    members: list[tuple[str, str]], blanks: tuple[str, str, str], before: str, end: str
) -> None:
    first, colon, comma = blanks
    counts = comma.join(f'"{name}"{colon}{value}' for name, value in members)
    text = f'{before}"usage":{first}{{{counts}{end}'.encode()
    with using(python_form):
        expected = find_usage(text)
    with using(c_form()):
        assert find_usage(text) == expected


def test_usual_token_counts_are_read_in_c() -> None:
    text = b'{"usage":{"prompt_tokens":17,"total_tokens":19,"completion_tokens": 2,"x":null}}'
    assert c_form().usage_counts(text) == (17, 2, None)


@given(
    st.lists(
        st.sampled_from(
            [
                *(b'"finish_reason":', b'"finish_reason": ', b"null", b'"', b"stop", b"length"),
                *(b"tool_calls", b"other", b"abort", b"stopped", b",", b"}", b"content_filter"),
            ]
        ),
        max_size=12,
    ).map(b"".join)
)
@example(b'"finish_reason":"stop')
@example(b'"finish_reason":"stop"')
def test_finish_reasons_are_found_alike(text: bytes) -> None:
    with using(python_form):
        expected = find_finish_reason(text)
    with using(c_form()):
        assert find_finish_reason(text) == expected
    assert c_form().finish_reason(text) in (None, expected)


@given(TEXTS, st.lists(st.integers(1, 200), max_size=30), CUTS)
def test_streams_are_relayed_alike(texts: list[str], sizes: list[int], cuts: list[int]) -> None:
    events = [event + "\n\n" for event in whole_stream(texts).split("\n\n")[:-1]]
    by_event = [len(event.encode()) for event in events]
    for wire in (
        HEAD + chunked("".join(events).encode(), sizes),
        HEAD + chunked("".join(events).encode(), by_event),
    ):
        with using(python_form):
            expected = feed(wire, cuts)
        with using(c_form()):
            assert feed(wire, cuts) == expected
