"""Tests of split requests with Mooncake, whose bootstrap server identifies the prefill engine."""

from __future__ import annotations

import asyncio

import pytest

from tests.duration_limits import within
from tests.unit.gateway.disagg.bootstrap_server import bootstrap_server, page
from tests.unit.gateway.disagg.scripted_engines import (
    TEXT,
    decodes,
    in_turn,
    never_answers,
    prefills,
    refuses,
    resets,
    split_gateway,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

WHOLE = "".join(TEXT)


async def test_the_bootstrap_server_is_queried_once_per_prefill_engine() -> None:
    async with (
        bootstrap_server([page("one")]) as (address, request),
        split_gateway("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):
        for _ in range(3):
            assert (await f.ask()).text == WHOLE
        assert request == ["GET /query HTTP/1.1"]
        prefill, decode = f.prefill[0].requests[0], f.decode[0].requests[0]
        transfer = f"xfer-{prefill.headers['x-request-id']}"
        assert prefill.headers["x-data-parallel-rank"] == "0"
        assert prefill.json["kv_transfer_params"]["transfer_id"] == transfer
        assert decode.json["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": f"http://{address}",
            "remote_engine_id": "one",
            "transfer_id": transfer,
        }
        await f.at_rest()


@pytest.mark.parametrize("nonsense", [b"{}", b"<html>", b"[1]"])
async def test_without_an_identity_the_decoder_computes_the_prompt(nonsense: bytes) -> None:
    async with (
        bootstrap_server([nonsense]) as (address, _),
        split_gateway("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):
        assert (await f.ask()).text == WHOLE
        assert not f.prefill[0].requests
        assert "kv_transfer_params" not in f.decode[0].requests[0].json
        await f.at_rest()


async def test_an_unreachable_bootstrap_server_does_not_fail_the_request() -> None:
    async with split_gateway("mooncake", [prefills(None)], [decodes], bootstrap="127.0.0.1:1") as f:
        assert (await f.ask()).text == WHOLE
        assert f.error_count(f.prefill[0]) == 1
        await f.at_rest()


async def test_a_silent_bootstrap_server_delays_a_request_by_one_second_at_most() -> None:
    async with (
        bootstrap_server([b""]) as (address, _),
        split_gateway("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):
        assert (await within(2, f.ask())).text == WHOLE
        await f.at_rest()


async def test_a_client_may_disconnect_during_the_bootstrap_query() -> None:
    async with (
        bootstrap_server([b""]) as (address, request),
        split_gateway("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):

        async def was_asked() -> None:
            while not request:
                await asyncio.sleep(0.001)

        await f.ask_and_leave(was_asked)
        await f.at_rest()
        assert not f.prefill[0].requests
        assert not f.decode[0].requests


async def test_concurrent_requests_share_one_bootstrap_query_when_a_client_disconnects() -> None:
    gate = asyncio.Event()
    async with (
        bootstrap_server([page("one")], gate) as (address, request),
        split_gateway("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):

        async def are_reserved(requests: int) -> None:
            while f.loads()[0] < requests:
                await asyncio.sleep(0.001)

        staying = [asyncio.ensure_future(f.ask()) for _ in range(4)]
        await are_reserved(4)
        await f.ask_and_leave(lambda: are_reserved(5))
        await are_reserved(4)
        gate.set()
        assert [reply.text for reply in await asyncio.gather(*staying)] == [WHOLE] * 4
        assert request == ["GET /query HTTP/1.1"]
        assert len(f.prefill[0].requests) == 4
        await f.at_rest()


async def test_the_bootstrap_connection_closes_with_its_response_or_the_last_waiting_request() -> (
    None
):
    gate = asyncio.Event()
    async with (
        bootstrap_server([page("one")], gate) as (address, request),
        split_gateway("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):

        async def was_asked() -> None:
            while not request:
                await asyncio.sleep(0.001)

        async def hung_up(times: int) -> None:
            while request.hung_up < times:
                await asyncio.sleep(0.001)

        await f.ask_and_leave(was_asked)
        await within(0.5, hung_up(1))
        gate.set()
        assert (await f.ask()).text == WHOLE
        await within(0.5, hung_up(2))
        assert len(request) == 2
        await f.at_rest()


async def test_after_a_failure_the_bootstrap_server_is_queried_again() -> None:
    async with bootstrap_server([page("one"), page("two")]) as (address, request):
        prefill = in_turn(
            prefills(None), resets, resets, prefills(None)
        )  # a pooled connection is retried
        async with split_gateway(
            "mooncake", [prefill], [in_turn(decodes, never_answers, decodes)], bootstrap=address
        ) as f:
            for _ in range(2):
                assert (await f.ask()).text == WHOLE
            assert (await f.ask()).text == WHOLE
            assert len(request) == 2
            assert f.decode[0].requests[-1].json["kv_transfer_params"]["remote_engine_id"] == "two"
            await f.at_rest()


async def test_a_failed_kv_load_makes_the_gateway_query_the_identity_again() -> None:
    async with bootstrap_server([page("one"), page("two")]) as (address, request):
        decode = in_turn(decodes, refuses(500), decodes)
        async with split_gateway("mooncake", [prefills(None)], [decode], bootstrap=address) as f:
            for _ in range(3):
                assert (await f.ask()).text == WHOLE
            assert len(request) == 2
            assert f.decode[0].requests[-1].json["kv_transfer_params"]["remote_engine_id"] == "two"
            await f.at_rest()


async def test_after_a_prefill_that_ended_early_the_decoder_computes_the_prompt() -> None:
    ended = [{"index": 0, "message": {"content": ""}, "finish_reason": "stop"}]
    async with bootstrap_server([page("one")]) as (address, _):
        prefill = prefills(None, choices=ended)
        async with split_gateway(
            "mooncake", [prefill], [in_turn(never_answers, decodes)], bootstrap=address
        ) as f:
            assert (await f.ask()).text == WHOLE
            assert "kv_transfer_params" not in f.decode[0].requests[1].json
            await f.at_rest()
