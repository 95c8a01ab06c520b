"""Switchboard: the links of one agent. Dialled and answered, proven, exchanged for better ones, kept alive, lost.

Not here: transfers (the books hear what matters to them), or any waiting: what may wait is done aside (clock.py).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping

import msgspec

from kvtransfer.clock import Clock, Timer
from kvtransfer.commands import Command
from kvtransfer.ends import Reason
from kvtransfer.hold import Hold
from kvtransfer.lines import Dialling, Line, astray, unfit
from kvtransfer.messages import (
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
from kvtransfer.options import Options
from kvtransfer.session import Session, Unproven, greeting_nonce, shows_key
from kvtransfer.sink import SinkBook
from kvtransfer.source import SourceBook
from kvtransfer.tally import Tally
from kvtransfer.transports.base import MOST_LANES, Laned, Link, Transport, TransportError
from kvtransfer.transports.choose import better
from kvtransfer.unproven_links import UnprovenLinks

_MOST_REDIALS = 3  # of a peer that hung up before it had said who it is
_REDIAL_S = 0.02  # before the first; twice as long before each next one
_MOST_MISSES = 3  # lanes of a link that come to nothing; then it has as many as it has
log = logging.getLogger("penstock")


class Switchboard:
    """`do` carries out what the books decide, `lock` is the agent's. Peers are dialled by the first of `transports`."""

    def __init__(
        self,
        key: bytes,
        transports: Mapping[str, Transport],
        clock: Clock,
        options: Options,
        books: tuple[SinkBook, SourceBook, Tally],
        lock: Hold,
        do: Callable[[list[Command]], None],
    ) -> None:
        self.card: Card
        self.options = options
        self._key, self._transports, self._clock = key, transports, clock
        self._sink, self._source, self._tally = books
        self._lock, self._do = lock, do
        self._lines: dict[Link, Line] = {}
        self._unproven = UnprovenLinks(options.most_strangers, options.unproven_per_address)
        self._dials = 0  # under way
        self._short_lived: dict[
            Link, str
        ] = {}  # links that ended before whoever dialled them could say so
        self._pulse: Timer | None = None
        self._closed = False

    def __len__(self) -> int:
        """Links; lanes are parts of one."""
        return sum(not line.session.lane_of for line in self._lines.values())

    def open(self, card: Card) -> None:
        self.card = card
        self._set_pulse(self._clock.now())

    def refuse(self) -> None:
        """No more links."""
        self._closed = True

    def close(self) -> None:
        """Hang up everywhere. Nothing is told of it: whoever calls has ended all transfers."""
        with self._lock:
            self._closed = True
            if self._pulse is not None:
                self._pulse.cancel()
            links = list(self._lines)
            self._lines.clear()
        for link in links:
            link.close()

    def say(self, link: Link, message: Message) -> None:
        """Nothing happens on a link that is gone."""
        if (line := self._lines.get(link)) is not None:
            line.say(message)

    def dial(self, address: str) -> None:
        """Aside: a link to the agent there. The sink's book hears `linked` or `unlinked`."""
        self._seek(Dialling(next(iter(self._transports.values())), address, address))

    def linked(self, link: Link) -> None:
        with self._lock:
            if self._closed:
                return link.close()
            self._drop_unproven(self._unproven.admit(link))
            session = Session(self._key, secrets.token_bytes(16), self.card, dialled=False)
            self._lines[link] = Line(link, session, None, self._clock.now())
            return None

    def _drop_unproven(self, link: Link | None) -> None:
        if link is None:
            return
        self._tally.faults["strangers"] += 1
        self._lines.pop(link, None)
        link.close()

    def message(self, link: Link, data: bytes) -> None:
        line = self._lines.get(link)
        if line is None:
            return
        line.hearing = True
        try:
            message, reply = line.session.answer(data)
            if reply is not None:
                link.send(reply)
            with self._lock:
                if self._lines.get(link) is not line:
                    return  # lost meanwhile: what comes up now would never be told of it
                if not line.up:
                    self._promote(line)
                if line.session.peer is not None and not line.up:
                    self._prove(line)
                if message is not None:
                    self._do(self._hear(line, message, self._clock.now()))
        except (ProtocolError, Unproven) as wrong:
            forged = isinstance(wrong, Unproven)
            self._tally.faults["unproven" if forged else "protocol"] += 1
            reason = Reason.WRONG_KEY if forged and not line.up else Reason.PROTOCOL
            self.lose(link, reason, str(wrong))
        finally:
            line.hearing = False

    def _promote(self, line: Line) -> None:
        """A link whose greeting shows the key is dropped for no other. Of several with one greeting, the first."""
        greeting = line.session.greeting
        if line.dialling is not None or (
            line.session.peer is None and not shows_key(self._key, greeting)
        ):
            return
        lines = self._lines.values()
        served = [line.session.greeting for line in lines if line.link not in self._unproven]
        if line.session.peer is not None or greeting not in served:
            self._unproven.remove(line.link)

    def lose(self, link: Link, reason: Reason, detail: str) -> None:
        """The link is of no more use: whatever was on it ends, each behind its own fence."""
        with self._lock:
            line = self._lines.pop(link, None)
            self._unproven.remove(link)
            if line is None:
                if self._dials:
                    self._short_lived[link] = detail
                return
            now = self._clock.now()
            log.info(
                "kv %s: link to %s (%s) ends: %s %s",
                self.card.agent,
                line.peer,
                link.transport,
                reason,
                detail,
            )
            for lane in line.lanes:
                self._lines.pop(lane.link, None)
                lane.link.close()
            if line.first is not None:
                self._lose_lane(line, line.first, detail)
            elif line.dialling is None:
                self._do(self._source.lost(link, reason, detail, now))
            elif line.linked:
                self._do(self._sink.lost(link, reason, detail, now))
            else:
                settle = self._settle if line.up else self._hung_up_on
                self._do(settle(line.dialling, reason, detail))
            link.close()

    def _greeting(self, link: Link, dialling: Dialling) -> Session:
        """What all lanes together may have under way stands in the Hello of the first."""
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

    def _seek(self, dialling: Dialling) -> None:
        """Under the lock: dial on a thread that may wait."""
        self._dials += 1
        try:
            self._clock.aside(lambda: self._dial(dialling))
        except RuntimeError as wrong:  # there is no thread to be had
            self._dialled(None)
            self._do(self._settle(dialling, Reason.UNREACHABLE, str(wrong)))

    def _dialled(self, link: Link | None) -> str | None:
        """A dial is over. Why its link has ended already, if it has."""
        self._dials -= 1
        detail = None if link is None else self._short_lived.pop(link, None)
        if not self._dials:
            self._short_lived.clear()
        return detail

    def _dial(self, dialling: Dialling) -> None:
        """Aside: a link to a peer."""
        try:
            link = dialling.transport.dial(dialling.where)
        except Exception as wrong:  # whatever it is, somebody waits to hear of it
            if not isinstance(wrong, TransportError | RuntimeError):
                log.exception(
                    "kv %s: dialling %s by %s",
                    self.card.agent,
                    dialling.address,
                    dialling.transport.name,
                )
            with self._lock:
                self._dialled(None)
                self._do(self._settle(dialling, Reason.UNREACHABLE, str(wrong)))
            return
        line = Line(link, self._greeting(link, dialling), dialling, self._clock.now())
        with self._lock:
            ended = self._dialled(link)
            if self._closed:
                link.close()
                return
            if ended is not None:
                link.close()
                self._do(self._hung_up_on(dialling, Reason.UNREACHABLE, ended))
                return
            self._lines[link] = line
        link.send(line.session.hello())

    def _prove(self, line: Line) -> None:
        """The other end is who it says. Is it one that we can work with?"""
        line.up, peer = True, line.session.peer
        assert peer is not None
        reason = unfit(self.card, peer, line.session.version) or astray(line) or self._late(line)
        reason = reason or self._unwanted_lane(line)
        if reason is not None:
            self._tally.refused[reason[0]] += 1
            self.lose(line.link, *reason)
            return
        line.link.secure(line.session.window_key)
        first, dialling = self._first_of(line), line.dialling
        if first is not None:
            self._widen(first, line)
        elif dialling is None:
            self._source.linked(line.link, peer, line.session.budget_bytes)
        elif (name := better(self.card, peer, self._transports, line.link.transport)) is None:
            self._do(self._use(line))
        else:
            self._seek(
                Dialling(self._transports[name], peer.addresses[name], dialling.address, line)
            )

    def _late(self, line: Line) -> tuple[Reason, str] | None:
        """A better way, or a lane, that comes up when the line that led to it is gone: nobody waits for it any more,
        and another may have been dialled meanwhile."""
        before = None if line.dialling is None else line.dialling.led_by
        if before is None or before.link in self._lines:
            return None
        return Reason.LINK_LOST, "the link that led here is gone"

    # ---- lanes

    def _first_of(self, line: Line) -> Line | None:
        """The line whose lane this is, if it is one; at a source by what its greeting says, and the same peer's."""
        if line.dialling is not None:
            return line.dialling.lane_of
        if not line.session.lane_of:
            return None
        for each in self._lines.values():
            ours = each is not line and each.dialling is None and each.first is None
            if ours and each.session.greeting == line.session.lane_of and each.of_same_peer(line):
                return each  # and not a stranger that repeats what it has read on the wire
        return None

    def _unwanted_lane(self, line: Line) -> tuple[Reason, str] | None:
        if not line.session.lane_of:
            return None
        first = self._first_of(line)
        if (
            first is None
            or not isinstance(first.link, Laned)
            or first.link.transport != line.link.transport
        ):
            return Reason.LINK_LOST, "a lane of no link that is here"
        return (Reason.PROTOCOL, "too many lanes") if len(first.lanes) >= MOST_LANES - 1 else None

    def _widen(self, first: Line, line: Line) -> None:
        """From now on the first line's link speaks for the windows of both."""
        assert isinstance(first.link, Laned)
        line.first = first
        first.lanes.append(line)
        first.link.widen(line.link)
        if line.dialling is None:
            line.say(Beat())  # it is taken: the next may come

    def _seek_lane(self, first: Line) -> None:
        """Sink: one after the other, each when the source has said something on the one before. Until then it may not
        have taken our proof in: a lane that overtakes that would be of no link that it knows."""
        link, dialling = first.link, first.dialling
        if not isinstance(link, Laned) or dialling is None or first.seeking:
            return
        if first.misses < _MOST_MISSES and len(first.lanes) < link.lanes - 1:
            first.seeking = True
            self._seek(msgspec.structs.replace(dialling, fallback=None, lane_of=first))

    def _hear_lane(self, line: Line, first: Line, message: Message) -> list[Command]:
        if not isinstance(message, Beat):
            raise ProtocolError(
                f"{type(message).__name__} came by a lane, which has windows and beats alone"
            )
        if not line.heard:
            line.heard, first.seeking = True, False
            self._seek_lane(first)
        return []

    def _seek_again(self, first: Line, detail: str) -> None:
        """A lane did not come up, or ended before it was of use."""
        if first.link in self._lines and first.misses <= _MOST_MISSES:
            log.warning("kv %s: %s has a lane less: %s", self.card.agent, first.peer, detail)
            self._seek_lane(first)

    def _lose_lane(self, line: Line, first: Line, detail: str) -> None:
        """With one that was used went what had been sent by it and did not arrive: so its link is lost. Not before that
        one had time to end by itself: connections end in any order, and its last words say more."""
        lane = line.link
        assert isinstance(lane, Laned)

        def decide() -> None:
            # Asked now, and not before: its thread may just have been taking the first window when it was closed.
            if lane.used:
                self.lose(first.link, Reason.LINK_LOST, f"a lane is lost: {detail}")
            else:
                self._seek_again(first, detail)

        first.lanes.remove(line)
        first.misses += 1
        if not line.heard:
            first.seeking = False  # it was the one on its way
        if lane.used:
            self._sink.leave(first.link)
        self._later(self.options.silence_s, decide)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                call()

        self._clock.call_at(self._clock.now() + delay_s, locked)

    # ---- which line it is

    def _use(self, line: Line) -> list[Command]:
        """Sink: this line it is. The one that led to it is not needed any more."""
        peer, dialling = line.session.peer, line.dialling
        assert dialling is not None
        assert peer is not None
        line.linked = True
        fallback = dialling.fallback
        if fallback is not None and self._lines.pop(fallback.link, None) is not None:
            fallback.link.close()
        log.info("kv %s: %s by %s", self.card.agent, peer.agent, line.link.transport)
        return self._sink.linked(
            dialling.address, line.link, peer.layout, peer.agent, self._clock.now()
        )

    def _hung_up_on(self, dialling: Dialling, reason: Reason, detail: str) -> list[Command]:
        """Sink: the connection ended before the peer said who it is. A busy peer drops connections: dial again."""
        ended = reason in (Reason.LINK_LOST, Reason.UNREACHABLE)
        if (
            not ended
            or self._closed
            or dialling.led_by is not None
            or dialling.redials >= _MOST_REDIALS
        ):
            return self._settle(dialling, reason, detail)
        again = msgspec.structs.replace(dialling, redials=dialling.redials + 1)
        self._later(_REDIAL_S * 2**dialling.redials, lambda: self._seek(again))
        return []

    def _settle(self, dialling: Dialling, reason: Reason, detail: str) -> list[Command]:
        """Sink: a line did not come up. Take the next best, if there is one."""
        address, fallback = dialling.address, dialling.fallback
        if (first := dialling.lane_of) is not None:
            first.seeking = False
            first.misses += 1
            # Until then strangers that kept it out of the source have had their time.
            self._later(self.options.handshake_s, lambda: self._seek_again(first, detail))
            return []
        if fallback is None:
            return self._sink.unlinked(address, reason, detail, self._clock.now())
        if fallback.link not in self._lines:
            return []  # who waited for it has been told; whoever waits by now waits for another
        log.warning("kv %s: %s not by the better way: %s", self.card.agent, address, detail)
        self._tally.faults["fallback"] += 1
        return self._use(fallback)

    def _hear(self, line: Line, message: Message, now: float) -> list[Command]:
        """Each end has its lines; who says the other's is out."""
        link = line.link
        if line.first is not None:
            return self._hear_lane(line, line.first, message)
        if line.linked and not line.heard:
            line.heard = True
            self._seek_lane(line)
        match message, line.dialling is not None:
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
        raise ProtocolError(f"{type(message).__name__} is not this end's to say")

    def _beat(self, due: float, say: bool = True) -> None:
        """On the clock's thread, and without the agent's lock: say that we live, and notice (twice as often) who does
        not. A freeze is thus noticed within the silence that is allowed and half a beat."""
        now, beat_s = self._clock.now(), self.options.beat_s
        late_s = now - due if now - due > beat_s else 0.0
        try:
            for line in list(self._lines.values()):
                if line.silent(now, late_s, self.options):
                    limit_s = self.options.silence_s if line.up else self.options.handshake_s
                    self.lose(line.link, Reason.SILENT, f"nothing heard for {limit_s} s")
                elif line.up and say:
                    line.say(Beat())
        finally:
            self._set_pulse(now + beat_s / 2, not say)

    def _set_pulse(self, when: float, say: bool = True) -> None:
        if not self._closed or self._lines:
            self._pulse = self._clock.call_at(when, lambda: self._beat(when, say))
