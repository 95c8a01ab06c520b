"""The source's book: offers of one agent and the leases that protect them, until the blocks are free again. Sans-IO:
events and the time in, commands out. All races of the giving side are decided here; states are lease.py's.

Not here: the bytes (transports), the clock, the lock, the engine's handles (agent.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.commands import Admit, Bump, Command, Drop, Resolve, Send, reckoned
from kvtransfer.credits import Bandwidth, Klass
from kvtransfer.ends import Reason, end
from kvtransfer.guests import Guests
from kvtransfer.layout import fingerprint_of
from kvtransfer.lease import Lease, LeaseError, LeaseEvent, LeaseState, advance
from kvtransfer.leave import Leave, by_name
from kvtransfer.messages import (
    MOST_BLOCKS,
    Accept,
    Card,
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
from kvtransfer.outlet import Offer, Outlet, Ware
from kvtransfer.regions import Region
from kvtransfer.reshard import LayoutMismatch, Plan, layers_per_group, most_pairs, plan
from kvtransfer.tally import Tally
from kvtransfer.ticket import Ticket, renewed
from kvtransfer.transports.base import Link


class SourceBook:
    """`key` is the fleet's, `epoch` this agent's life; numbers of offers are the caller's."""

    def __init__(
        self, card: Card, regions: Sequence[Region], key: bytes, options: Options, tally: Tally
    ) -> None:
        self._card, self._regions, self._options, self._tally = card, regions, options, tally
        self._offers: dict[int, Offer] = {}
        self._names: dict[str, Offer] = {}
        self._outlets: dict[Link, Outlet] = {}
        self._guests = Guests(options)
        self._leave = Leave(key, card, regions)
        self.bandwidth = Bandwidth()
        self._holders = np.zeros(min(region.blocks for region in regions), np.int32)
        self._deadlines: list[tuple[float, int]] = []

    @property
    def held(self) -> dict[str, int]:
        """Leases by state, and invitations that wait."""
        states = [offer.lease.state for offer in self._offers.values()]
        counts = {state.value: states.count(state) for state in LeaseState}
        return {**counts, "waiting_invitations": len(self._guests)}

    def unclaimed_s(self, now: float) -> float:
        """For how long KV has been kept here that nobody was fetching, over all offers there were and are."""
        waiting = [now - offer.began for offer in self._offers.values() if offer.plan is None]
        return self._tally.unclaimed_s + sum(waiting)

    def credits_taken(self) -> int:
        """Bytes under way to all peers, as far as they have said."""
        return sum(outlet.credits.taken_bytes for outlet in self._outlets.values())

    def due(self) -> float | None:
        """When `tick` is wanted next, or earlier. Nobody is woken for what has ended."""
        while self._deadlines and self._deadlines[0][1] not in self._offers:
            heapq.heappop(self._deadlines)
        dues = [self._deadlines[0][0] if self._deadlines else None, self._guests.due()]
        return min((due for due in dues if due is not None), default=None)

    def offer(self, number: int, ware: Ware, now: float) -> tuple[str, list[Command]]:
        """Protect blocks until fetched: (the ticket, what is due). Raises ValueError for what cannot be offered.

        An offer that its sink has given up waiting for ends at once: nobody would come for the blocks.
        """
        self._check(ware)
        generations = [region.generations_of(ware.blocks) for region in self._regions]
        offer = Offer(number, ware, generations, now)
        offer.ticket = self._leave.write(offer)
        self._offers[number] = self._names[ware.name] = offer
        self._holders[ware.distinct] += 1
        self._watch(offer)
        guest, gave_up = self._guests.offered(ware.name, now)
        if guest is not None:
            return offer.ticket, self._answer(offer, guest.link, guest.invite, None, now)
        if gave_up is not None and by_name(ware, gave_up):
            return offer.ticket, self._over(
                offer, Reason.CANCELLED, f"{gave_up} gave up before", now
            )
        return offer.ticket, []

    def ready(self, number: int, layers: int, now: float) -> list[Command]:
        """The first `layers` layers are computed: whatever groups that completes may leave."""
        offer = self._offers.get(number)
        if offer is None or layers <= offer.ready_layers:
            return []
        offer.ready_layers = layers
        if offer.link is None:
            return []
        self._outlets[offer.link].line_up(offer, now)
        return self._pumped(self._outlets[offer.link], now)

    def renew(self, number: int, ttl_s: float, now: float) -> str | None:
        """A later deadline, and a ticket that lives as long; None if the offer is gone or it is too late. Raises
        ValueError for seconds that are none."""
        check_seconds("an offer", ttl_s)
        offer = self._offers.get(number)
        if offer is None or not self._renew(offer, now + ttl_s, now):
            return None
        offer.nonces.append(renewed(offer.nonces[-1]))
        offer.ticket = self._leave.write(offer)
        return offer.ticket

    def revoke(self, number: int, reason: Reason, detail: str, now: float) -> list[Command]:
        """The engine takes its blocks back, whoever reads them: readers find them stale."""
        offer = self._offers.get(number)
        return [] if offer is None else self._over(offer, reason, detail, now)

    def decline(self, name: str, detail: str, now: float) -> list[Command]:
        """No such offer will come: who waits for it need not, nor who comes to wait."""
        if name not in self._names:
            self._guests.ended(name, Reason.DECLINED, now)
        return self._dismiss(name, Reason.DECLINED, detail)

    def close(self, now: float) -> list[Command]:
        commands = [
            command
            for name in list(self._guests)
            for command in self._dismiss(name, Reason.CLOSED, "")
        ]
        return commands + [
            c for number in list(self._offers) for c in self.revoke(number, Reason.CLOSED, "", now)
        ]

    def linked(self, link: Link, card: Card, budget_bytes: int) -> None:
        """A peer that dialled us has proven itself."""
        pair = (card.agent, link.transport)

        def seen(n_bytes: int, seconds: float) -> None:
            self.bandwidth.seen(*pair, n_bytes, seconds)
            self._tally.sent(pair, n_bytes, seconds)

        self._outlets[link] = Outlet(link, card, budget_bytes, list(self._regions), seen)

    def lost(self, link: Link, reason: Reason, detail: str, now: float) -> list[Command]:
        """A peer is gone: what it had claimed is nobody's, and free at once."""
        outlet = self._outlets.pop(link, None)
        if outlet is None:
            return []
        self._guests.lost(link)
        hit = list(outlet.claimed.values())
        return [
            command for each in hit for command in self._over(each, reason, detail, now, tell=False)
        ]

    def tick(self, now: float) -> list[Command]:
        """Leases whose time is up end; invitations that have waited too long are refused."""
        commands: list[Command] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            offer = self._offers.get(heapq.heappop(self._deadlines)[1])
            if offer is not None and offer.lease.deadline <= now:
                commands += self._over(offer, Reason.LEASE_EXPIRED, "", now)
            elif offer is not None:
                self._watch(offer)
        for name in self._guests.overdue(now):
            commands += self._dismiss(name, Reason.NEVER_OFFERED, "")
        return commands

    def invited(self, link: Link, invite: Invite, now: float) -> list[Command]:
        """A sink asks. Whatever is not in order is refused with a reason, and nothing has moved."""
        outlet = self._outlets[link]
        if invite.transfer <= outlet.newest:
            raise ProtocolError(f"transfer {invite.transfer} is not new")
        outlet.newest = invite.transfer
        offer = self._names.get(invite.name)
        ticket: Ticket | None = None
        if invite.ticket is not None:
            shown = self._leave.read(invite.ticket, offer, invite.name, outlet.card.agent, now)
            if isinstance(shown, Reason):
                return self._refuse(link, invite.transfer, shown)
            ticket = shown
        if offer is None:
            refused = self._guests.seat(link, invite, now)
            return [] if refused is None else self._refuse(link, invite.transfer, refused)
        return self._answer(offer, link, invite, ticket, now)

    def stopped(self, link: Link, message: Stop, now: float) -> list[Command]:
        """The sink gave up."""
        if message.reason in (Reason.LANDED, Reason.LEASE_EXPIRED):
            raise ProtocolError(f"{message.reason} is no sink's reason to stop")
        outlet = self._outlets[link]
        unwanted_by = outlet.card.agent if message.reason is Reason.CANCELLED else None
        if self._guests.give_up(link, message.transfer, unwanted_by, now):
            return []
        offer = outlet.claimed.get(message.transfer)
        return (
            []
            if offer is None
            else self._over(offer, message.reason, message.detail, now, tell=False)
        )

    def unwanted(self, link: Link, message: Unwanted, now: float) -> list[Command]:
        """The sink gave up before it asked. Without the right to ask it has no say."""
        agent, offer = self._outlets[link].card.agent, self._names.get(message.name)
        if message.ticket is None:
            theirs = offer is not None and by_name(offer.ware, agent)
            if offer is None:
                self._guests.unwanted(message.name, agent, now)
        else:
            theirs = not isinstance(
                self._leave.read(message.ticket, offer, message.name, agent, now), Reason
            )
        return (
            self._over(offer, Reason.CANCELLED, "", now)
            if offer and theirs and offer.link is None
            else []
        )

    def landed(self, link: Link, message: Landed, now: float) -> list[Command]:
        """The sink has everything. ProtocolError if it cannot have."""
        offer = self._outlets[link].claimed.get(message.transfer)
        if offer is None:
            return []
        if offer.plan is None or not message.n_bytes == offer.put_bytes == offer.plan.n_bytes:
            raise ProtocolError(f"{message.n_bytes} bytes cannot have landed")
        return self._over(offer, Reason.LANDED, "", now, tell=False)

    def credited(self, link: Link, message: Credit, now: float) -> list[Command]:
        """The sink takes more. ProtocolError if it had not been sent so much."""
        outlet = self._outlets[link]
        if message.transfer not in outlet.claimed:
            return []
        try:
            outlet.give(message.transfer, message.n_bytes, now)
        except ValueError as wrong:
            raise ProtocolError(str(wrong)) from wrong
        return self._pumped(outlet, now)

    def unadmitted(self, link: Link, transfer: int, detail: str, now: float) -> list[Command]:
        """The transport cannot work with the sink's grant."""
        offer = self._outlets[link].claimed.get(transfer)
        return [] if offer is None else self._over(offer, Reason.PROTOCOL, detail, now)

    def beaten(self, link: Link, now: float) -> None:
        """The sink is alive, and so are the leases that it has claimed."""
        for offer in self._outlets[link].claimed.values():
            self._renew(offer, now + offer.ware.ttl_s, now)

    def _check(self, ware: Ware) -> None:
        check_words(ware.name)
        check_seconds("an offer", ware.ttl_s)
        size = self._card.layout.block_tokens
        if ware.name in self._names:
            raise ValueError(f"{ware.name} is on offer already")
        if not 0 < ware.tokens <= ware.blocks.size * size:
            raise ValueError(f"{ware.tokens} tokens do not fit into {ware.blocks.size} blocks")
        if ware.blocks.size > MOST_BLOCKS:
            raise ValueError(f"an offer has at most {MOST_BLOCKS} blocks, not {ware.blocks.size}")
        if ware.blocks.min() < 0 or ware.blocks.max() >= self._holders.size:
            raise ValueError(f"blocks lie between 0 and {self._holders.size}")

    def _dismiss(self, name: str, reason: Reason, detail: str) -> list[Command]:
        guest = self._guests.leave(name)
        return (
            [] if guest is None else self._refuse(guest.link, guest.invite.transfer, reason, detail)
        )

    def _refuse(self, link: Link, transfer: int, reason: Reason, detail: str = "") -> list[Command]:
        self._tally.refused[reason] += 1
        return [Send(link, stop(transfer, reason, detail))]

    def _answer(
        self, offer: Offer, link: Link, invite: Invite, ticket: Ticket | None, now: float
    ) -> list[Command]:
        """An invitation meets its offer, whichever came first: is it for this sink, free, and so large?"""
        outlet = self._outlets[link]
        if ticket is None and not by_name(offer.ware, outlet.card.agent):
            return self._refuse(link, invite.transfer, Reason.BAD_TICKET)
        if offer.link is not None:
            return self._refuse(link, invite.transfer, Reason.NAME_TAKEN)
        if invite.tokens > offer.ware.tokens:
            return self._refuse(
                link, invite.transfer, Reason.TOKENS, f"{offer.ware.tokens} are on offer"
            )
        outlet.take(offer, invite.transfer)

        def work() -> Callable[[float], list[Command]]:
            made = self._plan(offer, outlet.card, invite)
            return lambda now: self._claim(offer, link, invite, ticket, made, now)

        layout = self._card.layout
        group_layers = layers_per_group(layout, invite.tokens - invite.skip_tokens)
        pairs = most_pairs(layout, outlet.card.layout, group_layers)
        return reckoned(max(offer.ware.blocks.size, len(invite.blocks) // 4), pairs, work, now)

    def _claim(
        self,
        offer: Offer,
        link: Link,
        invite: Invite,
        ticket: Ticket | None,
        made: Plan | str,
        now: float,
    ) -> list[Command]:
        """One offer becomes one sink's. What does not fit is refused before a byte moves, and stays on offer. Nothing
        comes of it if either is over by now."""
        outlet = self._outlets.get(link)
        if outlet is None or outlet.claimed.get(invite.transfer) is not offer:
            return []
        outlet.let_go(offer)
        if isinstance(made, str):
            return self._refuse(link, invite.transfer, Reason.LAYOUT, made)
        try:
            lease = advance(offer.lease, LeaseEvent.CLAIM, now)
        except LeaseError:
            return self._refuse(link, invite.transfer, Reason.LEASE_EXPIRED) + self.tick(now)
        if ticket is not None and (refused := self._leave.spend(ticket, now)) is not None:
            return self._refuse(link, invite.transfer, refused)
        offer.lease = lease
        outlet.take(offer, invite.transfer)
        return self._begin(offer, outlet, invite, made, now)

    def _begin(
        self, offer: Offer, outlet: Outlet, invite: Invite, made: Plan, now: float
    ) -> list[Command]:
        """The sink hears what it will get, and gets what is there."""
        link = offer.link
        assert link is not None
        self._tally.unclaimed_s += now - offer.began
        window_bytes = max(
            1, min(invite.window_bytes, self._options.window_bytes, link.window_bytes)
        )
        outlet.claim(offer, made, window_bytes)
        offer.klass, offer.urgent_at = Klass(invite.klass), now + invite.slack_s
        outlet.line_up(offer, now)
        accept = Accept(
            transfer=invite.transfer,
            blocks=pack_blocks(offer.ware.blocks),
            group_layers=made.group_layers,
            window_bytes=window_bytes,
            layouts=fingerprint_of(made.src, made.dst),
        )
        commands: list[Command] = [Admit(link, invite.transfer, invite.grant), Send(link, accept)]
        return commands + self._pumped(outlet, now)

    def _plan(self, offer: Offer, card: Card, invite: Invite) -> Plan | str:
        """All computed, and runs join across layers: one group. Else groups, which leave as they are computed, and of
        whose many short runs only a group's are held at a time. Without the lock, so the first group's runs are made as
        well. Or why it cannot be."""
        layout = self._card.layout
        at_once = offer.ready_layers >= layout.layers and layout.same_block(card.layout)
        try:
            made = plan(
                layout,
                card.layout,
                offer.ware.blocks,
                unpack_blocks(invite.blocks),
                invite.tokens,
                skip_tokens=invite.skip_tokens,
                group_layers=layout.layers if at_once else None,
            )
        except (LayoutMismatch, ValueError) as wrong:
            return str(wrong)
        made.runs(0, 0)
        return made

    def _pumped(self, outlet: Outlet, now: float) -> list[Command]:
        """Windows to send. A lease that has run out does not begin to move by that: nobody may claim later that it was
        in time."""
        puts = outlet.pump(now)
        for offer in {
            put.head.transfer: outlet.claimed[put.head.transfer] for put in puts
        }.values():
            if offer.lease.state is LeaseState.CLAIMED and now < offer.lease.deadline:
                offer.lease = advance(offer.lease, LeaseEvent.START, now)
        return list(puts)

    def _renew(self, offer: Offer, deadline: float, now: float) -> bool:
        try:
            offer.lease = advance(
                offer.lease, LeaseEvent.RENEW, now, max(deadline, offer.lease.deadline)
            )
        except LeaseError:
            return False
        return True

    def _watch(self, offer: Offer) -> None:
        heapq.heappush(self._deadlines, (offer.lease.deadline, offer.number))

    def _over(
        self, offer: Offer, reason: Reason, detail: str, now: float, *, tell: bool = True
    ) -> list[Command]:
        """The one way out. The blocks change hands at once: a source never waits, its readers find out."""
        offer.lease = _ended(offer.lease, reason, now)
        if reason is Reason.LANDED and offer.lease.state is LeaseState.EXPIRED:
            reason = Reason.LEASE_EXPIRED
        del self._offers[offer.number], self._names[offer.ware.name]
        self._guests.ended(offer.ware.name, Reason.GONE, now)
        commands: list[Command] = []
        others: list[Command] = []
        transport = ""
        if offer.plan is None:
            self._tally.unclaimed_s += now - offer.began
        if offer.link is not None:
            transport = offer.link.transport
            if offer.link in self._outlets:
                self._outlets[offer.link].release(offer, now, landed=reason is Reason.LANDED)
                others = self._pumped(self._outlets[offer.link], now)
            if reason is not Reason.LANDED:
                commands.append(Drop(offer.link, offer.transfer))
            if tell:
                commands.append(Send(offer.link, stop(offer.transfer, reason, detail)))
        ended = end(
            reason,
            n_bytes=offer.put_bytes,
            seconds=now - offer.began,
            transport=transport,
            detail=detail,
        )
        self._tally.offer_ended(ended)
        return [*commands, Bump(self._let_go(offer)), Resolve(offer.number, ended), *others]

    def _let_go(self, offer: Offer) -> NDArray[np.int64]:
        """The blocks that no other offer protects: requests share the blocks of a common prefix."""
        blocks = offer.ware.distinct
        self._holders[blocks] -= 1
        last: NDArray[np.int64] = blocks[self._holders[blocks] == 0]
        return last


def _ended(lease: Lease, reason: Reason, now: float) -> Lease:
    """The lease in its last state, by lease.py's table."""
    if reason is Reason.LANDED:
        try:
            if lease.state is LeaseState.CLAIMED:
                lease = advance(lease, LeaseEvent.START, now)
            return advance(advance(lease, LeaseEvent.LAND, now), LeaseEvent.RELEASE, now)
        except LeaseError:
            return advance(lease, LeaseEvent.EXPIRE, now)
    return advance(
        lease, LeaseEvent.EXPIRE if reason is Reason.LEASE_EXPIRED else LeaseEvent.REVOKE, now
    )
