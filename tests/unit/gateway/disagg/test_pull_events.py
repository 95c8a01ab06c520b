"""Tests of the events of a pull: an endpoint fetches a prompt's beginning, and computes the rest."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import msgspec
import pytest

from policies.pricing.split_decision import (
    EndpointPair,
    PricedSplitter,
    SplitDecision,
    SplitReason,
)
from tests.unit.gateway.disagg.scripted_engines import (
    OBJECT,
    TEXT,
    EngineRequest,
    Script,
    SplitGateway,
    decodes,
    in_turn,
    never_answers,
    prefills,
    refuses,
    split_gateway,
    when_open,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

WHOLE = "".join(TEXT)
OFFERED = OBJECT | {"kv_handoff": "sealed"}
PULLED = 2048


@pytest.fixture
def pulls_always(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: PricedSplitter, *args: Any) -> SplitDecision:
        pools, query, _, splitting, transfers = args
        pair = self.choose_pair(pools, query, transfers)
        if pair is None or query.failed_endpoints:
            return SplitDecision(None, SplitReason.NO_PAIR, splitting)
        decode = msgspec.structs.replace(pair.decode, cached_tokens=PULLED)
        pull = EndpointPair(pair.prefill, decode, 0.1, PULLED)
        return SplitDecision(pull, SplitReason.PULL_CHEAPER, splitting)

    monkeypatch.setattr(PricedSplitter, "decide", decide)


def after(seconds: float, script: Script = decodes) -> Script:
    async def waiting(request: EngineRequest) -> None:
        await asyncio.sleep(seconds)
        await script(request)

    return waiting


def is_paused(f: SplitGateway) -> bool:
    source = f.prefill[0].url.removeprefix("http://")
    return source in f.app.gateway.handoffs.pull_pauses.paused(monotonic())


@pytest.mark.usefixtures("pulls_always")
async def test_an_endpoint_has_time_to_compute_the_rest_of_a_pulled_prompt() -> None:
    split = {"transfer_timeout": "5s"}
    async with split_gateway(
        "penstock", [prefills(OFFERED)], [after(15.0)], split=split, policy="priced"
    ) as f:
        # This endpoint is expected to need more than 10 s for the whole prompt.
        assert (await f.ask(words=150_000, stream=True)).text == WHOLE
        assert len(f.decode[0].requests) == 1
        assert f.metric("penstock_pulls_total", result="pulled") == 1
        assert not is_paused(f)
        await f.at_rest()


@pytest.mark.usefixtures("pulls_always")
async def test_the_kv_of_a_pull_has_a_time_limit() -> None:
    split = {"transfer_timeout": "5s"}
    async with split_gateway(
        "penstock",
        [prefills(OFFERED)],
        [in_turn(never_answers, decodes)],
        split=split,
        policy="priced",
    ) as f:
        assert (await f.ask(stream=True)).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].requests[1].json
        assert f.metric("penstock_pulls_total", result="failed") == 1
        assert is_paused(f)
        await f.at_rest()


@pytest.mark.usefixtures("pulls_always")
async def test_a_late_answer_of_the_source_is_not_counted_as_cached() -> None:
    gate = asyncio.Event()
    usage = {
        "prompt_tokens": 2048,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 2040},
    }
    source = when_open(gate, prefills(OFFERED, usage=usage))
    decoder = in_turn(when_open(gate, after(0.2)), decodes)
    async with split_gateway("penstock", [source], [decoder], policy="priced") as f:
        asking = asyncio.ensure_future(f.ask())
        # The source is late: the other endpoint computes the prompt, and the source answers then.
        request = await f.decode[0].wait_for_request()
        assert "kv_transfer_params" not in request.json
        gate.set()
        released = await f.decode[0].wait_for_request(2)
        assert released.json["kv_transfer_params"] == OFFERED
        assert released.json["max_tokens"] == 1
        # Both requests run on one engine, which tells requests apart by their ids.
        assert released.headers["x-request-id"] == f"{request.headers['x-request-id']}-release"
        assert (await asking).text == WHOLE
        # The endpoint that computed the prompt has reported 8 cached tokens.
        assert f.metric("penstock_cached_tokens_total") == 8
        await f.at_rest()


@pytest.mark.usefixtures("pulls_always")
@pytest.mark.parametrize(("status", "is_blamed"), [(500, False), (501, False), (502, True)])
async def test_a_source_that_cannot_hand_over_a_beginning_stays_healthy(
    status: int, is_blamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with split_gateway("penstock", [refuses(status)], [decodes], policy="priced") as f:
        for _ in range(6):
            assert (await f.ask(stream=True)).text == WHOLE
        assert ("ejected" in caplog.text) == is_blamed
        assert bool(f.metric("penstock_upstream_errors_total")) == is_blamed
        await f.at_rest()


@pytest.mark.usefixtures("pulls_always")
@pytest.mark.parametrize("script", [refuses(400), refuses(503), prefills(OBJECT), never_answers])
async def test_pulls_from_a_source_pause_after_one_failed_until_one_is_served(
    script: Script,
) -> None:
    source = in_turn(script, prefills(OFFERED))
    async with split_gateway("penstock", [source], [decodes], policy="priced") as f:
        assert (await f.ask(stream=True)).text == WHOLE
        assert is_paused(f)
        await asyncio.sleep(1.5)
        assert not is_paused(f)
        # The next pause would last 2 s, but this pull is served.
        assert (await f.ask(stream=True)).text == WHOLE
        assert f.metric("penstock_pulls_total", result="pulled") == 1
        f.app.gateway.handoffs.pull_pauses.on_failed(f.prefill[0].url[7:], monotonic())
        await asyncio.sleep(1.5)
        assert not is_paused(f)
        await f.at_rest()


@pytest.mark.usefixtures("pulls_always")
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_source_that_does_not_shorten_the_prompt_pauses_for_long(
    is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()
    usage = {"prompt_tokens": 9_000, "completion_tokens": 1}
    source = prefills(OFFERED, usage=usage)
    source = when_open(gate, source) if is_late else source
    decoder = in_turn(when_open(gate, after(0.2)), decodes) if is_late else decodes
    async with split_gateway("penstock", [source], [decoder], policy="priced") as f:
        asking = asyncio.ensure_future(f.ask())
        await f.decode[0].wait_for_request()
        gate.set()
        await f.decode[0].wait_for_request(2)
        assert (await asking).text == WHOLE
        bodies = [request.json for request in f.decode[0].requests]
        (whole,) = [body for body in bodies if "kv_transfer_params" not in body]
        (released,) = [body for body in bodies if "kv_transfer_params" in body]
        assert whole["messages"] == released["messages"]
        # The KV is that of the whole prompt, and so is the request that takes it.
        assert (released["max_tokens"], "truncate_prompt_tokens" in released) == (1, False)
        assert f.metric("penstock_pulls_total", result="computed") == 1
        assert f.metric("penstock_split_leases_given_up_total", reason="not_shortened") == 1
        assert caplog.text.count("the prompt had 9000 tokens") == 1
        await asyncio.sleep(200.0)
        assert is_paused(f)
        await f.at_rest()


@pytest.mark.usefixtures("pulls_always")
async def test_a_source_may_count_a_few_tokens_more_than_it_was_asked_for() -> None:
    source = prefills(OFFERED, usage={"prompt_tokens": PULLED + 2, "completion_tokens": 1})
    async with split_gateway("penstock", [source], [decodes], policy="priced") as f:
        assert (await f.ask(stream=True)).text == WHOLE
        assert f.metric("penstock_pulls_total", result="pulled") == 1
        await f.at_rest()
