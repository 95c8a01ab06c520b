"""The door of a replayed fleet: who is let in, who waits, who is refused, and when clients come again or give up.

Waiting and judging are the gateway's own (policies/waiting.py, policies/admission.py). What becomes of a request that
is let in is fleet.py's.
"""

from __future__ import annotations

from functools import partial
from random import Random

from planner.replay.flight import Flight
from planner.replay.port import FleetPort
from planner.replay.record import End, Record
from policies.admission import Admit, Outcome, Shed
from policies.model import Ask, Pick
from policies.waiting import Room

TICK_S = 0.1
NO_RETRY_AFTER = Shed("no_capacity", 1.0)
SHORT_BACKOFF_S, LONG_BACKOFF_S = 0.5, 8.0


class Door:
    """Sole owner of the waiting room and of the random numbers of clients. `room` None: everybody is let in at once."""

    def __init__(self, fleet: FleetPort, room: Room[int] | None) -> None:
        self._fleet = fleet
        self._room = room
        self._clients = fleet.options.clients
        self._rng = Random(f"clients {fleet.options.seed}")
        self._waiting: dict[int, Flight] = {}

    def open(self) -> None:
        """Count the places, and begin to look at the room every tenth of a second, as the gateway does."""
        if self._room is not None:
            self.refresh(0.0)
            self._fleet.at(0.0, self._tick)

    def arrive(self, now: float, flight: Flight) -> None:
        """A client's first try; from now on it may lose its patience."""
        if self._clients.patience_s is not None:
            self._fleet.at(now + self._clients.patience_s, self._lose_patience, flight)
        self._knock(now, flight)

    def refresh(self, now: float) -> None:
        """Groups came or went: the room counts its places anew."""
        if self._room is not None:
            self._room.refresh(self._fleet.front.candidates)
            self._settle(now)

    def booked(self, ask: Ask, pick: Pick) -> None:
        """Its tenant pays, if there is a room that counts."""
        if self._room is not None:
            self._room.booked(ask, pick)

    def left(self, now: float, flight: Flight) -> None:
        """A request has ended: its place is free, and the room hears how it went."""
        if self._returns_permit(flight):
            assert self._room is not None
            self._room.leave(flight.request, _outcome(now, flight.record))
            self._fleet.at(now, self._settle)

    def nobody(self, now: float, flight: Flight) -> None:
        """Nobody may serve a request that was let in: it is refused like any other, and its place is free."""
        if self._returns_permit(flight):
            assert self._room is not None
            self._room.gone(now)
            self._fleet.at(now, self._settle)
        if flight.tried:
            self._fleet.over_with(now, flight, End.LOST, "no_capacity")
        else:
            self._refused(now, flight, NO_RETRY_AFTER)

    def _returns_permit(self, flight: Flight) -> bool:
        had, flight.permit = flight.permit, False
        return had

    def _knock(self, now: float, flight: Flight) -> None:
        """One try to be let in: its first, or again after a refusal."""
        if flight.over:
            return
        if self._room is None:
            self._fleet.serve(now, flight, self._fleet.front.ask(flight, now))
        elif self._room.take():
            self._let_in(now, flight)
        else:
            self._judge(now, flight, self._room)

    def _judge(self, now: float, flight: Flight, room: Room[int]) -> None:
        """The room was not calm: its admission has the word."""
        fleet, number = self._fleet, flight.record.number
        ask, again = fleet.front.ask(flight, now), partial(fleet.front.ask, flight)
        verdict = room.arrive(ask, fleet.front.fitting(flight.one), number, again)
        if isinstance(verdict, Admit):
            flight.permit = True
            fleet.serve(now, flight, ask)
        elif isinstance(verdict, Shed):
            self._refused(now, flight, verdict)
        else:
            self._waiting[number] = flight
            fleet.at(now + verdict.timeout_s, self._settle)

    def _let_in(self, now: float, flight: Flight) -> None:
        flight.permit = True
        self._fleet.serve(now, flight, self._fleet.front.ask(flight, now))

    def _settle(self, now: float, _: object = None) -> None:
        """Let in and send away whoever's turn it is."""
        room = self._room
        if room is None:
            return
        for number, verdict in room.settle(now):
            flight = self._waiting.pop(number)
            if isinstance(verdict, Admit):
                self._let_in(now, flight)
            elif isinstance(verdict, Shed):
                self._refused(now, flight, verdict)

    def _tick(self, now: float, _: object) -> None:
        assert self._room is not None
        self._room.tick(now)
        self._settle(now)
        if self._fleet.under_way:
            self._fleet.at(now + TICK_S, self._tick)

    def _refused(self, now: float, flight: Flight, shed: Shed) -> None:
        """A 429: its client comes again when it was told to or after its backoff, until it has had enough."""
        clients, record = self._clients, flight.record
        record.refusals += 1
        if record.refusals > clients.retries:
            self._fleet.over_with(now, flight, End.SHED, shed.reason)
            return
        wait_s = shed.retry_after_s if clients.obey else None
        if wait_s is None:
            backoff_s = min(LONG_BACKOFF_S, SHORT_BACKOFF_S * 2 ** (record.refusals - 1))
            wait_s = backoff_s * (1 - 0.25 * self._rng.random())
        self._fleet.at(now + wait_s, self._knock, flight)

    def _lose_patience(self, now: float, flight: Flight) -> None:
        """Its client has waited long enough for a first token."""
        if not flight.over and flight.record.first_s is None:
            number = flight.record.number
            if self._waiting.pop(number, None) is not None and self._room is not None:
                self._room.cancel(number)
            self._fleet.withdraw(now, flight)
            self._fleet.over_with(now, flight, End.LEFT, "patience")


def _outcome(now: float, record: Record) -> Outcome:
    ended = {End.SERVED: "served", End.LEFT: "ignored"}.get(record.end, "dropped")
    made = record.output_tokens if record.end is End.SERVED else 0
    return Outcome(now, record.ttft_s, record.tpot_s, made, record.cached_tokens if made else None, ended)
