"""The logic of the source, the agent that sends KV: what happens to each of its offers.

A lease, the promise to keep offered KV, protects the blocks of an offer from reuse. All races of
the sending side are decided here, without I/O: events and the time go in, commands come out.
Transports move the bytes. agent.py has the clock, the lock and the engine's objects.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import chain

from kvtransfer.layout.kv_layout import pair_fingerprint
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import (
    LayoutMismatch,
    Ranks,
    TransferPlan,
    layers_per_group,
    max_pairs,
    plan_transfer,
)
from kvtransfer.protocol.agent_messages import (
    MAX_BLOCKS,
    Accept,
    AgentCard,
    Credit,
    Invite,
    Landed,
    ProtocolError,
    StopTransfer,
    Unwanted,
    check_seconds,
    check_texts,
    make_stop,
    pack_blocks,
    unpack_blocks,
)
from kvtransfer.protocol.lease import LeaseError, LeaseEvent, LeaseState, advance, end_lease
from kvtransfer.protocol.outcomes import EndReason, outcome_for
from kvtransfer.protocol.ticket import Ticket, renewed_nonce
from kvtransfer.transfer.authorization import Authorizer, may_fetch_by_name
from kvtransfer.transfer.bandwidth_meter import BandwidthMeter
from kvtransfer.transfer.commands import (
    AcceptGrant,
    BumpGenerations,
    Command,
    DropWindows,
    ResolveHandle,
    SendMessage,
    plan_or_defer,
)
from kvtransfer.transfer.leased_offer import LeasedOffer, OfferSpec
from kvtransfer.transfer.offer_division import OfferSharing
from kvtransfer.transfer.offered_blocks import OfferedBlocks
from kvtransfer.transfer.pending_invites import PendingInvites
from kvtransfer.transfer.send_queue import SendQueue
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.transfer.transfer_order import Priority
from kvtransfer.transport_interface import Link
from kvtransfer.util.agent_options import AgentOptions


class TransferSource:
    """All offers of KV of one agent; most methods handle an event and return commands to execute.

    key  the fleet's shared secret, for tickets
    """

    def __init__(
        self,
        card: AgentCard,
        regions: Sequence[Region],
        key: bytes,
        options: AgentOptions,
        stats: AgentStats,
    ) -> None:
        self._card, self._regions, self._options, self._stats = card, regions, options, stats
        self._offers: dict[int, LeasedOffer] = {}
        self._names: dict[str, LeasedOffer] = {}
        self._send_queues: dict[Link, SendQueue] = {}
        self._pending_invites = PendingInvites(options)
        self._authorizer = Authorizer(key, card, regions)
        self._sharing = OfferSharing(card, self._add_share)
        self.bandwidth = BandwidthMeter()
        self._blocks = OfferedBlocks(min(region.blocks for region in regions))
        self._deadlines: list[tuple[float, int]] = []
        self._set_deadlines = 0
        self._lost_rank: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        states = [offer.lease.state for offer in self._offers.values()]
        counts = {state.value: states.count(state) for state in LeaseState}
        return {**counts, "waiting_invitations": len(self._pending_invites)}

    def unclaimed_s(self, now: float) -> float:
        """Return the total seconds that offers of KV have waited to be fetched."""
        offers = self._offers.values()
        waiting = [now - offer.started_at for offer in offers if offer.is_unclaimed]
        return self._stats.unclaimed_s + sum(waiting)

    def in_flight_bytes(self) -> int:
        """Return the number of bytes of KV in flight to all peers."""
        return sum(send_queue.credits.in_flight_bytes for send_queue in self._send_queues.values())

    @property
    def deadline_count(self) -> int:
        """Return the number of deadlines set so far; only a new one can advance `next_deadline`."""
        return self._set_deadlines + self._pending_invites.deadline_count

    def next_deadline(self) -> float | None:
        """Return when to call `tick` next: not after the next deadline; None without a deadline."""
        while self._deadlines and self._deadlines[0][1] not in self._offers:
            heapq.heappop(self._deadlines)
        waiting = self._pending_invites.next_deadline()
        if not self._deadlines:
            return waiting
        return self._deadlines[0][0] if waiting is None else min(self._deadlines[0][0], waiting)

    def offer(self, number: int, spec: OfferSpec, now: float) -> tuple[str, list[Command]]:
        """Begin an offer of KV: from now on, its blocks may not be reused.

        Returns the ticket (a text that permits the fetch), and commands to execute. The offer ends
        immediately if the agent that wanted the KV has given up. Raises ValueError for an invalid
        offer.
        """
        self._check(spec)
        generations = [region.generations_of(spec.blocks) for region in self._regions]
        offer = LeasedOffer(number, spec, generations, now)
        offer.ticket = self._authorizer.issue(offer)
        self._offers[number] = self._names[spec.name] = offer
        self._blocks.protect(spec.distinct)
        self._push_deadline(offer)
        if self._lost_rank is not None:
            return offer.ticket, self._end(offer, EndReason.RANK_LOST, self._lost_rank, now)
        waiting, gave_up = self._pending_invites.take_for_offer(spec.name, now)
        if waiting:
            answers = (
                self._answer_invite(self._names.get(spec.name), pending.link, pending.invite, now)
                for pending in waiting
            )
            return offer.ticket, list(chain.from_iterable(answers))
        if gave_up is not None and may_fetch_by_name(spec, gave_up):
            return offer.ticket, self._end(
                offer, EndReason.CANCELLED, f"{gave_up} gave up before it was made", now
            )
        return offer.ticket, []

    def mark_ready(self, number: int, layers: int, now: float) -> list[Command]:
        """Allow the first `layers` layers of an offer to be sent, because they are computed."""
        offer = self._offers.get(number)
        if offer is None or layers <= offer.ready_layers:
            return []
        offer.ready_layers = layers
        if offer.shares:
            shares = list(offer.shares.values())
            return [c for share in shares for c in self.mark_ready(share.number, layers, now)]
        if offer.link is None:
            return []
        self._send_queues[offer.link].enqueue(offer, now)
        return self._pump(self._send_queues[offer.link], now)

    def renew(self, number: int, ttl_s: float, now: float) -> str | None:
        """Extend an offer's lease and return a new ticket; None if the offer has already ended.

        Raises ValueError for an invalid time.
        """
        check_seconds("an offer", ttl_s)
        offer = self._offers.get(number)
        if offer is None or not self._renew(offer, now + ttl_s, now):
            return None
        for share in offer.shares.values():
            self._renew(share, now + ttl_s, now)
        offer.nonces.append(renewed_nonce(offer.nonces[-1]))
        offer.ticket = self._authorizer.issue(offer)
        return offer.ticket

    def revoke(self, number: int, reason: EndReason, detail: str, now: float) -> list[Command]:
        """End an offer now; an agent that still reads it notices that its blocks are void."""
        offer = self._offers.get(number)
        return [] if offer is None else self._end(offer, reason, detail, now)

    def fail_rank(self, detail: str, now: float) -> list[Command]:
        """End all offers and refuse new ones until `join_group`: the engine has lost a rank."""
        self._lost_rank = detail
        numbers = list(self._offers)
        ends = (self.revoke(number, EndReason.RANK_LOST, detail, now) for number in numbers)
        return list(chain.from_iterable(ends))

    def join_group(self) -> None:
        """Accept offers again, after they were refused because a rank of the engine was lost."""
        self._lost_rank = None

    def decline(self, name: str, detail: str, now: float) -> list[Command]:
        """Inform agents that wait for the offer `name` that this agent will not make it."""
        if name not in self._names:
            self._pending_invites.mark_ended(name, EndReason.DECLINED, now)
        return self._refuse_waiting(name, EndReason.DECLINED, detail)

    def close(self, now: float) -> list[Command]:
        """End every offer of KV and refuse every waiting invitation, because the agent closes."""
        commands = [
            command
            for name in list(self._pending_invites)
            for command in self._refuse_waiting(name, EndReason.CLOSED, "")
        ]
        return commands + [
            c
            for number in list(self._offers)
            for c in self.revoke(number, EndReason.CLOSED, "", now)
        ]

    def on_linked(self, link: Link, card: AgentCard, budget_bytes: int) -> None:
        """Add an agent that has opened a connection to this one and has proven its identity."""
        pair = (card.agent, link.transport)

        def on_measured(n_bytes: int, seconds: float) -> None:
            self.bandwidth.record(*pair, n_bytes, seconds)
            self._stats.count_sent(pair, n_bytes, seconds)

        self._send_queues[link] = SendQueue(
            link, card, budget_bytes, list(self._regions), on_measured
        )

    def on_lost(self, link: Link, reason: EndReason, detail: str, now: float) -> list[Command]:
        """End every KV transfer of a lost connection. Its blocks are free immediately."""
        send_queue = self._send_queues.pop(link, None)
        if send_queue is None:
            return []
        self._pending_invites.remove_link(link)
        claimed = list(send_queue.claimed.values())
        ends = (self._end(offer, reason, detail, now, tell=False) for offer in claimed)
        return list(chain.from_iterable(ends))

    def tick(self, now: float) -> list[Command]:
        """End leases that have expired at `now`, and refuse invitations that waited too long."""
        commands: list[Command] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            offer = self._offers.get(heapq.heappop(self._deadlines)[1])
            if offer is not None and offer.lease.deadline <= now:
                commands += self._end(offer, EndReason.LEASE_EXPIRED, "", now)
            elif offer is not None:
                self._push_deadline(offer)
        for pending in self._pending_invites.take_expired(now):
            commands += self._refuse(pending.link, pending.invite.transfer, EndReason.NEVER_OFFERED)
        return commands

    def on_invite(self, link: Link, invite: Invite, now: float) -> list[Command]:
        """Answer an agent's request for KV, or let it wait until the KV is offered.

        Raises ProtocolError if its transfer number is not higher than earlier ones.
        """
        send_queue = self._send_queues[link]
        if invite.transfer <= send_queue.newest:
            raise ProtocolError(
                f"the sink sent transfer number {invite.transfer}, but it must be higher than "
                f"the last one, {send_queue.newest}"
            )
        send_queue.newest = invite.transfer
        return self._answer_invite(self._names.get(invite.name), link, invite, now)

    def _answer_invite(
        self, offer: LeasedOffer | None, link: Link, invite: Invite, now: float
    ) -> list[Command]:
        ticket: Ticket | None = None
        if invite.ticket is not None:
            card = self._send_queues[link].card
            checked = self._authorizer.check(invite.ticket, offer, invite.name, card, now)
            if isinstance(checked, EndReason):
                return self._refuse(link, invite.transfer, checked)
            ticket = checked
        if offer is None:
            rank = self._send_queues[link].card.rank
            refused = self._pending_invites.add(link, invite, rank, now)
            return [] if refused is None else self._refuse(link, invite.transfer, refused)
        return self._match_invite(offer, link, invite, ticket, now)

    def on_stop(self, link: Link, message: StopTransfer, now: float) -> list[Command]:
        """End a KV transfer that the sink stopped.

        Raises ProtocolError for an impossible reason.
        """
        if message.reason in (EndReason.LANDED, EndReason.LEASE_EXPIRED):
            raise ProtocolError(
                f"{message.reason} is not a reason for which a sink may stop a transfer"
            )
        send_queue = self._send_queues[link]
        unwanted_by = send_queue.card.agent if message.reason is EndReason.CANCELLED else None
        if self._pending_invites.withdraw(link, message.transfer, unwanted_by, now):
            return []
        offer = send_queue.claimed.get(message.transfer)
        return (
            []
            if offer is None
            else self._end(offer, message.reason, message.detail, now, tell=False)
        )

    def on_unwanted(self, link: Link, message: Unwanted, now: float) -> list[Command]:
        """End an offer, because the agent that wanted it gave up before it sent an invitation.

        The message is ignored from an agent that may not fetch the offer.
        """
        card, offer = self._send_queues[link].card, self._names.get(message.name)
        agent = card.agent
        if message.ticket is None:
            may_fetch = offer is not None and may_fetch_by_name(offer.spec, agent)
            if offer is None:
                self._pending_invites.mark_unwanted(message.name, agent, now)
        else:
            may_fetch = not isinstance(
                self._authorizer.check(message.ticket, offer, message.name, card, now), EndReason
            )
        return (
            self._end(offer, EndReason.CANCELLED, "", now)
            if offer and may_fetch and offer.link is None
            else []
        )

    def on_landed(self, link: Link, message: Landed, now: float) -> list[Command]:
        """End a transfer that the receiving agent reports as complete.

        Raises ProtocolError if not all of its bytes were sent.
        """
        offer = self._send_queues[link].claimed.get(message.transfer)
        if offer is None:
            return []
        if offer.plan is None or not message.n_bytes == offer.put_bytes == offer.plan.n_bytes:
            raise ProtocolError(
                f"a sink reports {message.n_bytes} landed bytes, but the source sent "
                f"{offer.put_bytes}"
            )
        return self._end(offer, EndReason.LANDED, "", now, tell=False)

    def on_credit(self, link: Link, message: Credit, now: float) -> list[Command]:
        """Send more KV to an agent, because earlier bytes have arrived there.

        Raises ProtocolError if more bytes are reported than were in flight.
        """
        send_queue = self._send_queues[link]
        if message.transfer not in send_queue.claimed:
            return []
        try:
            send_queue.put_back(message.transfer, message.n_bytes, now)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        return self._pump(send_queue, now)

    def on_bad_grant(self, link: Link, transfer: int, detail: str, now: float) -> list[Command]:
        """End a transfer, because the receiver's permission to write to its memory is invalid."""
        offer = self._send_queues[link].claimed.get(transfer)
        return [] if offer is None else self._end(offer, EndReason.PROTOCOL, detail, now)

    def on_beat(self, link: Link, now: float) -> None:
        """Renew the leases of all offers that an agent is fetching, because it sent a heartbeat."""
        for offer in self._send_queues[link].claimed.values():
            self._renew(offer, now + offer.spec.ttl_s, now)

    def _check(self, spec: OfferSpec) -> None:
        check_texts(spec.name)
        check_seconds("an offer", spec.ttl_s)
        size = self._card.layout.block_tokens
        if spec.name in self._names:
            raise ValueError(f"an open offer already has the name {spec.name}; use another name")
        if not 0 < spec.tokens <= spec.blocks.size * size:
            raise ValueError(
                f"{spec.tokens} tokens do not fit into the {spec.blocks.size} blocks of the offer"
            )
        if spec.blocks.size > MAX_BLOCKS:
            raise ValueError(f"an offer has at most {MAX_BLOCKS} blocks, not {spec.blocks.size}")
        self._blocks.check_range(spec.blocks)

    def _refuse_waiting(self, name: str, reason: EndReason, detail: str) -> list[Command]:
        return [
            command
            for pending in self._pending_invites.remove(name)
            for command in self._refuse(pending.link, pending.invite.transfer, reason, detail)
        ]

    def _refuse(
        self, link: Link, transfer: int, reason: EndReason, detail: str = ""
    ) -> list[Command]:
        self._stats.refused[reason] += 1
        return [SendMessage(link, make_stop(transfer, reason, detail))]

    def _match_invite(
        self, offer: LeasedOffer, link: Link, invite: Invite, ticket: Ticket | None, now: float
    ) -> list[Command]:
        send_queue = self._send_queues[link]
        if ticket is None and not may_fetch_by_name(offer.spec, send_queue.card.agent):
            return self._refuse(link, invite.transfer, EndReason.BAD_TICKET)
        if invite.tokens > offer.spec.tokens:
            return self._refuse(
                link, invite.transfer, EndReason.TOKENS, f"only {offer.spec.tokens} are offered"
            )
        share = self._sharing.share_for(offer, send_queue.card, now)
        if share is None or share.link is not None:
            return self._refuse(link, invite.transfer, EndReason.NAME_TAKEN)
        offer = share
        send_queue.assign(offer, invite.transfer)

        def work() -> Callable[[float], list[Command]]:
            plan_or_error = self._plan(offer, send_queue.card, invite)
            return lambda now: self._claim(offer, link, invite, ticket, plan_or_error, now)

        layout = self._card.layout
        group_layers = layers_per_group(layout, invite.tokens - invite.skip_tokens)
        pairs = max_pairs(layout, send_queue.card.layout, group_layers)
        return plan_or_defer(max(offer.spec.blocks.size, len(invite.blocks) // 4), pairs, work, now)

    def _add_share(self, share: LeasedOffer) -> None:
        self._offers[share.number] = share
        self._blocks.protect(share.spec.distinct)
        self._push_deadline(share)

    def _claim(
        self,
        offer: LeasedOffer,
        link: Link,
        invite: Invite,
        ticket: Ticket | None,
        plan_or_error: TransferPlan | str,
        now: float,
    ) -> list[Command]:
        # Complete a sink's claim of an offer after its plan is computed.
        #
        # A mismatch is refused before any byte moves, and the offer stays available. Does nothing
        # if the offer or the link has ended in the meantime.
        send_queue = self._send_queues.get(link)
        if send_queue is None or send_queue.claimed.get(invite.transfer) is not offer:
            return []
        send_queue.unassign(offer)
        if isinstance(plan_or_error, str):
            return self._refuse(link, invite.transfer, EndReason.LAYOUT, plan_or_error)
        try:
            lease = advance(offer.lease, LeaseEvent.CLAIM, now)
        except LeaseError:
            return self._refuse(link, invite.transfer, EndReason.LEASE_EXPIRED) + self.tick(now)
        refused = None if ticket is None else self._authorizer.spend(ticket, send_queue.card, now)
        if refused is not None:
            return self._refuse(link, invite.transfer, refused)
        offer.lease = lease
        send_queue.assign(offer, invite.transfer)
        return self._begin(offer, send_queue, invite, plan_or_error, now)

    def _begin(
        self,
        offer: LeasedOffer,
        send_queue: SendQueue,
        invite: Invite,
        transfer_plan: TransferPlan,
        now: float,
    ) -> list[Command]:
        link = offer.link
        assert link is not None
        if offer.is_unclaimed:
            self._stats.unclaimed_s += now - offer.started_at
        window_bytes = max(
            1, min(invite.window_bytes, self._options.window_bytes, link.window_bytes)
        )
        send_queue.claim(offer, transfer_plan, window_bytes)
        offer.priority, offer.urgent_at = Priority(invite.priority), now + invite.slack_s
        send_queue.enqueue(offer, now)
        accept = Accept(
            transfer=invite.transfer,
            blocks=pack_blocks(offer.spec.blocks),
            group_layers=transfer_plan.group_layers,
            window_bytes=window_bytes,
            layouts=pair_fingerprint(transfer_plan.src, transfer_plan.dst),
        )
        commands: list[Command] = [
            AcceptGrant(link, invite.transfer, invite.grant),
            SendMessage(link, accept),
        ]
        return commands + self._pump(send_queue, now)

    def _plan(self, offer: LeasedOffer, card: AgentCard, invite: Invite) -> TransferPlan | str:
        # Compute the plan of a transfer, or return as text why there is none.
        #
        # If all layers are computed and runs join across layers, one group holds everything.
        # Otherwise groups are sent as they are computed, which also bounds the runs in memory. This
        # runs without the lock, so the first group's runs are computed as well.
        layout = self._card.layout
        at_once = offer.ready_layers >= layout.layers and layout.has_same_blocks(card.layout)
        try:
            transfer_plan = plan_transfer(
                layout,
                card.layout,
                offer.spec.blocks,
                unpack_blocks(invite.blocks),
                invite.tokens,
                skip_tokens=invite.skip_tokens,
                group_layers=layout.layers if at_once else None,
                ranks=Ranks(self._card.only_rank, card.only_rank),
            )
        except (LayoutMismatch, ValueError) as error:
            return str(error)
        if transfer_plan.pairs(0):
            transfer_plan.runs(0, 0)
        return transfer_plan

    def _pump(self, send_queue: SendQueue, now: float) -> list[Command]:
        # Return the windows of KV to send, and advance the leases that begin to move.
        #
        # An expired lease does not advance, so that no transfer counts as in time later.
        puts = send_queue.next_windows(now)
        for offer in {
            put.head.transfer: send_queue.claimed[put.head.transfer] for put in puts
        }.values():
            if offer.lease.state is LeaseState.CLAIMED and now < offer.lease.deadline:
                offer.lease = advance(offer.lease, LeaseEvent.START, now)
        return list(puts)

    def _renew(self, offer: LeasedOffer, deadline: float, now: float) -> bool:
        if offer.whole is not None:
            self._renew(offer.whole, deadline, now)
        try:
            offer.lease = advance(
                offer.lease, LeaseEvent.RENEW, now, max(deadline, offer.lease.deadline)
            )
        except LeaseError:
            return False
        return True

    def _push_deadline(self, offer: LeasedOffer) -> None:
        heapq.heappush(self._deadlines, (offer.lease.deadline, offer.number))
        self._set_deadlines += 1

    def _end(
        self, offer: LeasedOffer, reason: EndReason, detail: str, now: float, *, tell: bool = True
    ) -> list[Command]:
        # End an offer with all its shares; every offer ends here.
        #
        # The blocks change owner immediately; readers find them stale.
        if offer.number not in self._offers:
            return []
        if offer.whole is not None:
            return self._end_share(offer, offer.whole, reason, detail, now, tell=tell)
        shares = list(offer.shares.values())
        offer.shares.clear()
        ended = [c for share in shares for c in self._release(share, reason, detail, now)]
        del self._names[offer.spec.name]
        self._pending_invites.mark_ended(offer.spec.name, EndReason.GONE, now)
        return ended + self._release(offer, reason, detail, now, tell=tell)

    def _end_share(
        self,
        share: LeasedOffer,
        whole: LeasedOffer,
        reason: EndReason,
        detail: str,
        now: float,
        *,
        tell: bool,
    ) -> list[Command]:
        # End a rank's share of an offer; the offer ends with its last share or a failed one.
        del whole.shares[share.rank]
        commands = self._release(share, reason, detail, now, tell=tell)
        whole.put_bytes += share.put_bytes
        if reason is EndReason.LANDED and whole.shares:
            return commands
        return commands + self._end(whole, reason, detail, now)

    def _release(
        self, offer: LeasedOffer, reason: EndReason, detail: str, now: float, *, tell: bool = True
    ) -> list[Command]:
        # End an offer without its shares, or a share without its offer; return the commands.
        if offer.is_unclaimed:
            self._stats.unclaimed_s += now - offer.started_at
        offer.lease = end_lease(offer.lease, reason, now)
        if reason is EndReason.LANDED and offer.lease.state is LeaseState.EXPIRED:
            reason = EndReason.LEASE_EXPIRED
        del self._offers[offer.number]
        commands: list[Command] = []
        pumped: list[Command] = []
        transport = ""
        if offer.link is not None:
            transport = offer.link.transport
            if offer.link in self._send_queues:
                self._send_queues[offer.link].release(offer, now, landed=reason is EndReason.LANDED)
                pumped = self._pump(self._send_queues[offer.link], now)
            if reason is not EndReason.LANDED:
                commands.append(DropWindows(offer.link, offer.transfer))
            if tell:
                commands.append(SendMessage(offer.link, make_stop(offer.transfer, reason, detail)))
        outcome = outcome_for(
            reason,
            n_bytes=offer.put_bytes,
            seconds=now - offer.started_at,
            transport=transport,
            detail=detail,
        )
        commands.append(BumpGenerations(self._blocks.release(offer.spec.distinct)))
        if offer.whole is None:
            self._stats.count_offer(outcome)
            commands.append(ResolveHandle(offer.number, outcome))
        return commands + pumped
