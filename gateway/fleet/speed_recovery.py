"""Returns endpoints that were ejected as slow into rotation, once test requests show normal speed.

A /health page does not show how fast an engine is, and an ejected endpoint gets no client requests
that could be timed. Therefore the gateway sends test requests to it and to a healthy peer at the
same time. policies/health/speed_outlier.py decides which endpoints are ejected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random
from time import monotonic
from typing import Protocol, cast

import msgspec

from gateway.fleet.live_endpoint import LiveEndpoint
from policies import restart_state
from policies.health.endpoint_health import Health, HealthEvent
from policies.health.endpoint_speed import Slowness
from policies.health.speed_samples import Measure

log = logging.getLogger("penstock")

Complete = Callable[[LiveEndpoint, float, dict[str, object]], Awaitable[int | None]]
"""Sends a completion request with a timeout in seconds and with these members in its body.

Returns the status of the response, or None if there is none. Raises NotSentError if it could not be
sent for a local reason.
"""


class SpeedProbe(msgspec.Struct, frozen=True):
    """A test request that measures an engine's speed.

    words   number of random words in its prompt
    tokens  number of tokens to generate
    """

    words: int
    tokens: int


PREFILL_PROBE, DECODE_PROBE = SpeedProbe(1000, 1), SpeedProbe(1, 16)
SPEED_PROBE_TIMEOUT_S = 30.0

# A probe passes below CLEAR_RATIO times the peers' time plus LEAST_EXCESS_S.
CLEAR_RATIO, LEAST_EXCESS_S = 1.6, 0.02

# The least time of a peer is an estimate that grows by this factor with every probe.
PEER_TIME_GROWTH = 1.05

CLEAR_ROUNDS = 3
"""Number of comparisons in a row that an ejected endpoint must pass before it returns.

One comparison is not enough, because its peer may be busy at that moment.
"""


def is_ejected_as_slow(live: LiveEndpoint) -> bool:
    """Return whether the endpoint was ejected as slow, which its /health page does not show."""
    return live.health.cause is HealthEvent.SLOW and live.speed.slowness is not None


def accept_returned(live: LiveEndpoint, before: Health, peer: LiveEndpoint | None) -> None:
    """Let an endpoint return into rotation; replace its latency model if it was ejected as slow.

    The replacement is a copy of the model of `peer`, a healthy endpoint. The endpoint's own model
    was learned while it was slow, and would keep latency-aware policies away from the endpoint.
    `before` is the endpoint's health before its return.
    """
    if before.cause is HealthEvent.SLOW and peer is not None:
        state = restart_state.belief_state(peer.load.belief)
        restart_state.restore_belief(live.load.belief, state)
    live.speed.accept()


class PeerFinder(Protocol):
    """The interface of the endpoint table that finds a healthy peer of a slow endpoint."""

    @property
    def rng(self) -> Random: ...
    def find_peer(self, live: LiveEndpoint) -> LiveEndpoint | None: ...


class SpeedRecovery:
    """Measures the speed of endpoints that were ejected as slow.

    endpoints  the endpoint table, which chooses the healthy peer for a comparison
    complete   coroutine function that sends one test request
    """

    def __init__(self, endpoints: PeerFinder, complete: Complete) -> None:
        self._endpoints = endpoints
        self._complete = complete
        self._peer_s: dict[LiveEndpoint, tuple[Slowness, float]] = {}

    def forget(self, live: LiveEndpoint) -> None:
        """Drop the measurements of an endpoint that leaves the configuration."""
        self._peer_s.pop(live, None)

    async def is_as_fast_as_peer(self, live: LiveEndpoint) -> bool:
        """Return whether an endpoint that was ejected as slow is as fast as a healthy peer again.

        It must be fast in CLEAR_ROUNDS comparisons. Returns True if there is no peer to compare
        with, and False if the last measurement is too recent for another. Raises NotSentError.
        """
        # The ejected endpoint is idle and the peer is not. Therefore the shortest time that a peer
        # has needed since the ejection counts.
        peer, slowness = self._endpoints.find_peer(live), live.speed.slowness
        if peer is None or slowness is None:
            return True
        if not live.speed.try_start_probe(monotonic()):
            return False
        probe = PREFILL_PROBE if slowness.measure is Measure.TTFT else DECODE_PROBE
        for _ in range(CLEAR_ROUNDS):
            own_s, peer_s = await self._time_both(live, peer, probe)
            if own_s is None or peer_s is None:
                return own_s is not None
            peer_s = self._least_peer_s(live, slowness, peer_s)
            if own_s >= CLEAR_RATIO * peer_s + LEAST_EXCESS_S:
                log.info(
                    "endpoint %s is still slow: its test request took %.3f s, that of endpoint "
                    "%s %.3f s",
                    *(live.endpoint.name, own_s, peer.endpoint.name, peer_s),
                )
                return False
        return True

    async def _time_both(
        self, live: LiveEndpoint, peer: LiveEndpoint, probe: SpeedProbe
    ) -> tuple[float | None, float | None]:
        # Both end before an exception of one is raised, so that no request is left behind.
        times = (self._time(live, probe), self._time(peer, probe))
        own_s, peer_s = await asyncio.gather(*times, return_exceptions=True)
        for result in (own_s, peer_s):
            if isinstance(result, BaseException):
                raise result
        return cast("tuple[float | None, float | None]", (own_s, peer_s))

    def _least_peer_s(self, live: LiveEndpoint, slowness: Slowness, peer_s: float) -> float:
        # Return the shortest time of peers during this slow period, in seconds.
        #
        # The stored time grows with every probe, so that one very short time loses its effect.
        last_slowness, least_s = self._peer_s.get(live, (slowness, peer_s))
        if last_slowness is slowness:
            peer_s = min(peer_s, PEER_TIME_GROWTH * least_s)
        self._peer_s[live] = slowness, peer_s
        return peer_s

    async def _time(self, live: LiveEndpoint, probe: SpeedProbe) -> float | None:
        # Return the seconds that the endpoint needs for the probe, or None if the probe fails.
        #
        # Raises NotSentError.
        words = " ".join(str(self._endpoints.rng.randrange(1000)) for _ in range(probe.words))
        members: dict[str, object] = {
            "prompt": words,
            "max_tokens": probe.tokens,
            "ignore_eos": True,
        }
        began = monotonic()
        status = await self._complete(live, SPEED_PROBE_TIMEOUT_S, members)
        return monotonic() - began if status == 200 else None
