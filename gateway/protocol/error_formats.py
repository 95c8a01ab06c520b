"""The formats in which APIs report errors: those of the gateway and those of engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from gateway.protocol.errors import (
    Failure,
    GatewayError,
    error_body,
    error_event,
    openai_error_body,
)

ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types of Anthropic's API by HTTP status. Other 4xx are `invalid_request_error`, other 5xx
`api_error`."""
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d{1,9})')


class ErrorFormat(msgspec.Struct, frozen=True, eq=False):
    """How one family of APIs, such as OpenAI's, reports errors.

    body         returns an error of the gateway as JSON, given the error and the id of the request
    event        returns the event that ends a broken stream, given the failure, its message and the
                 newest events
    from_engine  returns an engine's error as JSON, given its status and body
    id_header    name of the header in which clients of these APIs look for a request's id; it is
                 sent beside x-request-id. "" if they look for x-request-id only
    """

    body: Callable[[GatewayError, str], bytes]
    event: Callable[[Failure, str, bytes], bytes]
    from_engine: Callable[[int, bytes], bytes]
    id_header: str = ""

    def id_headers(self, request_id: str) -> list[tuple[str, str]]:
        """Return the response headers with the id of a request, for all responses of these APIs."""
        headers = [("x-request-id", request_id)]
        if self.id_header:
            headers.append((self.id_header, request_id))
        return headers


def _openai_body(error: GatewayError, _: str) -> bytes:
    return error_body(error)


def _openai_event(failure: Failure, message: str, _: bytes) -> bytes:
    return error_event(failure, message)


def _responses_event(failure: Failure, message: str, newest: bytes) -> bytes:
    # Return the `error` event of a Responses stream, numbered after the newest event.
    #
    # The event has the members that the API documents, and a member `error`, on which SDKs raise.
    row, numbers = failure.value, _SEQUENCE_NUMBER.findall(newest)
    error = {"message": message, "type": row.error_type, "param": None, "code": row.in_stream_code}
    event = {
        "type": "error",
        "code": row.in_stream_code,
        "message": message,
        "param": None,
        "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        "error": error,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)


def anthropic_error(error: GatewayError, request_id: str) -> bytes:
    """Return the body of an error response in Anthropic's format, as JSON."""
    return _anthropic(error.status, error.message, {"request_id": request_id})


def _anthropic_event(failure: Failure, message: str, _: bytes) -> bytes:
    return b"event: error\ndata: %b\n\n" % _anthropic(failure.value.status, message, {})


def _anthropic_from_engine(status: int, body: bytes) -> bytes:
    message = msgspec.json.decode(openai_error_body(status, body))["error"]["message"]
    return _anthropic(status, message, {})


def _anthropic(status: int, message: str, more: Mapping[str, str]) -> bytes:
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": "error", "error": {"type": kind, "message": message}, **more}
    return msgspec.json.encode(error)


OPENAI = ErrorFormat(_openai_body, _openai_event, openai_error_body)
RESPONSES = ErrorFormat(_openai_body, _responses_event, openai_error_body)
ANTHROPIC = ErrorFormat(anthropic_error, _anthropic_event, _anthropic_from_engine, "request-id")
