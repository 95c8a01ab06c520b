"""Pacing of prefill, so that the running answers of an engine meet their TPOT budget.

While a chunk of a prompt is computed, every answer of that engine waits. If a decode step takes d
and the budget is b per token, prefill may take 1 - d/b of the time. What exceeds that is held back.
Implemented as a leaky bucket per endpoint. Queue length is limited elsewhere (priced.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.load import EndpointLoad
from policies.model import Candidate

LEAST_SHARE = 0.2
"""Prefill always gets this share of the time: a budget may be impossible to meet."""


class PrefillPace:
    """Seconds of prefill sent to each endpoint in excess of its pace, by slot. One owner.

    share  fraction of the TPOT budget to plan with; the rest is a margin
    """

    __slots__ = ("_at", "_level", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._level: dict[int, float] = {}
        self._at: dict[int, float] = {}

    def ahead_s(self, load: EndpointLoad, tpot_s: float, now: float) -> float:
        """Return how far the endpoint is ahead of its pace, in seconds of prefill."""
        level = self._level.get(load.slot, 0.0)
        return (
            max(0.0, level - self._pace(load, tpot_s) * (now - self._at[load.slot]))
            if level
            else 0.0
        )

    def record(self, load: EndpointLoad, prefill_s: float, tpot_s: float, now: float) -> float:
        """Record a prompt sent to the endpoint; return how far ahead of its pace it is now."""
        level = self._level[load.slot] = self.ahead_s(load, tpot_s, now) + prefill_s
        self._at[load.slot] = now
        return level

    def mean_share(self, candidates: Sequence[Candidate], tpot_s: float) -> float:
        """Return the share of the time prefill may take, averaged over the available candidates.

        1 if there are none.
        """
        paces = [
            self._pace(candidate.load, tpot_s)
            for candidate in candidates
            if candidate.load.is_available
        ]
        return sum(paces) / len(paces) if paces else 1.0

    def _pace(self, load: EndpointLoad, tpot_s: float) -> float:
        """Return the share of the time that prefill may take at this endpoint."""
        return (
            max(LEAST_SHARE, 1.0 - load.timeline.decode_s / (self._share * tpot_s))
            if load.decoding
            else 1.0
        )
