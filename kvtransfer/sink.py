"""The sink's book: reservations of one agent, from `fetch` to the fence behind the last writer. Sans-IO: events and the
time in, commands out. All races of the receiving side are decided here.

    WAITING -> INVITED -> MOVING -> FENCING -> gone

Not here: the bytes (transports), the clock, the lock, the engine's handles (agent.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.commands import Command, Dial, Fence, Progress, Resolve, Send, SendInvite, reckoned
from kvtransfer.credits import Klass
from kvtransfer.ends import Reason, end
from kvtransfer.landing import Arrivals, CameBefore, WindowError
from kvtransfer.lattice import distinct
from kvtransfer.layout import KvLayout, fingerprint_of
from kvtransfer.messages import (
    MOST_BLOCKS,
    MOST_TOKENS,
    Accept,
    Credit,
    Invite,
    Landed,
    ProtocolError,
    Stop,
    Unwanted,
    check_seconds,
    check_words,
    pack_blocks,
    stop,
    unpack_blocks,
)
from kvtransfer.options import Options
from kvtransfer.regions import Region
from kvtransfer.reshard import LayoutMismatch, Plan, most_pairs, plan
from kvtransfer.tally import Tally
from kvtransfer.transports.base import Link, Slice, Verdict, WindowHead


class Wish(msgspec.Struct, frozen=True):
    """What an engine asks for: tokens [skip_tokens, tokens) of `name` at `address`, into `blocks`."""

    address: str
    name: str
    blocks: NDArray[np.int64]
    tokens: int
    skip_tokens: int
    timeout_s: float
    klass: Klass = Klass.INTERACTIVE
    ticket: str | None = None


class SinkState(StrEnum):
    """WAITING for a link; INVITED: the peer may write; MOVING: it does; FENCING: over, but for writers still there."""

    WAITING = "waiting"
    INVITED = "invited"
    MOVING = "moving"
    FENCING = "fencing"


class Reservation:
    """One landing. Owned by the SinkBook."""

    __slots__ = (
        "arrivals", "began", "began_moving", "deadline", "end", "layers", "layout", "link", "number", "peer", "plan",
        "said", "state", "wish",
    )  # fmt: skip

    def __init__(self, number: int, wish: Wish, now: float) -> None:
        self.number, self.wish = number, wish
        self.began, self.deadline = now, now + wish.timeout_s
        self.state = SinkState.WAITING
        self.link: Link | None = None
        self.said = False
        self.peer = ""
        self.layout: KvLayout | None = None
        self.plan: Plan | None = None
        self.arrivals: Arrivals | None = None
        self.began_moving = now
        self.layers = 0
        self.end: tuple[Reason, str] | None = None


class SinkBook:
    """`regions`: this agent's, one per rank. Numbers of reservations are the caller's, and transfers on the wire."""

    def __init__(
        self, layout: KvLayout, regions: Sequence[Region], options: Options, tally: Tally
    ) -> None:
        self._layout, self._regions, self._options, self._tally = layout, regions, options, tally
        self._held: dict[int, Reservation] = {}
        self._links: dict[str, tuple[Link, KvLayout, str]] = {}
        self._waiting: dict[str, list[Reservation]] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def held(self) -> dict[str, int]:
        """Reservations by state."""
        states = [reservation.state for reservation in self._held.values()]
        return {state.value: states.count(state) for state in SinkState}

    def due(self) -> float | None:
        """When `tick` is wanted next."""
        while self._deadlines and self._deadlines[0][1] not in self._held:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fetch(self, number: int, wish: Wish, now: float) -> list[Command]:
        """Begin a landing. `check` comes first."""
        reservation = Reservation(number, wish, now)
        self._held[number] = reservation
        heapq.heappush(self._deadlines, (reservation.deadline, number))
        if wish.address in self._links:
            return [self._invite(reservation, now)]
        waiting = self._waiting.get(wish.address)
        self._waiting.setdefault(wish.address, []).append(reservation)
        return [Dial(wish.address)] if waiting is None else []

    def linked(
        self, address: str, link: Link, layout: KvLayout, agent: str, now: float
    ) -> list[Command]:
        """The link that was dialled is up, and the peer has proven itself."""
        self._links[address] = (link, layout, agent)
        commands: list[Command] = []
        for each in self._waiting.pop(address, []):
            if each.number in self._held:
                commands.append(self._invite(each, now))
            else:
                commands += self._never_asked(link, each)
        return commands

    def unlinked(self, address: str, reason: Reason, detail: str, now: float) -> list[Command]:
        """There will be no link: what waits for it ends."""
        waiters = [each for each in self._waiting.pop(address, []) if each.number in self._held]
        return [
            command
            for each in waiters
            for command in self._over(each, reason, detail, now, tell=False)
        ]

    def leave(self, link: Link) -> None:
        """A link is about to go: what is on it may still land, and whatever comes now has another dialled."""
        self._links = {
            address: there for address, there in self._links.items() if there[0] is not link
        }

    def lost(self, link: Link, reason: Reason, detail: str, now: float) -> list[Command]:
        """A link is gone. Its writers may not be: everything on it goes through the fence."""
        self.leave(link)
        hit = [reservation for reservation in self._held.values() if reservation.link is link]
        return [
            command for each in hit for command in self._over(each, reason, detail, now, tell=False)
        ]

    def cancel(self, number: int, reason: Reason, detail: str, now: float) -> list[Command]:
        """The engine gives up. Too late when it has ended otherwise."""
        reservation = self._held.get(number)
        return [] if reservation is None else self._over(reservation, reason, detail, now)

    def close(self, now: float) -> list[Command]:
        return [
            command
            for number in list(self._held)
            for command in self.cancel(number, Reason.CLOSED, "", now)
        ]

    def tick(self, now: float) -> list[Command]:
        """Whatever has not landed by its deadline does not land."""
        commands: list[Command] = []
        while (due := self.due()) is not None and due <= now:
            _, number = heapq.heappop(self._deadlines)
            commands += self.cancel(number, Reason.TIMEOUT, "", now)
        return commands

    def accepted(self, link: Link, message: Accept, now: float) -> list[Command]:
        """The source sends. Raises ProtocolError when nobody asked."""
        reservation = self._on(link, message.transfer)
        if reservation is None or reservation.state is SinkState.FENCING:
            return []
        if reservation.state is not SinkState.INVITED:
            raise ProtocolError(
                f"transfer {message.transfer} is {reservation.state}: it cannot be accepted"
            )

        def work() -> Callable[[float], list[Command]]:
            made = self._plan(reservation, message)
            return lambda now: self._begin(reservation, made, now)

        assert reservation.layout is not None
        pairs = most_pairs(reservation.layout, self._layout, message.group_layers)
        return reckoned(
            max(reservation.wish.blocks.size, len(message.blocks) // 4), pairs, work, now
        )

    def _begin(self, reservation: Reservation, made: Arrivals | str, now: float) -> list[Command]:
        """Windows may come. Unless the landing is over by now."""
        if reservation.state is not SinkState.INVITED:
            return []
        if isinstance(made, str):
            return self._over(reservation, Reason.LAYOUT, made, now)
        reservation.plan, reservation.arrivals = made.plan, made
        reservation.state, reservation.began_moving = SinkState.MOVING, now
        return []

    def stopped(self, link: Link, message: Stop, now: float) -> list[Command]:
        """The source gave up, or refused."""
        if message.reason is Reason.LANDED:
            raise ProtocolError("a source cannot say that bytes have landed")
        reservation = self._on(link, message.transfer)
        if reservation is None:
            return []
        return self._over(reservation, message.reason, message.detail, now, tell=False)

    def incoming(self, link: Link, head: WindowHead) -> Slice | None:
        """Where a window goes: once, as planned, and only while its transfer is moving. Raises WindowError for one that
        is not in the plan: then `misled` is due."""
        reservation = self._moving(link, head.transfer)
        if reservation is None or reservation.arrivals is None or reservation.plan is None:
            self._tally.discarded["late"] += 1
            return None
        try:
            runs = reservation.arrivals.begin(
                head.group, head.pair, head.first, head.count, head.n_bytes
            )
        except CameBefore:
            self._tally.discarded["repeated"] += 1
            return None
        except WindowError:
            self._tally.discarded["unplanned"] += 1
            raise
        src_rank, dst_rank = reservation.plan.pairs(head.group)[head.pair]
        return Slice(runs, self._regions[dst_rank], src_rank, dst_rank)

    def misled(self, link: Link, transfer: int, detail: str, now: float) -> list[Command]:
        """The source's plan is not ours: what is missing would never come."""
        reservation = self._moving(link, transfer)
        return [] if reservation is None else self._over(reservation, Reason.PROTOCOL, detail, now)

    def landed(self, link: Link, head: WindowHead, verdict: Verdict, now: float) -> list[Command]:
        """A window is in place, or what is there must not be used."""
        reservation = self._moving(link, head.transfer)
        if reservation is None or reservation.arrivals is None:
            return []
        if verdict is not Verdict.OK:
            return self._over(reservation, Reason(verdict.value), f"layer group {head.group}", now)
        try:
            reservation.arrivals.land(head.group, head.pair, head.first, head.count)
        except WindowError:
            self._tally.discarded["repeated"] += 1
            return []
        commands = self._progress(reservation)
        if not reservation.arrivals.complete:
            return [*commands, Send(link, Credit(head.transfer, head.n_bytes))]
        self._measure(reservation, link, now)
        reservation.state, reservation.end = SinkState.FENCING, (Reason.LANDED, "")
        done = Landed(head.transfer, reservation.arrivals.n_bytes)
        return [*commands, Send(link, done), Fence(link, head.transfer)]

    def fenced(self, link: Link, transfer: int, now: float) -> list[Command]:
        """No writer is left: the blocks are the engine's again."""
        reservation = self._on(link, transfer)
        if reservation is None or reservation.state is not SinkState.FENCING:
            return []
        return self._resolve(reservation, now)

    def all_fenced(self, now: float) -> list[Command]:
        """Every transport has ended, with its threads: nobody can write any more, whether it said so or not."""
        left = [each for each in self._held.values() if each.state is SinkState.FENCING]
        return [command for each in left for command in self._resolve(each, now)]

    def invites(self, link: Link, transfer: int) -> bool:
        """Whether the peer is still to write: then it is asked to now."""
        reservation = self._on(link, transfer)
        if reservation is None or reservation.state is SinkState.FENCING:
            return False
        reservation.said = True
        return True

    def check(self, wish: Wish) -> None:
        """Raises ValueError for a wish that cannot be: blocks that are not, tokens that do not fit. Needs no lock."""
        check_words(wish.name, wish.ticket)
        check_seconds("a landing", wish.timeout_s)
        if not 0 <= wish.skip_tokens < wish.tokens <= MOST_TOKENS:
            raise ValueError(f"tokens {wish.skip_tokens} to {wish.tokens} are none")
        if wish.blocks.size * self._layout.block_tokens < wish.tokens:
            raise ValueError(f"{wish.tokens} tokens do not fit into {wish.blocks.size} blocks")
        most = min(region.blocks for region in self._regions)
        if wish.blocks.size > MOST_BLOCKS or wish.blocks.min() < 0 or wish.blocks.max() >= most:
            raise ValueError(f"blocks lie between 0 and {most}")
        if distinct(wish.blocks).size != wish.blocks.size:
            raise ValueError("a block is named twice")

    def _invite(self, reservation: Reservation, now: float) -> Command:
        wish = reservation.wish
        link, reservation.layout, reservation.peer = self._links[wish.address]
        reservation.state, reservation.link = SinkState.INVITED, link
        left_s = max(0.0, reservation.deadline - now)
        invite = Invite(
            transfer=reservation.number,
            name=wish.name,
            blocks=pack_blocks(wish.blocks),
            tokens=wish.tokens,
            skip_tokens=wish.skip_tokens,
            wait_s=min(left_s, 86_400.0),
            slack_s=min(left_s, 86_400.0),
            klass=int(wish.klass),
            window_bytes=min(self._options.window_bytes, link.window_bytes),
            ticket=wish.ticket,
        )
        block_tokens = self._layout.block_tokens
        written = wish.blocks[wish.skip_tokens // block_tokens : -(-wish.tokens // block_tokens)]
        return SendInvite(
            link, invite, written
        )  # those before are cached: others may be reading them

    def _plan(self, reservation: Reservation, message: Accept) -> Arrivals | str:
        """What the source plans as well: from its blocks and layout, and ours. Or why that cannot be. Without the lock,
        so the first group's runs are made as well."""
        wish = reservation.wish
        assert reservation.layout is not None
        ours = fingerprint_of(reservation.layout, self._layout)
        if message.layouts != ours:
            return f"the source plans from other layouts: {ours} here, {message.layouts or 'none'} there"
        if message.window_bytes > self._options.window_bytes:
            return f"windows of {message.window_bytes} bytes are too large"
        try:
            made = plan(
                reservation.layout,
                self._layout,
                unpack_blocks(message.blocks),
                wish.blocks,
                wish.tokens,
                skip_tokens=wish.skip_tokens,
                group_layers=message.group_layers,
            )
        except (LayoutMismatch, ValueError) as wrong:
            return str(wrong)
        made.runs(0, 0)
        return Arrivals(made)

    def _on(self, link: Link, transfer: int) -> Reservation | None:
        """The reservation, if it is this link's: no peer reaches another's."""
        reservation = self._held.get(transfer)
        return reservation if reservation is not None and reservation.link is link else None

    def _moving(self, link: Link, transfer: int) -> Reservation | None:
        reservation = self._on(link, transfer)
        return (
            reservation
            if reservation is not None and reservation.state is SinkState.MOVING
            else None
        )

    def _progress(self, reservation: Reservation, *, fenced: bool = False) -> list[Command]:
        """What of it may be read. Nothing ahead of the fence, where until then the source can write what it likes."""
        layers = 0 if reservation.arrivals is None else reservation.arrivals.layers
        early = reservation.link is not None and reservation.link.one_sided and not fenced
        if layers == reservation.layers or early:
            return []
        reservation.layers = layers
        return [Progress(reservation.number, layers)]

    def _measure(self, reservation: Reservation, link: Link, now: float) -> None:
        pair = (reservation.peer, link.transport)
        self._tally.moved(pair, _moved(reservation), now - reservation.began_moving)

    def _over(
        self,
        reservation: Reservation,
        reason: Reason,
        detail: str,
        now: float,
        *,
        tell: bool = True,
    ) -> list[Command]:
        """The landing fails. Its blocks come back behind the fence only; with nobody invited there is none."""
        if reservation.state is SinkState.FENCING:
            return []
        reservation.end = (reason, detail)
        if reservation.link is None:
            return self._resolve(reservation, now)
        reservation.state = SinkState.FENCING
        fence = Fence(reservation.link, reservation.number)
        if not tell:
            return [fence]
        if not reservation.said:
            return [*self._never_asked(reservation.link, reservation), fence]
        return [Send(reservation.link, stop(reservation.number, reason, detail)), fence]

    def _never_asked(self, link: Link, reservation: Reservation) -> list[Command]:
        """What the source hears of a landing that was cancelled before its invitation left: blocks are not kept for
        nobody. Nothing where another landing wants the same."""
        wish = reservation.wish
        wanted = any(
            (each.wish.address, each.wish.name) == (wish.address, wish.name)
            and each.state is not SinkState.FENCING
            for each in self._held.values()
        )
        unwanted = reservation.end is not None and reservation.end[0] is Reason.CANCELLED
        return [Send(link, Unwanted(wish.name, wish.ticket))] if unwanted and not wanted else []

    def _resolve(self, reservation: Reservation, now: float) -> list[Command]:
        assert reservation.end is not None
        del self._held[reservation.number]
        reason, detail = reservation.end
        transport = "" if reservation.link is None else reservation.link.transport
        ended = end(
            reason,
            n_bytes=_moved(reservation),
            seconds=now - reservation.began,
            transport=transport,
            detail=detail,
        )
        self._tally.landing_ended(ended)
        last = self._progress(reservation, fenced=True) if ended.landed else []
        return [*last, Resolve(reservation.number, ended)]


def _moved(reservation: Reservation) -> int:
    return 0 if reservation.arrivals is None else reservation.arrivals.n_bytes
