"""W3C trace context: reads the headers traceparent and tracestate, and records a request's spans.

Source: W3C Trace Context level 2. Headers that are malformed or too long are ignored. telemetry/
exports the traces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from secrets import token_hex

import msgspec

PARENT_HEADER, STATE_HEADER = "traceparent", "tracestate"
MAX_PARENT_CHARS, MAX_STATE_CHARS = 128, 512  # characters; W3C requires at least 512 of tracestate
SAMPLED_FLAG = 1

new_span_id = partial(token_hex, 8)
"""A function that returns a new span id."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_STATE = re.compile(r"[!-~](?:[!-~ \t]*[!-~])?")  # a nested repeat would take exponential time


class ParentSpan(msgspec.Struct, frozen=True):
    """The client's trace span, to which its request belongs. Its ids are lower-case hexadecimal.

    flags  the flags of the header traceparent; the lowest bit is set if the trace is sampled
    state  the header tracestate; "" without one
    """

    trace_id: str
    span_id: str
    flags: int
    state: str

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED_FLAG)


class LegSpan(msgspec.Struct, frozen=True):
    """The trace span of one request to an engine.

    role        whole (the engine does prefill and decode), prefill, or decode
    endpoint    name of the endpoint
    started_at  monotonic time of its start
    """

    role: str
    endpoint: str
    span_id: str
    started_at: float


class Trace(msgspec.Struct, eq=False):
    """A traced request, with the spans of its requests to engines.

    span_id    id of the gateway's own span
    parent_id  id of the client's span; "" if the trace begins at this gateway
    state      the header tracestate, which is passed on; "" without one
    legs       the spans of the requests to engines, in the order in which they began
    """

    trace_id: str
    span_id: str
    parent_id: str
    state: str
    legs: list[LegSpan] = []

    def add_leg(self, role: str, endpoint: str, now: float) -> str:
        """Record the start of a request to an engine, and return its trace header lines.

        With these lines, the engine's spans become children of the recorded one. `role` and
        `endpoint` are as in LegSpan; `now` is in monotonic seconds.
        """
        span_id = new_span_id()
        self.legs.append(LegSpan(role, endpoint, span_id, now))
        state = f"{STATE_HEADER}: {self.state}\r\n" if self.state else ""
        return f"{PARENT_HEADER}: 00-{self.trace_id}-{span_id}-01\r\n{state}"


def parse_parent(headers: Mapping[str, str]) -> ParentSpan | None:
    """Return the parent span that the client's headers name, or None if missing or invalid."""
    text = headers.get(PARENT_HEADER)
    if text is None or len(text) > MAX_PARENT_CHARS:
        return None
    match = _PARENT.fullmatch(text)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    if not match[2].strip("0") or not match[3].strip("0"):
        return None
    state = headers.get(STATE_HEADER, "")
    if len(state) > MAX_STATE_CHARS or not _STATE.fullmatch(state):
        state = ""
    return ParentSpan(match[2], match[3], int(match[4], 16), state)


def propagated_headers(headers: Mapping[str, str]) -> str:
    """Return the client's trace context as header lines, for a request that is not traced here.

    The result is "" if the client sent no valid trace context.
    """
    if PARENT_HEADER not in headers:  # the usual case
        return ""
    parent = parse_parent(headers)
    if parent is None:
        return ""
    state = f"{STATE_HEADER}: {parent.state}\r\n" if parent.state else ""
    return f"{PARENT_HEADER}: {headers[PARENT_HEADER]}\r\n{state}"
