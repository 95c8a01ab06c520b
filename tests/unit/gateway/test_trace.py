"""Trace context goes through as W3C wants it, and nothing that is not one goes through at all."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.trace import MOST_STATE, Trace, parent_of, passed_on

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{ID}-{SPAN}-01"
CONTEXT = re.compile(r"(traceparent: [!-~]{1,128}\r\n(tracestate: [!-~][ \t!-~]{0,511}\r\n)?)?")


def test_what_a_client_says_of_its_trace_is_read() -> None:
    parent = parent_of({"traceparent": GOOD, "tracestate": "vendor=1,other=2"})
    assert parent is not None
    assert (parent.trace_id, parent.span_id, parent.state, parent.sampled) == (
        ID,
        SPAN,
        "vendor=1,other=2",
        True,
    )
    unsampled = parent_of({"traceparent": f"00-{ID}-{SPAN}-00"})
    assert unsampled is not None
    assert not unsampled.sampled


def test_a_later_version_may_say_more() -> None:
    parent = parent_of({"traceparent": f"01-{ID}-{SPAN}-03-what-came-later"})
    assert parent is not None
    assert parent.sampled


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
def test_what_is_no_context_counts_as_absent_and_goes_nowhere(text: str) -> None:
    headers = {"traceparent": text, "tracestate": "a=1"}
    assert parent_of(headers) is None
    assert passed_on(headers) == ""


def test_a_context_goes_through_untouched_and_a_state_that_is_too_long_does_not() -> None:
    assert passed_on({}) == ""
    assert (
        passed_on({"traceparent": GOOD, "tracestate": "a=1"})
        == f"traceparent: {GOOD}\r\ntracestate: a=1\r\n"
    )
    assert (
        passed_on({"traceparent": GOOD, "tracestate": "a" * (MOST_STATE + 1)})
        == f"traceparent: {GOOD}\r\n"
    )
    assert passed_on({"tracestate": "a=1"}) == ""


@pytest.mark.parametrize("wrong", ["a" * 500 + "\xe9", "a=1, " * 100 + "\x7f", "a " * 250, " a=1"])
def test_a_state_that_is_none_is_known_as_such_at_once(wrong: str) -> None:
    """However often it could be divided into parts: a pattern that tries all of them would not end."""
    assert passed_on({"traceparent": GOOD, "tracestate": wrong}) == f"traceparent: {GOOD}\r\n"


@given(st.text(max_size=200), st.text(max_size=600))
def test_whatever_a_client_sends_an_engine_sees_one_context_or_none(
    parent: str, state: str
) -> None:
    assert CONTEXT.fullmatch(passed_on({"traceparent": parent, "tracestate": state}))
    assert CONTEXT.fullmatch(passed_on({"traceparent": GOOD, "tracestate": state}))


def test_every_leg_has_a_span_of_its_own() -> None:
    trace = Trace(ID, SPAN, "", "a=1")
    lines = [trace.leg("prefill", "p", 1.0), trace.leg("decode", "d", 2.0)]
    spans = [leg.span_id for leg in trace.legs]
    assert lines == [f"traceparent: 00-{ID}-{span}-01\r\ntracestate: a=1\r\n" for span in spans]
    assert len({*spans, SPAN}) == 3
    assert all(parent_of({"traceparent": line[13:68]}) is not None for line in lines)
