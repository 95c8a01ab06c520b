"""Pacing: how fast prompts may be given to an engine so that the answers it is giving stay within their TPOT budget.

While a chunk of a prompt is computed every answer of that engine waits. If a decode step takes d and the budget is b
per token, prefill may take 1 - d/b of the time; a burst beyond is better held back than computed at once. A leaky
bucket per endpoint. Not here: how long a queue may be (dual.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.load import EndpointLoad
from policies.model import Candidate

LEAST_SHARE = 0.2
"""Prefill gets so much of the time whatever the budget: it may be one that nobody could keep."""


class Pace:
    """Seconds of prefill given to each endpoint beyond what its pace allowed, by slot. One owner.

    share  of the TPOT budget that is planned with: the rest is for what is not known
    """

    __slots__ = ("_at", "_level", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._level: dict[int, float] = {}
        self._at: dict[int, float] = {}

    def ahead_s(self, load: EndpointLoad, tpot_s: float, now: float) -> float:
        """How far the endpoint is ahead of its pace, in seconds of prefill."""
        level = self._level.get(load.slot, 0.0)
        return max(0.0, level - self._pace(load, tpot_s) * (now - self._at[load.slot])) if level else 0.0

    def given(self, load: EndpointLoad, prefill_s: float, tpot_s: float, now: float) -> float:
        """The endpoint got a prompt; how far ahead it is now."""
        level = self._level[load.slot] = self.ahead_s(load, tpot_s, now) + prefill_s
        self._at[load.slot] = now
        return level

    def mean(self, candidates: Sequence[Candidate], tpot_s: float) -> float:
        """The share of the time that prefill may take, over all available candidates; 1 with none."""
        paces = [self._pace(each.load, tpot_s) for each in candidates if each.load.available]
        return sum(paces) / len(paces) if paces else 1.0

    def _pace(self, load: EndpointLoad, tpot_s: float) -> float:
        """The share of the time that prefill may take."""
        return max(LEAST_SHARE, 1.0 - load.timeline.decode_s / (self._share * tpot_s)) if load.decoding else 1.0
