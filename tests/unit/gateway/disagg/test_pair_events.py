"""Tests of what events of a split request change: load, cached prompts, counted failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.http.eager_task import EagerFuture
from gateway.http.engine_connections import UpstreamConnection
from tests.duration_limits import PATIENCE_S
from tests.replacement import replace_method
from tests.unit.gateway.disagg.scripted_engines import (
    PUSHED,
    TEXT,
    decodes,
    in_turn,
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decoder_with_an_unseen_first_token_counts_as_decoding_from_the_handover_on(
    stream: bool,
) -> None:
    gate = asyncio.Event()
    async with split_gateway(NIXL, [prefills()], [when_open(gate, decodes)]) as f:
        asking = asyncio.ensure_future(f.ask(stream=stream))
        await f.decode[0].wait_for_request()
        load = f.app.gateway.endpoints.all()[1].load
        assert (load.in_flight, load.decoding) == (1, not stream)
        gate.set()
        assert (await asking).text == WHOLE
        await f.at_rest()


@pytest.mark.parametrize("computed", [True, False])
async def test_a_prompt_is_recorded_as_cached_only_where_it_was_computed(computed: bool) -> None:
    async with split_gateway(NIXL, [prefills() if computed else resets], [decodes]) as f:
        assert (await f.ask()).text == WHOLE
        await f.at_rest()
        endpoints = f.app.gateway.endpoints
        holdings = [
            endpoints.prefixes.index.cached_tokens(live.load.slot) > 0 for live in endpoints.all()
        ]
        assert holdings == [computed, True]


async def test_a_decoder_that_cannot_load_pushed_kv_is_not_blamed() -> None:
    gate = asyncio.Event()
    async with split_gateway(
        "vllm_push", [prefills(PUSHED)], [in_turn(decodes, when_open(gate, refuses(500)), decodes)]
    ) as f:
        assert (await f.ask()).text == WHOLE
        asking = asyncio.ensure_future(f.ask())
        async with asyncio.timeout(PATIENCE_S):
            while f.metric("penstock_split_legs_total", role="prefill", outcome="served") < 2:
                await asyncio.sleep(0.001)
        gate.set()
        assert (await asking).text == WHOLE
        assert f.metric("penstock_split_decisions_total", reason="recompute") == 1
        assert f.error_count(f.prefill[0]) == f.error_count(f.decode[0]) == 0
        await f.at_rest()


async def test_events_raised_during_an_action_are_handled_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with split_gateway(NIXL, [prefills()], [decodes, decodes]) as f:
        start, failed = UpstreamConnection.start, list[UpstreamConnection]()

        def fails_once(
            self: UpstreamConnection, head: bytes, payload: Any, *to: Any
        ) -> EagerFuture:
            if not failed and b'"remote_engine_id":"engine-p"' in payload.body.replace(b" ", b""):
                failed.append(self)
                raise RuntimeError("the test lets the first decode request fail")
            return start(self, head, payload, *to)

        # Open a connection to each decoder, because a request repeats what fails on a new one.
        for half in f.decode:
            with f.choosing(half):
                assert (await f.ask()).text == WHOLE
        assert [len(half.requests) for half in f.decode] == [1, 1]
        replace_method(monkeypatch, UpstreamConnection, "start", fails_once)
        assert (await f.ask()).text == WHOLE
        assert len(failed) == 1
        assert f.metric("penstock_split_legs_total", role="decode", outcome="broke") == 1
        await f.at_rest()
