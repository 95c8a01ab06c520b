"""The logic of the sink, the agent that receives KV: what happens to each of its fetches.

    WAITING -> INVITED -> MOVING -> FENCING -> removed

In the last state, the transport stops all writes to the fetch's blocks, so that the engine can use
them. All races of the receiving side are decided here, without I/O: events and the time go in,
commands come out. agent.py has the clock, the lock and the engine's objects.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from kvtransfer.layout.byte_ranges import ByteRuns, sorted_distinct
from kvtransfer.layout.kv_layout import KvLayout, pair_fingerprint
from kvtransfer.layout.memory_regions import Region, local_rank
from kvtransfer.layout.transfer_plan import LayoutMismatch, Ranks, max_pairs, plan_transfer
from kvtransfer.protocol.agent_messages import (
    MAX_BLOCKS,
    MAX_TOKENS,
    Accept,
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
from kvtransfer.protocol.outcomes import EndReason, outcome_for
from kvtransfer.transfer.commands import (
    Command,
    DialPeer,
    EndGroup,
    FenceTransfer,
    ReportLayers,
    ResolveHandle,
    SendInvite,
    SendMessage,
    plan_or_defer,
)
from kvtransfer.transfer.fetch_state import BlockReservation, FetchRequest, SinkState
from kvtransfer.transfer.receive_tracker import ReceiveTracker, RepeatedWindowError, WindowError
from kvtransfer.transfer.send_credits import in_flight_limit
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.transfer.window_forecast import WindowForecast
from kvtransfer.transport_interface import Link, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.util.agent_options import AgentOptions


class TransferSink:
    """All fetches of KV of one agent; most methods handle an event and return commands to execute.

    A fetch has a number, which the caller chooses and messages contain.

    rank            the only rank whose memory `regions` has; None: all ranks
    deadline_count  number of deadlines that were set; as long as it does not change,
                    `next_deadline` does not become earlier
    """

    def __init__(
        self,
        layout: KvLayout,
        regions: Sequence[Region],
        options: AgentOptions,
        stats: AgentStats,
        rank: int | None = None,
    ) -> None:
        self._layout, self._regions, self._options, self._stats = layout, regions, options, stats
        self._blocks = min(region.blocks for region in regions)
        self._reservations: dict[int, BlockReservation] = {}
        self._rank = rank
        self._links: dict[str, tuple[Link, KvLayout, str, int | None]] = {}
        self._waiting: dict[str, list[BlockReservation]] = {}
        self._members: set[str] = set()
        self._member_links: dict[Link, str] = {}
        self._deadlines: list[tuple[float, int]] = []
        self.deadline_count = 0

    @property
    def counts(self) -> dict[str, int]:
        states = [reservation.state for reservation in self._reservations.values()]
        return {state.value: states.count(state) for state in SinkState}

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` must be called next; None without a deadline."""
        while self._deadlines and self._deadlines[0][1] not in self._reservations:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fetch(self, number: int, request: FetchRequest, now: float) -> list[Command]:
        """Begin a fetch of KV from another agent; return the commands to execute.

        `check` must have accepted the request.
        """
        reservation = BlockReservation(number, request, now)
        self._reservations[number] = reservation
        heapq.heappush(self._deadlines, (reservation.deadline, number))
        self.deadline_count += 1
        if request.address in self._links:
            return [self._invite(reservation, now)]
        waiting = self._waiting.get(request.address)
        self._waiting.setdefault(request.address, []).append(reservation)
        return [DialPeer(request.address)] if waiting is None else []

    def join_group(self, addresses: Sequence[str]) -> list[Command]:
        """Connect to the agents of this engine's other ranks, so that a lost one is noticed."""
        self._members = set(addresses)
        self._member_links = {
            there[0]: address for address, there in self._links.items() if address in self._members
        }
        missing = self._members - self._links.keys() - self._waiting.keys()
        for address in missing:
            self._waiting[address] = []
        return [DialPeer(address) for address in sorted(missing)]

    def _lose_member(self, address: str | None, detail: str) -> list[Command]:
        if address not in self._members:
            return []
        return [EndGroup(f"the agent at {address} is lost: {detail}")]

    def on_linked(
        self,
        address: str,
        link: Link,
        layout: KvLayout,
        agent: str,
        now: float,
        rank: int | None = None,
    ) -> list[Command]:
        """Ask an agent for KV, for all fetches that waited for a connection to it.

        address  address that the fetches named
        link     the connection
        layout   KV layout of the other agent's engine
        agent    name of the other agent
        rank     the only rank that it serves; None: all ranks
        """
        self._links[address] = (link, layout, agent, rank)
        if address in self._members:
            self._member_links[link] = address
        commands: list[Command] = []
        for reservation in self._waiting.pop(address, []):
            if reservation.number in self._reservations:
                commands.append(self._invite(reservation, now))
            else:
                commands += self._unwanted(link, reservation)
        return commands

    def on_link_failed(
        self, address: str, reason: EndReason, detail: str, now: float
    ) -> list[Command]:
        """End all KV fetches that waited for a connection, because it could not be opened."""
        waiters = [
            reservation
            for reservation in self._waiting.pop(address, [])
            if reservation.number in self._reservations
        ]
        ended = [
            command
            for reservation in waiters
            for command in self._end(reservation, reason, detail, now, tell=False)
        ]
        return ended + self._lose_member(address, detail or reason)

    def retire_link(self, link: Link) -> None:
        """Start no new fetches over a connection that will be replaced; running ones continue."""
        self._links = {
            address: there for address, there in self._links.items() if there[0] is not link
        }

    def on_lost(self, link: Link, reason: EndReason, detail: str, now: float) -> list[Command]:
        """End all fetches of a lost connection, after all writes to their blocks have stopped."""
        self.retire_link(link)
        affected = [
            reservation for reservation in self._reservations.values() if reservation.link is link
        ]
        ended = [
            command
            for reservation in affected
            for command in self._end(reservation, reason, detail, now, tell=False)
        ]
        return ended + self._lose_member(self._member_links.pop(link, None), detail or reason)

    def cancel(self, number: int, reason: EndReason, detail: str, now: float) -> list[Command]:
        """End a fetch of KV as failed or cancelled. Does nothing if it has already ended."""
        reservation = self._reservations.get(number)
        return [] if reservation is None else self._end(reservation, reason, detail, now)

    def close(self, now: float) -> list[Command]:
        """Cancel all fetches of KV, because the agent closes; return the commands to execute."""
        return [
            command
            for number in list(self._reservations)
            for command in self.cancel(number, EndReason.CLOSED, "", now)
        ]

    def tick(self, now: float) -> list[Command]:
        """End all KV fetches whose deadline has passed at `now`; return the commands."""
        commands: list[Command] = []
        while (due := self.next_deadline()) is not None and due <= now:
            _, number = heapq.heappop(self._deadlines)
            commands += self.cancel(number, EndReason.TIMEOUT, "", now)
        return commands

    def on_accept(self, link: Link, message: Accept, now: float) -> list[Command]:
        """Begin to receive KV for an invitation. Raises ProtocolError if there was none."""
        reservation = self._find(link, message.transfer)
        if reservation is None or reservation.state is SinkState.FENCING:
            return []
        if reservation.state is not SinkState.INVITED:
            raise ProtocolError(
                f"the source accepted transfer {message.transfer}, which it may not do in the "
                f"state {reservation.state}"
            )

        def work() -> Callable[[float], list[Command]]:
            tracker_or_error = self._plan(reservation, message)
            return lambda now: self._begin(reservation, tracker_or_error, message, now)

        assert reservation.layout is not None
        pairs = max_pairs(reservation.layout, self._layout, message.group_layers)
        return plan_or_defer(
            max(reservation.request.blocks.size, len(message.blocks) // 4), pairs, work, now
        )

    def _begin(
        self,
        reservation: BlockReservation,
        tracker_or_error: ReceiveTracker | str,
        message: Accept,
        now: float,
    ) -> list[Command]:
        # Admit windows of KV after the plan is computed, unless the fetch has ended since.
        if reservation.state is not SinkState.INVITED:
            return []
        if isinstance(tracker_or_error, str):
            return self._end(reservation, EndReason.LAYOUT, tracker_or_error, now)
        reservation.plan, reservation.tracker = tracker_or_error.plan, tracker_or_error
        reservation.forecast = WindowForecast(
            reservation.number, tracker_or_error.plan, message.window_bytes
        )
        reservation.state, reservation.moving_since = SinkState.MOVING, now
        return []

    def on_stop(self, link: Link, message: StopTransfer, now: float) -> list[Command]:
        """End a fetch that the source has stopped. Raises ProtocolError for reason LANDED."""
        if message.reason is EndReason.LANDED:
            raise ProtocolError(
                "a source of KV may not report that bytes have landed; only the sink may"
            )
        reservation = self._find(link, message.transfer)
        if reservation is None:
            return []
        return self._end(reservation, message.reason, message.detail, now, tell=False)

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        """Return where to write a unit of KV (window) that begins to arrive, or None to discard it.

        It is written once, as planned, and only while its fetch is in the state MOVING. Raises
        WindowError if it is not planned; call `on_bad_window` then.
        """
        reservation = self._find_moving(link, head.transfer)
        if reservation is None or reservation.tracker is None or reservation.plan is None:
            self._stats.discarded["late"] += 1
            return None
        try:
            runs = reservation.tracker.begin(
                head.group, head.pair, head.first, head.count, head.n_bytes
            )
        except RepeatedWindowError:
            self._stats.discarded["repeated"] += 1
            return None
        except WindowError:
            self._stats.discarded["unplanned"] += 1
            raise
        return self._slice(reservation, head, runs)

    def _slice(self, moving: BlockReservation, head: WindowHead, runs: ByteRuns) -> WindowSlice:
        assert moving.plan is not None
        src_rank, dst_rank = moving.plan.pairs(head.group)[head.pair]
        src = local_rank(src_rank, moving.source_rank is None)
        dst = local_rank(dst_rank, self._rank is None)
        return WindowSlice(runs, self._regions[dst], src, dst)

    def following_windows(
        self, link: Link, head: WindowHead, most: int
    ) -> list[tuple[WindowHead, WindowSlice]]:
        """Return up to `most` units of KV (windows) that will probably follow this one."""
        moving = self._find_moving(link, head.transfer)
        if moving is None or moving.tracker is None or moving.forecast is None:
            return []
        # Use half of the bytes that may be in flight, so that credit returns before the source has
        # to stop.
        window_bytes, priority = moving.forecast.window_bytes, moving.request.priority
        most_bytes = in_flight_limit(self._options.budget_bytes, window_bytes, priority) // 2
        following = moving.forecast.following(head, moving.tracker, most, most_bytes)
        return [(after, self._slice(moving, after, runs)) for after, runs in following]

    def on_bad_window(self, link: Link, transfer: int, detail: str, now: float) -> list[Command]:
        """End a fetch, because the source sent KV that this agent's plan does not contain.

        The source then has a different plan, so the fetch could never complete.
        """
        reservation = self._find_moving(link, transfer)
        return (
            [] if reservation is None else self._end(reservation, EndReason.PROTOCOL, detail, now)
        )

    def on_landed(
        self, link: Link, head: WindowHead, verdict: WindowVerdict, now: float
    ) -> list[Command]:
        """Record that a window (unit of KV) has arrived; end its fetch if the bytes are unusable.

        verdict  whether the bytes are intact
        """
        if verdict is WindowVerdict.OK:
            return self.on_intact_windows(link, [head], now)
        reservation = self._find_moving(link, head.transfer)
        if reservation is None or reservation.tracker is None:
            return []
        return self._end(reservation, EndReason(verdict.value), f"layer group {head.group}", now)

    def on_intact_windows(
        self, link: Link, heads: Sequence[WindowHead], now: float
    ) -> list[Command]:
        """Record that several units of KV (windows) of one transfer have arrived intact.

        The source gets one message that it may send more, or none if the transfer is complete.
        """
        transfer = heads[0].transfer
        reservation = self._find_moving(link, transfer)
        if reservation is None or reservation.tracker is None:
            return []
        sizes = [head.n_bytes for head in heads if self._mark_verified(reservation.tracker, head)]
        if not sizes:
            return []
        commands = self._progress(reservation)
        if not reservation.tracker.is_complete:
            return [*commands, SendMessage(link, Credit(transfer, sum(sizes)))]
        self._count_received(reservation, link, now)
        reservation.state, reservation.end = SinkState.FENCING, (EndReason.LANDED, "")
        done = Landed(transfer, reservation.tracker.n_bytes)
        return [*commands, SendMessage(link, done), FenceTransfer(link, transfer)]

    def _mark_verified(self, tracker: ReceiveTracker, head: WindowHead) -> bool:
        try:
            tracker.mark_verified(head.group, head.pair, head.first, head.count)
        except WindowError:
            self._stats.discarded["repeated"] += 1
            return False
        return True

    def on_fenced(self, link: Link, transfer: int, now: float) -> list[Command]:
        """End a fetch and return its blocks to the engine: all writes to them have ended."""
        reservation = self._find(link, transfer)
        if reservation is None or reservation.state is not SinkState.FENCING:
            return []
        return self._resolve(reservation, now)

    def on_all_fenced(self, now: float) -> list[Command]:
        """End every fetch of KV, because all transports have ended and write no more."""
        fencing = [
            reservation
            for reservation in self._reservations.values()
            if reservation.state is SinkState.FENCING
        ]
        return [command for reservation in fencing for command in self._resolve(reservation, now)]

    def confirm_invite(self, link: Link, transfer: int) -> bool:
        """Return whether a fetch of KV is still wanted, so that its invitation must be sent.

        It may have ended while its memory was registered with a network card.
        """
        reservation = self._find(link, transfer)
        if reservation is None or reservation.state is SinkState.FENCING:
            return False
        reservation.is_invited = True
        return True

    def check(self, request: FetchRequest) -> None:
        """Raise ValueError for a fetch of KV with invalid blocks, tokens or texts."""
        check_texts(request.name, request.ticket)
        check_seconds("a landing", request.timeout_s)
        if not 0 <= request.skip_tokens < request.tokens <= MAX_TOKENS:
            raise ValueError(
                f"{request.skip_tokens} to {request.tokens} is not a valid range of tokens"
            )
        if request.blocks.size * self._layout.block_tokens < request.tokens:
            raise ValueError(
                f"{request.tokens} tokens do not fit into the {request.blocks.size} blocks of "
                "the fetch"
            )
        sorted_blocks = sorted_distinct(request.blocks)
        most = self._blocks
        if request.blocks.size > MAX_BLOCKS or sorted_blocks[0] < 0 or sorted_blocks[-1] >= most:
            raise ValueError(f"the block numbers of the fetch must be from 0 to {most - 1}")
        if sorted_blocks.size != request.blocks.size:
            raise ValueError("the list of blocks of the fetch contains a block twice")

    def _invite(self, reservation: BlockReservation, now: float) -> Command:
        request = reservation.request
        link, reservation.layout, reservation.peer, reservation.source_rank = self._links[
            request.address
        ]
        reservation.state, reservation.link = SinkState.INVITED, link
        left_s = max(0.0, reservation.deadline - now)
        invite = Invite(
            transfer=reservation.number,
            name=request.name,
            blocks=pack_blocks(request.blocks),
            tokens=request.tokens,
            skip_tokens=request.skip_tokens,
            wait_s=min(left_s, 86_400.0),
            slack_s=min(left_s, 86_400.0),
            priority=int(request.priority),
            window_bytes=min(self._options.window_bytes, link.window_bytes),
            ticket=request.ticket,
        )
        block_tokens = self._layout.block_tokens
        written = request.blocks[
            request.skip_tokens // block_tokens : -(-request.tokens // block_tokens)
        ]
        # The blocks before are cached, and others may be reading them: no access to those.
        return SendInvite(link, invite, written)

    def _plan(self, reservation: BlockReservation, message: Accept) -> ReceiveTracker | str:
        # Compute the same plan as the source, or return as text why there is none.
        #
        # The caller does not hold the lock, so there is time to compute the first group's runs too.
        request = reservation.request
        assert reservation.layout is not None
        fingerprint = pair_fingerprint(reservation.layout, self._layout)
        if message.layouts != fingerprint:
            source_fingerprint = message.layouts or "none"
            return (
                f"the source plans with other KV layouts (hashes {fingerprint} here, "
                f"{source_fingerprint} there)"
            )
        if message.window_bytes > self._options.window_bytes:
            return f"windows of {message.window_bytes} bytes are too large"
        try:
            transfer_plan = plan_transfer(
                reservation.layout,
                self._layout,
                unpack_blocks(message.blocks),
                request.blocks,
                request.tokens,
                skip_tokens=request.skip_tokens,
                group_layers=message.group_layers,
                ranks=Ranks(reservation.source_rank, self._rank),
            )
        except (LayoutMismatch, ValueError) as error:
            return str(error)
        if transfer_plan.pairs(0):
            transfer_plan.runs(0, 0)
        return ReceiveTracker(transfer_plan)

    def _find(self, link: Link, transfer: int) -> BlockReservation | None:
        # Return the fetch if it uses this link, else None, so that no peer reaches another's fetch.
        reservation = self._reservations.get(transfer)
        return reservation if reservation is not None and reservation.link is link else None

    def _find_moving(self, link: Link, transfer: int) -> BlockReservation | None:
        reservation = self._find(link, transfer)
        return (
            reservation
            if reservation is not None and reservation.state is SinkState.MOVING
            else None
        )

    def _progress(self, reservation: BlockReservation, *, fenced: bool = False) -> list[Command]:
        # Report layers that have become readable.
        #
        # Over a one-sided link nothing is readable before the fence, because the source can still
        # write.
        layers = 0 if reservation.tracker is None else reservation.tracker.complete_layers
        early = reservation.link is not None and reservation.link.is_one_sided and not fenced
        if layers == reservation.layers or early:
            return []
        reservation.layers = layers
        return [ReportLayers(reservation.number, layers)]

    def _count_received(self, reservation: BlockReservation, link: Link, now: float) -> None:
        pair = (reservation.peer, link.transport)
        self._stats.count_received(
            pair, _received_bytes(reservation), now - reservation.moving_since
        )

    def _end(
        self,
        reservation: BlockReservation,
        reason: EndReason,
        detail: str,
        now: float,
        *,
        tell: bool = True,
    ) -> list[Command]:
        # End a fetch as failed; if a peer was invited, its blocks come back once no peer can write.
        if reservation.state is SinkState.FENCING:
            return []
        reservation.end = (reason, detail)
        if reservation.link is None:
            return self._resolve(reservation, now)
        reservation.state = SinkState.FENCING
        fence = FenceTransfer(reservation.link, reservation.number)
        if not tell:
            return [fence]
        if not reservation.is_invited:
            return [*self._unwanted(reservation.link, reservation), fence]
        return [SendMessage(reservation.link, make_stop(reservation.number, reason, detail)), fence]

    def _unwanted(self, link: Link, reservation: BlockReservation) -> list[Command]:
        # Report a fetch to the source that was cancelled before its invitation was sent.
        #
        # The source then frees the blocks. Nothing is sent if another fetch wants the same offer.
        request = reservation.request
        wanted = any(
            (other.request.address, other.request.name) == (request.address, request.name)
            and other.state is not SinkState.FENCING
            for other in self._reservations.values()
        )
        unwanted = reservation.end is not None and reservation.end[0] is EndReason.CANCELLED
        return (
            [SendMessage(link, Unwanted(request.name, request.ticket))]
            if unwanted and not wanted
            else []
        )

    def _resolve(self, reservation: BlockReservation, now: float) -> list[Command]:
        assert reservation.end is not None
        del self._reservations[reservation.number]
        reason, detail = reservation.end
        transport = "" if reservation.link is None else reservation.link.transport
        outcome = outcome_for(
            reason,
            n_bytes=_received_bytes(reservation),
            seconds=now - reservation.started_at,
            transport=transport,
            detail=detail,
        )
        self._stats.count_landing(outcome)
        progress = self._progress(reservation, fenced=True) if outcome.has_landed else []
        return [*progress, ResolveHandle(reservation.number, outcome)]


def _received_bytes(reservation: BlockReservation) -> int:
    return 0 if reservation.tracker is None else reservation.tracker.n_bytes
