"""Tests that an exception inside a split request leaves nothing reserved, over real sockets."""

from __future__ import annotations

import pytest

from gateway.disagg.leg_requests import LegRequests
from gateway.fleet.reservation import DecodeReservation
from gateway.request_record import Exchange
from tests.replacement import replace_method
from tests.unit.gateway.disagg.scripted_engines import (
    TEXT,
    answers_without_tokens,
    decodes,
    prefills,
    split_gateway,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

NIXL = "vllm_nixl"
WHOLE = "".join(TEXT)


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("the test replaced this method by one that raises")


async def test_an_exception_at_the_reservation_of_a_pair_leaves_nothing_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        with monkeypatch.context() as broken:
            replace_method(broken, Exchange, "on_reserved", fails)
            assert (await f.ask()).status == 500
        await f.at_rest()
        assert f.app.gateway.handoffs.live_count == 0
        assert (await f.ask()).text == WHOLE


@pytest.mark.parametrize("name", ["interpret", "relay"])
async def test_an_exception_at_a_response_ends_the_request_and_leaves_nothing_reserved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        with monkeypatch.context() as broken:
            replace_method(broken, LegRequests, name, fails)
            assert (await f.ask()).status == 500
        assert f.metric("penstock_split_pairs_total", result="failed") == 1
        await f.at_rest()
        assert (await f.ask()).text == WHOLE


async def test_an_exception_at_the_end_of_a_response_leaves_nothing_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with split_gateway(NIXL, [prefills()], [answers_without_tokens]) as f:
        with monkeypatch.context() as broken:
            replace_method(broken, DecodeReservation, "on_served", fails)
            await f.ask(stream=True)
        await f.at_rest()
        assert f.metric("penstock_split_pairs_total", result="failed") == 1
