"""Tests of the newest ended requests that are kept: their number, and that texts are dropped."""

from __future__ import annotations

from random import Random

from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.telemetry.recent_requests import USUAL_PER_S, RecentExchanges
from policies.prefix.fingerprint import Fingerprinter
from policies.routing_types import RoutingQuery
from tests.unit.gateway.telemetry.ended_requests import answered, exchange


def test_the_ring_holds_the_newest_requests_without_their_contents() -> None:
    ring = RecentExchanges(3)
    for number in range(5):
        x = exchange(number)
        x.relay = answered(0.1, 0.2, 10)
        ring.add(x, TokenUsage(), 0, 1.0)
        assert x.call is not None
        assert (x.relay, x.call.body, x.call.prompt) == (None, b"", ())
    assert [ring.find_as_json(f"req_{number}") is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    ring.resize(2)
    assert ring.find_as_json("req_4") is None


def test_recent_exchanges_hold_no_fingerprint() -> None:
    x = exchange()
    assert x.call is not None
    x.first_query = RoutingQuery(
        x.call.request,
        0.0,
        Random(0),
        (),
        frozenset(),
        Fingerprinter(bytes(16)).fingerprint(b"", bytes(10_000)),
    )
    explained = RecentExchanges(2)
    explained.add(x, TokenUsage(), 0, 1.0)
    assert x.first_query.fingerprint is None


def test_a_burst_is_kept_up_to_the_size_then_some_requests_per_second() -> None:
    explained = RecentExchanges(100)
    burst = [explained.has_room(1000.0) for _ in range(150)]
    assert burst == [True] * 100 + [False] * 50
    later = [explained.has_room(1000.0 + number / 1000) for number in range(10_000)]
    assert abs(sum(later) - 10 * USUAL_PER_S) <= 1
    assert not any(RecentExchanges(0).has_room(float(now)) for now in range(5))


def test_requests_at_a_usual_rate_are_all_kept() -> None:
    explained = RecentExchanges(10)
    assert all(explained.has_room(5.0 + number / USUAL_PER_S) for number in range(1000))
