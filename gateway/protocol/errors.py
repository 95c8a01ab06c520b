"""The errors that the gateway sends: HTTP status, OpenAI error type and code, and retry advice.

Each kind of error is a row of one table, the enum Failure. openai_error_body() converts the 4xx
errors of engines to OpenAI's format.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from enum import Enum
from math import ceil, isfinite
from types import MappingProxyType

import msgspec

MAX_PLAIN_ERROR = 2048  # characters of an error in plain text that are kept

# The longest Retry-After that SDKs obey is one to two minutes; some retry a longer one immediately.
MAX_RETRY_AFTER_S = 60.0


class ErrorRow(msgspec.Struct, frozen=True):
    """The HTTP status and the OpenAI error type and code of one kind of error.

    should_retry    value of the x-should-retry header, which OpenAI's SDKs obey; None omits the
                    header
    in_stream_code  the error code that is used after the response has begun
    """

    status: int
    error_type: str
    code: str | None
    should_retry: bool | None = False
    in_stream_code: str = "stream_interrupted"


class Failure(Enum):
    """The kinds of failure of a request; the value of each is the error that the client gets."""

    BAD_REQUEST = ErrorRow(400, "invalid_request_error", None)
    CONTEXT_TOO_LONG = ErrorRow(400, "invalid_request_error", "context_length_exceeded")
    BAD_KEY = ErrorRow(401, "authentication_error", "invalid_api_key")
    NOT_FOUND = ErrorRow(404, "invalid_request_error", "unknown_url")
    MODEL_NOT_FOUND = ErrorRow(404, "invalid_request_error", "model_not_found")
    RESPONSE_NOT_FOUND = ErrorRow(404, "invalid_request_error", "response_not_found")
    FILE_NOT_FOUND = ErrorRow(404, "invalid_request_error", "file_not_found")
    BATCH_NOT_FOUND = ErrorRow(404, "invalid_request_error", "batch_not_found")
    METHOD_NOT_ALLOWED = ErrorRow(405, "invalid_request_error", "method_not_allowed")
    REQUEST_TIMEOUT = ErrorRow(408, "invalid_request_error", "request_timeout")
    BATCH_CONFLICT = ErrorRow(409, "invalid_request_error", "batch_conflict")
    STORAGE_FULL = ErrorRow(413, "invalid_request_error", "storage_quota_exceeded")
    TOO_LARGE = ErrorRow(413, "invalid_request_error", "request_too_large")
    URI_TOO_LONG = ErrorRow(414, "invalid_request_error", "uri_too_long")
    UNSUPPORTED_MEDIA = ErrorRow(415, "invalid_request_error", "unsupported_media_type")
    EXPECTATION_FAILED = ErrorRow(417, "invalid_request_error", "expectation_failed")
    HEADERS_TOO_LARGE = ErrorRow(431, "invalid_request_error", "headers_too_large")
    TENANT_RATE_LIMITED = ErrorRow(
        429, "rate_limit_error", "tenant_rate_limited", should_retry=None
    )
    TENANT_CONCURRENCY_LIMITED = ErrorRow(
        429, "rate_limit_error", "tenant_concurrency_limited", should_retry=None
    )
    OVERLOADED = ErrorRow(429, "overloaded_error", "overloaded", should_retry=None)
    SHED = ErrorRow(429, "overloaded_error", "slo_shed", should_retry=None)
    DEADLINE_UNREACHABLE = ErrorRow(429, "overloaded_error", "deadline_unreachable")
    QUEUE_TIMEOUT = ErrorRow(429, "overloaded_error", "queue_timeout", should_retry=None)
    INTERNAL = ErrorRow(500, "server_error", "internal_error")
    NOT_IMPLEMENTED = ErrorRow(501, "invalid_request_error", "not_implemented")
    UPSTREAM_FAILED = ErrorRow(502, "upstream_error", "upstream_failed", should_retry=None)
    NO_CAPACITY = ErrorRow(503, "service_unavailable_error", "no_capacity", should_retry=True)
    STORAGE_UNREACHABLE = ErrorRow(
        503, "service_unavailable_error", "storage_unreachable", should_retry=True
    )
    SHUTTING_DOWN = ErrorRow(
        503,
        "service_unavailable_error",
        "shutting_down",
        should_retry=True,
        in_stream_code="shutting_down",
    )
    UPSTREAM_TIMEOUT = ErrorRow(504, "upstream_error", "upstream_timeout", should_retry=None)


class GatewayError(Exception):
    """An exception that becomes the error response to the client.

    retry_after_s  seconds after which the client should try again; None if unknown
    reason         short label in logs and metrics
    may_return     False if a retry of this request cannot help, even if it helps for others
    """

    def __init__(
        self,
        failure: Failure,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        may_return: bool = True,
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.param = param
        self.retry_after_s = (
            retry_after_s if retry_after_s is not None and isfinite(retry_after_s) else None
        )
        self.headers = headers
        self.may_return = may_return
        self.reason = reason or failure.name.lower()

    @property
    def status(self) -> int:
        return self.failure.value.status


def error_body(error: GatewayError) -> bytes:
    """Return the body of an error response: an OpenAI error object as JSON."""
    row = error.failure.value
    return _encode(error.message, row.error_type, error.param, row.code)


def error_event(failure: Failure, message: str) -> bytes:
    """Return an error as a server-sent event that makes SDKs raise an exception.

    The event [DONE] must not follow it.
    """
    return (
        b"data: "
        + _encode(message, failure.value.error_type, None, failure.value.in_stream_code)
        + b"\n\n"
    )


def response_not_found(response_id: str) -> GatewayError:
    """Return the error (404) for a stored response that is unknown, lost, or of another tenant."""
    message = f"Response with id '{response_id[:64]}' not found."
    return GatewayError(Failure.RESPONSE_NOT_FOUND, message)


def shutting_down() -> GatewayError:
    """Return the error for requests that are cut off because the gateway is shutting down.

    They still run when the time that a shutdown leaves for running requests is over.
    """
    message = "The gateway stopped before it could respond. Try again."
    return GatewayError(Failure.SHUTTING_DOWN, message)


def retry_headers(error: GatewayError) -> list[tuple[str, str]]:
    """Return headers that tell the client whether and when to retry.

    Without them, SDKs retry most errors twice.
    """
    headers: list[tuple[str, str]] = []
    retry, after_s = error.failure.value.should_retry, error.retry_after_s
    if not error.may_return or (after_s is not None and after_s > MAX_RETRY_AFTER_S):
        retry = False
    if retry is not None:
        headers.append(("x-should-retry", "true" if retry else "false"))
    if after_s is not None:
        headers.append(("retry-after-ms", str(max(1, round(after_s * 1000)))))
        headers.append(("retry-after", str(max(1, ceil(after_s)))))
    return [*headers, *error.headers]


PHRASES: Mapping[int, str] = MappingProxyType(
    {
        200: "OK",
        400: "Bad Request",
        401: "Unauthorized",
        402: "Payment Required",
        403: "Forbidden",
        404: "Not Found",
        405: "Method Not Allowed",
        406: "Not Acceptable",
        407: "Proxy Authentication Required",
        408: "Request Timeout",
        409: "Conflict",
        410: "Gone",
        411: "Length Required",
        412: "Precondition Failed",
        413: "Request Entity Too Large",
        414: "Request-URI Too Long",
        415: "Unsupported Media Type",
        416: "Requested Range Not Satisfiable",
        417: "Expectation Failed",
        418: "I'm a Teapot",
        421: "Misdirected Request",
        422: "Unprocessable Entity",
        423: "Locked",
        424: "Failed Dependency",
        425: "Too Early",
        426: "Upgrade Required",
        428: "Precondition Required",
        429: "Too Many Requests",
        431: "Request Header Fields Too Large",
        451: "Unavailable For Legal Reasons",
        500: "Internal Server Error",
        501: "Not Implemented",
        502: "Bad Gateway",
        503: "Service Unavailable",
        504: "Gateway Timeout",
        505: "HTTP Version Not Supported",
        507: "Insufficient Storage",
        508: "Loop Detected",
        511: "Network Authentication Required",
    }
)
"""Reason phrases by HTTP status (RFC 9110)."""


def new_request_id() -> str:
    """Return a new request id, for error responses to requests that have no id yet."""
    return f"req_{secrets.token_hex(16)}"


def reason_phrase(status: int) -> str:
    """Return the reason phrase of an HTTP status, or "Error" if the status is not registered."""
    return PHRASES.get(status, "Error")


def openai_error_body(status: int, body: bytes) -> bytes:
    """Convert the error body of an engine to OpenAI's format. The message is kept.

    Engines send an object `error`, the members of that object without the name `error`, or a
    string. Web frameworks in front of them may send plain text.
    An integer `code` is dropped, because OpenAI's error codes are strings.
    """
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        decoded = _plain_text(body)
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        error = {}
    message = error.get("message") or error.get("detail") or reason_phrase(status)
    return _encode(
        message if isinstance(message, str) else msgspec.json.encode(message).decode(),
        _openai_type(status),
        _str_or_none(error.get("param")),
        _openai_code(error, status),
    )


def _plain_text(body: bytes) -> str | None:
    # Return the text of an error body that is not JSON; None for a web page or anything unreadable.
    try:
        text = body.decode().strip()
    except UnicodeDecodeError:
        return None
    is_text = text[:1] not in ("<", "{", "[") and "".join(text.split()).isprintable()
    return text[:MAX_PLAIN_ERROR] if is_text and text else None


def _encode(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def _str_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _openai_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _openai_code(error: dict[str, object], status: int) -> str | None:
    code = error.get("code")
    if isinstance(code, str):
        return code
    if status == 404 and error.get("param") == "model":
        return "model_not_found"
    if status == 400 and "context length" in str(error.get("message", "")):
        return "context_length_exceeded"
    return None
