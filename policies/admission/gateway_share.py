"""Divides the concurrency caps of a pool's endpoints among the gateways that use the pool."""

from __future__ import annotations

from collections.abc import Iterable

from policies.routing_types import Candidate


def total_capacity(candidates: Iterable[Candidate]) -> int:
    """Return how many requests this gateway may run at once on all available endpoints together.

    Each endpoint adds its concurrency cap, minus the requests that other gateways run there. It
    adds at least the cap divided by the number of gateways, so that a gateway that starts late also
    gets capacity.
    """
    total = 0
    for candidate in candidates:
        load, cap = candidate.load, candidate.endpoint.max_concurrency
        if load.is_available:
            peer_load = load.peer_load
            total += (
                max(cap - peer_load.in_flight, cap // (len(peer_load.shares) + 1))
                if peer_load.shares
                else cap
            )
    return total
