"""Describes Redis errors for operators, without secrets.

It imports no Redis client, because `penstock doctor` uses it without one.
"""

from __future__ import annotations

import ssl

CLASSES: tuple[tuple[str, str], ...] = (
    (
        "WRONGPASS",
        "it refuses the user or the password (shared.redis.username, shared.redis.password)",
    ),
    (
        "invalid username-password pair",
        "it refuses the user or the password (shared.redis.username and password)",
    ),
    ("invalid password", "it refuses the password (shared.redis.password)"),
    (
        "without any password configured",
        "a password is configured here and none in Redis (shared.redis.password)",
    ),
    ("NOAUTH", "it requires a password, and none is configured (shared.redis.password)"),
    (
        "already authenticated",
        "it requires a password, and none is configured (shared.redis.password)",
    ),
    (
        "Authentication required",
        "it requires a password, and none is configured (shared.redis.password)",
    ),
    (
        "NOPERM",
        "its user lacks a required permission (ACL: +xadd +xread +xrange +xrevrange +time)",
    ),
    (
        "no permissions",
        "its user lacks a required permission (ACL: +xadd +xread +xrange +xrevrange +time)",
    ),
    ("MISCONF", "it accepts no writes, because it cannot save to disk (MISCONF)"),
    ("can't write against a read only", "it is a replica and accepts no writes"),
    ("READONLY", "it is a replica and accepts no writes"),
    ("OOM", "its memory is full (maxmemory)"),
    ("LOADING", "it is loading its data set"),
    ("closed by server", "it closed the connection"),
    ("Name or service not known", "its host name does not resolve"),
    ("max number of clients", "it has its highest number of clients (maxclients)"),
)


_TYPES = {
    "InvalidResponse": "its answers are not those of a Redis server; is it the right port?",
}


def describe_redis_error(error: BaseException) -> str:
    """Return the cause of a Redis error as text, without anything that was sent to Redis."""
    text = str(error)
    for part, meaning in CLASSES:
        if part.lower() in text.lower():
            return meaning
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {cause.reason or type(cause).__name__}"
        if isinstance(cause, ConnectionRefusedError):
            return "it refuses connections: no server listens there"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "it does not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror}"
    return _TYPES.get(type(error).__name__, type(error).__name__)
