"""Tests that an engine that sends a whole answer in place of a stream does not seem slow."""

from __future__ import annotations

import msgspec

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.reservation import Reservation
from gateway.protocol.response.usage_and_error_search import TokenUsage
from policies.health.speed_samples import Measure
from policies.routing_types import Pick, Request
from tests.unit.gateway.fleet.tables import table_of

STREAM = Request(id="r", tenant="", model="m", prompt_tokens=100, output_tokens=20, stream=True)


def table() -> EndpointTable:
    return table_of(["http://127.0.0.1:1", "http://127.0.0.1:2"])[0]


def reserve(table: EndpointTable, request: Request = STREAM) -> Reservation:
    (candidates,) = table._pools.values()
    return table.reserve(Pick(candidates[0], 0, 0.0, 2, "test"), request, None)


def serve(reservation: Reservation, *, is_whole: bool) -> None:
    reservation.on_stream_seen(is_whole=is_whole)
    reservation.on_first_token()
    reservation.on_served(TokenUsage(100, 20))
    reservation.close()


def sample_counts(table: EndpointTable) -> dict[Measure, float]:
    speed = table.all()[0].speed
    speed.prepare(1e9)
    return {
        measure: track.reference.total for measure, track in zip(Measure, speed.tracks, strict=True)
    }


async def test_a_whole_answer_is_no_sample_of_a_prompt_but_of_an_answer() -> None:
    pool = table()
    for _ in range(3):
        serve(reserve(pool), is_whole=True)
    counts = sample_counts(pool)
    assert (counts[Measure.TTFT], counts[Measure.ANSWER]) == (0, 3)
    assert pool.all()[0].speed.waiting == 0


async def test_an_endpoint_that_answers_whole_is_not_watched_for_a_late_first_token() -> None:
    pool = table()
    serve(reserve(pool), is_whole=True)
    with reserve(pool):
        assert pool.all()[0].speed.waiting == 0


async def test_a_stream_ends_the_belief_that_answers_come_whole() -> None:
    pool = table()
    serve(reserve(pool), is_whole=True)
    serve(reserve(pool), is_whole=False)
    assert not pool.all()[0].answers_whole
    with reserve(pool):
        assert pool.all()[0].speed.waiting == 1


async def test_a_request_without_a_stream_tells_nothing() -> None:
    pool = table()
    serve(reserve(pool), is_whole=True)
    serve(reserve(pool, msgspec.structs.replace(STREAM, stream=False)), is_whole=False)
    assert pool.all()[0].answers_whole
