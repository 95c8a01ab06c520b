"""The faults set on one TP group: when they begin and end, and which one strikes a request.

The grammar is faults.py's. Faults of the group (refuse, slow, lost rank) are begun and ended here by timers.
"""

from __future__ import annotations

import asyncio
from math import inf
from random import Random
from typing import Protocol

from mockgpu.faults import (
    GROUP_FAULTS,
    RANK_FAULTS,
    WIRE_FAULTS,
    Fault,
    FaultError,
    FaultKind,
    parse_faults,
)
from mockgpu.group import TpGroup

# An engine that stands still moves no KV either.
_STALLING = frozenset((FaultKind.FREEZE, FaultKind.PARTITION))
_ON_THE_WIRE = _STALLING | WIRE_FAULTS


class Door(Protocol):
    """A listener that can refuse connections."""

    def shut(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        ...

    def open(self) -> None:
        """Accept connections again."""
        ...


class Wires(Protocol):
    """What joins a group's agent to its peers and can be harmed."""

    @property
    def harmable(self) -> bool:
        """Whether it can: only what passes through sockets of ours can."""
        ...

    def harm(self, fault: Fault | None) -> None:
        """This is wrong with it from now on; None: all is well."""
        ...


class FaultBox:
    """Sole owner of a group's faults and of the timers that begin and end them."""

    def __init__(
        self,
        group: TpGroup,
        door: Door,
        loop: asyncio.AbstractEventLoop,
        rng: Random,
        wires: Wires | None = None,
    ) -> None:
        self.spec = ""
        self._wires = wires
        self._group = group
        self._door = door
        self._loop = loop
        self._rng = rng
        self._set_at = loop.time()
        self._faults: tuple[Fault, ...] = ()
        self._timers: list[asyncio.TimerHandle] = []
        self._in_force: list[Fault] = []
        self._cut_off: asyncio.Event | None = None

    async def reachable(self) -> None:
        """Returns when requests reach the group: at once, unless it is cut off."""
        while self._cut_off is not None:
            await self._cut_off.wait()

    def set(self, spec: str) -> None:
        """Replace all faults; the empty spec heals everything. FaultError leaves what was set before."""
        faults = parse_faults(spec)
        self.check(faults)
        self.clear()
        self.spec, self._faults, self._set_at = spec, faults, self._loop.time()
        for fault in faults:
            if fault.kind in GROUP_FAULTS:
                self._schedule(fault)

    def check(self, faults: tuple[Fault, ...]) -> None:
        """FaultError for what cannot happen to this group."""
        if any(fault.kind in WIRE_FAULTS for fault in faults) and (
            self._wires is None or not self._wires.harmable
        ):
            raise FaultError("faults of the wire need a group that hands KV over by tcp")

    def clear(self) -> None:
        """End all faults now; a group that died of one, or of a malformed request, is started again."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for fault in list(self._in_force):
            self._end(fault)
        if self._group.dead:
            self._group.restore()
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
                self._set_pace()
            case FaultKind.LOST_RANK:
                self._group.lose_rank(fault.rank, fault.hang)
            case FaultKind.REFUSE:
                self._door.shut()
            case FaultKind.FREEZE | FaultKind.PARTITION:
                self._group.lose_rank(0, hang=True)
                self._harm(Fault(FaultKind.WIRE_STALL))
                if fault.kind is FaultKind.PARTITION and self._cut_off is None:
                    self._cut_off = asyncio.Event()
            case kind if kind in WIRE_FAULTS:
                self._harm(fault)

    def _end(self, fault: Fault) -> None:
        """What this fault did is undone, except where another one in force does the same."""
        self._in_force.remove(fault)
        kinds = {other.kind for other in self._in_force}
        match fault.kind:
            case FaultKind.SLOW:
                self._set_pace()
            case FaultKind.REFUSE if FaultKind.REFUSE not in kinds:
                self._door.open()
            case kind if kind in RANK_FAULTS and not kinds & RANK_FAULTS:
                self._group.restore()
        if fault.kind in _ON_THE_WIRE:
            self._harm(self._harm_left())
        if FaultKind.PARTITION not in kinds and self._cut_off is not None:
            self._cut_off.set()
            self._cut_off = None

    def _set_pace(self) -> None:
        """Slow both kinds of steps down as the last fault in force says that is about them."""
        prefill = decode = 1.0
        for fault in self._in_force:
            if fault.kind is FaultKind.SLOW:
                prefill = prefill if fault.only == "decode" else fault.factor
                decode = decode if fault.only == "prefill" else fault.factor
        self._group.slow_prefill, self._group.slow_decode = prefill, decode

    def _harm_left(self) -> Fault | None:
        """What is still wrong with the wire: by the fault that began last."""
        wrong = [other for other in self._in_force if other.kind in _ON_THE_WIRE]
        if not wrong:
            return None
        return Fault(FaultKind.WIRE_STALL) if wrong[-1].kind in _STALLING else wrong[-1]

    def _harm(self, fault: Fault | None) -> None:
        if self._wires is not None:
            self._wires.harm(fault)
