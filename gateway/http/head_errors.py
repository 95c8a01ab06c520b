"""Errors for requests that are refused because of their head (request line and headers).

Errors about bodies are in protocol/request/json_members.py; errors for lack of capacity are in
admission/pool_queue.py.
"""

from __future__ import annotations

from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from gateway.protocol.errors import Failure, GatewayError


def invalid_head(problem: BaseException | None, max_uri: int) -> GatewayError:
    """Return the HTTP error for a request head that aiohttp's parser has rejected.

    problem  the parser's exception; None if the HTTP version is not supported
    max_uri  the parser's limit on the request line, in bytes
    """
    failure, message = Failure.BAD_REQUEST, "The request is not valid HTTP/1.1."
    if isinstance(problem, LineTooLong):
        is_uri = problem.args[1] == max_uri
        failure = Failure.URI_TOO_LONG if is_uri else Failure.HEADERS_TOO_LARGE
        message = "The request line or a header is too long."
    elif isinstance(problem, HttpProcessingError) and "too many" in str(problem.message).lower():
        failure, message = Failure.HEADERS_TOO_LARGE, "The request has too many headers."
    return GatewayError(failure, message)


def head_size(message: RawRequestMessage) -> int:
    """Return the size of a request head in bytes, without the method and the HTTP version."""
    return len(message.path) + sum(
        len(name) + len(value) + 4 for name, value in message.raw_headers
    )


def head_too_long(max_head: int) -> GatewayError:
    return GatewayError(
        Failure.HEADERS_TOO_LARGE, f"The request's head is longer than {max_head} bytes."
    )


def unknown_coding() -> GatewayError:
    return GatewayError(
        Failure.NOT_IMPLEMENTED, "The only supported transfer coding of a request is 'chunked'."
    )


def expectation_failed() -> GatewayError:
    return GatewayError(Failure.EXPECTATION_FAILED, "Only 'Expect: 100-continue' is supported.")
