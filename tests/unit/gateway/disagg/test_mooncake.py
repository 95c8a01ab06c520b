"""Mooncake: both legs at once, once the bootstrap server has told who the prefiller is. Over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from tests.fair_time import within
from tests.unit.gateway.disagg.bootstraps import bootstrap_server, page
from tests.unit.gateway.disagg.halves import (
    TEXT,
    decodes,
    each,
    front,
    holds,
    prefills,
    refuses,
    resets,
)

WHOLE = "".join(TEXT)


async def test_mooncake_is_introduced_once_by_the_bootstrap_server() -> None:
    async with (
        bootstrap_server([page("one")]) as (address, request),
        front("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):
        for _ in range(3):
            assert (await f.ask()).text == WHOLE
        assert request == ["GET /query HTTP/1.1"]
        prefill, decode = f.prefill[0].asked[0], f.decode[0].asked[0]
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
async def test_without_an_introduction_the_decoder_computes_for_itself(nonsense: bytes) -> None:
    async with (
        bootstrap_server([nonsense]) as (address, _),
        front("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):
        assert (await f.ask()).text == WHOLE
        assert not f.prefill[0].asked
        assert "kv_transfer_params" not in f.decode[0].asked[0].json
        await f.at_rest()


async def test_a_bootstrap_server_that_does_not_run_does_not_stop_the_request() -> None:
    async with front("mooncake", [prefills(None)], [decodes], bootstrap="127.0.0.1:1") as f:
        assert (await f.ask()).text == WHOLE
        assert f.blamed(f.prefill[0]) == 1
        await f.at_rest()


async def test_a_silent_bootstrap_server_is_not_waited_for_longer_than_a_second() -> None:
    async with (
        bootstrap_server([b""]) as (address, _),
        front("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):
        assert (await within(2, f.ask())).text == WHOLE
        await f.at_rest()


async def test_a_client_may_leave_while_the_bootstrap_server_is_asked() -> None:
    async with (
        bootstrap_server([b""]) as (address, request),
        front("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):

        async def was_asked() -> None:
            while not request:
                await asyncio.sleep(0.001)

        await f.ask_and_leave(was_asked)
        await f.at_rest()
        assert not f.prefill[0].asked
        assert not f.decode[0].asked


async def test_concurrent_requests_ask_the_bootstrap_server_once_whichever_client_leaves() -> None:
    gate = asyncio.Event()
    async with (
        bootstrap_server([page("one")], gate) as (address, request),
        front("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
    ):

        async def are_booked(requests: int) -> None:
            while f.loads()[0] < requests:
                await asyncio.sleep(0.001)

        staying = [asyncio.ensure_future(f.ask()) for _ in range(4)]
        await are_booked(4)
        await f.ask_and_leave(lambda: are_booked(5))
        await are_booked(4)
        gate.set()
        assert [reply.text for reply in await asyncio.gather(*staying)] == [WHOLE] * 4
        assert request == ["GET /query HTTP/1.1"]
        assert len(f.prefill[0].asked) == 4
        await f.at_rest()


async def test_a_bootstrap_server_is_let_go_of_with_its_answer_or_with_the_last_who_waits() -> None:
    gate = asyncio.Event()
    async with (
        bootstrap_server([page("one")], gate) as (address, request),
        front("mooncake", [prefills(None)], [decodes], bootstrap=address) as f,
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


async def test_after_a_failure_the_bootstrap_server_is_asked_again() -> None:
    async with bootstrap_server([page("one"), page("two")]) as (address, request):
        prefill = each(
            prefills(None), resets, resets, prefills(None)
        )  # a pooled connection is tried again
        async with front(
            "mooncake", [prefill], [each(decodes, holds, decodes)], bootstrap=address
        ) as f:
            for _ in range(2):
                assert (await f.ask()).text == WHOLE
            assert (await f.ask()).text == WHOLE
            assert len(request) == 2
            assert f.decode[0].asked[-1].json["kv_transfer_params"]["remote_engine_id"] == "two"
            await f.at_rest()


async def test_a_decoder_that_could_not_load_the_kv_may_have_been_told_of_an_engine_that_is_no_more() -> (
    None
):
    async with bootstrap_server([page("one"), page("two")]) as (address, request):
        decode = each(decodes, refuses(500), decodes)
        async with front("mooncake", [prefills(None)], [decode], bootstrap=address) as f:
            for _ in range(3):
                assert (await f.ask()).text == WHOLE
            assert len(request) == 2
            assert f.decode[0].asked[-1].json["kv_transfer_params"]["remote_engine_id"] == "two"
            await f.at_rest()


async def test_a_mooncake_prefill_that_ended_early_sends_nothing_and_the_decoder_computes() -> None:
    ended = [{"index": 0, "message": {"content": ""}, "finish_reason": "stop"}]
    async with bootstrap_server([page("one")]) as (address, _):
        prefill = prefills(None, choices=ended)
        async with front("mooncake", [prefill], [each(holds, decodes)], bootstrap=address) as f:
            assert (await f.ask()).text == WHOLE
            assert "kv_transfer_params" not in f.decode[0].asked[1].json
            await f.at_rest()
