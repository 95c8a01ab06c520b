"""Applies injected faults to one mock engine: begins and ends them, and chooses affected requests.

The syntax is in mockgpu/fault_grammar.py. Timers begin and end the faults that affect the whole
engine, such as closed ports.
"""

from __future__ import annotations

import asyncio
from math import inf
from random import Random
from typing import Protocol

from mockgpu.fault_grammar import (
    EVENT_FAULTS,
    GROUP_FAULTS,
    RANK_FAULTS,
    WIRE_FAULTS,
    FaultError,
    FaultKind,
    InjectedFault,
    parse_faults,
)
from mockgpu.tp_group import TpGroup

_NOT_OF_REQUESTS = GROUP_FAULTS | EVENT_FAULTS

# Faults that stop an engine, and with it its KV transfers.
_STALLING = frozenset((FaultKind.FREEZE, FaultKind.PARTITION))
_ON_THE_WIRE = _STALLING | WIRE_FAULTS


class FaultyListener(Protocol):
    """The interface of a mock engine's listening port: an injected fault can close and open it."""

    def shut(self) -> None: ...

    def open(self) -> None:
        """Accept connections on the port again after `shut()` has closed it."""
        ...


class FaultyConnection(Protocol):
    """The interface by which faults are injected into the KV transfers of a mock engine."""

    @property
    def supports_faults(self) -> bool:
        """Return whether faults can be injected: all bytes must pass through a relay."""
        ...

    def set_fault(self, fault: InjectedFault | None) -> None:
        """Apply this fault to the engine's KV connections from now on. None ends the fault."""
        ...


class GroupFaults:
    """The faults of one mock engine that are set now, and the timers that begin and end them."""

    def __init__(
        self,
        group: TpGroup,
        listener: FaultyListener,
        loop: asyncio.AbstractEventLoop,
        rng: Random,
        wires: FaultyConnection | None = None,
    ) -> None:
        self.spec = ""
        self._wires = wires
        self._group = group
        self._listener = listener
        self._loop = loop
        self._rng = rng
        self._set_at = loop.time()
        self._faults: tuple[InjectedFault, ...] = ()
        self._timers: list[asyncio.TimerHandle] = []
        self._active: list[InjectedFault] = []
        self._reconnected: asyncio.Event | None = None

    async def wait_reachable(self) -> None:
        """Wait until the mock engine is reachable over the network.

        Only the fault `partition` makes it unreachable; otherwise the call returns immediately.
        """
        while self._reconnected is not None:
            await self._reconnected.wait()

    def apply(self, spec: str) -> None:
        """Set the faults of the mock engine to those of a specification such as "stall@10-20".

        They replace all earlier ones; an empty specification ends all faults. Raises FaultError if
        the specification is invalid. The earlier faults then stay active.
        """
        faults = parse_faults(spec)
        self.check(faults)
        self.clear()
        self.spec, self._faults, self._set_at = spec, faults, self._loop.time()
        for fault in faults:
            if fault.kind in GROUP_FAULTS:
                self._schedule(fault)

    def check(self, faults: tuple[InjectedFault, ...]) -> None:
        """Raise FaultError if this engine does not support one of the faults."""
        if any(fault.kind in WIRE_FAULTS for fault in faults) and (
            self._wires is None or not self._wires.supports_faults
        ):
            raise FaultError(
                "faults of KV connections need an engine that transfers KV over tcp; start it "
                "with --wire-faults"
            )
        if any(fault.kind in EVENT_FAULTS for fault in faults) and self._group.kv_events is None:
            raise FaultError(
                "faults of KV events need an engine that publishes them; start it with "
                "--kv-events-port"
            )

    def clear(self) -> None:
        """End all faults of the mock engine. Restart it if a fault or a bad request stopped it."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for fault in list(self._active):
            self._end(fault)
        if self._group.is_dead:
            self._group.restore()
        self.spec, self._faults = "", ()

    def pick_fault(self) -> InjectedFault | None:
        """Return the first fault that affects the request arriving now; None: no fault does."""
        elapsed_s = self._loop.time() - self._set_at
        for fault in self._faults:
            if fault.kind not in _NOT_OF_REQUESTS and fault.should_strike(elapsed_s, self._rng):
                return fault
        return None

    def strikes_events(self, kind: FaultKind) -> bool:
        """Decide whether a fault of this kind affects the next message of KV events."""
        elapsed_s = self._loop.time() - self._set_at
        return any(
            fault.kind is kind and fault.should_strike(elapsed_s, self._rng)
            for fault in self._faults
        )

    def _schedule(self, fault: InjectedFault) -> None:
        if fault.start_s > 0:
            self._timers.append(self._loop.call_later(fault.start_s, self._begin, fault))
        else:
            self._begin(fault)
        if fault.end_s < inf:
            self._timers.append(self._loop.call_later(fault.end_s, self._end, fault))

    def _begin(self, fault: InjectedFault) -> None:
        self._active.append(fault)
        match fault.kind:
            case FaultKind.SLOW:
                self._set_pace()
            case FaultKind.LOST_RANK:
                self._group.fail_rank(fault.rank, fault.hang)
            case FaultKind.REFUSE:
                self._listener.shut()
            case FaultKind.FREEZE | FaultKind.PARTITION:
                self._group.fail_rank(0, hang=True)
                self._set_wire_fault(InjectedFault(FaultKind.WIRE_STALL))
                if fault.kind is FaultKind.PARTITION and self._reconnected is None:
                    self._reconnected = asyncio.Event()
            case kind if kind in WIRE_FAULTS:
                self._set_wire_fault(fault)

    def _end(self, fault: InjectedFault) -> None:
        self._active.remove(fault)
        kinds = {other.kind for other in self._active}
        match fault.kind:
            case FaultKind.SLOW:
                self._set_pace()
            case FaultKind.REFUSE if FaultKind.REFUSE not in kinds:
                self._listener.open()
            case kind if kind in RANK_FAULTS and not kinds & RANK_FAULTS:
                self._group.restore()
        if fault.kind in _ON_THE_WIRE:
            self._set_wire_fault(self._active_wire_fault())
        if FaultKind.PARTITION not in kinds and self._reconnected is not None:
            self._reconnected.set()
            self._reconnected = None

    def _set_pace(self) -> None:
        # Set the slow-down of prefill and decode steps; the fault that began last applies.
        prefill = decode = 1.0
        for fault in self._active:
            if fault.kind is FaultKind.SLOW:
                prefill = prefill if fault.only == "decode" else fault.factor
                decode = decode if fault.only == "prefill" else fault.factor
        self._group.slow_prefill, self._group.slow_decode = prefill, decode

    def _active_wire_fault(self) -> InjectedFault | None:
        active = [other for other in self._active if other.kind in _ON_THE_WIRE]
        if not active:
            return None
        return InjectedFault(FaultKind.WIRE_STALL) if active[-1].kind in _STALLING else active[-1]

    def _set_wire_fault(self, fault: InjectedFault | None) -> None:
        if self._wires is not None:
            self._wires.set_fault(fault)
