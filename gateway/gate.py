"""The gate: who may occupy the gateway. Rooms with Permits per pool, memory for bodies, turns for retries.

The decisions are policies.admission's and policies.retry's; here is the waiting around them. Every taking is given back
by leaving a `with`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic

from gateway.answer import Failure, GatewayError
from gateway.config import Config, WaitingRoom
from gateway.errand import within
from policies import admission
from policies.admission import Admit, DrainRate, Shed
from policies.model import Candidate
from policies.retry import RetryBudget, RetryLimits

RETRY_PATIENCE_S = 5.0

_WHY = {
    "no_capacity": "No endpoint is available.",
    "waiting_room_full": "The waiting room is full.",
    "too_slow": "The wait would be longer than the waiting room allows.",
    "waited_too_long": "No endpoint became free in time.",
}


class Room:
    """The permits of one pool and those who wait for one, first come first served. `with` it to give a permit back."""

    __slots__ = ("_candidates", "_capacity", "_degraded", "_drain", "_limits", "_waiting", "in_flight", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._drain = DrainRate()
        self._limits = admission.WaitingRoom()
        self._candidates: tuple[Candidate, ...] = ()
        self._capacity = 0
        self._degraded = False

    def configure(self, limits: WaitingRoom, candidates: tuple[Candidate, ...]) -> None:
        self._limits = admission.WaitingRoom(limits.size, limits.timeout)
        self._candidates = candidates
        self.refresh()

    def refresh(self) -> None:
        """Endpoints came or went: count the capacity anew and let in whom it fits."""
        self._capacity = admission.capacity(self._candidates)
        self._degraded = not all(candidate.load.available for candidate in self._candidates)
        self._let_in()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Permits that weigh on available endpoints; answers still flowing from an ejected one take nobody's place."""
        if not self._degraded:
            return self.in_flight
        elsewhere = sum(each.load.in_flight for each in self._candidates if not each.load.available)
        return max(0, self.in_flight - elsewhere)

    def take(self) -> bool:
        """A Permit, if it can be had without a thought: what nearly always holds."""
        if self._waiting or self.in_flight >= self._capacity or self._degraded:
            return False
        self.in_flight += 1
        return True

    async def enter(self) -> Room:
        """A Permit, now or after waiting. Raises GatewayError when the request is shed."""
        if self.take():
            return self
        now = monotonic()
        verdict = admission.admit(self.busy, self._capacity, len(self._waiting), self._limits, self._drain, now)
        if isinstance(verdict, Shed):
            raise self._shed(verdict)
        if isinstance(verdict, Admit):
            self.in_flight += 1
        else:
            await self._wait(verdict.timeout_s)
        return self

    async def _wait(self, timeout_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with within(timeout_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as problem:
            if turn.done() and not turn.cancelled():  # the turn came in the same moment: hand it on
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(problem, TimeoutError):
                raise self._shed(admission.timed_out(len(self._waiting), self._drain, monotonic())) from None
            raise

    def _shed(self, shed: Shed) -> GatewayError:
        if shed.reason == "no_capacity":
            return GatewayError(Failure.NO_CAPACITY, _WHY[shed.reason], retry_after_s=1.0)
        failure = Failure.QUEUE_TIMEOUT if shed.reason == "waited_too_long" else Failure.OVERLOADED
        message = (
            f"{_WHY[shed.reason]} {self.busy} of {self._capacity} places are taken and {self.waiting} requests wait"
        )
        expected = "" if shed.retry_after_s is None else f"; a place is expected in {shed.retry_after_s:.1f} s"
        return GatewayError(failure, f"{message}{expected}.", retry_after_s=shed.retry_after_s, reason=shed.reason)

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self.in_flight -= 1
        self._drain.completed(monotonic())
        if self._waiting:
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.busy < self._capacity:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)


class Gate:
    """All rooms, the memory for bodies, and the fleet's retry turns. Live: it outlives snapshots."""

    def __init__(self, config: Config) -> None:
        self._rooms: dict[str, Room] = {}
        self._budget_bytes = config.limits.body_budget
        self._retry_limits = RetryLimits(config.retries.budget, config.retries.floor)
        self._retries = RetryBudget(self._retry_limits)
        self._retrying: deque[asyncio.Future[None]] = deque()
        self.body_bytes = 0

    def room(self, name: str, limits: WaitingRoom, candidates: tuple[Candidate, ...]) -> Room:
        """The room of a pool, configured anew; who is in it stays in it."""
        room = self._rooms.setdefault(name, Room(name))
        room.configure(limits, candidates)
        return room

    def rooms(self) -> list[Room]:
        return list(self._rooms.values())

    def refresh(self) -> None:
        """Some endpoint's availability changed."""
        for room in self._rooms.values():
            room.refresh()

    @property
    def active(self) -> int:
        return sum(room.in_flight for room in self._rooms.values())

    def hold(self, body_bytes: int) -> int:
        """Take memory for a body as it comes in; what was taken, to be released.

        Raises GatewayError when there is none left.
        """
        if self.body_bytes + body_bytes > self._budget_bytes:
            raise GatewayError(
                Failure.OVERLOADED,
                f"Request bodies already take {self.body_bytes} of {self._budget_bytes} bytes.",
                retry_after_s=1.0,
                reason="body_budget",
            )
        self.body_bytes += body_bytes
        return body_bytes

    def release(self, body_bytes: int) -> None:
        self.body_bytes -= body_bytes

    async def retry_turn(self) -> bool:
        """Take one retry out of the fleet's budget. Over budget a request waits for its turn before it gives up:
        a dead group's requests are spread over time rather than refused. Pair True with give_back_turn()."""
        if self.retry_at_once():
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._retrying.append(turn)
        try:
            async with within(RETRY_PATIENCE_S):
                await turn
        except TimeoutError:
            return turn.done() and not turn.cancelled()  # it came in the same moment
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back_turn()
            raise
        finally:
            if turn in self._retrying:
                self._retrying.remove(turn)
        return True

    def retry_at_once(self) -> bool:
        """As retry_turn(), without waiting: False when the budget is used up."""
        return self._retries.try_take(self.active)

    def give_back_turn(self) -> None:
        self._retries.give_back()
        while self._retrying and self._retries.try_take(self.active):
            self._pass_turn()

    def _pass_turn(self) -> None:
        """Hand a retry that was taken to the first who still waits for one."""
        while self._retrying:
            turn = self._retrying.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._retries.give_back()

    @property
    def retries_running(self) -> int:
        return self._retries.running

    @property
    def retries_left(self) -> int:
        allowed = self._retry_limits.floor + self._retry_limits.share * self.active
        return max(0, int(allowed) - self._retries.running)
