"""W3C trace context: what a client's headers say of its trace, and what the engines' requests say of ours.

Lives here: the two headers, and the record of one traced request. Not here: what becomes of it (observe/).
Source: W3C Trace Context level 2. Headers that are malformed or too long count as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from secrets import token_hex

import msgspec

PARENT, STATE = "traceparent", "tracestate"
MOST_PARENT, MOST_STATE = 128, 512  # characters; W3C asks for 512 of tracestate at least
SAMPLED = 1

new_id = partial(token_hex, 8)
"""Of a span."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_STATE = re.compile(
    r"[!-~](?:[!-~ \t]*[!-~])?"
)  # one loop: two, one in the other, take for ever to say no


class Parent(msgspec.Struct, frozen=True):
    """The span that a client's request belongs to. Ids are lower-case hexadecimal, as on the wire."""

    trace_id: str
    span_id: str
    flags: int
    state: str

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


class TraceLeg(msgspec.Struct, frozen=True):
    """A request to an engine: role (whole, prefill, decode), whom, its span's id, monotonic seconds when it left."""

    role: str
    endpoint: str
    span_id: str
    began: float


class Trace(msgspec.Struct, eq=False):
    """A request that is traced. `parent_id` is "" when its trace begins here."""

    trace_id: str
    span_id: str
    parent_id: str
    state: str
    legs: list[TraceLeg] = []

    def leg(self, role: str, endpoint: str, now: float) -> str:
        """Another request to an engine: the header lines that make its spans children of ours."""
        span_id = new_id()
        self.legs.append(TraceLeg(role, endpoint, span_id, now))
        state = f"{STATE}: {self.state}\r\n" if self.state else ""
        return f"{PARENT}: 00-{self.trace_id}-{span_id}-01\r\n{state}"


def parent_of(headers: Mapping[str, str]) -> Parent | None:
    """What the client says its request belongs to; None when it says nothing that counts."""
    text = headers.get(PARENT)
    if text is None or len(text) > MOST_PARENT:
        return None
    found = _PARENT.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    if not found[2].strip("0") or not found[3].strip("0"):
        return None
    state = headers.get(STATE, "")
    kept = state if len(state) <= MOST_STATE and _STATE.fullmatch(state) else ""
    return Parent(found[2], found[3], int(found[4], 16), kept)


def passed_on(headers: Mapping[str, str]) -> str:
    """The client's own context as header lines, for a request that is not traced here: it goes through untouched."""
    if PARENT not in headers:  # nearly always
        return ""
    parent = parent_of(headers)
    if parent is None:
        return ""
    state = f"{STATE}: {parent.state}\r\n" if parent.state else ""
    return f"{PARENT}: {headers[PARENT]}\r\n{state}"
