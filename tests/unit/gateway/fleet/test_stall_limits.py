"""Tests of how long engines may be silent before they count as stalled.

An engine that computes one request at a time may be silent for longer, because the gateway's test
request has to wait there.
"""

from __future__ import annotations

import pytest

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.stall_limits import FIRST_ANSWER_FACTOR, LEAST_FACTOR, SILENCE_MARGIN, Silences
from gateway.http.engine_connections import ConnectionPool
from tests.replacement import replace_method
from tests.unit.gateway.fleet.tables import table_of

LIMIT_S = 5.0


def two_endpoints() -> tuple[LiveEndpoint, ...]:
    return table_of(["http://127.0.0.1:1", "http://127.0.0.1:2"])[0].all()


def limit_s(silences: Silences, live: LiveEndpoint, peers: tuple[LiveEndpoint, ...]) -> float:
    return silences.limit_s(live, peers, LIMIT_S)


def answer_after(
    monkeypatch: pytest.MonkeyPatch, silences: Silences, live: LiveEndpoint, silence_s: float
) -> None:
    # Let the endpoint be silent for a time, and then answer.
    replace_method(monkeypatch, ConnectionPool, "silence_duration_s", lambda pool, now: silence_s)
    silences.observe(live, 0.0)
    live.upstream.last_body_at += 1.0
    replace_method(monkeypatch, ConnectionPool, "silence_duration_s", lambda pool, now: 0.0)
    silences.observe(live, 0.0)


async def test_before_the_first_answer_of_a_pool_a_silence_may_last_a_minute() -> None:
    live, peer = two_endpoints()
    assert limit_s(Silences(), live, (live, peer)) == FIRST_ANSWER_FACTOR * LIMIT_S == 60.0


async def test_an_engine_whose_metrics_show_progress_is_known_to_batch() -> None:
    live, peer = two_endpoints()
    live.progress = (7, 0.1)
    assert limit_s(Silences(), live, (live, peer)) == LIMIT_S


async def test_an_engine_that_generates_a_test_token_beside_a_request_is_known_to_batch() -> None:
    live, peer = two_endpoints()
    silences = Silences()
    silences.on_test_token(live)
    assert limit_s(silences, live, (live, peer)) == LIMIT_S
    assert limit_s(silences, peer, (live, peer)) == FIRST_ANSWER_FACTOR * LIMIT_S


async def test_a_silence_may_last_longer_than_those_that_ended_with_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, peer = two_endpoints()
    silences = Silences()
    answer_after(monkeypatch, silences, live, 12.0)
    for each in (live, peer):
        assert limit_s(silences, each, (live, peer)) == SILENCE_MARGIN * 12.0


async def test_a_stalled_engine_of_a_quick_pool_is_found_within_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, peer = two_endpoints()
    silences = Silences()
    answer_after(monkeypatch, silences, peer, 1.0)
    assert limit_s(silences, live, (live, peer)) == LEAST_FACTOR * LIMIT_S < 10.0


async def test_an_endpoint_that_is_polled_no_more_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, _ = two_endpoints()
    silences = Silences()
    answer_after(monkeypatch, silences, live, 12.0)
    silences.forget(live)
    assert limit_s(silences, live, (live,)) == LEAST_FACTOR * LIMIT_S
