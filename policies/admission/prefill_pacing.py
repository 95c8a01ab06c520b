"""Paces the sending of prompts, so that prefill does not slow running answers too much.

An engine that computes a part of a prompt delays all its running answers. If a decode step takes d
seconds, and the latency budget is b seconds per token (TPOT), prefill may take 1 - d/b of the time.
PrefillPace measures how far an endpoint exceeds that, with a leaky bucket. The queue length is
limited in priced_admission.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate

LEAST_SHARE = 0.2
"""Share of an endpoint's time (0 to 1) that prefill may always take.

Otherwise a TPOT budget that cannot be met would stop prefill altogether.
"""


class PrefillPace:
    """Measures whether prompts are sent to an endpoint too fast for its running answers.

    Each prompt that an engine computes delays its running answers. The allowed pace is the fraction
    of time that prefill may take before those answers exceed their budget of seconds per token
    (TPOT). `ahead_s` returns how many seconds of prefill an endpoint is ahead of that pace.

    share  fraction (0 to 1) of the TPOT budget that decoding and prefill may use; the rest is a
           margin
    """

    __slots__ = ("_at", "_level", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._level: dict[int, float] = {}
        self._at: dict[int, float] = {}

    def ahead_s(self, load: EndpointLoad, tpot_s: float, now: float) -> float:
        """Return by how many seconds of prefill an endpoint is ahead of its allowed pace.

        If the result is 0, another prompt may be sent immediately.

        load    the endpoint
        tpot_s  the TPOT budget of the endpoint's answers, in seconds per token
        """
        level = self._level.get(load.slot, 0.0)
        return (
            max(0.0, level - self._pace(load, tpot_s) * (now - self._at[load.slot]))
            if level
            else 0.0
        )

    def record(self, load: EndpointLoad, prefill_s: float, tpot_s: float, now: float) -> float:
        """Record that a prompt which takes `prefill_s` seconds to compute was sent to the endpoint.

        Returns how many seconds of prefill the endpoint has now got beyond its allowed pace.
        `tpot_s` is the TPOT budget of its answers, in seconds per token.
        """
        level = self._level[load.slot] = self.ahead_s(load, tpot_s, now) + prefill_s
        self._at[load.slot] = now
        return level

    def mean_share(self, candidates: Sequence[Candidate], tpot_s: float) -> float:
        """Return the fraction of time (0 to 1) that prefill may take, as a mean over endpoints.

        candidates  the endpoints; only available ones count, and without any, the result is 1
        tpot_s      the TPOT budget in seconds per token
        """
        paces = [
            self._pace(candidate.load, tpot_s)
            for candidate in candidates
            if candidate.load.is_available
        ]
        return sum(paces) / len(paces) if paces else 1.0

    def _pace(self, load: EndpointLoad, tpot_s: float) -> float:
        # Return the share of the time, 0 to 1, that the endpoint may spend on prefill.
        return (
            max(LEAST_SHARE, 1.0 - load.timeline.decode_s / (self._share * tpot_s))
            if load.decoding
            else 1.0
        )
