"""Counts the KV transfers in each of vLLM's processes; vLLM serves the sums at /metrics.

connector_metadata.py has the classes by which vLLM collects the counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Counts = Mapping[str, float]

COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "kv_handoffs_offered": "Prefills whose KV was offered to a decode engine.",
        "kv_handoffs_accepted": "Handoffs whose KV this engine began to fetch.",
        "kv_handoffs_refused": "Handoffs that did not fit their request; it was computed here.",
        "kv_handoffs_cached": "Handoffs that were not needed, because all KV was cached here.",
        "kv_ranks_received": "Fetches that a rank completed.",
        "kv_ranks_not_received": "Fetches of a rank that failed, expired or were cancelled.",
        "kv_ranks_sent": "Offers of a rank that were fetched completely.",
        "kv_ranks_not_sent": "Offers of a rank that ended without being fetched completely.",
        "kv_received_bytes": "Bytes of KV that arrived and were verified.",
        "kv_receive_seconds": "Time from a rank's fetch to its end, added up over fetches.",
        "kv_store_loaded_blocks": "Blocks that a rank loaded from the host's store.",
        "kv_store_load_seconds": "Time that a rank's loads from the store took, added up.",
        "kv_store_failed_loads": "Loads of a rank that found too few blocks; they were computed.",
        "kv_store_declined_tokens": "Stored tokens that were computed, as the faster choice.",
        "kv_store_saved_blocks": "Blocks that a rank saved in the store, which lacked them.",
        "kv_store_skipped_saves": "Requests not saved, because too many blocks waited to be saved.",
        "kv_store_lost_calls": "Lookups, loads and saves that could not reach the store.",
    }
)


class PendingCounts:
    """Counters of KV transfers that have not been reported to vLLM yet, by name."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to a counter of KV transfers. Raises KeyError for an unknown counter."""
        if name not in COUNTERS:
            raise KeyError(name)
        self._counts[name] = self._counts.get(name, 0) + amount

    def add_nonzero(self, name: str, amount: float) -> None:
        """Add `amount` to a counter of KV transfers, unless it is 0.

        So a counter that is never used does not appear in reports.
        """
        if amount:
            self.add(name, amount)

    def take(self) -> dict[str, float]:
        """Return the KV transfer counters since the last call that are not 0, and reset them."""
        taken, self._counts = self._counts, {}
        return taken


def add_counts(one: Counts, other: Counts) -> dict[str, float]:
    """Return the sum of two reports of KV transfer counters, counter by counter."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}
