"""Refusals of requests for their heads. Not here: refusals of bodies (openai.py) and for want of room (gate.py)."""

from __future__ import annotations

from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from gateway.answer import Failure, GatewayError


def unparsed(problem: BaseException | None, most_uri_bytes: int) -> GatewayError:
    """The refusal of a head that aiohttp's parser could not read, for the reason that it gave."""
    failure, message = Failure.BAD_REQUEST, "The request is not valid HTTP/1.1."
    if isinstance(problem, LineTooLong):
        failure = Failure.URI_TOO_LONG if problem.args[1] == most_uri_bytes else Failure.HEADERS_TOO_LARGE
        message = "The request line or a header is too long."
    elif isinstance(problem, HttpProcessingError) and "too many" in str(problem.message).lower():
        failure, message = Failure.HEADERS_TOO_LARGE, "The request has too many headers."
    return GatewayError(failure, message)


def head_size(message: RawRequestMessage) -> int:
    return len(message.path) + sum(len(name) + len(value) + 4 for name, value in message.raw_headers)


def head_too_long(most_bytes: int) -> GatewayError:
    return GatewayError(Failure.HEADERS_TOO_LARGE, f"The request's head is longer than {most_bytes} bytes.")


def coding_not_known() -> GatewayError:
    return GatewayError(Failure.NOT_IMPLEMENTED, "The only transfer coding of a request's body is 'chunked'.")


def expectation_failed() -> GatewayError:
    return GatewayError(Failure.EXPECTATION_FAILED, "Only 'Expect: 100-continue' is understood.")
