"""The counters of an agent's KV transfers, which become metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

from kvtransfer.protocol.outcomes import TransferOutcome

_MAX_PAIRS = 1024

N = TypeVar("N", int, float)


class AgentStats:
    """Counters of one agent's transfers, updated under its lock.

    Sums by (peer, transport) are stored for the most recent pairs only, because peers choose their
    own names.
    """

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

    def count_offer(self, end: TransferOutcome) -> None:
        self.offers[end.kind, end.reason] += 1

    def count_landing(self, end: TransferOutcome) -> None:
        self.landings[end.kind, end.reason] += 1

    def count_sent(self, pair: tuple[str, str], n_bytes: int, seconds: float) -> None:
        """Count bytes of KV that this agent sent to another agent.

        pair     the other agent's name, and the transport
        seconds  time in which bytes were in flight
        """
        _add(self._sent_bytes, pair, n_bytes)
        _add(self._sent_s, pair, seconds)

    def count_received(self, pair: tuple[str, str], n_bytes: int, seconds: float) -> None:
        """Count bytes of KV that this agent received from another agent.

        pair     the other agent's name, and the transport
        seconds  time since the other agent accepted the transfer
        """
        _add(self._moved_bytes, pair, n_bytes)
        _add(self._moved_s, pair, seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return all counters of the agent by label. Labels with two parts are tuples.

        sent_*    as sender, by (peer, transport): bytes, and seconds with bytes in flight
        moved_*   as receiver, by (peer, transport): bytes, and seconds from accept to end,
                  including the wait for layers to be computed
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


def _add(sums: dict[tuple[str, str], N], pair: tuple[str, str], amount: N) -> None:
    # Add `amount` to the sum of `pair`.
    #
    # If there are too many sums, drop the least recently used.
    sums[pair] = sums.pop(pair, 0) + amount
    if len(sums) > _MAX_PAIRS:
        del sums[next(iter(sums))]
