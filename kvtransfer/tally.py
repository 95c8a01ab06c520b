"""Tally: what an agent has done so far, counted. Read by `figures()` for metrics; decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from kvtransfer.ends import End


class Tally:
    """Written by the books, under the agent's lock."""

    def __init__(self) -> None:
        self.offers: Counter[tuple[str, str]] = Counter()
        self.landings: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.sent_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        self.moved_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.unclaimed_s = 0.0
        self.discarded: Counter[str] = Counter()

    def offer_ended(self, end: End) -> None:
        self.offers[end.how, end.reason] += 1

    def landing_ended(self, end: End) -> None:
        self.landings[end.how, end.reason] += 1

    def figures(self) -> dict[str, Any]:
        """Counters by label; keys of two parts are tuples, those by peer (peer, transport).

        sent: by us as the source, and for how long anything was under way; moved: to us as the sink, and how long
        transfers took from when they were accepted, waiting for layers to be computed included.
        """
        return {
            "offers": dict(self.offers),
            "landings": dict(self.landings),
            "refused": dict(self.refused),
            "faults": dict(self.faults),
            "sent_bytes": dict(self.sent_bytes),
            "sent_s": {pair: round(seconds, 6) for pair, seconds in self.sent_s.items()},
            "moved_bytes": dict(self.moved_bytes),
            "moved_s": {pair: round(seconds, 6) for pair, seconds in self.moved_s.items()},
            "unclaimed_s": self.unclaimed_s,
            "discarded_windows": dict(self.discarded),
        }
