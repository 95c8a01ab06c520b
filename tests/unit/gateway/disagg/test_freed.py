"""Prefill, then decode: KV that the request's own decoder will not fetch, and who frees it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.upstream import ConnectionPool, UpstreamConnection
from tests.replaced import replace_method
from tests.unit.gateway.disagg.halves import (
    OBJECT,
    TEXT,
    Script,
    after,
    decodes,
    front,
    prefills,
    refuses,
    resets,
)

NIXL = "vllm_nixl"
WHOLE = "".join(TEXT)


@pytest.mark.parametrize("first", [resets, refuses(503)])
async def test_kv_that_a_dead_decoder_was_given_is_freed_by_another_where_no_later_request_finds_it(
    first: Script,
) -> None:
    """It may be gone by then, and its blocks another request's: what is fetched has a salt of its own."""
    async with front(NIXL, [prefills()], [first, decodes]) as f:
        f.have_met()
        f.app.gateway.endpoints.all()[2].load.in_flight += 1  # so that the other is chosen first
        assert (await f.ask(stream=True, cache_salt="mine")).text == WHOLE
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        (asked,) = f.decode[0].asked
        freed = await f.decode[1].was_asked(2)
        assert freed.json["kv_transfer_params"] == asked.json["kv_transfer_params"] == OBJECT
        assert (freed.json["max_tokens"], freed.json["stream"]) == (1, False)
        assert freed.json["cache_salt"].startswith("unread ")
        assert freed.came_at - asked.came_at > 0.15, "had only its connection broken, it would be fetching still"
        assert f.metric("penstock_split_leases_given_up_total", reason="decoder_gone") == 1
        await f.at_rest()


async def test_kv_of_a_prefiller_that_has_no_other_decoder_waits_for_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.disagg.handoffs.MOST_WAIT_S", 0.0)
    async with front(NIXL, [prefills()], [resets]) as f:
        assert (await f.ask()).status == 502
        assert f.metric("penstock_split_leases_given_up_total") == 0
        assert all(asked.json["max_tokens"] != 1 for asked in f.decode[0].asked)
        await f.at_rest()


async def test_a_client_that_leaves_before_the_decode_request_left_has_the_kv_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decoder is connecting: it still gets the handoff, for one token, so that P frees the KV."""
    async with front(NIXL, [prefills()], [decodes]) as f:
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
        asked = await f.decode[0].was_asked()
        assert asked.json["kv_transfer_params"] == OBJECT
        assert (asked.json["max_tokens"], asked.json["stream"]) == (1, False)
        assert "stream_options" not in asked.json
        assert f.metric("penstock_split_leases_given_up_total", reason="client_gone") == 1


async def test_a_prefill_answer_that_crosses_the_client_on_its_way_has_its_kv_freed() -> None:
    gate = asyncio.Event()
    async with front(NIXL, [after(gate, prefills())], [decodes]) as f:
        await f.ask_and_leave(f.prefill[0].was_asked)
        await f.at_rest()
        gate.set()
        asked = await f.decode[0].was_asked()
        assert asked.json["kv_transfer_params"] == OBJECT
        assert asked.json["max_tokens"] == 1
        assert f.metric("penstock_split_leases_given_up_total", reason="client_gone") == 1
