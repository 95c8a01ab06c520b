"""LinkManager: the links of one agent, from dialling and proof to heartbeat and loss.

It also replaces a link by a better one and adds lanes to it. Not here: transfers (kvtransfer/transfer/source.py and
kvtransfer/transfer/sink.py receive their events), and blocking work, which runs on other threads.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping

import msgspec

from kvtransfer.contract import MOST_LANES, Laned, Link, Transport, TransportError
from kvtransfer.links.peer_link import Dialling, Line, astray, unfit
from kvtransfer.links.unproven_links import UnprovenLinks
from kvtransfer.protocol.messages import (
    Accept,
    Beat,
    Card,
    Credit,
    Invite,
    Landed,
    Message,
    ProtocolError,
    Stop,
    Unwanted,
)
from kvtransfer.protocol.outcomes import Reason
from kvtransfer.protocol.session import Session, Unproven, greeting_nonce, shows_key
from kvtransfer.transfer.commands import Command
from kvtransfer.transfer.sink import SinkBook
from kvtransfer.transfer.source import SourceBook
from kvtransfer.transfer.stats import Tally
from kvtransfer.transports.choose import better
from kvtransfer.util.agent_lock import Hold
from kvtransfer.util.clock import Clock, Timer
from kvtransfer.util.options import Options

# Dials are repeated for a peer that closed before it showed its identity. The delay doubles.
_MAX_REDIALS = 3
_REDIAL_S = 0.02
# After this many failed lanes, a link makes execute with those it has.
_MAX_FAILED_LANES = 3
log = logging.getLogger("penstock")


class Switchboard:
    """The links of one agent. Peers are dialled over the first of `transports`.

    `execute` executes the commands that messages cause; `lock` is the agent's.
    """

    def __init__(
        self,
        key: bytes,
        transports: Mapping[str, Transport],
        clock: Clock,
        options: Options,
        books: tuple[SinkBook, SourceBook, Tally],
        lock: Hold,
        execute: Callable[[list[Command]], None],
    ) -> None:
        self.card: Card
        self.options = options
        self._key, self._transports, self._clock = key, transports, clock
        self._sink, self._source, self._tally = books
        self._lock, self._execute = lock, execute
        self._peer_links: dict[Link, Line] = {}
        self._unproven = UnprovenLinks(options.most_strangers, options.unproven_per_address)
        self._dials = 0  # dials in progress
        self._ended_early: dict[
            Link, str
            # Links that ended before their dial returned, with the reason.
        ] = {}
        self._heartbeat: Timer | None = None
        self._closed = False

    def __len__(self) -> int:
        """Return the number of links, not counting lanes."""
        return sum(not peer_link.session.lane_of for peer_link in self._peer_links.values())

    def open(self, card: Card) -> None:
        self.card = card
        self._schedule_heartbeat(self._clock.now())

    def refuse(self) -> None:
        """Accept no more links."""
        self._closed = True

    def close(self) -> None:
        """Close all links without reporting it: the caller has ended all transfers."""
        with self._lock:
            self._closed = True
            if self._heartbeat is not None:
                self._heartbeat.cancel()
            links = list(self._peer_links)
            self._peer_links.clear()
        for link in links:
            link.close()

    def say(self, link: Link, message: Message) -> None:
        """Send a message. No-op on a link that has ended."""
        if (peer_link := self._peer_links.get(link)) is not None:
            peer_link.say(message)

    def dial(self, address: str) -> None:
        """Dial the agent there on another thread.

        The sink receives `on_linked` or `on_link_failed`.
        """
        self._start_dial(Dialling(next(iter(self._transports.values())), address, address))

    def linked(self, link: Link) -> None:
        with self._lock:
            if self._closed:
                return link.close()
            self._evict(self._unproven.admit(link))
            session = Session(self._key, secrets.token_bytes(16), self.card, dialled=False)
            self._peer_links[link] = Line(link, session, None, self._clock.now())
            return None

    def _evict(self, link: Link | None) -> None:
        if link is None:
            return
        self._tally.faults["strangers"] += 1
        self._peer_links.pop(link, None)
        link.close()

    def message(self, link: Link, data: bytes) -> None:
        peer_link = self._peer_links.get(link)
        if peer_link is None:
            return
        peer_link.hearing = True
        try:
            message, reply = peer_link.session.answer(data)
            if reply is not None:
                link.send(reply)
            with self._lock:
                if self._peer_links.get(link) is not peer_link:
                    # The link was lost in the meantime, so new state would never be cleaned up.
                    return
                if not peer_link.up:
                    self._protect_link(peer_link)
                if peer_link.session.peer is not None and not peer_link.up:
                    self._prove(peer_link)
                if message is not None:
                    self._execute(self._handle(peer_link, message, self._clock.now()))
        except (ProtocolError, Unproven) as error:
            forged = isinstance(error, Unproven)
            self._tally.faults["unproven" if forged else "protocol"] += 1
            reason = Reason.WRONG_KEY if forged and not peer_link.up else Reason.PROTOCOL
            self.lose(link, reason, str(error))
        finally:
            peer_link.hearing = False

    def _protect_link(self, peer_link: Line) -> None:
        """Protect a link whose greeting shows the key from being dropped.

        Of several links with the same greeting, only the first is protected, because greetings can
        be replayed.
        """
        greeting = peer_link.session.greeting
        if peer_link.dialling is not None or (
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

    def lose(self, link: Link, reason: Reason, detail: str) -> None:
        """Drop a link. Every transfer on it ends, behind its own fence."""
        with self._lock:
            peer_link = self._peer_links.pop(link, None)
            self._unproven.remove(link)
            if peer_link is None:
                if self._dials:
                    self._ended_early[link] = detail
                return
            now = self._clock.now()
            log.info(
                "kv %s: link to %s (%s) ends: %s %s",
                self.card.agent,
                peer_link.peer,
                link.transport,
                reason,
                detail,
            )
            for lane in peer_link.lanes:
                self._peer_links.pop(lane.link, None)
                lane.link.close()
            if peer_link.first is not None:
                self._lose_lane(peer_link, peer_link.first, detail)
            elif peer_link.dialling is None:
                self._execute(self._source.lost(link, reason, detail, now))
            elif peer_link.linked:
                self._execute(self._sink.lost(link, reason, detail, now))
            else:
                on_failure = self._on_dial_failed if peer_link.up else self._redial
                self._execute(on_failure(peer_link.dialling, reason, detail))
            link.close()

    def _greeting(self, link: Link, dialling: Dialling) -> Session:
        """Return the session of a dialled link.

        The first link's Hello carries the send budget of all its lanes together.
        """
        lane_of = b"" if dialling.lane_of is None else dialling.lane_of.session.greeting
        budget_bytes = self.options.budget_bytes * (link.lanes if isinstance(link, Laned) else 1)
        return Session(
            self._key,
            greeting_nonce(self._key, secrets.token_bytes(8)),
            self.card,
            dialled=True,
            budget_bytes=budget_bytes,
            lane_of=lane_of,
        )

    def _start_dial(self, dialling: Dialling) -> None:
        """Dial on another thread. Call it with the lock held."""
        self._dials += 1
        try:
            self._clock.aside(lambda: self._dial(dialling))
        except RuntimeError as error:
            # No thread can be started.
            self._finish_dial(None)
            self._execute(self._on_dial_failed(dialling, Reason.UNREACHABLE, str(error)))

    def _finish_dial(self, link: Link | None) -> str | None:
        """Account for a finished dial. Returns why its link has already ended, if it has."""
        self._dials -= 1
        detail = None if link is None else self._ended_early.pop(link, None)
        if not self._dials:
            self._ended_early.clear()
        return detail

    def _dial(self, dialling: Dialling) -> None:
        """Dial a peer. Runs on its own thread, because it may block."""
        try:
            link = dialling.transport.dial(dialling.where)
        except Exception as error:
            # Whatever fails, waiting transfers must be informed.
            if not isinstance(error, TransportError | RuntimeError):
                log.exception(
                    "kv %s: dialling %s by %s",
                    self.card.agent,
                    dialling.address,
                    dialling.transport.name,
                )
            with self._lock:
                self._finish_dial(None)
                self._execute(self._on_dial_failed(dialling, Reason.UNREACHABLE, str(error)))
            return
        peer_link = Line(link, self._greeting(link, dialling), dialling, self._clock.now())
        with self._lock:
            ended = self._finish_dial(link)
            if self._closed:
                link.close()
                return
            if ended is not None:
                link.close()
                self._execute(self._redial(dialling, Reason.UNREACHABLE, ended))
                return
            self._peer_links[link] = peer_link
        link.send(peer_link.session.hello())

    def _prove(self, peer_link: Line) -> None:
        """Put a link whose peer has proven its identity to use, or drop an incompatible one."""
        peer_link.up, peer = True, peer_link.session.peer
        assert peer is not None
        reason = (
            unfit(self.card, peer, peer_link.session.version)
            or astray(peer_link)
            or self._missing_parent(peer_link)
        )
        reason = reason or self._lane_error(peer_link)
        if reason is not None:
            self._tally.refused[reason[0]] += 1
            self.lose(peer_link.link, *reason)
            return
        peer_link.link.secure(peer_link.session.window_key)
        first, dialling = self._lane_owner(peer_link), peer_link.dialling
        if first is not None:
            self._add_lane(first, peer_link)
        elif dialling is None:
            self._source.linked(peer_link.link, peer, peer_link.session.budget_bytes)
        elif (name := better(self.card, peer, self._transports, peer_link.link.transport)) is None:
            self._execute(self._use(peer_link))
        else:
            self._start_dial(
                Dialling(self._transports[name], peer.addresses[name], dialling.address, peer_link)
            )

    def _missing_parent(self, peer_link: Line) -> tuple[Reason, str] | None:
        """Return an error if the link that led to this one is gone.

        Nothing waits for a better link or a lane of it any more, and another link may have been
        dialled since.
        """
        parent = None if peer_link.dialling is None else peer_link.dialling.led_by
        if parent is None or parent.link in self._peer_links:
            return None
        return Reason.LINK_LOST, "the link that led here is gone"

    # ---- lanes

    def _lane_owner(self, peer_link: Line) -> Line | None:
        """Return the link whose lane this is, if it is one.

        A source finds it by the greeting, among links of the same peer.
        """
        if peer_link.dialling is not None:
            return peer_link.dialling.lane_of
        if not peer_link.session.lane_of:
            return None
        for candidate in self._peer_links.values():
            is_candidate = (
                candidate is not peer_link
                and candidate.dialling is None
                and candidate.first is None
            )
            if (
                is_candidate
                and candidate.session.greeting == peer_link.session.lane_of
                and candidate.of_same_peer(peer_link)
            ):
                # The check of the peer rejects a replayed greeting.
                return candidate
        return None

    def _lane_error(self, peer_link: Line) -> tuple[Reason, str] | None:
        if not peer_link.session.lane_of:
            return None
        first = self._lane_owner(peer_link)
        if (
            first is None
            or not isinstance(first.link, Laned)
            or first.link.transport != peer_link.link.transport
        ):
            return Reason.LINK_LOST, "a lane of an unknown link"
        return (Reason.PROTOCOL, "too many lanes") if len(first.lanes) >= MOST_LANES - 1 else None

    def _add_lane(self, first: Line, peer_link: Line) -> None:
        """Share the first link's windows with this lane."""
        assert isinstance(first.link, Laned)
        peer_link.first = first
        first.lanes.append(peer_link)
        first.link.widen(peer_link.link)
        if peer_link.dialling is None:
            peer_link.say(Beat())  # confirms the lane, so that the sink dials the next

    def _dial_lane(self, first: Line) -> None:
        """Sink: dial the next lane, once the source has sent something over the previous one.

        Before that the source may not have received our proof, and would reject a lane of an
        unknown link.
        """
        link, dialling = first.link, first.dialling
        if not isinstance(link, Laned) or dialling is None or first.seeking:
            return
        if first.misses < _MAX_FAILED_LANES and len(first.lanes) < link.lanes - 1:
            first.seeking = True
            self._start_dial(msgspec.structs.replace(dialling, fallback=None, lane_of=first))

    def _handle_lane_message(self, peer_link: Line, first: Line, message: Message) -> list[Command]:
        if not isinstance(message, Beat):
            raise ProtocolError(
                f"{type(message).__name__} on a lane, which carries only windows and beats"
            )
        if not peer_link.heard:
            peer_link.heard, first.seeking = True, False
            self._dial_lane(first)
        return []

    def _retry_lane(self, first: Line, detail: str) -> None:
        """Dial another lane after one failed or ended before it was used."""
        if first.link in self._peer_links and first.misses <= _MAX_FAILED_LANES:
            log.warning("kv %s: a lane to %s failed: %s", self.card.agent, first.peer, detail)
            self._dial_lane(first)

    def _lose_lane(self, peer_link: Line, first: Line, detail: str) -> None:
        """Handle the end of a lane.

        If it was used, windows may be missing, so its link is lost too.

        The decision waits: connections end in any order, and the link's own last messages tell
        more.
        """
        lane = peer_link.link
        assert isinstance(lane, Laned)

        def decide() -> None:
            # Read late, because the lane's thread may have been taking its first window when it
            # closed.
            if lane.used:
                self.lose(first.link, Reason.LINK_LOST, f"a lane is lost: {detail}")
            else:
                self._retry_lane(first, detail)

        first.lanes.remove(peer_link)
        first.misses += 1
        if not peer_link.heard:
            first.seeking = False  # this was the lane being dialled
        if lane.used:
            self._sink.leave(first.link)
        self._later(self.options.silence_s, decide)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                call()

        self._clock.call_at(self._clock.now() + delay_s, locked)

    # ---- choosing the link

    def _use(self, peer_link: Line) -> list[Command]:
        """Sink: use this link, and close the one that led to it."""
        peer, dialling = peer_link.session.peer, peer_link.dialling
        assert dialling is not None
        assert peer is not None
        peer_link.linked = True
        fallback = dialling.fallback
        if fallback is not None and self._peer_links.pop(fallback.link, None) is not None:
            fallback.link.close()
        log.info("kv %s: linked to %s by %s", self.card.agent, peer.agent, peer_link.link.transport)
        return self._sink.linked(
            dialling.address, peer_link.link, peer.layout, peer.agent, self._clock.now()
        )

    def _redial(self, dialling: Dialling, reason: Reason, detail: str) -> list[Command]:
        """Sink: dial again after the connection ended before the peer showed its identity.

        A busy peer drops unproven connections.
        """
        ended = reason in (Reason.LINK_LOST, Reason.UNREACHABLE)
        if (
            not ended
            or self._closed
            or dialling.led_by is not None
            or dialling.redials >= _MAX_REDIALS
        ):
            return self._on_dial_failed(dialling, reason, detail)
        repeated = msgspec.structs.replace(dialling, redials=dialling.redials + 1)
        self._later(_REDIAL_S * 2**dialling.redials, lambda: self._start_dial(repeated))
        return []

    def _on_dial_failed(self, dialling: Dialling, reason: Reason, detail: str) -> list[Command]:
        """Sink: handle a link that did not come up. Use its fallback, if there is one."""
        address, fallback = dialling.address, dialling.fallback
        if (lane_owner := dialling.lane_of) is not None:
            lane_owner.seeking = False
            lane_owner.misses += 1
            # By then, unproven links that kept the lane out of the source have timed out.
            self._later(self.options.handshake_s, lambda: self._retry_lane(lane_owner, detail))
            return []
        if fallback is None:
            return self._sink.unlinked(address, reason, detail, self._clock.now())
        if fallback.link not in self._peer_links:
            # Transfers that waited for the fallback have ended. Later ones wait for another link.
            return []
        log.warning("kv %s: no better link to %s: %s", self.card.agent, address, detail)
        self._tally.faults["fallback"] += 1
        return self._use(fallback)

    def _handle(self, peer_link: Line, message: Message, now: float) -> list[Command]:
        """Dispatch a message. Raises ProtocolError for one that this direction does not allow."""
        link = peer_link.link
        if peer_link.first is not None:
            return self._handle_lane_message(peer_link, peer_link.first, message)
        if peer_link.linked and not peer_link.heard:
            peer_link.heard = True
            self._dial_lane(peer_link)
        match message, peer_link.dialling is not None:
            case Beat(), True:
                return []
            case Beat(), False:
                self._source.beaten(link, now)
                return []
            case Accept(), True:
                return self._sink.accepted(link, message, now)
            case Stop(), True:
                return self._sink.stopped(link, message, now)
            case Invite(), False:
                return self._source.invited(link, message, now)
            case Stop(), False:
                return self._source.stopped(link, message, now)
            case Unwanted(), False:
                return self._source.unwanted(link, message, now)
            case Landed(), False:
                return self._source.landed(link, message, now)
            case Credit(), False:
                return self._source.credited(link, message, now)
        raise ProtocolError(f"{type(message).__name__} is not allowed in this direction")

    def _beat(self, due: float, send_beat: bool = True) -> None:
        """Send heartbeats, and drop silent links.

        Runs on the clock's thread without the agent's lock.

        Silence is checked twice per beat, so a freeze is noticed within the allowed silence plus
        half a beat.
        """
        now, beat_s = self._clock.now(), self.options.beat_s
        late_s = now - due if now - due > beat_s else 0.0
        try:
            for peer_link in list(self._peer_links.values()):
                if peer_link.silent(now, late_s, self.options):
                    limit_s = self.options.silence_s if peer_link.up else self.options.handshake_s
                    self.lose(peer_link.link, Reason.SILENT, f"silent for {limit_s} s")
                elif peer_link.up and send_beat:
                    peer_link.say(Beat())
        finally:
            self._schedule_heartbeat(now + beat_s / 2, not send_beat)

    def _schedule_heartbeat(self, when: float, send_beat: bool = True) -> None:
        if not self._closed or self._peer_links:
            self._heartbeat = self._clock.call_at(when, lambda: self._beat(when, send_beat))
