"""Finds out why a probe of an endpoint failed, such as that its host name is unknown. No I/O."""

from __future__ import annotations

import errno
import logging
import socket
import traceback

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.http.connect_errors import is_local_error, is_process_error
from gateway.http.engine_poll_client import ConnectError, ConnectionLostError
from gateway.protocol.response.http_response_parser import FramingError

log = logging.getLogger("penstock")

PROBE_ERRORS = (TimeoutError, OSError, ConnectError, ConnectionLostError, FramingError)
"""What a request of a health check raises if its engine cannot be reached or does not answer."""
CONNECTION_LOST = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


class NotSentError(Exception):
    """Raised if a health check or test request was not sent because of this machine or its DNS.

    The engine may be healthy.
    """


def record_resolution(live: LiveEndpoint, error: BaseException) -> None:
    """Record whether the host name could not be resolved for a probe; log the first failure."""
    cause = error.os_error if isinstance(error, ConnectError) else None
    is_unresolved = isinstance(cause, socket.gaierror)
    if is_unresolved and not live.is_unresolved:
        log.warning(
            "the host name of endpoint %s cannot be resolved (%s): %s",
            live.endpoint.name,
            live.endpoint.url,
            cause,
        )
    live.is_unresolved = is_unresolved


def is_unreachable(error: BaseException) -> bool:
    """Return whether the error shows that nothing listens at the endpoint."""
    if isinstance(error, ConnectError):
        return not is_local_error(error.os_error)
    return isinstance(error, ConnectionLostError) or (
        isinstance(error, OSError) and error.errno in CONNECTION_LOST
    )


def is_own_failure(error: BaseException) -> bool:
    """Return whether this process lacks descriptors, memory or local ports for a connection."""
    return isinstance(error, ConnectError) and is_process_error(error.os_error)


def is_not_sent(error: BaseException) -> bool:
    """Return whether the request was not sent because of this machine or its resolver."""
    return isinstance(error, ConnectError) and is_local_error(error.os_error)


def clear_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and its causes, because their frames form reference cycles.

    A dead engine is probed every second, and only the garbage collector would free the cycles.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
