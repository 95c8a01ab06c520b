"""Chooses the bus between gateways: a Redis server, or a socket for workers of one machine."""

from __future__ import annotations

from pathlib import Path
from random import Random

from gateway.config.shared_section import Shared
from gateway.http.outgoing_tls import redis_settings
from gateway.peers.bus_interface import Bus, DropCounter
from gateway.peers.local_bus import LocalBus


def create_bus(
    shared: Shared | None, hub: Path | None, rng: Random, count_drop: DropCounter
) -> Bus:
    """Create the message bus over which this gateway exchanges state with others.

    The configuration section `shared` names a Redis server. If it is None, the bus uses the unix
    socket `hub`, which connects the workers of one machine. For each dropped message, `count_drop`
    is called with the reason.
    """
    if shared is None:
        assert hub is not None
        return LocalBus(hub, count_drop)
    # This import takes 60 ms, and only gateways with Redis need it.
    from gateway.peers.redis_bus import RedisAddress, RedisBus

    redis = shared.redis
    password = None if redis.password is None else redis.password.reveal()
    encryption = redis_settings(redis.url, redis.tls)
    address = RedisAddress(redis.url, shared.fleet, redis.username, password, encryption)
    return RedisBus(address, rng, count_drop)
