"""Builds the headers of requests to engines, and selects the client's headers to pass on."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from gateway.protocol.message_bytes import request_head
from gateway.protocol.request.forwarded_headers import all_values
from gateway.protocol.request.service_level_headers import HeaderFields
from gateway.protocol.request.sessions import SESSION_HEADER
from gateway.protocol.trace_context import propagated_headers
from gateway.request_record import Exchange

PASSED_HEADERS = (SESSION_HEADER, "anthropic-version", "anthropic-beta")
"""The client's request headers that are passed on to engines: those that name the conversation or
the API dialect."""


def engine_request_head(
    start: bytes, exchange: Exchange, headers: Mapping[str, str], length: int, endpoint: str
) -> bytes:
    """Return the head of a request to an engine.

    start    what ConnectionPool.request_head() returned
    headers  the client's headers
    length   length of the body in bytes
    """
    if exchange.trace is not None:
        passed = client_lines(headers) + exchange.trace.add_leg("whole", endpoint, monotonic())
    elif type(headers) is not HeaderFields:
        passed = client_lines(headers) + propagated_headers(headers)
    else:  # one object for most requests of a connection, which caches the lines
        lines = headers.forwarded_lines
        if lines is None:
            lines = headers.forwarded_lines = client_lines(headers) + propagated_headers(headers)
        passed = lines
    return request_head(start, exchange.id, length, passed)


def client_lines(headers: Mapping[str, str]) -> str:
    """Return the client's header lines that are passed on to engines (PASSED_HEADERS).

    gateway/protocol/trace_context.py adds the trace context.
    """
    return "".join(
        f"{name}: {value}\r\n" for name in PASSED_HEADERS if (value := all_values(headers, name))
    )
