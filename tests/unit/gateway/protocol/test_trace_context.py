"""Tests that trace context is propagated as W3C specifies, and that invalid context is dropped."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.trace_context import MAX_STATE_CHARS, Trace, parse_parent, propagated_headers

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{ID}-{SPAN}-01"
CONTEXT = re.compile(r"(traceparent: [!-~]{1,128}\r\n(tracestate: [!-~][ \t!-~]{0,511}\r\n)?)?")


def test_a_clients_trace_context_is_parsed() -> None:
    parent = parse_parent({"traceparent": GOOD, "tracestate": "vendor=1,other=2"})
    assert parent is not None
    assert (parent.trace_id, parent.span_id, parent.state, parent.is_sampled) == (
        ID,
        SPAN,
        "vendor=1,other=2",
        True,
    )
    unsampled = parse_parent({"traceparent": f"00-{ID}-{SPAN}-00"})
    assert unsampled is not None
    assert not unsampled.is_sampled


def test_a_later_version_may_have_more_fields() -> None:
    parent = parse_parent({"traceparent": f"01-{ID}-{SPAN}-03-what-came-later"})
    assert parent is not None
    assert parent.is_sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"ff-{ID}-{SPAN}-01",
        f"00-{ID}-{SPAN}-01-more",
        f"00-{ID.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{ID}-{'0' * 16}-01",
        f"00-{ID[:-1]}-{SPAN}-01",
        f"00-{ID}-{SPAN}-1",
        f"00-{ID}-{SPAN}-01\r\nx-evil: 1",
        f"01-{ID}-{SPAN}-01-" + "a" * 100,
    ],
)
def test_an_invalid_context_is_ignored_and_not_propagated(text: str) -> None:
    headers = {"traceparent": text, "tracestate": "a=1"}
    assert parse_parent(headers) is None
    assert propagated_headers(headers) == ""


def test_a_context_is_propagated_unchanged_but_a_long_state_is_dropped() -> None:
    assert propagated_headers({}) == ""
    assert (
        propagated_headers({"traceparent": GOOD, "tracestate": "a=1"})
        == f"traceparent: {GOOD}\r\ntracestate: a=1\r\n"
    )
    assert (
        propagated_headers({"traceparent": GOOD, "tracestate": "a" * (MAX_STATE_CHARS + 1)})
        == f"traceparent: {GOOD}\r\n"
    )
    assert propagated_headers({"tracestate": "a=1"}) == ""


@pytest.mark.parametrize("wrong", ["a" * 500 + "\xe9", "a=1, " * 100 + "\x7f", "a " * 250, " a=1"])
def test_an_invalid_state_is_rejected_in_linear_time(wrong: str) -> None:
    # A pattern with nested repeats would try every way to divide the text.
    assert (
        propagated_headers({"traceparent": GOOD, "tracestate": wrong}) == f"traceparent: {GOOD}\r\n"
    )


@given(st.text(max_size=200), st.text(max_size=600))
def test_any_headers_yield_one_valid_context_or_none(parent: str, state: str) -> None:
    assert CONTEXT.fullmatch(propagated_headers({"traceparent": parent, "tracestate": state}))
    assert CONTEXT.fullmatch(propagated_headers({"traceparent": GOOD, "tracestate": state}))


def test_every_request_to_an_engine_has_its_own_span() -> None:
    trace = Trace(ID, SPAN, "", "a=1")
    lines = [trace.add_leg("prefill", "p", 1.0), trace.add_leg("decode", "d", 2.0)]
    spans = [leg.span_id for leg in trace.legs]
    assert lines == [f"traceparent: 00-{ID}-{span}-01\r\ntracestate: a=1\r\n" for span in spans]
    assert len({*spans, SPAN}) == 3
    assert all(parse_parent({"traceparent": line[13:68]}) is not None for line in lines)
