"""Opens, checks and closes an agent's connections to other agents, which are called links.

Both agents of a new link must prove that they have the fleet's key. LinkManager can also replace a
link by one over a better transport, and add parallel connections (lanes) to it. Blocking work runs
on other threads. source.py and sink.py in kvtransfer/transfer handle the events of transfers.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping

import msgspec

from kvtransfer.links.peer_link import DialRequest, PeerLink, incompatibility, wrong_peer_error
from kvtransfer.links.unproven_links import UnprovenLinks
from kvtransfer.protocol.agent_messages import (
    Accept,
    AgentCard,
    Beat,
    Credit,
    Invite,
    Landed,
    Message,
    ProtocolError,
    StopTransfer,
    Unwanted,
)
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.protocol.session_authentication import (
    LinkSession,
    SealError,
    greeting_nonce,
    shows_key,
)
from kvtransfer.transfer.commands import Command
from kvtransfer.transfer.sink import TransferSink
from kvtransfer.transfer.source import TransferSource
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.transport_interface import MAX_LANES, Link, MultiLaneLink, Transport, TransportError
from kvtransfer.transports.transport_choice import better_transport
from kvtransfer.util.agent_lock import AgentLock
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import Clock, Timer

# Dials are repeated for a peer that closed before it showed its identity. The delay doubles.
_MAX_REDIALS = 3
_REDIAL_S = 0.02
# Number of failed lanes (parallel connections) after which a link dials no more of them.
_MAX_FAILED_LANES = 3
log = logging.getLogger("penstock")


class LinkManager:
    """Opens and closes an agent's connections to other agents (links).

    state    the logic of the agent's transfers for both directions, and its counters
    lock     the agent's lock
    execute  function that executes the commands which follow from received messages
    """

    def __init__(
        self,
        key: bytes,
        transports: Mapping[str, Transport],
        clock: Clock,
        options: AgentOptions,
        state: tuple[TransferSink, TransferSource, AgentStats],
        lock: AgentLock,
        execute: Callable[[list[Command]], None],
    ) -> None:
        self.card: AgentCard
        self.options = options
        self._key, self._transports, self._clock = key, transports, clock
        self._sink, self._source, self._stats = state
        self._lock, self._execute = lock, execute
        self._peer_links: dict[Link, PeerLink] = {}
        self._unproven = UnprovenLinks(options.max_unproven_links, options.max_unproven_per_address)
        self._dials = 0  # dials in progress
        self._ended_early: dict[
            Link, str
            # Links that ended before their dial returned, with the reason.
        ] = {}
        self._heartbeat: Timer | None = None
        self._closed = False

    def __len__(self) -> int:
        """Return the number of connections to other agents. Parallel ones (lanes) do not count."""
        return sum(not peer_link.session.lane_of for peer_link in self._peer_links.values())

    def open(self, card: AgentCard) -> None:
        self.card = card
        self._schedule_heartbeat(self._clock.now())

    def stop_accepting(self) -> None:
        """Refuse all connections that other agents open from now on; open ones stay."""
        self._closed = True

    def close(self) -> None:
        """Close all connections, without events. The caller has already ended all transfers."""
        with self._lock:
            self._closed = True
            if self._heartbeat is not None:
                self._heartbeat.cancel()
            links = list(self._peer_links)
            self._peer_links.clear()
        for link in links:
            link.close()

    def send(self, link: Link, message: Message) -> None:
        """Send a message to another agent; do nothing on a connection that has ended."""
        if (peer_link := self._peer_links.get(link)) is not None:
            peer_link.send(message)

    def dial(self, address: str) -> None:
        """Open a connection to the agent at `address`, on another thread.

        When that is done, the agent's TransferSink gets a call of `on_linked` or `on_link_failed`.
        """
        self._start_dial(DialRequest(next(iter(self._transports.values())), address, address))

    def on_linked(self, link: Link) -> None:
        with self._lock:
            if self._closed:
                return link.close()
            self._evict(self._unproven.admit(link))
            session = LinkSession(self._key, secrets.token_bytes(16), self.card, is_dialler=False)
            self._peer_links[link] = PeerLink(link, session, None, self._clock.now())
            return None

    def _evict(self, link: Link | None) -> None:
        if link is None:
            return
        self._stats.faults["strangers"] += 1
        self._peer_links.pop(link, None)
        link.close()

    def on_message(self, link: Link, data: bytes) -> None:
        peer_link = self._peer_links.get(link)
        if peer_link is None:
            return
        peer_link.is_handling = True
        try:
            message, reply = peer_link.session.handle(data)
            if reply is not None:
                link.send(reply)
            with self._lock:
                if self._peer_links.get(link) is not peer_link:
                    # The link was lost in the meantime. State that is added now would never be
                    # removed.
                    return
                if not peer_link.is_proven:
                    self._protect_link(peer_link)
                if peer_link.session.peer is not None and not peer_link.is_proven:
                    self._on_proven(peer_link)
                if message is not None:
                    self._execute(self._handle(peer_link, message, self._clock.now()))
        except (ProtocolError, SealError) as error:
            forged = isinstance(error, SealError)
            self._stats.faults["unproven" if forged else "protocol"] += 1
            reason = (
                EndReason.WRONG_KEY if forged and not peer_link.is_proven else EndReason.PROTOCOL
            )
            self.drop_link(link, reason, str(error))
        finally:
            peer_link.is_handling = False

    def _protect_link(self, peer_link: PeerLink) -> None:
        # Exempt a link from eviction if its first message shows knowledge of the key.
        #
        # If several links have the same greeting, only the first is protected, because an attacker
        # can replay a greeting.
        greeting = peer_link.session.greeting
        if peer_link.dial_request is not None or (
            peer_link.session.peer is None and not shows_key(self._key, greeting)
        ):
            return
        served = [
            other.session.greeting
            for other in self._peer_links.values()
            if other.link not in self._unproven
        ]
        if peer_link.session.peer is not None or greeting not in served:
            self._unproven.remove(peer_link.link)

    def drop_link(self, link: Link, reason: EndReason, detail: str) -> None:
        """Close the connection to another agent, and end all KV transfers on it, for this reason.

        A fetch of KV ends only when the other agent cannot write to its blocks any more.
        """
        with self._lock:
            peer_link = self._peer_links.pop(link, None)
            self._unproven.remove(link)
            if peer_link is None:
                if self._dials:
                    self._ended_early[link] = detail
                return
            now = self._clock.now()
            log.info(
                "kv: agent %s: the link to %s (%s) ends: %s %s",
                self.card.agent,
                peer_link.peer,
                link.transport,
                reason,
                detail,
            )
            for lane in peer_link.lanes:
                self._peer_links.pop(lane.link, None)
                lane.link.close()
            if peer_link.lane_owner is not None:
                self._lose_lane(peer_link, peer_link.lane_owner, detail)
            elif peer_link.dial_request is None:
                self._execute(self._source.on_lost(link, reason, detail, now))
            elif peer_link.is_in_use:
                self._execute(self._sink.on_lost(link, reason, detail, now))
            else:
                on_failure = self._on_dial_failed if peer_link.is_proven else self._redial
                self._execute(on_failure(peer_link.dial_request, reason, detail))
            link.close()

    def _dialler_session(self, link: Link, dialling: DialRequest) -> LinkSession:
        # Return the session of a link that this agent has dialled.
        #
        # The Hello message of the first link carries the send budget of all its lanes together.
        lane_of = b"" if dialling.lane_of is None else dialling.lane_of.session.greeting
        budget_bytes = self.options.budget_bytes * (
            link.lanes if isinstance(link, MultiLaneLink) else 1
        )
        return LinkSession(
            self._key,
            greeting_nonce(self._key, secrets.token_bytes(8)),
            self.card,
            is_dialler=True,
            budget_bytes=budget_bytes,
            lane_of=lane_of,
        )

    def _start_dial(self, dialling: DialRequest) -> None:
        # Dial a peer on another thread; call it with the lock held.
        self._dials += 1
        try:
            self._clock.run_in_thread(lambda: self._dial(dialling))
        except RuntimeError as error:
            # No thread can be started.
            self._finish_dial(None)
            self._execute(self._on_dial_failed(dialling, EndReason.UNREACHABLE, str(error)))

    def _finish_dial(self, link: Link | None) -> str | None:
        # Count an attempt to dial as finished.
        #
        # Return the reason if its link has already ended, else None.
        self._dials -= 1
        detail = None if link is None else self._ended_early.pop(link, None)
        if not self._dials:
            self._ended_early.clear()
        return detail

    def _dial(self, dialling: DialRequest) -> None:
        # Dial a peer and register the link; runs on its own thread, because it may block.
        try:
            link = dialling.transport.dial(dialling.where)
        except Exception as error:
            # Waiting transfers must be informed of any error.
            if not isinstance(error, TransportError | RuntimeError):
                log.exception(
                    "kv: agent %s: opening a link to %s by transport %s failed",
                    self.card.agent,
                    dialling.address,
                    dialling.transport.name,
                )
            with self._lock:
                self._finish_dial(None)
                self._execute(self._on_dial_failed(dialling, EndReason.UNREACHABLE, str(error)))
            return
        peer_link = PeerLink(
            link, self._dialler_session(link, dialling), dialling, self._clock.now()
        )
        with self._lock:
            ended = self._finish_dial(link)
            if self._closed:
                link.close()
                return
            if ended is not None:
                link.close()
                self._execute(self._redial(dialling, EndReason.UNREACHABLE, ended))
                return
            self._peer_links[link] = peer_link
        link.send(peer_link.session.hello())

    def _on_proven(self, peer_link: PeerLink) -> None:
        peer_link.is_proven, peer = True, peer_link.session.peer
        assert peer is not None
        reason = (
            incompatibility(self.card, peer, peer_link.session.version)
            or wrong_peer_error(peer_link)
            or self._missing_parent(peer_link)
        )
        reason = reason or self._lane_error(peer_link)
        if reason is not None:
            self._stats.refused[reason[0]] += 1
            self.drop_link(peer_link.link, *reason)
            return
        peer_link.link.secure(peer_link.session.window_key)
        first, dialling = self._lane_owner(peer_link), peer_link.dial_request
        if first is not None:
            self._add_lane(first, peer_link)
        elif dialling is None:
            self._source.on_linked(peer_link.link, peer, peer_link.session.budget_bytes)
        elif (
            name := better_transport(self.card, peer, self._transports, peer_link.link.transport)
        ) is None:
            self._execute(self._use(peer_link))
        else:
            self._start_dial(
                DialRequest(
                    self._transports[name], peer.addresses[name], dialling.address, peer_link
                )
            )

    def _missing_parent(self, peer_link: PeerLink) -> tuple[EndReason, str] | None:
        # Return an error if the link over which this peer was found has ended; None if not.
        #
        # No transfer waits for a better link or a lane of it any more, and another link may have
        # been dialled since.
        parent = None if peer_link.dial_request is None else peer_link.dial_request.parent
        if parent is None or parent.link in self._peer_links:
            return None
        return EndReason.LINK_LOST, "the connection over which this address was sent has ended"

    # ---- lanes

    def _lane_owner(self, peer_link: PeerLink) -> PeerLink | None:
        # Return the link to which a lane (parallel connection) belongs; None if this is not a lane.
        #
        # A source finds the link by the greeting, among the links to the same peer.
        if peer_link.dial_request is not None:
            return peer_link.dial_request.lane_of
        if not peer_link.session.lane_of:
            return None
        for candidate in self._peer_links.values():
            is_candidate = (
                candidate is not peer_link
                and candidate.dial_request is None
                and candidate.lane_owner is None
            )
            if (
                is_candidate
                and candidate.session.greeting == peer_link.session.lane_of
                and candidate.has_same_peer(peer_link)
            ):
                # The check of the peer rejects a replayed greeting.
                return candidate
        return None

    def _lane_error(self, peer_link: PeerLink) -> tuple[EndReason, str] | None:
        if not peer_link.session.lane_of:
            return None
        first = self._lane_owner(peer_link)
        if (
            first is None
            or not isinstance(first.link, MultiLaneLink)
            or first.link.transport != peer_link.link.transport
        ):
            return EndReason.LINK_LOST, "the link of this lane (parallel connection) is not open"
        return (EndReason.PROTOCOL, "too many lanes") if len(first.lanes) >= MAX_LANES - 1 else None

    def _add_lane(self, first: PeerLink, peer_link: PeerLink) -> None:
        assert isinstance(first.link, MultiLaneLink)
        peer_link.lane_owner = first
        first.lanes.append(peer_link)
        first.link.add_lane(peer_link.link)
        if peer_link.dial_request is None:
            peer_link.send(Beat())  # confirms the lane, so that the sink dials the next

    def _dial_lane(self, first: PeerLink) -> None:
        # Dial the next lane (parallel connection) of a link, once the source has sent a message
        # over the previous one.
        #
        # Before that the source may not have received this agent's proof, and would reject a lane
        # of an unknown link.
        link, dialling = first.link, first.dial_request
        if not isinstance(link, MultiLaneLink) or dialling is None or first.is_dialling_lane:
            return
        if first.failed_lanes < _MAX_FAILED_LANES and len(first.lanes) < link.lanes - 1:
            first.is_dialling_lane = True
            self._start_dial(msgspec.structs.replace(dialling, fallback=None, lane_of=first))

    def _handle_lane_message(
        self, peer_link: PeerLink, first: PeerLink, message: Message
    ) -> list[Command]:
        if not isinstance(message, Beat):
            raise ProtocolError(
                f"a {type(message).__name__} message arrived on a lane (parallel connection), "
                "which may carry only KV and heartbeats"
            )
        if not peer_link.has_received:
            peer_link.has_received, first.is_dialling_lane = True, False
            self._dial_lane(first)
        return []

    def _retry_lane(self, first: PeerLink, detail: str) -> None:
        # Dial another lane (parallel connection) after one has failed or ended before it was used.
        if first.link in self._peer_links and first.failed_lanes <= _MAX_FAILED_LANES:
            log.warning(
                "kv: agent %s: a lane (parallel link) to %s failed: %s",
                self.card.agent,
                first.peer,
                detail,
            )
            self._dial_lane(first)

    def _lose_lane(self, peer_link: PeerLink, first: PeerLink, detail: str) -> None:
        # Remove a lane (parallel connection) that has ended. If the lane has carried windows of KV,
        # drop the whole link.
        #
        # The link is dropped after a delay, because connections end in any order and the link's own
        # last messages say more about the cause.
        lane = peer_link.link
        assert isinstance(lane, MultiLaneLink)

        def decide() -> None:
            # Read late, because the lane's thread may have been taking its first window when it
            # closed.
            if lane.has_carried_windows:
                self.drop_link(first.link, EndReason.LINK_LOST, f"a lane is lost: {detail}")
            else:
                self._retry_lane(first, detail)

        first.lanes.remove(peer_link)
        first.failed_lanes += 1
        if not peer_link.has_received:
            first.is_dialling_lane = False  # the lane that has ended was the one being dialled
        if lane.has_carried_windows:
            self._sink.retire_link(first.link)
        self._call_later(self.options.silence_s, decide)

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                call()

        self._clock.call_at(self._clock.now() + delay_s, locked)

    # ---- choosing the link

    def _use(self, peer_link: PeerLink) -> list[Command]:
        peer, dialling = peer_link.session.peer, peer_link.dial_request
        assert dialling is not None
        assert peer is not None
        peer_link.is_in_use = True
        fallback = dialling.fallback
        if fallback is not None and self._peer_links.pop(fallback.link, None) is not None:
            fallback.link.close()
        log.info(
            "kv: agent %s: the link to %s now uses the transport %s",
            self.card.agent,
            peer.agent,
            peer_link.link.transport,
        )
        return self._sink.on_linked(
            dialling.address,
            peer_link.link,
            peer.layout,
            peer.agent,
            self._clock.now(),
            peer.only_rank,
        )

    def _redial(self, dialling: DialRequest, reason: EndReason, detail: str) -> list[Command]:
        # Dial again after a connection ended before the peer showed its identity.
        #
        # A busy peer drops unproven connections.
        ended = reason in (EndReason.LINK_LOST, EndReason.UNREACHABLE)
        if (
            not ended
            or self._closed
            or dialling.parent is not None
            or dialling.redials >= _MAX_REDIALS
        ):
            return self._on_dial_failed(dialling, reason, detail)
        repeated = msgspec.structs.replace(dialling, redials=dialling.redials + 1)
        self._call_later(_REDIAL_S * 2**dialling.redials, lambda: self._start_dial(repeated))
        return []

    def _on_dial_failed(
        self, dialling: DialRequest, reason: EndReason, detail: str
    ) -> list[Command]:
        address, fallback = dialling.address, dialling.fallback
        if (lane_owner := dialling.lane_of) is not None:
            lane_owner.is_dialling_lane = False
            lane_owner.failed_lanes += 1
            # By then, unproven connections that kept the source from accepting the lane have timed
            # out.
            self._call_later(self.options.handshake_s, lambda: self._retry_lane(lane_owner, detail))
            return []
        if fallback is None:
            return self._sink.on_link_failed(address, reason, detail, self._clock.now())
        if fallback.link not in self._peer_links:
            # Transfers that waited for the fallback link have ended. Later ones use another link.
            return []
        log.warning(
            "kv: agent %s: a better link to %s could not be opened: %s",
            self.card.agent,
            address,
            detail,
        )
        self._stats.faults["fallback"] += 1
        return self._use(fallback)

    def _handle(self, peer_link: PeerLink, message: Message, now: float) -> list[Command]:
        # Dispatch a message.
        #
        # Raises ProtocolError for a message that this direction does not allow.
        link = peer_link.link
        if peer_link.lane_owner is not None:
            return self._handle_lane_message(peer_link, peer_link.lane_owner, message)
        if peer_link.is_in_use and not peer_link.has_received:
            peer_link.has_received = True
            self._dial_lane(peer_link)
        match message, peer_link.dial_request is not None:
            case Accept(), True:
                return self._sink.on_accept(link, message, now)
            case Invite(), False:
                link.expect_windows()
                return self._source.on_invite(link, message, now)
            case Landed(), False:
                return self._source.on_landed(link, message, now)
            case Credit(), False:
                return self._source.on_credit(link, message, now)
            case Beat(), True:
                return []
            case Beat(), False:
                self._source.on_beat(link, now)
                return []
            case StopTransfer(), True:
                return self._sink.on_stop(link, message, now)
            case StopTransfer(), False:
                return self._source.on_stop(link, message, now)
            case Unwanted(), False:
                return self._source.on_unwanted(link, message, now)
        raise ProtocolError(f"a {type(message).__name__} message is not allowed in this direction")

    def _check_heartbeats(self, due: float, send_beat: bool = True) -> None:
        # Send heartbeats, and drop links whose peers have been silent for too long.
        #
        # Runs on the clock's thread without the agent's lock. Silence is checked twice per beat, so
        # a freeze is noticed within the allowed silence plus half a beat.
        now, beat_s = self._clock.now(), self.options.beat_s
        late_s = now - due if now - due > beat_s else 0.0
        try:
            for peer_link in list(self._peer_links.values()):
                if peer_link.is_silent(now, late_s, self.options):
                    limit_s = (
                        self.options.silence_s if peer_link.is_proven else self.options.handshake_s
                    )
                    self.drop_link(
                        peer_link.link, EndReason.SILENT, f"the agent was silent for {limit_s} s"
                    )
                elif peer_link.is_proven and send_beat:
                    peer_link.send(Beat())
        finally:
            self._schedule_heartbeat(now + beat_s / 2, not send_beat)

    def _schedule_heartbeat(self, when: float, send_beat: bool = True) -> None:
        if not self._closed or self._peer_links:
            self._heartbeat = self._clock.call_at(
                when, lambda: self._check_heartbeats(when, send_beat)
            )
