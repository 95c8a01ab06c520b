"""Tally: what an agent has done so far, counted. Read by `figures()` for metrics; decides nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

from kvtransfer.ends import End

_MOST_WAYS = 1024

N = TypeVar("N", int, float)


class Tally:
    """Written by the books, under the agent's lock. Sums by (peer, transport) are kept for the latest of them alone: a
    peer's name is its own choice."""

    def __init__(self) -> None:
        self.offers: Counter[tuple[str, str]] = Counter()
        self.landings: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._sent_bytes: dict[tuple[str, str], int] = {}
        self._sent_s: dict[tuple[str, str], float] = {}
        self._moved_bytes: dict[tuple[str, str], int] = {}
        self._moved_s: dict[tuple[str, str], float] = {}
        self.unclaimed_s = 0.0
        self.discarded: Counter[str] = Counter()

    def offer_ended(self, end: End) -> None:
        self.offers[end.how, end.reason] += 1

    def landing_ended(self, end: End) -> None:
        self.landings[end.how, end.reason] += 1

    def sent(self, way: tuple[str, str], n_bytes: int, seconds: float) -> None:
        """By us as the source, and for how long anything was under way."""
        _add(self._sent_bytes, way, n_bytes)
        _add(self._sent_s, way, seconds)

    def moved(self, way: tuple[str, str], n_bytes: int, seconds: float) -> None:
        """To us as the sink, from when the transfer was accepted."""
        _add(self._moved_bytes, way, n_bytes)
        _add(self._moved_s, way, seconds)

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
            "sent_bytes": dict(self._sent_bytes),
            "sent_s": {pair: round(seconds, 6) for pair, seconds in self._sent_s.items()},
            "moved_bytes": dict(self._moved_bytes),
            "moved_s": {pair: round(seconds, 6) for pair, seconds in self._moved_s.items()},
            "unclaimed_s": self.unclaimed_s,
            "discarded_windows": dict(self.discarded),
        }


def _add(sums: dict[tuple[str, str], N], way: tuple[str, str], more: N) -> None:
    """The latest way comes to the end; the one that was not used for longest is forgotten where there are too many."""
    sums[way] = sums.pop(way, 0) + more
    if len(sums) > _MOST_WAYS:
        del sums[next(iter(sums))]
