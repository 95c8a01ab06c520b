"""Checks for `penstock doctor` that the configured Redis can be used: connect, PING, TIME."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.cli.doctor.findings import CheckFinding, fail_finding, pass_finding
from gateway.config import Config
from gateway.http.outgoing_tls import redis_options, redis_settings

CHECK = "Redis"
TIMEOUT_S = 3.0


def check_redis(config: Config) -> Iterator[CheckFinding]:
    """Check the configured Redis server.

    Yields one finding if gateways share state through Redis, and none otherwise.
    """
    if config.shared is None:
        return
    import redis  # slow to import, and only needed here

    from gateway.peers.redis_error import describe_redis_error

    settings = config.shared.redis
    client = redis.Redis.from_url(
        settings.url,
        username=settings.username,
        password=None if settings.password is None else settings.password.reveal(),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        **redis_options(redis_settings(settings.url, settings.tls)),
    )
    try:
        client.ping()
        client.time()
    except (redis.RedisError, OSError) as error:
        fix = "until it is repaired, each gateway routes by its own state alone"
        yield fail_finding(settings.url, CHECK, describe_redis_error(error), fix)
    else:
        yield pass_finding(settings.url, CHECK, "it responds")
    finally:
        client.close()
