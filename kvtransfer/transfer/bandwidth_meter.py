"""Measures the bandwidth to each other agent, in bytes of KV per second of sending. No I/O.

The gateway chooses engine pairs by this bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable


class BandwidthMeter:
    """Measures in bytes per second how fast KV is sent to each other agent, over each transport.

    Recent measurements count more: every `half_life_s` seconds of sending halve the weight of
    earlier ones. Bytes and seconds are summed separately, so that many small transfers do not
    outweigh a large one. At most `max_entries` pairs of agent and transport are stored; the least
    recently used is dropped first.
    """

    def __init__(self, half_life_s: float = 1.0, max_entries: int = 1024) -> None:
        self._half_life_s, self._most = half_life_s, max_entries
        self._decayed: dict[tuple[str, str], tuple[float, float]] = {}

    def record(self, peer: str, transport: str, n_bytes: int, seconds: float) -> None:
        """Record that sending `n_bytes` bytes to a peer took `seconds`; a time of 0 is ignored."""
        if seconds <= 0:
            return
        old_bytes, old_seconds = self._decayed.pop((peer, transport), (0.0, 0.0))
        fade = 0.5 ** (seconds / self._half_life_s)
        self._decayed[peer, transport] = (old_bytes * fade + n_bytes, old_seconds * fade + seconds)
        if len(self._decayed) > self._most:
            del self._decayed[next(iter(self._decayed))]

    def bytes_per_s(self, peer: str, transport: str) -> float | None:
        """Return the measured bytes per second to a peer over a transport.

        Return None if there are none.
        """
        decayed = self._decayed.get((peer, transport))
        return None if decayed is None else decayed[0] / decayed[1]

    def all(self) -> dict[tuple[str, str], float]:
        """Return every measured bandwidth in bytes per second, by (peer, transport)."""
        return {pair: n_bytes / seconds for pair, (n_bytes, seconds) in self._decayed.items()}

    def forget(self, peer: str) -> None:
        """Drop the measured bandwidth of an agent that will not come back."""
        for pair in [pair for pair in self._decayed if pair[0] == peer]:
            del self._decayed[pair]


class ThroughputMeter:
    """Measures how fast KV is sent to an agent, counting only the time in which bytes are in
    flight.

    When no bytes are in flight, or after `most_s` seconds, `on_measured` is called with the bytes
    and seconds.
    """

    def __init__(self, on_measured: Callable[[int, float], None], most_s: float = 0.1) -> None:
        self._seen, self._most_s = on_measured, most_s
        self._since: float | None = None
        self._bytes = 0

    def start(self, now: float) -> None:
        """Start to measure at the time `now`, unless a measurement has already begun."""
        if self._since is None:
            self._since = now

    def count(self, n_bytes: int, now: float, *, idle: bool) -> None:
        """Count bytes of KV that have arrived at the other agent.

        idle  whether no other bytes are in flight, which ends the measurement
        """
        self._bytes += n_bytes
        if self._since is None or not (idle or now - self._since > self._most_s):
            return
        if self._bytes:
            self._seen(self._bytes, now - self._since)
        self._since, self._bytes = None if idle else now, 0
