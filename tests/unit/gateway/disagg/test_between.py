"""Between two events of a pair: what is known of its places and its handoff, and in which order events are heard."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.http.eager_task import EagerFuture
from gateway.http.upstream import UpstreamConnection
from tests.fair_time import PATIENCE_S
from tests.replaced import replace_method
from tests.unit.gateway.disagg.halves import (
    PUSHED,
    TEXT,
    after,
    decodes,
    each,
    front,
    prefills,
    refuses,
    resets,
)

NIXL = "vllm_nixl"
WHOLE = "".join(TEXT)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decoder_whose_first_token_stays_unseen_decodes_from_the_handover_on(stream: bool) -> None:
    gate = asyncio.Event()
    async with front(NIXL, [prefills()], [after(gate, decodes)]) as f:
        asking = asyncio.ensure_future(f.ask(stream=stream))
        await f.decode[0].was_asked()
        load = f.app.gateway.endpoints.all()[1].load
        assert (load.in_flight, load.decoding) == (1, not stream)
        gate.set()
        assert (await asking).text == WHOLE
        await f.at_rest()


@pytest.mark.parametrize("computed", [True, False])
async def test_a_prompt_is_believed_to_be_where_it_was_computed_and_only_there(computed: bool) -> None:
    async with front(NIXL, [prefills() if computed else resets], [decodes]) as f:
        assert (await f.ask()).text == WHOLE
        await f.at_rest()
        endpoints = f.app.gateway.endpoints
        held = [endpoints.prefixes.index.cached_tokens(live.load.slot) > 0 for live in endpoints.all()]
        assert held == [computed, True]


async def test_a_decoder_that_cannot_load_what_was_pushed_is_not_to_blame_when_its_prefiller_was_done_either() -> None:
    gate = asyncio.Event()
    async with front("vllm_push", [prefills(PUSHED)], [each(decodes, after(gate, refuses(500)), decodes)]) as f:
        assert (await f.ask()).text == WHOLE
        asking = asyncio.ensure_future(f.ask())
        async with asyncio.timeout(PATIENCE_S):
            while f.metric("penstock_split_legs_total", role="prefill", outcome="served") < 2:
                await asyncio.sleep(0.001)
        gate.set()
        assert (await asking).text == WHOLE
        assert f.metric("penstock_split_decisions_total", reason="recompute") == 1
        assert f.blamed(f.prefill[0]) == f.blamed(f.decode[0]) == 0
        await f.at_rest()


async def test_what_happens_while_something_is_done_is_heard_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode request has left, and then it failed: it was not out of reach."""
    async with front(NIXL, [prefills()], [decodes, decodes]) as f:
        carry, failed = UpstreamConnection.start, list[UpstreamConnection]()

        def fails_once(self: UpstreamConnection, head: bytes, payload: Any, *to: Any) -> EagerFuture:
            if not failed and b'"remote_engine_id":"engine-p"' in payload.body.replace(b" ", b""):
                failed.append(self)
                raise RuntimeError("as asked")
            return carry(self, head, payload, *to)

        while not all(half.asked for half in f.decode):  # from now on either has an idle connection
            assert (await f.ask()).text == WHOLE
        replace_method(monkeypatch, UpstreamConnection, "carry", fails_once)
        assert (await f.ask()).text == WHOLE
        assert len(failed) == 1
        assert f.metric("penstock_split_legs_total", role="decode", outcome="broke") == 1
        await f.at_rest()
