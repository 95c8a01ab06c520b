"""Tests that a prefill engine frees the KV of a request that its decode engine does not fetch.

This concerns protocols in which the decode request is sent after the prefill.
"""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.engine_connections import ConnectionPool, UpstreamConnection
from tests.duration_limits import PATIENCE_S
from tests.replacement import replace_method
from tests.unit.gateway.disagg.scripted_engines import (
    OBJECT,
    TEXT,
    EngineRequest,
    Script,
    ScriptedEngine,
    decodes,
    prefills,
    refuses,
    resets,
    split_gateway,
    when_open,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

NIXL = "vllm_nixl"
WHOLE = "".join(TEXT)


@pytest.mark.parametrize("first", [resets, refuses(503)])
async def test_kv_handed_to_a_dead_decoder_is_freed_by_another_under_a_salt_of_its_own(
    first: Script,
) -> None:
    # The blocks may belong to another request by then.
    #
    # The cache salt keeps later requests from using them.
    async with split_gateway(NIXL, [prefills()], [first, decodes]) as f:
        f.assume_fast_pairs()
        f.app.gateway.endpoints.all()[2].load.in_flight += 1  # the other decoder is chosen first
        assert (await f.ask(stream=True, cache_salt="mine")).text == WHOLE
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        (request,) = f.decode[0].requests
        freed = await f.decode[1].wait_for_request(2)
        assert freed.json["kv_transfer_params"] == request.json["kv_transfer_params"] == OBJECT
        assert (freed.json["max_tokens"], freed.json["stream"]) == (1, False)
        assert freed.json["cache_salt"].startswith("unread ")
        assert freed.received_at - request.received_at > 0.15, (
            "had only its connection broken, it would be fetching still"
        )
        assert f.metric("penstock_split_leases_given_up_total", reason="decoder_gone") == 1
        await f.at_rest()


async def test_release_requests_after_a_dead_decoder_go_to_the_least_busy_survivors() -> None:
    crash, gate = asyncio.Event(), asyncio.Event()

    async def holds_release_requests(request: EngineRequest) -> None:
        if request.json["max_tokens"] == 1:
            await gate.wait()
        await decodes(request)

    def release_requests(engine: ScriptedEngine) -> int:
        return sum(request.json["max_tokens"] == 1 for request in engine.requests)

    survivors = [holds_release_requests] * 3
    async with split_gateway(NIXL, [prefills()], [when_open(crash, resets), *survivors]) as f:
        f.assume_fast_pairs()
        busy, *idle = (live.load for live in f.app.gateway.endpoints.all()[2:])
        busy.in_flight += 100
        for load in idle:
            load.in_flight += 40  # the dead decoder is chosen first
        answers = [asyncio.ensure_future(f.ask()) for _ in range(4)]
        await f.decode[0].wait_for_request(4)
        crash.set()
        assert [(await answer).text for answer in answers] == [WHOLE] * 4
        async with asyncio.timeout(PATIENCE_S):
            while sum(release_requests(engine) for engine in f.decode) < 4:
                await asyncio.sleep(0.005)
        assert [release_requests(engine) for engine in f.decode[1:]] == [0, 2, 2]
        gate.set()


async def test_kv_without_another_decoder_is_freed_by_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.disagg.handoffs.MAX_WAIT_S", 0.0)
    async with split_gateway(NIXL, [prefills()], [resets]) as f:
        assert (await f.ask()).status == 502
        assert f.metric("penstock_split_leases_given_up_total") == 0
        assert all(item.json["max_tokens"] != 1 for item in f.decode[0].requests)
        await f.at_rest()


async def test_a_client_that_disconnects_before_the_decode_request_is_sent_has_its_kv_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The gateway is still connecting to the decode engine.
    #
    # It sends the handoff with a limit of one token, so that the prefill engine frees the KV.
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        connecting, upstream = asyncio.Event(), f.app.gateway.endpoints.all()[1].upstream
        connect, go = ConnectionPool.connect, asyncio.Event()

        async def slowly(to: ConnectionPool) -> UpstreamConnection:
            if to is upstream:
                connecting.set()
                await go.wait()
            return await connect(to)

        replace_method(monkeypatch, ConnectionPool, "connect", slowly)
        await f.ask_and_leave(connecting.wait, stream=True, stream_options={"include_usage": True})
        await f.at_rest()
        go.set()
        request = await f.decode[0].wait_for_request()
        assert request.json["kv_transfer_params"] == OBJECT
        assert (request.json["max_tokens"], request.json["stream"]) == (1, False)
        assert "stream_options" not in request.json
        assert f.metric("penstock_split_leases_given_up_total", reason="client_gone") == 1


async def test_a_prefill_response_after_the_client_disconnected_has_its_kv_freed() -> None:
    gate = asyncio.Event()
    async with split_gateway(NIXL, [when_open(gate, prefills())], [decodes]) as f:
        await f.ask_and_leave(f.prefill[0].wait_for_request)
        await f.at_rest()
        gate.set()
        request = await f.decode[0].wait_for_request()
        assert request.json["kv_transfer_params"] == OBJECT
        assert request.json["max_tokens"] == 1
        assert f.metric("penstock_split_leases_given_up_total", reason="client_gone") == 1
