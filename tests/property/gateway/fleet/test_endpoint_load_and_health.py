"""Property tests that all capacity reserved at endpoints is released, in any order of events.

The test is a state machine.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.config import Config
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.engine_metrics import ScrapedLoad
from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.fleet.reservation import Reservation
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from gateway.protocol.response.relay import UpstreamError
from gateway.protocol.response.usage_and_error_search import TokenUsage
from policies.health.endpoint_health import HealthEvent, is_unreachable
from policies.routing_types import Candidate, Pick, Request

KINDS = [
    "reset",
    "timeout",
    "connect_failed",
    "status_500",
    "status_503",
    "engine_error",
    "ejected",
    "framing",
]


class Reservations(RuleBasedStateMachine):
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._build())
        self.open: dict[Reservation, tuple[int, int, int, bool]] = {}

    async def _build(self) -> None:
        urls = [{"url": f"http://127.0.0.1:{9000 + n}"} for n in range(3)]
        config = Config.model_validate({"version": 1, "pools": {"main": {"endpoints": urls}}})
        self.table = EndpointTable(
            config,
            PrefixCacheView(bytes(32), 1 << 20, 256),
            Metrics(),
            Random(1),
            WriteQueue(self.loop),
        )
        adoption = self.table.plan(config)
        self.table.apply(adoption)
        self.candidates: tuple[Candidate, ...] = adoption.pools["main"]
        self.lives = list(self.table.all())

    def teardown(self) -> None:
        for reservation in list(self.open):
            reservation.__exit__()
        for candidate in self.candidates:
            load = candidate.load
            assert (
                load.in_flight,
                load.prefill_tokens,
                load.decode_tokens,
                load.expected_tokens,
            ) == (0, 0, 0, 0)
        self.loop.close()

    @rule(
        target=reservations,
        slot=st.integers(0, 2),
        prompt=st.integers(0, 10**6),
        output=st.integers(0, 10**5),
        share=st.floats(0, 1),
    )
    def reserve(self, slot: int, prompt: int, output: int, share: float) -> Reservation:
        cached = int(prompt * share)
        pick = Pick(self.candidates[slot], cached, 0.0, 3, "test")
        reservation = self.table.reserve(
            pick, Request("id", "m", "", prompt, output, stream=True), None
        )
        self.open[reservation] = (slot, prompt, cached, False)
        return reservation

    @rule(reservation=reservations)
    def first_token(self, reservation: Reservation) -> None:
        if reservation in self.open:
            reservation.on_first_token()
            slot, prompt, cached, _ = self.open[reservation]
            self.open[reservation] = (slot, prompt, cached, True)

    @rule(reservation=consumes(reservations), end=st.sampled_from(["served", "left", *KINDS]))
    def leave(self, reservation: Reservation, end: str) -> None:
        with suppress(UpstreamError), reservation:
            del self.open[reservation]
            if end == "served":
                reservation.on_served(TokenUsage(7, 3, 2))
            elif end != "left":
                reservation.on_failed(UpstreamError(end, "test"))
                reservation.on_failed(UpstreamError(end, "told twice counts once"))

    @rule(slot=st.integers(0, 2), status=st.sampled_from([200, 500, 503, None]))
    def probe(self, slot: int, status: int | None) -> None:
        self.table.on_probe(self.lives[slot], status)

    @rule(slot=st.integers(0, 2), event=st.sampled_from(list(HealthEvent)))
    def happen(self, slot: int, event: HealthEvent) -> None:
        self.table.on_event(self.lives[slot], event)

    @rule(
        slot=st.integers(0, 2),
        running=st.none() | st.integers(0, 50),
        waiting=st.none() | st.integers(0, 50),
    )
    def scrape(self, slot: int, running: int | None, waiting: int | None) -> None:
        load = self.candidates[slot].load
        before = load.unexplained_requests
        self.table.on_scrape(self.lives[slot], ScrapedLoad(running, waiting, 0.5, None))
        assert load.unexplained_requests == max(0, (running or 0) + (waiting or 0) - load.in_flight)
        assert load.external_requests == min(before, load.unexplained_requests)

    @invariant()
    def loads_are_the_sum_of_open_reservations(self) -> None:
        for candidate in self.candidates:
            load = candidate.load
            mine = [
                reservation for reservation in self.open.values() if reservation[0] == load.slot
            ]
            assert load.in_flight == len(mine)
            assert load.prefill_tokens == sum(
                prompt - cached for _, prompt, cached, began in mine if not began
            )
            assert load.decode_tokens == sum(prompt for _, prompt, _, began in mine if began)

    @invariant()
    def an_endpoint_is_available_unless_all_are_dead_or_unreachable(self) -> None:
        alive: list[Any] = [
            live
            for live in self.lives
            if live.health.state != "dead" and not is_unreachable(live.health)
        ]
        assert bool(alive) == any(live.load.is_available for live in alive)


TestReservations = Reservations.TestCase
TestReservations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
