"""The gate: who may occupy the gateway. Rooms with Permits per pool, memory for bodies, turns for retries.

The decisions are policies.admission's and policies.retry's; here is the waiting around them. Every taking is given back
by leaving a `with`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from math import ceil
from time import monotonic
from types import MappingProxyType

from gateway.answer import Failure, GatewayError
from gateway.config import Config, WaitingRoom
from gateway.errand import within
from gateway.large_bodies import LargeBodies
from gateway.quotas import Quotas
from gateway.shared.news import News
from policies import admission, waiting
from policies.admission import Admission, Admit, Cap, Outcome, Shed, Verdict, Wait
from policies.dual import PricedAdmission
from policies.fairness import FairShares, charged_tokens
from policies.model import Ask, Candidate, EndpointLoad, Pick, Request
from policies.retry import RetryBudget, RetryLimits
from policies.sessions import WorkingSet

RETRY_PATIENCE_S = 5.0

# uvloop's timers count whole milliseconds and may come that much early: who is due within this is due.
TIMER_SLACK_S = 0.002

# Reasons that are told apart by their code. The others are a price of some kind: too much would be lost by serving it.
FAILURES: Mapping[str, Failure] = MappingProxyType(
    {
        "waited_too_long": Failure.QUEUE_TIMEOUT,
        "waiting_room_full": Failure.OVERLOADED,
        "too_slow": Failure.OVERLOADED,
        "deadline": Failure.DEADLINE_UNREACHABLE,
    }
)

AT_ONCE = 4  # who goes in is picked for and sent on, a third of a millisecond each

Turn = asyncio.Future[Verdict]


class Room:
    """The permits of one pool and those who wait for one: policies.waiting's room, whose tickets are futures.

    `with` it to give a permit back. `listens`: its admission learns from requests, and is told of them.
    """

    __slots__ = ("_candidates", "_leaving", "_news", "_room", "_verdicts", "listens", "name", "take")

    def __init__(self, name: str) -> None:
        self.name = name
        self._room: waiting.Room[Turn] = waiting.Room(Cap())
        self.listens = False
        self._verdicts: deque[tuple[Turn, Verdict]] = deque()
        self._news: News | None = None
        self._candidates: tuple[Candidate, ...] = ()
        self._leaving: tuple[EndpointLoad, ...] = ()
        self.take = self._room.take

    def configure(
        self, limits: WaitingRoom, candidates: tuple[Candidate, ...], leaving: tuple[EndpointLoad, ...] = ()
    ) -> None:
        """From now on these limits and endpoints; at the `leaving` ones, requests of before finish."""
        self._room.limits = admission.WaitingRoom(limits.size, limits.timeout)
        self._candidates, self._leaving = candidates, leaving
        self.refresh()

    def govern(self, judge: Admission, shares: Mapping[str, float]) -> None:
        """From now on this admission decides, and tenants have these shares. configure() is due after it.

        A mere cap with a single tenant learns nothing from requests and is not told of them.
        """
        self._room.admission = judge
        self._room.share(FairShares(shares))
        self.listens = bool(shares) or type(judge) is not Cap
        self._share()

    def tell(self, news: News | None) -> None:
        """From now on other gateways hear of what tenants are charged, and of sessions."""
        self._news = news
        self._share()

    def _share(self) -> None:
        if self._news is not None and self.sessions is not None:
            self.sessions.share(self._news.named)

    @property
    def admission(self) -> Admission:
        return self._room.admission

    @property
    def price(self) -> float:
        """What the admission asks for a typical request; 0 for one that has no prices."""
        judge = self._room.admission
        return judge.price if isinstance(judge, PricedAdmission) else 0.0

    @property
    def sessions(self) -> WorkingSet | None:
        """Those whose contexts are counted; None for an admission that does not watch them."""
        judge = self._room.admission
        return judge.sessions if isinstance(judge, PricedAdmission) else None

    @property
    def phi(self) -> float:
        """The share of KV memory that sessions may fill; 1 for an admission that does not watch them."""
        return 1.0 if self.sessions is None else self.sessions.phi

    def booked(self, ask: Ask, pick: Pick) -> None:
        """One with a permit was picked its first endpoint. Due where the room listens."""
        self._room.booked(ask, pick)
        if self._news is not None:
            self._news.charge(self.name, ask.request.tenant, charged_tokens(ask.request, pick.cached_tokens))

    def ended(self, request: Request, outcome: Callable[[], Outcome]) -> None:
        """One that was booked is over, and how."""
        if self.listens:
            told = outcome()
            self._room.ended(request, told)
            if self._news is not None:
                self._news.charge(self.name, request.tenant, told.output_tokens - request.output_tokens)

    def charged_elsewhere(self, tenant: str, tokens: float) -> None:
        """Another gateway of the fleet did so much work for the tenant."""
        self._room.charged_elsewhere(tenant, tokens)

    def tick(self, now: float) -> None:
        """The admission's clockwork, due about every 100 ms."""
        self._room.tick(now)
        if self._room.waiting:
            self._settle()

    def refresh(self) -> None:
        """Endpoints came or went: count the capacity anew and let in whom it fits."""
        self._room.refresh(self._candidates, self._leaving)
        self._settle()

    @property
    def in_flight(self) -> int:
        return self._room.in_flight

    @property
    def waiting(self) -> int:
        return self._room.waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those who wait."""
        return self._room.queued_tokens

    @property
    def busy(self) -> int:
        return self._room.busy

    async def enter(self, ask: Ask, again: Callable[[float], Ask] | None = None) -> Room:
        """A Permit, now or after waiting. Raises GatewayError when the request is shed. `again` asks it at
        another moment."""
        turn: Turn = asyncio.get_running_loop().create_future()
        verdict = self._room.arrive(ask, self._candidates, turn, again)
        self._settle()
        if isinstance(verdict, Wait):
            verdict = await self._wait(ask.request, turn, verdict.timeout_s)
        if isinstance(verdict, Shed):
            raise refusal(verdict)
        return self

    def enter_now(self, ask: Ask) -> bool:
        """Whether there was a Permit without waiting, which has been taken then."""
        return isinstance(self._room.knock(ask, self._candidates), Admit)

    def unbooked(self, request: Request) -> None:
        """One who was let in after waiting got no endpoint."""
        self._room.unbooked(request)

    async def _wait(self, request: Request, turn: Turn, timeout_s: float) -> Verdict:
        """What becomes of one in line. The timer only calls settle() at the moment when the room refuses it."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._settle)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and isinstance(turn.result(), Admit):
                self._room.withdraw()  # the turn came in the same moment: hand it on
                self._settle()
            else:
                self._room.cancel(turn)
            self._room.unbooked(request)
            raise
        finally:
            timer.cancel()

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.gone(monotonic())
        if self._room.waiting:
            self._settle()

    def _settle(self) -> None:
        more_due = bool(self._verdicts)
        self._verdicts.extend(self._room.settle(monotonic() + TIMER_SLACK_S))
        if not more_due:
            self._hand_out()

    def _hand_out(self) -> None:
        """Some verdicts a turn of the loop: a hundred who go in at once would hold up everybody else."""
        told = 0
        while self._verdicts and told < AT_ONCE:  # no recursion: a crowd may leave in the turn in which it is told
            turn, verdict = self._verdicts.popleft()
            if not turn.done():
                turn.set_result(verdict)
                told += 1
            elif isinstance(verdict, Admit):
                self._room.withdraw()
                self._verdicts.extend(self._room.settle(monotonic() + TIMER_SLACK_S))
        if self._verdicts:
            self._verdicts[0][0].get_loop().call_soon(self._hand_out)


def refusal(shed: Shed) -> GatewayError:
    """A verdict as the client hears it."""
    if shed.reason == "no_capacity":
        return GatewayError(Failure.NO_CAPACITY, shed.detail, retry_after_s=1.0)
    failure = FAILURES.get(shed.reason, Failure.SHED)
    return GatewayError(failure, shed.detail, retry_after_s=shed.retry_after_s, reason=shed.reason)


class Gate:
    """All rooms, tenants' quotas, the memory for bodies, and the fleet's retry turns. Live: it outlives snapshots."""

    __slots__ = (
        "_budget_bytes",
        "_news",
        "_retries",
        "_retrying",
        "_rooms",
        "body_bytes",
        "large_bodies",
        "quotas",
        "stopping",
    )

    def __init__(self, config: Config) -> None:
        self._rooms: dict[str, Room] = {}
        self._retries = RetryBudget(RetryLimits())
        self._retrying: deque[asyncio.Future[bool]] = deque()
        self.stopping = False
        self._news: News | None = None
        self.quotas = Quotas()
        self.large_bodies = LargeBodies()
        self.body_bytes = 0
        self.configure(config)

    def configure(self, config: Config) -> None:
        """From now on these limits; what is held stays held."""
        self.quotas.configure(config.tenants)
        self._budget_bytes = config.limits.body_budget
        self._retries.limits = RetryLimits(config.retries.budget, config.retries.floor)

    def room(self, pool: str) -> Room:
        """The pool's room, or a new one for open(). Who is in it stays in it, whatever is configured."""
        return self._rooms.get(pool) or Room(pool)

    def open(self, room: Room) -> None:
        """Its pool is in force."""
        room.tell(self._news)
        self._rooms[room.name] = room

    def tell(self, news: News) -> None:
        """From now on other gateways hear of what tenants take, and of sessions."""
        self._news = self.quotas.news = news
        for room in self._rooms.values():
            room.tell(news)

    def close(self, room: Room) -> None:
        """Its pool is gone, and so is everybody who was in it."""
        if self._rooms.get(room.name) is room:
            del self._rooms[room.name]

    def rooms(self) -> list[Room]:
        return list(self._rooms.values())

    def tick(self, now: float) -> None:
        """Due about every 100 ms."""
        for room in self._rooms.values():
            room.tick(now)

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
        if self.stopping:
            return False
        if self.retry_at_once():
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._retrying.append(turn)
        try:
            async with within(RETRY_PATIENCE_S):
                await turn
        except TimeoutError:
            return turn.done() and not turn.cancelled() and turn.result()  # it came in the same moment
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.give_back_turn()
            raise
        finally:
            if turn in self._retrying:
                self._retrying.remove(turn)
        return turn.result()

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
                turn.set_result(True)
                return
        self._retries.give_back()

    def end_retries(self) -> None:
        """The gateway stops: nobody is asked any more, and whoever waits for a turn hears of it."""
        self.stopping = True
        for turn in self._retrying:
            if not turn.done():
                turn.set_result(False)

    @property
    def retries_running(self) -> int:
        return self._retries.running

    @property
    def retries_left(self) -> int | None:
        """How many more would be granted now. None: the configuration allows none at all, so none can be used up."""
        limits = self._retries.limits
        if not limits.floor and not limits.share:
            return None
        return max(0, ceil(limits.floor + limits.share * self.active) - self._retries.running)
