"""Tests of split requests whose prefill ends before the decode begins, over real sockets.

They cover every transition of the request's state.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.disagg.pair_attempt import PairAttempt
from gateway.request_record import Exchange
from gateway.telemetry.accounting import Accounting
from policies.pricing.split_decision import PricedSplitter, SplitDecision, SplitReason
from tests.duration_limits import PATIENCE_S, within
from tests.replacement import replace_method
from tests.unit.gateway.disagg.scripted_engines import (
    OBJECT,
    TEXT,
    EngineRequest,
    answers_without_tokens,
    breaks_after_a_token,
    decodes,
    in_turn,
    never_answers,
    prefills,
    refuses,
    resets,
    split_gateway,
    streams_one_token,
    streams_unknown_events,
    when_open,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

NIXL = "vllm_nixl"
WHOLE = "".join(TEXT)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_prefilled_and_its_kv_handed_to_the_decoder(stream: bool) -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        reply = await f.ask(stream=stream, max_tokens=7)
        assert (reply.status, reply.text) == (200, WHOLE)
        (prefill,), (decode,) = f.prefill[0].requests, f.decode[0].requests
        assert reply.headers["x-penstock-endpoint"] == f.decode[0].name
        assert reply.headers["x-penstock-prefill"] == f.prefill[0].name
        assert (
            prefill.headers["x-request-id"]
            == decode.headers["x-request-id"]
            == reply.headers["x-request-id"]
        )
        request = {
            "model": "demo",
            "max_tokens": 7,
            "stream": stream,
            "messages": decode.json["messages"],
        }
        assert decode.json == request | {"kv_transfer_params": OBJECT}
        assert prefill.json == request | {
            "max_tokens": 1,
            "min_tokens": 1,
            "stream": False,
            "kv_transfer_params": prefill.json["kv_transfer_params"],
        }
        assert f.metric("penstock_split_legs_total", outcome="served") == 2
        assert f.metric("penstock_split_stage_seconds_count") == 4
        await f.at_rest()


@pytest.fixture
def splits_always(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: PricedSplitter, *args: Any) -> SplitDecision:
        pools, query, _, splitting, transfers = args
        pair = self.choose_pair(pools, query, transfers)
        return SplitDecision(pair, SplitReason.PAIR_CHEAPER, splitting)

    monkeypatch.setattr(PricedSplitter, "decide", decide)


@pytest.mark.usefixtures("splits_always")
async def test_the_speed_of_a_link_is_learnt_before_the_answer_ends() -> None:
    async with split_gateway(NIXL, [prefills()], [streams_one_token], policy="priced") as f:
        times = f.app.gateway.handoffs.transfer_times

        async def measured() -> None:
            await within(PATIENCE_S, f.decode[0].wait_for_request())
            for _ in range(100):
                await asyncio.sleep(0.01)

        await f.ask_and_leave(measured, stream=True)
        assert len(f.prefill[0].requests) == 1
        assert times.is_measured(asyncio.get_running_loop().time())
        assert times.backlog_s((f.prefill[0].name, f.decode[0].name), 0.0) == 0.0
        await f.at_rest()


@pytest.mark.usefixtures("splits_always")
async def test_an_answer_without_a_stream_is_not_taken_for_a_slow_link() -> None:
    async def answers_after_a_while(request: EngineRequest) -> None:
        await asyncio.sleep(5.0)
        await decodes(request)

    async with split_gateway(NIXL, [prefills()], [answers_after_a_while], policy="priced") as f:
        times, names = f.app.gateway.handoffs.transfer_times, (f.prefill[0].name, f.decode[0].name)
        assert (await f.ask()).status == 200
        assert times.is_measured(asyncio.get_running_loop().time())
        assert times.speed(names, 0.0, 0.0).service_s(1000) == 0.0
        await f.at_rest()


@pytest.mark.parametrize(
    ("reason", "members"),
    [
        ("short", {"words": 3}),
        ("one_token", {"max_tokens": 1}),
        ("one_token", {"max_completion_tokens": 1, "max_tokens": None}),
        ("choices", {"n": 2}),
        ("prompt_scores", {"prompt_logprobs": 0}),
        ("prompts", {"path": "/v1/completions", "prompt": ["word " * 400, "word"]}),
        ("choices", {"path": "/v1/completions", "prompt": "word " * 400, "best_of": 2}),
        ("prompt_scores", {"path": "/v1/completions", "prompt": "word " * 400, "echo": True}),
    ],
)
async def test_unsplittable_requests_are_served_whole_by_a_decoder(
    reason: str, members: dict[str, Any]
) -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        reply = await f.ask(**members)
        assert reply.status == 200
        assert "x-penstock-prefill" not in reply.headers
        assert not f.prefill[0].requests
        assert "kv_transfer_params" not in f.decode[0].requests[0].json
        assert f.metric("penstock_split_decisions_total", decision="whole", reason=reason) == 1


async def test_whitespace_does_not_hide_several_prompts() -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        body = b'{"model":"demo","prompt":[%b"%b","word"]}' % (b" \t\n" * 100, b"word " * 400)
        headers = {"content-type": "application/json"}
        async with f.http.post(f"{f.app.url}/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 200
        assert not f.prefill[0].requests
        assert f.metric("penstock_split_decisions_total", decision="whole", reason="prompts") == 1


async def test_a_request_with_a_permit_is_served_whole_when_split_requests_fill_the_pool() -> None:
    gate = asyncio.Event()

    async def slow_prefill(request: EngineRequest) -> None:
        if request.json["max_tokens"] == 1:
            await gate.wait()
            await prefills()(request)
        else:
            await decodes(request)

    async with split_gateway(
        NIXL, [], [slow_prefill] * 2, decode_role="both", max_concurrency=1
    ) as f:
        long = asyncio.ensure_future(f.ask())
        async with asyncio.timeout(PATIENCE_S):
            while not any(half.requests for half in f.decode):
                await asyncio.sleep(0.001)
        assert (await f.ask(words=1)).status == 200
        gate.set()
        assert (await long).status == 200
        await f.at_rest()


async def test_a_prompt_that_the_decoder_has_cached_is_not_transferred() -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        messages = [{"role": "user", "content": "word " * 2000}]
        await f.ask(messages=messages)
        await f.ask(messages=messages)
        assert len(f.prefill[0].requests) == 1
        assert f.metric("penstock_split_decisions_total", decision="whole", reason="cached") == 1


async def test_the_decode_slot_is_reserved_before_the_prefill_is_sent() -> None:
    gate = asyncio.Event()
    async with split_gateway(NIXL, [when_open(gate, prefills())], [decodes]) as f:
        asking = asyncio.ensure_future(f.ask())
        await f.prefill[0].wait_for_request()
        loads = {live.endpoint.url: live.load for live in f.app.gateway.endpoints.all()}
        prefill, decode = loads[f.prefill[0].url], loads[f.decode[0].url]
        assert (prefill.in_flight, decode.in_flight) == (1, 1)
        assert prefill.prefill_tokens > 400
        assert (decode.prefill_tokens, decode.decode_tokens) == (0, prefill.prefill_tokens)
        gate.set()
        assert (await asking).text == WHOLE
        await f.at_rest()


MALFORMED: list[object] = [
    None,
    {},
    [],
    "text",
    OBJECT | {"remote_block_ids": []},
    OBJECT | {"remote_engine_id": None},
    OBJECT | {"remote_port": 0},
    OBJECT | {"do_remote_prefill": False},
]


@pytest.mark.parametrize("handoff", MALFORMED, ids=str)
async def test_a_malformed_handoff_is_not_sent_and_the_decoder_computes_the_prompt(
    handoff: object,
) -> None:
    async with split_gateway(NIXL, [prefills(handoff)], [decodes]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        (decode,) = f.decode[0].requests
        assert "kv_transfer_params" not in decode.json
        assert f.metric("penstock_split_legs_total", role="prefill", outcome="unusable") == 1
        assert [figures.tokens for figures in f.app.gateway.handoffs.pairs.values()] == [0]
        await f.at_rest()


async def test_a_broken_prefill_is_retried_on_another_engine_and_only_the_broken_one_is_blamed() -> (
    None
):
    async with split_gateway(NIXL, [resets, prefills()], [decodes]) as f:
        with f.choosing(f.prefill[0]):
            assert (await f.ask()).text == WHOLE
        assert f.error_count(f.prefill[0]) == 1
        assert f.error_count(f.prefill[1]) == f.error_count(f.decode[0]) == 0
        await f.at_rest()


async def test_without_another_prefill_engine_the_decoder_computes_the_prompt() -> None:
    async with split_gateway(NIXL, [refuses(500)], [decodes]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].requests[0].json
        assert f.error_count(f.prefill[0]) == 1
        await f.at_rest()


async def test_a_request_that_the_prefill_engine_calls_invalid_is_answered_with_its_error() -> None:
    async with split_gateway(NIXL, [refuses(422)], [decodes]) as f:
        reply = await f.ask()
        assert (reply.status, reply.json["error"]["message"]) == (422, "as asked")
        assert not f.decode[0].requests
        assert f.error_count(f.prefill[0]) == 0
        await f.at_rest()


async def test_a_request_the_decoder_calls_invalid_gets_its_error_and_its_kv_is_freed() -> None:
    # The prefill request was valid, because it asked for one token only.
    async with split_gateway(NIXL, [prefills()], [in_turn(refuses(400), decodes)]) as f:
        reply = await f.ask(stream=True, logprobs=True, top_logprobs=20)
        assert (reply.status, reply.json["error"]["message"]) == (400, "as asked")
        freed = await f.decode[0].wait_for_request(2)
        assert (freed.json["kv_transfer_params"], freed.json["max_tokens"]) == (OBJECT, 1)
        assert not freed.json.keys() & {"logprobs", "top_logprobs"}
        assert f.metric("penstock_split_leases_given_up_total", reason="refused") == 1
        await f.at_rest()


async def test_the_handoff_of_an_unreachable_decoder_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Exchange] = []
    replace_method(monkeypatch, Accounting, "add_ended", lambda _, x, *__: ended.append(x))
    async with split_gateway(NIXL, [prefills()], [decodes, decodes]) as f:
        f.decode[0].stop()
        f.app.gateway.endpoints.all()[2].load.in_flight += 1  # the stopped decoder is chosen first
        assert (await f.ask()).text == WHOLE
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        assert len(f.prefill[0].requests) == 1, "nothing was prefilled twice"
        assert f.decode[1].requests[0].json["kv_transfer_params"] == OBJECT
        assert f.error_count(f.decode[0]) == 1
        assert f.metric("penstock_retries_total") == 1
        await f.at_rest()
        assert [item.retries for item in ended] == [[f.decode[0].name]], "it stays on record"


async def test_a_whole_answer_counts_as_decoding_at_the_other_decoder_of_its_handoff() -> None:
    decoding: list[int] = []

    async def counts(request: EngineRequest) -> None:
        decoding.append(f.app.gateway.endpoints.all()[2].load.decoding)
        await decodes(request)

    async with split_gateway(NIXL, [prefills()], [decodes, counts]) as f:
        f.decode[0].stop()
        f.app.gateway.endpoints.all()[2].load.in_flight += 1  # the stopped decoder is chosen first
        assert (await f.ask()).text == WHOLE
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        await f.at_rest()
    assert decoding == [1]


async def test_a_decoder_that_refuses_connections_uses_no_retry_budget() -> None:
    budget = {"budget": 0, "floor": 1, "attempts": 1}
    async with split_gateway(NIXL, [prefills()], [decodes, decodes], retries=budget) as f:
        gate = f.app.gateway.gate
        assert gate.retries.try_acquire(), "another request's"
        f.decode[0].stop()
        f.app.gateway.endpoints.all()[2].load.in_flight += 1  # the stopped decoder is chosen first
        assert (await f.ask()).text == WHOLE
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        gate.retries.release()
        assert (len(f.prefill[0].requests), len(f.decode[1].requests)) == (1, 1), "the same handoff"
        assert f.error_count(f.decode[0]) == 1
        assert f.metric("penstock_retries_total") == 1
        await f.at_rest()


async def test_a_prefill_engine_that_refuses_connections_uses_no_attempt() -> None:
    async with split_gateway(NIXL, [prefills()] * 4, [decodes], retries={"attempts": 1}) as f:
        for half in f.prefill[:3]:
            half.stop()
        assert (await f.ask()).text == WHOLE
        await f.at_rest()


async def test_after_a_failed_kv_load_the_decoder_computes_the_prompt_without_blame() -> None:
    async with split_gateway(NIXL, [prefills()], [in_turn(refuses(500), decodes)]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        first, second = f.decode[0].requests
        assert "kv_transfer_params" in first.json
        assert "kv_transfer_params" not in second.json
        assert f.error_count(f.decode[0]) == f.error_count(f.prefill[0]) == 0
        assert f.metric("penstock_split_decisions_total", reason="recompute") == 1
        await f.at_rest()


async def test_a_stream_that_fails_after_its_role_event_is_retried_without_the_handoff() -> None:
    # vLLM sends 200 and a role event before it knows that the KV transfer failed.
    async def role_then_error(request: EngineRequest) -> None:
        request.open_stream()
        request.event(
            {
                "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
                "pad": "x" * 400,
            }
        )
        await request.writer.drain()
        await asyncio.sleep(0.01)
        request.event(
            {"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}}
        )
        request.end_stream()

    async with split_gateway(NIXL, [prefills()], [in_turn(role_then_error, decodes)]) as f:
        reply = await f.ask(stream=True)
        assert reply.text == WHOLE
        assert b"error" not in (reply.body or b"")
        assert "kv_transfer_params" not in f.decode[0].requests[1].json
        assert f.error_count(f.decode[0]) == 0
        await f.at_rest()


async def test_events_of_an_unknown_kind_are_forwarded_eventually() -> None:
    async with split_gateway(
        NIXL, [prefills()], [streams_unknown_events], split={"transfer_timeout": "100ms"}
    ) as f:
        async with f.listen() as answer:
            assert b"note 3" in await answer.readany()
            f.app.gateway.handoffs.sweep(float("inf"))
            await asyncio.sleep(0.05)
            assert not f.decode[0].requests[0].closed.is_set()
            assert len(f.decode[0].requests) == 1
        await f.at_rest()


async def test_a_response_without_tokens_is_a_valid_response() -> None:
    async with split_gateway(NIXL, [prefills()], [answers_without_tokens]) as f:
        reply = await f.ask(stream=True)
        assert (reply.status, reply.text, len(reply.events)) == (200, "", 2)
        await f.at_rest()


async def test_a_decoder_that_dies_with_the_handoff_is_blamed_and_another_pair_serves() -> None:
    async with split_gateway(NIXL, [prefills(), prefills()], [resets, resets, decodes]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        assert f.error_count(f.prefill[0]) == f.error_count(f.prefill[1]) == 0
        await f.at_rest()


async def test_an_overdue_transfer_is_abandoned_and_the_request_is_served_whole() -> None:
    async with split_gateway(
        NIXL, [prefills()], [in_turn(never_answers, decodes)], split={"transfer_timeout": "50ms"}
    ) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        await within(1, f.decode[0].requests[0].closed.wait())
        assert "kv_transfer_params" not in f.decode[0].requests[1].json
        await f.at_rest()


async def test_a_whole_answer_is_not_overdue_while_its_tokens_are_generated() -> None:
    async def answers_after_a_while(request: EngineRequest) -> None:
        await asyncio.sleep(45.0)
        await decodes(request)

    async with split_gateway(NIXL, [prefills()], [answers_after_a_while]) as f:
        assert (await f.ask(max_tokens=2000)).text == WHOLE
        assert len(f.decode[0].requests) == 1
        await f.at_rest()


@pytest.mark.usefixtures("splits_always")
async def test_an_overdue_transfer_teaches_that_its_link_is_slow() -> None:
    script = in_turn(never_answers, decodes)
    split = {"transfer_timeout": "5s"}
    async with split_gateway(NIXL, [prefills()], [script], split=split, policy="priced") as f:
        times, names = f.app.gateway.handoffs.transfer_times, (f.prefill[0].name, f.decode[0].name)
        assert (await f.ask(stream=True)).text == WHOLE
        now = asyncio.get_running_loop().time()
        assert times.is_measured(now)
        assert times.speed(names, 0.0, now).service_s(1000) > 0.1
        assert times.backlog_s(names, now) == 0.0
        await f.at_rest()


async def test_a_response_that_breaks_after_its_first_token_ends_with_an_error_event() -> None:
    async with split_gateway(NIXL, [prefills()], [breaks_after_a_token]) as f:
        reply = await f.ask(stream=True)
        assert reply.body is not None
        assert b'"error"' in reply.body
        assert b"[DONE]" not in reply.body
        assert f.error_count(f.decode[0]) == 1
        await f.at_rest()


async def test_a_response_that_ends_with_an_error_event_is_a_failure_of_the_decoder() -> None:
    gate = asyncio.Event()

    async def token_then_error(request: EngineRequest) -> None:
        request.open_stream()
        request.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
        await gate.wait()  # the client has the token, so that the answer has begun
        request.event(
            {"error": {"message": "as asked", "type": "InternalServerError", "code": 500}}
        )
        request.end_stream()

    async with split_gateway(NIXL, [prefills()], [token_then_error]) as f:
        async with f.listen() as answer:
            assert TEXT[0].encode() in await answer.readany()
            gate.set()
            assert b'"error"' in await answer.read()
        await f.at_rest()
        assert (f.error_count(f.prefill[0]), f.error_count(f.decode[0])) == (0, 1)
        assert len(f.decode[0].requests) == 1


async def test_a_prefill_is_a_success_of_its_engine() -> None:
    async with split_gateway(NIXL, [in_turn(refuses(500), prefills())], [decodes]) as f:
        await f.ask()
        live = f.app.gateway.endpoints.all()[0]
        assert live.health.failures == 1
        await f.ask()
        assert live.health.failures == 0
        await f.at_rest()


async def test_the_bytes_of_a_prefill_are_released_while_its_decoder_works() -> None:
    gate = asyncio.Event()
    async with split_gateway(NIXL, [prefills()], [when_open(gate, decodes)]) as f:
        asking = asyncio.ensure_future(f.ask())
        await f.decode[0].wait_for_request()
        (attempt,) = f.app.gateway.handoffs.transfers
        assert isinstance(attempt, PairAttempt)
        assert attempt.prefill is not None
        assert attempt.prefill.body == b""
        gate.set()
        assert (await asking).text == WHOLE


async def test_a_request_with_no_endpoint_left_is_a_502() -> None:
    async with split_gateway(NIXL, [resets], [resets]) as f:
        reply = await f.ask()
        assert reply.status == 502
        await f.at_rest()


@pytest.mark.parametrize("stage", ["prefilling", "transferring", "decoding"])
async def test_a_client_that_disconnects_closes_both_legs(stage: str) -> None:
    prefill = never_answers if stage == "prefilling" else prefills()
    decode = {"prefilling": decodes, "transferring": never_answers, "decoding": streams_one_token}[
        stage
    ]
    async with split_gateway(NIXL, [prefill], [decode]) as f:
        f.assume_fast_pairs()
        half = f.prefill[0] if stage == "prefilling" else f.decode[0]
        await f.ask_and_leave(half.wait_for_request, stream=True)
        (request,) = half.requests
        await within(0.25, request.closed.wait())
        assert request.closed_at is not None
        if stage == "transferring":
            assert request.closed_at - request.received_at > 0.15, (
                "its engine must have seen the handoff, or the KV stays"
            )
        await f.at_rest()
        assert f.metric("penstock_client_disconnects_total") == 1


async def test_cached_tokens_are_those_of_prefill_if_the_decoder_cannot_report_them() -> None:
    cached = {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    async with split_gateway(NIXL, [prefills(usage=cached)], [decodes]) as f:
        streamed = await f.ask(stream=True, stream_options={"include_usage": True})
        assert streamed.events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        plain = await f.ask(words=500)
        assert plain.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert f.metric("penstock_cached_tokens_total") == 8
        assert "stream_options" not in f.prefill[0].requests[0].json


async def test_cached_tokens_are_those_of_the_decoder_if_the_handoff_has_them() -> None:
    report = OBJECT | {"remote_prefill_cached_tokens": 4}
    async with split_gateway(NIXL, [prefills(report)], [decodes]) as f:
        assert (await f.ask()).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_cached_tokens_are_those_of_the_decoder_without_a_handoff() -> None:
    async with split_gateway(NIXL, [prefills(None)], [decodes]) as f:
        assert (await f.ask()).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        await f.at_rest()
        assert f.metric("penstock_cached_tokens_total") == 8


async def test_a_client_cannot_send_its_own_handoff() -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        await f.ask(
            words=3, kv_transfer_params=OBJECT, vllm_xargs={"kv_transfer_params": "x", "kept": 1}
        )
        (decode,) = f.decode[0].requests
        assert "kv_transfer_params" not in decode.json
        assert decode.json["vllm_xargs"] == {"kept": 1}


async def test_the_endpoints_page_shows_pairs_and_their_results() -> None:
    async def decodes_later(request: EngineRequest) -> None:
        await asyncio.sleep(0.25)
        await decodes(request)

    async with split_gateway(NIXL, [prefills()], [decodes_later]) as f:
        await f.ask()
        shown = await (await f.http.get(f"{f.app.admin_url}/endpoints")).json()
        (group,) = shown["splits"]
        assert (group["prefill"], group["decode"]) == ([f.prefill[0].name], [f.decode[0].name])
        (pair,) = shown["pairs"]
        assert (pair["served"], pair["failed"]) == (1, 0)
        assert pair["handoff_s"] == pytest.approx(0.25)


async def test_whole_requests_never_go_to_a_prefill_endpoint() -> None:
    async with split_gateway(NIXL, [prefills()], [decodes]) as f:
        for _ in range(8):
            await f.ask(words=3)
        assert not f.prefill[0].requests


async def test_many_concurrent_requests_leave_nothing_reserved() -> None:
    async with split_gateway(
        NIXL, [prefills(), in_turn(resets, prefills())], [decodes, in_turn(refuses(500), decodes)]
    ) as f:
        replies = await asyncio.gather(*(f.ask(stream=bool(n % 2)) for n in range(40)))
        assert {reply.text for reply in replies} == {WHOLE}
        await f.at_rest()


async def test_ttft_of_a_split_request_is_predicted_after_one_measured_handoff() -> None:
    async with split_gateway(NIXL, [prefills()], [decodes], policy="mooncake") as f:
        for count in (0, 1, 2):
            assert (await f.ask(stream=True, max_tokens=7)).status == 200
            await f.at_rest()
            assert f.metric("penstock_ttft_prediction_error_ratio_count") == count
