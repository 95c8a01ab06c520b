"""Detects expired leases of other processes, without comparing clocks between machines. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

LOOKS_PER_LEASE = 3  # number of times that another process's lease is checked before it can end


class _Observation(msgspec.Struct):
    etag: str
    since: float
    look_due: float


class LeaseWatch:
    """Detects leases of other processes that have expired, as they stay unchanged for too long.

    The time is measured on this process's clock, so the clocks of several machines need not agree.
    An owner changes the entity tag of its lease with every renewal. A process that has just started
    has to wait for one whole duration before it can take a lease.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create a watch that knows no leases. `clock` returns seconds and must not jump."""
        self._clock = clock
        self._seen: dict[str, _Observation] = {}

    def is_due(self, name: str) -> bool:
        """Return whether the lease with this name has to be read from the storage again.

        A lease is the right of a process to run a batch. To save requests, a lease that cannot have
        expired yet is rarely read.
        """
        seen = self._seen.get(name)
        return seen is None or self._clock() >= seen.look_due

    def has_expired(self, name: str, etag: str, duration_s: float) -> bool:
        """Return whether the owner of a lease has stopped renewing it, given its current state.

        name        name of the lease
        etag        its current entity tag, which every renewal changes
        duration_s  seconds after which an unchanged lease has expired
        """
        now = self._clock()
        seen = self._seen.get(name)
        if seen is None or seen.etag != etag:
            seen = self._seen[name] = _Observation(etag, now, now)
        ends = seen.since + duration_s
        seen.look_due = min(now + duration_s / LOOKS_PER_LEASE, max(ends, now))
        return now >= ends

    def forget_all_but(self, names: Iterable[str]) -> None:
        """Forget all leases except `names`, because the batches of the others have ended."""
        self._seen = {name: self._seen[name] for name in names if name in self._seen}
