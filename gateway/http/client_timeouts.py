"""The timeouts of a client connection in each phase: idle, receiving, serving, closing.

The functions are pure. Their arguments are durations in seconds and the configured limits.
"""

from __future__ import annotations

from enum import Enum, auto

from gateway.config import Limits

LINGER_S = 1.0  # how long a refused upload may keep arriving before the connection is aborted
BODY_GRACE_S = 1.0  # the minimum rate of a body does not apply to its first second


class Phase(Enum):
    """What a client connection is waiting for. Each phase has its own timeout."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    SERVING = auto()
    CLOSING = auto()


# Module-level names, because looking up an Enum member on its class is ten times slower.
IDLE, HEAD, BODY, SERVING, CLOSING = Phase


class Expiry(Enum):
    """The ways to end a client connection whose timeout has passed."""

    ABORT = auto()
    CLOSE = auto()
    HEAD_TIMEOUT = auto()
    BODY_TIMEOUT = auto()


def reader_expiry(paused_s: float, limits: Limits) -> Expiry | None:
    """Return ABORT if the client has not read its response for too long, else None.

    The limit is `limits.slow_reader` seconds.
    """
    return Expiry.ABORT if paused_s > limits.slow_reader else None


def idle_expiry(age_s: float, limits: Limits, *, has_sent_nothing: bool) -> Expiry | None:
    """Return CLOSE if the client has not begun to send its next request in time, else None.

    The limit is `headers_timeout` for the first request on a connection, and `idle_timeout` for
    later ones.
    """
    is_late = has_sent_nothing and age_s > limits.headers_timeout
    return Expiry.CLOSE if is_late or age_s > limits.idle_timeout else None


def head_expiry(age_s: float, limits: Limits) -> Expiry | None:
    """Return HEAD_TIMEOUT if a request head is incomplete after `headers_timeout`, else None."""
    return Expiry.HEAD_TIMEOUT if age_s > limits.headers_timeout else None


def body_expiry(age_s: float, received: int, limits: Limits) -> Expiry | None:
    """Return BODY_TIMEOUT if a request body takes too long or arrives too slowly, else None.

    age_s     seconds since the gateway began to wait for the body
    received  number of bytes received so far
    """
    rated_s = age_s - BODY_GRACE_S
    is_slow = rated_s > 0 and received < rated_s * limits.body_min_rate
    return Expiry.BODY_TIMEOUT if is_slow or age_s > limits.body_timeout else None


def closing_expiry(age_s: float, limits: Limits, *, is_flushing: bool) -> Expiry | None:
    """Return ABORT if closing a client connection takes too long, else None.

    While the end of a response is being sent (`is_flushing`), the limit is that of a slow reader.
    While a refused upload is being discarded, it is LINGER_S seconds.
    """
    return Expiry.ABORT if age_s > (limits.slow_reader if is_flushing else LINGER_S) else None
