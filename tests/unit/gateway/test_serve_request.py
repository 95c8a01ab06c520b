"""Tests of the record that a request gets at its start: its id, and whether chunks are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.http.client_interface import Client
from gateway.metrics.catalogue import Metrics
from gateway.protocol import api_table
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway
from gateway.serve_request import GAPS_EVERY, RequestFactory
from tests.replacement import stand_in

CLIENT = cast(
    Client, SimpleNamespace(address="10.0.0.7", headers={"traceparent": "theirs"}, will_close=False)
)


def new_exchanges(patch: pytest.MonkeyPatch, number: int, tracer: Any = None) -> list[Exchange]:
    patch.setattr("gateway.serve_request.serve", lambda gateway, exchange, client, handle: exchange)
    gateway = stand_in(Gateway, SimpleNamespace(accounts=SimpleNamespace(tracer=tracer)))
    beginning = RequestFactory(gateway, Metrics().itl_seconds)
    return [cast(Exchange, beginning.serve(CLIENT, api_table.CHAT)) for _ in range(number)]


def test_ids_have_one_length_and_differ_from_their_first_digits_on_in_every_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [exchange.id for _ in range(2) for exchange in new_exchanges(monkeypatch, 50)]
    assert len(set(ids)) == 100  # although both processes have drawn the same random numbers
    assert {len(request_id) for request_id in ids} == {len("req_") + 32}
    assert len({request_id[:12] for request_id in ids}) == 100


def test_one_exchange_in_so_many_has_its_gaps_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = [
        exchange.gaps is not None for exchange in new_exchanges(monkeypatch, 3 * GAPS_EVERY)
    ]
    assert looked_at == ([False] * (GAPS_EVERY - 1) + [True]) * 3


def test_an_exchange_has_its_client_s_address_and_its_place_in_the_client_s_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (exchange,) = new_exchanges(
        monkeypatch, 1, SimpleNamespace(start_trace=lambda headers: headers["traceparent"])
    )
    assert (exchange.api, exchange.client, exchange.trace) == (api_table.CHAT, "10.0.0.7", "theirs")
