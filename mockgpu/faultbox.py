"""The faults set on one TP group: when they begin and end, and which one strikes a request.

The grammar is faults.py's. Faults of the group (refuse, slow, lost rank) are begun and ended here by timers.
"""

from __future__ import annotations

import asyncio
from math import inf
from random import Random
from typing import Protocol

from mockgpu.faults import GROUP_FAULTS, Fault, FaultKind, parse_faults
from mockgpu.group import TpGroup


class Door(Protocol):
    """A listener that can refuse connections."""

    def shut(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        ...

    def open(self) -> None:
        """Accept connections again."""
        ...


class FaultBox:
    """Sole owner of a group's faults and of the timers that begin and end them."""

    def __init__(self, group: TpGroup, door: Door, loop: asyncio.AbstractEventLoop, rng: Random) -> None:
        self.spec = ""
        self._group = group
        self._door = door
        self._loop = loop
        self._rng = rng
        self._set_at = loop.time()
        self._faults: tuple[Fault, ...] = ()
        self._timers: list[asyncio.TimerHandle] = []
        self._in_force: list[Fault] = []

    def set(self, spec: str) -> None:
        """Replace all faults; the empty spec heals everything. FaultError leaves what was set before."""
        faults = parse_faults(spec)
        self.clear()
        self.spec, self._faults, self._set_at = spec, faults, self._loop.time()
        for fault in faults:
            if fault.kind in GROUP_FAULTS:
                self._schedule(fault)

    def clear(self) -> None:
        """End all faults now."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for fault in list(self._in_force):
            self._end(fault)
        self.spec, self._faults = "", ()

    def strike(self) -> Fault | None:
        """The fault that befalls the request now arriving, if any: the first of the spec that strikes."""
        elapsed_s = self._loop.time() - self._set_at
        for fault in self._faults:
            if fault.kind not in GROUP_FAULTS and fault.strikes(elapsed_s, self._rng):
                return fault
        return None

    def _schedule(self, fault: Fault) -> None:
        if fault.start_s > 0:
            self._timers.append(self._loop.call_later(fault.start_s, self._begin, fault))
        else:
            self._begin(fault)
        if fault.end_s < inf:
            self._timers.append(self._loop.call_later(fault.end_s, self._end, fault))

    def _begin(self, fault: Fault) -> None:
        self._in_force.append(fault)
        match fault.kind:
            case FaultKind.SLOW:
                self._group.slowness = fault.factor
            case FaultKind.LOST_RANK:
                self._group.lose_rank(fault.rank, fault.hang)
            case FaultKind.REFUSE:
                self._door.shut()

    def _end(self, fault: Fault) -> None:
        self._in_force.remove(fault)
        match fault.kind:
            case FaultKind.SLOW:
                self._group.slowness = 1.0
            case FaultKind.LOST_RANK:
                self._group.restore()
            case FaultKind.REFUSE:
                self._door.open()
