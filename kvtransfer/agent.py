"""The transfer agent, the object by which an engine sends and receives KV cache.

An engine offers the KV of a prompt, and the agent of another engine fetches it. The class Agent
joins the parts of this library: connections to other agents, timers, and the logic of transfers.
That logic is in transfer/source.py (sending) and transfer/sink.py (receiving).

Events, such as a received message, arrive on any thread. They are handled one at a time, under one
lock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import msgspec
import numpy as np

from kvtransfer.agent_argument_checks import check_arguments
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import Blocks
from kvtransfer.links.link_manager import LinkManager
from kvtransfer.protocol.agent_messages import AgentCard
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.transfer.commands import (
    AcceptGrant,
    BumpGenerations,
    Command,
    ComputePlan,
    DialPeer,
    DropWindows,
    EndGroup,
    FenceTransfer,
    PutWindow,
    ReportLayers,
    ResolveHandle,
    SendInvite,
    SendMessage,
)
from kvtransfer.transfer.fetch_state import FetchRequest
from kvtransfer.transfer.handles import HandleListener, Landing, LoopWaker, Offer, TransferHandle
from kvtransfer.transfer.invite_registration import InviteRegistration
from kvtransfer.transfer.leased_offer import OfferSpec
from kvtransfer.transfer.receive_tracker import WindowError
from kvtransfer.transfer.sink import TransferSink
from kvtransfer.transfer.source import TransferSource
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.transfer.transfer_order import Priority
from kvtransfer.transport_interface import (
    Link,
    Transport,
    TransportError,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.transports.pump import EVENTFD_CALLS
from kvtransfer.transports.transport_choice import host_id
from kvtransfer.util.agent_lock import AgentLock
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import Clock, ThreadClock, Timer

log = logging.getLogger("penstock")

# Maximum seconds for which close() waits for fences before it closes the transports.
_FENCES_S = 5.0


class Agent:
    """The agent that performs the KV transfers of one engine (all of its GPUs), or of one rank.

    layout      how the engine's KV cache lies in memory
    regions     the KV memory of each rank; it must exist for longer than the agent
    key         the fleet's shared secret, at least 16 bytes; agents without it are refused
    transports  ways to reach other agents, such as TCP. The first one defines `address`, and opens
                connections; two agents then switch to the best transport that both have
    clock       the source of time and timers; None: the agent starts a thread for them
    rank        the only rank that this agent serves, with one region; None: it serves all ranks
    group       only if `rank` is set: a name that the agents of all ranks of this engine share, and
                no other agent has
    """

    def __init__(
        self,
        name: str,
        layout: KvLayout,
        regions: Sequence[Region],
        *,
        key: bytes,
        transports: Sequence[Transport],
        clock: Clock | None = None,
        options: AgentOptions | None = None,
        rank: int | None = None,
        group: str = "",
    ) -> None:
        check_arguments(layout, regions, transports, rank, group)
        self.options = options or AgentOptions()
        self.address = ""
        self._name, self._layout, self._regions = name, layout, list(regions)
        self._transports = {transport.name: transport for transport in transports}
        self._own_clock = ThreadClock(f"kv-{name}") if clock is None else None
        self._clock: Clock = clock or self._own_clock or ThreadClock()
        self._lock = AgentLock()
        self._stats = AgentStats()
        host = host_id() if self.options.host is None else self.options.host
        self._card = AgentCard(
            name,
            secrets.token_bytes(16),
            layout,
            self.options.family,
            host,
            rank=-1 if rank is None else rank,
            group=group,
        )
        self._sink = TransferSink(layout, self._regions, self.options, self._stats, rank)
        self._source = TransferSource(self._card, self._regions, key, self.options, self._stats)
        state = (self._sink, self._source, self._stats)
        self._link_manager = LinkManager(
            key, self._transports, self._clock, self.options, state, self._lock, self._run_commands
        )
        self._invite_registration = InviteRegistration(
            self._regions, self._clock, self._lock, self._send_invite, self._cancel_invite
        )
        self._commands: deque[Command] = deque()
        self._is_executing = False
        self._handles: dict[int, TransferHandle] = {}
        self._numbers = itertools.count(1)
        self._listener: HandleListener | None = None
        self._loop_waker: LoopWaker | None = None
        self._next_timer: Timer | None = None
        self._deadlines = 0  # number of deadlines for which the timer was set
        self._closed = False

    # ---- API of the engine

    async def start(self) -> None:
        """Start to listen for other agents, so that KV transfers can be awaited on this event loop.

        Raises TransportError if the first transport does not start.
        """
        doorbell = LoopWaker(asyncio.get_running_loop(), self._lock.defer, *EVENTFD_CALLS)
        try:
            self.open(doorbell)
        except BaseException:
            doorbell.close()
            raise
        self._loop_waker = doorbell

    def open(self, listener: HandleListener | None = None) -> None:
        """Start to listen for other agents, for an engine without an event loop.

        The engine can then read the state of its transfers, but cannot await them. `listener` is
        called whenever the state of a transfer changes.

        Raises TransportError if the first transport does not start. Another transport that does not
        start is logged and left out.
        """
        self._listener = listener
        first_name, *other_names = self._transports
        try:
            addresses = self._start_transports(other_names)
            # Start the first transport last: peers that dial it find the others ready.
            self._link_manager.card = msgspec.structs.replace(self._card, addresses=addresses)
            self.address = self._transports[first_name].start(self, self._regions)
        except BaseException:
            for name in list(self._transports)[1:]:
                self._transports.pop(name).close()
            raise
        self._link_manager.open(
            msgspec.structs.replace(self._card, addresses={first_name: self.address, **addresses})
        )

    def _start_transports(self, names: Sequence[str]) -> dict[str, str]:
        # Start the named transports and return their addresses; drop those that fail to start.
        addresses: dict[str, str] = {}
        for name in names:
            try:
                addresses[name] = self._transports[name].start(self, self._regions)
            except TransportError as error:
                log.warning(
                    "kv: agent %s: the transport %s is not available: %s", self._name, name, error
                )
                del self._transports[name]
        return addresses

    async def close(self) -> None:
        """End every KV transfer, wait until no peer can write to this memory, and stop listening.

        Afterwards all blocks belong to the engine again. The method may be called twice.
        """
        self.begin_close()
        ends = [
            asyncio.ensure_future(handle.wait_ended()) for handle in list(self._handles.values())
        ]
        if ends:
            await asyncio.wait(ends, timeout=_FENCES_S)
        await asyncio.to_thread(self.finish_close)
        doorbell, self._loop_waker, self._listener = self._loop_waker, None, None
        if doorbell is not None:
            doorbell.close()
        await asyncio.gather(*ends)

    def begin_close(self) -> None:
        """Refuse new KV transfers and begin to end the current ones, as the first half of a close.

        An engine without an event loop calls finish_close() after that. Other engines call close().
        """
        with self._lock:
            self._closed = True
            self._link_manager.stop_accepting()
            now = self._clock.now()
            self._run_commands(self._sink.close(now) + self._source.close(now))

    def finish_close(self) -> None:
        """Close all connections to other agents and stop listening, as the second half of a close.

        Call begin_close() first. Transfers that are still in progress end with their connections.
        """
        with self._lock:
            if self._next_timer is not None:
                self._next_timer.cancel()
        self._link_manager.close()
        for transport in self._transports.values():
            transport.close()
        with self._lock:
            self._run_commands(self._sink.on_all_fenced(self._clock.now()))
        if self._own_clock is not None:
            self._own_clock.close()

    def offer(
        self,
        name: str,
        blocks: Blocks,
        tokens: int,
        *,
        ttl_s: float = 30.0,
        ready_layers: int | None = None,
        sink: str | None = None,
        public: bool = False,
        nonce: bytes | None = None,
    ) -> Offer:
        """Let one other agent, the sink, fetch the KV of `tokens` tokens, which is in `blocks`.

        The blocks must stay unchanged until the offer has ended. It ends when the KV has been
        fetched, or after `ttl_s` seconds unless a sink is fetching it. It ends immediately, as
        CANCELLED, if its sink had waited for it and gave up.

        name          a name that no other open offer has; preferably never reused
        ready_layers  number of layers that are computed, and can be sent, so far; None: all
        sink          name of the only agent that may fetch the KV, with or without a ticket; None:
                      any agent with the offer's ticket, a text that permits the fetch
        public        whether any agent that knows the name may fetch it; use names that cannot be
                      guessed
        nonce         nonce of a ticket that was issued before the offer
                      (kvtransfer/protocol/ticket.py)

        Raises ValueError for invalid arguments.
        """
        layers = self._layout.layers if ready_layers is None else ready_layers
        block_numbers, nonce = np.array(blocks, np.int64), nonce or secrets.token_bytes(16)
        spec = OfferSpec(
            name, block_numbers, index(tokens), float(ttl_s), index(layers), nonce, sink, public
        )
        with self._lock:
            offer = Offer(self, self._number(), name)
            offer.ticket, commands = self._source.offer(offer.number, spec, self._clock.now())
            self._handles[offer.number] = offer
            self._run_commands(commands)
        return offer

    def fetch(
        self,
        address: str,
        name: str,
        blocks: Blocks,
        tokens: int,
        *,
        ticket: str | None = None,
        skip_tokens: int = 0,
        timeout_s: float = 30.0,
        priority: str = "interactive",
    ) -> Landing:
        """Fetch the KV of tokens [skip_tokens, tokens) from another agent into these blocks.

        The other agent offers the KV as `name`, now or later. The method returns immediately, with
        an object that can be awaited. The blocks belong to the transfer until it has ended.

        ticket     text by which the other agent permits the fetch; None: fetch by name an offer
                   that is public or made for this agent
        timeout_s  seconds after which the transfer fails
        priority   "interactive", "bulk" or "migration"

        Raises ValueError for invalid arguments.
        """
        # Numpy scalars cannot be encoded in a message, so numbers are converted.
        request = FetchRequest(
            str(address),
            name,
            np.array(blocks, np.int64),
            *(index(tokens), index(skip_tokens), float(timeout_s)),
            Priority.from_name(priority),
            ticket,
        )
        self._sink.check(request)
        with self._lock:
            landing = Landing(self, self._number(), name)
            commands = self._sink.fetch(landing.number, request, self._clock.now())
            self._handles[landing.number] = landing
            self._run_commands(commands)
        return landing

    def join_group(self, addresses: Sequence[str]) -> None:
        """Watch the agents of this engine's other ranks, whose addresses are given.

        If one of them cannot be reached or ends, this engine's KV is incomplete, and of no use. All
        offers of this agent then end as RANK_LOST. So do new ones, until the next call of this
        method.
        """
        with self._lock:
            self._source.join_group()
            self._run_commands(self._sink.join_group(addresses))

    @property
    def name(self) -> str:
        return self._name

    @property
    def epoch(self) -> bytes:
        """Return 16 random bytes that identify this run of the agent.

        A ticket contains them, so that tickets from before a restart are refused.
        """
        return self._card.epoch

    def decline(self, name: str, detail: str = "") -> None:
        """Inform other agents that KV for which they wait under this name will not be offered.

        Agents that ask within the next seconds get the same answer. `detail` is a reason for their
        logs.
        """
        with self._lock:
            self._run_commands(self._source.decline(name, detail, self._clock.now()))

    def stats(self) -> dict[str, Any]:
        """Return the agent's counters since its start and its present state, by name.

        They are described in AgentStats.as_dict().
        """
        with self._lock:
            return {
                **self._stats.as_dict(),
                "leases": self._source.counts,
                "reservations": self._sink.counts,
                "unclaimed_s": self._source.unclaimed_s(self._clock.now()),
                "under_way_bytes": self._source.in_flight_bytes(),
                "links": len(self._link_manager),
                "bytes_per_s": self._source.bandwidth.all(),
            }

    # ---- called by handles

    def mark_ready(self, number: int, layers: int) -> None:
        with self._lock:
            self._run_commands(self._source.mark_ready(number, layers, self._clock.now()))

    def renew(self, number: int, ttl_s: float) -> str | None:
        with self._lock:
            return self._source.renew(number, float(ttl_s), self._clock.now())

    def revoke(self, number: int, detail: str) -> None:
        with self._lock:
            self._run_commands(
                self._source.revoke(number, EndReason.REVOKED, detail, self._clock.now())
            )

    def cancel(self, number: int, detail: str) -> None:
        with self._lock:
            self._run_commands(
                self._sink.cancel(number, EndReason.CANCELLED, detail, self._clock.now())
            )

    # ---- events of links (LinkOwner)

    def on_linked(self, link: Link) -> None:
        self._link_manager.on_linked(link)

    def on_message(self, link: Link, data: bytes) -> None:
        self._link_manager.on_message(link, data)

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        with self._lock:
            try:
                return self._sink.place_window(link, head)
            except WindowError as error:
                self._run_commands(
                    self._sink.on_bad_window(link, head.transfer, str(error), self._clock.now())
                )
                return None

    def following_windows(
        self, link: Link, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        with self._lock:
            return self._sink.following_windows(link, head, most)

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        with self._lock:
            self._run_commands(self._sink.on_landed(link, head, verdict, self._clock.now()))

    def on_intact_windows(self, link: Link, heads: Sequence[WindowHead]) -> None:
        with self._lock:
            self._run_commands(self._sink.on_intact_windows(link, heads, self._clock.now()))

    def on_sent(self, link: Link, head: WindowHead) -> None:
        """Do nothing: more KV may be sent only when the receiver reports that KV has arrived."""

    def on_fenced(self, link: Link, transfer: int) -> None:
        with self._lock:
            self._run_commands(self._sink.on_fenced(link, transfer, self._clock.now()))

    def on_lost(self, link: Link, reason: str) -> None:
        self._link_manager.drop_link(link, EndReason.LINK_LOST, reason)

    # ---- time

    def _tick(self) -> None:
        with self._lock:
            self._next_timer = None
            now = self._clock.now()
            self._run_commands(self._sink.tick(now) + self._source.tick(now))

    def _schedule_tick(self) -> None:
        deadlines = self._sink.deadline_count + self._source.deadline_count
        if deadlines == self._deadlines and self._next_timer is not None:
            return
        self._deadlines = deadlines
        dues = [
            due
            for due in (self._sink.next_deadline(), self._source.next_deadline())
            if due is not None
        ]
        if dues and (self._next_timer is None or min(dues) < self._next_timer.when):
            if self._next_timer is not None:
                self._next_timer.cancel()
            self._next_timer = self._clock.call_at(min(dues), self._tick)

    # ---- commands

    def _number(self) -> int:
        if self._closed or not self.address:
            raise RuntimeError(f"agent {self._name} is not open; call start() or open() first")
        return next(self._numbers)

    def _run_commands(self, commands: list[Command]) -> None:
        self._commands.extend(commands)
        if self._is_executing:
            return
        self._is_executing = True
        try:
            while self._commands:
                self._execute(self._commands.popleft())
        finally:
            self._is_executing = False
        self._schedule_tick()

    def _execute(self, command: Command) -> None:
        # Commands are tested in the order of their frequency.
        match command:
            case SendMessage(link, message):
                self._link_manager.send(link, message)
            case BumpGenerations() | ReportLayers() | ResolveHandle():
                self._notify_engine(command)
            case PutWindow(link, head, window):
                link.put(head, window)
            case FenceTransfer(link, transfer):
                link.fence(transfer)
            case SendInvite():
                self._invite(command)
            case AcceptGrant():
                self._admit(command)
            case DropWindows(link, transfer):
                link.drop(transfer)
            case EndGroup(detail):
                self._run_commands(self._source.fail_rank(detail, self._clock.now()))
            case DialPeer(address):
                self._link_manager.dial(address)
            case ComputePlan(work):
                self._lock.defer(lambda: self._finish_deferred_plan(work))

    def _invite(self, command: SendInvite) -> None:
        # Grant the peer access to the blocks, then invite it to write KV: before, it may not write.
        command.link.expect_windows()
        if command.link.is_one_sided:
            self._invite_registration.add(command)
            return
        self._send_invite(
            command, command.link.grant(command.invite.transfer, self._regions, command.blocks)
        )

    def _send_invite(self, command: SendInvite, grant: bytes) -> None:
        # Send an invitation to write KV, now that the peer has access to the blocks.
        #
        # If the transfer has ended meanwhile, nothing is sent, and its fence revokes the access.
        if self._sink.confirm_invite(command.link, command.invite.transfer):
            self._link_manager.send(
                command.link, msgspec.structs.replace(command.invite, grant=grant)
            )

    def _cancel_invite(self, command: SendInvite, detail: str) -> None:
        self._run_commands(
            self._sink.cancel(
                command.invite.transfer, EndReason.UNREACHABLE, detail, self._clock.now()
            )
        )

    def _finish_deferred_plan(self, work: Callable[[], Callable[[float], list[Command]]]) -> None:
        finish = work()
        with self._lock:
            self._run_commands(finish(self._clock.now()))

    def _admit(self, command: AcceptGrant) -> None:
        try:
            command.link.accept(command.transfer, command.grant)
        except TransportError as error:
            self._run_commands(
                self._source.on_bad_grant(
                    command.link, command.transfer, str(error), self._clock.now()
                )
            )

    def _notify_engine(self, command: BumpGenerations | ReportLayers | ResolveHandle) -> None:
        if isinstance(command, BumpGenerations):
            for region in self._regions:
                region.bump(command.blocks)
            return
        handle = self._handles[command.number]
        if isinstance(command, ResolveHandle):
            del self._handles[command.number]
            handle.outcome = command.end
        elif isinstance(handle, Landing):
            handle.layers = command.layers
        if self._listener is not None:
            self._listener.on_change(handle)
