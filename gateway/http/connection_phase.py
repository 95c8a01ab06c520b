"""The phases of a client connection and their deadlines. Sans-IO."""

from __future__ import annotations

from enum import Enum, auto

from gateway.config import Limits

LINGER_S = 1.0  # how long a refused upload may keep arriving before the connection is aborted
BODY_GRACE_S = 1.0  # the minimum rate of a body does not apply to its first second


class Phase(Enum):
    """What a connection is waiting for, which determines its deadline."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    SERVING = auto()
    CLOSING = auto()


# Module-level names, because looking up an Enum member on its class is ten times slower.
IDLE, HEAD, BODY, SERVING, CLOSING = Phase


class Expiry(Enum):
    """How a connection ends whose deadline has passed."""

    ABORT = auto()
    CLOSE = auto()
    HEAD_TIMEOUT = auto()
    BODY_TIMEOUT = auto()


def reader_expiry(paused_s: float, limits: Limits) -> Expiry | None:
    """Return ABORT if the client has not read a response for too long."""
    return Expiry.ABORT if paused_s > limits.slow_reader else None


def idle_expiry(age_s: float, limits: Limits, *, has_sent_nothing: bool) -> Expiry | None:
    """Return CLOSE if the next request does not begin in time; the first one must come sooner."""
    is_late = has_sent_nothing and age_s > limits.headers_timeout
    return Expiry.CLOSE if is_late or age_s > limits.idle_timeout else None


def head_expiry(age_s: float, limits: Limits) -> Expiry | None:
    """Return HEAD_TIMEOUT if a request head is not complete in time."""
    return Expiry.HEAD_TIMEOUT if age_s > limits.headers_timeout else None


def body_expiry(age_s: float, received: int, limits: Limits) -> Expiry | None:
    """Return BODY_TIMEOUT if a body takes too long or arrives below the minimum rate."""
    rated_s = age_s - BODY_GRACE_S
    is_slow = rated_s > 0 and received < rated_s * limits.body_min_rate
    return Expiry.BODY_TIMEOUT if is_slow or age_s > limits.body_timeout else None


def closing_expiry(age_s: float, limits: Limits, *, is_flushing: bool) -> Expiry | None:
    """Return ABORT if closing takes too long.

    A connection that only has a response left to send may take as long as a slow reader; one that
    still discards a refused upload may not.
    """
    return Expiry.ABORT if age_s > (limits.slow_reader if is_flushing else LINGER_S) else None
