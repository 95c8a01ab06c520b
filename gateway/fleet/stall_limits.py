"""Learns how long each endpoint's engine may be silent before it counts as stalled.

The gateway sends a silent engine a test request for one token. An engine that computes one request
at a time lets the test request wait, too. So a missing token proves a stall only if the engine is
known to compute requests side by side. For other engines, the limit follows from the longest
silence after which an engine of the pool has answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from gateway.fleet.engine_metrics import UNKNOWN_PROGRESS
from gateway.fleet.live_endpoint import LiveEndpoint
from policies.engine_kinds import ENGINE_TRAITS

SILENCE_MARGIN = 3.0
"""How many times as long as the longest earlier silence of the pool a silence must last to count as
a stall, at an engine that may compute one request at a time."""

LEAST_FACTOR = 1.8
"""Least time for such a silence, as a multiple of the time for engines known to batch requests.

With the default of 5 s a stall is still found within 10 s.
"""

FIRST_ANSWER_FACTOR = 12.0
"""Time for a silence in a pool that has not answered yet, as a multiple in the same way.

A minute by default: nothing is known of how long its answers take, but requests must not wait for
`timeouts.first_byte` (10 minutes) at an engine that will never answer.
"""


class _Silence:
    # The current silence and the longest past silence of one endpoint's engine.
    #
    # current_s  length of the silence at the last look
    # body_at    when the engine had last sent a byte of a body, at the last look
    # longest_s  the longest silence that ended with output
    # batches    whether it generated a test token while an earlier request kept waiting

    __slots__ = ("batches", "body_at", "current_s", "longest_s")

    def __init__(self) -> None:
        self.current_s = self.body_at = self.longest_s = 0.0
        self.batches = False


class Silences:
    """Knows how long each engine is silent while requests wait, and when that is a stall."""

    __slots__ = ("_by_endpoint",)

    def __init__(self) -> None:
        self._by_endpoint: dict[LiveEndpoint, _Silence] = {}

    def observe(self, live: LiveEndpoint, now: float) -> float:
        """Return for how many seconds the endpoint has been silent while requests wait.

        If the engine has ended its silence by output since the last call, the silence is recorded.
        `now` is in monotonic seconds.
        """
        silence = self._of(live)
        if live.upstream.last_body_at != silence.body_at:
            silence.body_at = live.upstream.last_body_at
            silence.longest_s = max(silence.longest_s, silence.current_s)
        silence.current_s = live.upstream.silence_duration_s(now)
        return silence.current_s

    def on_test_token(self, live: LiveEndpoint) -> None:
        """Record that the engine answered a test request while earlier requests kept waiting.

        Then the engine computes requests side by side, so a shorter silence proves a stall.
        """
        self._of(live).batches = True

    def forget(self, live: LiveEndpoint) -> None:
        """Forget how long an endpoint was silent, because it is no longer polled."""
        self._by_endpoint.pop(live, None)

    def limit_s(self, live: LiveEndpoint, peers: Iterable[LiveEndpoint], limit_s: float) -> float:
        """Return after how many seconds of silence the endpoint counts as stalled; inf if never.

        peers    the endpoints of its pool, itself included
        limit_s  the limit for an engine that is known to compute requests side by side
        """
        if not ENGINE_TRAITS[live.endpoint.engine].can_be_asked:
            return inf
        if live.progress != UNKNOWN_PROGRESS or self._of(live).batches:
            return limit_s
        known = [self._of(peer) for peer in peers if peer.upstream.last_body_at]
        if not known:
            return FIRST_ANSWER_FACTOR * limit_s
        longest_s = max(silence.longest_s for silence in known)
        return max(LEAST_FACTOR * limit_s, SILENCE_MARGIN * longest_s)

    def _of(self, live: LiveEndpoint) -> _Silence:
        silence = self._by_endpoint.get(live)
        if silence is None:
            silence = self._by_endpoint[live] = _Silence()
        return silence
