"""Prefill, then decode: every row of the table that a pulling pair can come to, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.disagg.attempt import PairAttempt
from gateway.disagg.leg_requests import LegRequests
from gateway.exchange import Exchange
from gateway.fleet.booking import Reservation
from gateway.telemetry.accounting import Accounting
from tests.fair_time import PATIENCE_S, within
from tests.replaced import replace_method
from tests.unit.gateway.disagg.halves import (
    OBJECT,
    TEXT,
    Asked,
    after,
    begins,
    breaks_after_a_token,
    decodes,
    each,
    front,
    holds,
    prefills,
    refuses,
    resets,
    sings,
)

NIXL = "vllm_nixl"
WHOLE = "".join(TEXT)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_prefilled_and_its_kv_handed_to_the_decoder(stream: bool) -> None:
    async with front(NIXL, [prefills()], [decodes]) as f:
        reply = await f.ask(stream=stream, max_tokens=7)
        assert (reply.status, reply.text) == (200, WHOLE)
        (prefill,), (decode,) = f.prefill[0].asked, f.decode[0].asked
        assert reply.headers["x-penstock-endpoint"] == f.decode[0].name
        assert reply.headers["x-penstock-prefill"] == f.prefill[0].name
        assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == reply.headers["x-request-id"]
        asked = {"model": "demo", "max_tokens": 7, "stream": stream, "messages": decode.json["messages"]}
        assert decode.json == asked | {"kv_transfer_params": OBJECT}
        assert prefill.json == asked | {
            "max_tokens": 1,
            "min_tokens": 1,
            "stream": False,
            "kv_transfer_params": prefill.json["kv_transfer_params"],
        }
        assert f.metric("penstock_split_legs_total", outcome="served") == 2
        assert f.metric("penstock_split_stage_seconds_count") == 4
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
async def test_what_must_not_be_split_is_served_whole_by_a_decoder(reason: str, members: dict[str, Any]) -> None:
    async with front(NIXL, [prefills()], [decodes]) as f:
        reply = await f.ask(**members)
        assert reply.status == 200
        assert "x-penstock-prefill" not in reply.headers
        assert not f.prefill[0].asked
        assert "kv_transfer_params" not in f.decode[0].asked[0].json
        assert f.metric("penstock_split_decisions_total", decision="whole", reason=reason) == 1


async def test_no_amount_of_blank_hides_that_there_are_several_prompts() -> None:
    async with front(NIXL, [prefills()], [decodes]) as f:
        body = b'{"model":"demo","prompt":[%b"%b","word"]}' % (b" \t\n" * 100, b"word " * 400)
        headers = {"content-type": "application/json"}
        async with f.http.post(f"{f.app.url}/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 200
        assert not f.prefill[0].asked
        assert f.metric("penstock_split_decisions_total", decision="whole", reason="prompts") == 1


async def test_a_request_that_holds_a_permit_is_served_whole_though_split_ones_fill_every_place() -> None:
    """Endpoints of both roles: one split request takes two places, and its permit only one."""
    gate = asyncio.Event()

    async def slow_prefill(asked: Asked) -> None:
        if asked.json["max_tokens"] == 1:
            await gate.wait()
            await prefills()(asked)
        else:
            await decodes(asked)

    async with front(NIXL, [], [slow_prefill] * 2, decode_role="both", max_concurrency=1) as f:
        long = asyncio.ensure_future(f.ask())
        async with asyncio.timeout(PATIENCE_S):
            while not any(half.asked for half in f.decode):
                await asyncio.sleep(0.001)
        assert (await f.ask(words=1)).status == 200
        gate.set()
        assert (await long).status == 200
        await f.at_rest()


async def test_a_prompt_that_the_decoder_holds_already_is_not_handed_over_again() -> None:
    async with front(NIXL, [prefills()], [decodes]) as f:
        said = [{"role": "user", "content": "word " * 2000}]
        await f.ask(messages=said)
        await f.ask(messages=said)
        assert len(f.prefill[0].asked) == 1
        assert f.metric("penstock_split_decisions_total", decision="whole", reason="cached") == 1


async def test_the_decode_place_is_taken_before_the_prefill_is_sent() -> None:
    gate = asyncio.Event()
    async with front(NIXL, [after(gate, prefills())], [decodes]) as f:
        asking = asyncio.ensure_future(f.ask())
        await f.prefill[0].was_asked()
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
async def test_a_malformed_handoff_never_reaches_a_decoder_which_then_computes_for_itself(handoff: object) -> None:
    async with front(NIXL, [prefills(handoff)], [decodes]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        (decode,) = f.decode[0].asked
        assert "kv_transfer_params" not in decode.json
        assert f.metric("penstock_split_legs_total", role="prefill", outcome="unusable") == 1
        assert [figures.tokens for figures in f.app.gateway.handoffs.pairs.values()] == [0]
        await f.at_rest()


async def test_a_broken_prefill_is_tried_on_another_and_only_the_broken_one_is_blamed() -> None:
    async with front(NIXL, [resets, prefills()], [decodes]) as f:
        while not f.prefill[0].asked:
            assert (await f.ask()).text == WHOLE
        assert f.blamed(f.prefill[0]) == 1
        assert f.blamed(f.prefill[1]) == f.blamed(f.decode[0]) == 0
        await f.at_rest()


async def test_without_another_prefiller_the_decoder_computes_for_itself() -> None:
    async with front(NIXL, [refuses(500)], [decodes]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].asked[0].json
        assert f.blamed(f.prefill[0]) == 1
        await f.at_rest()


async def test_a_request_that_the_prefiller_calls_wrong_is_answered_so() -> None:
    async with front(NIXL, [refuses(422)], [decodes]) as f:
        reply = await f.ask()
        assert (reply.status, reply.json["error"]["message"]) == (422, "as asked")
        assert not f.decode[0].asked
        assert f.blamed(f.prefill[0]) == 0
        await f.at_rest()


async def test_a_request_that_the_decoder_calls_wrong_is_answered_so_and_its_kv_freed_without_what_was_wrong() -> None:
    """The prefiller was asked for one token alone, and found nothing wrong with that."""
    async with front(NIXL, [prefills()], [each(refuses(400), decodes)]) as f:
        reply = await f.ask(stream=True, logprobs=True, top_logprobs=20)
        assert (reply.status, reply.json["error"]["message"]) == (400, "as asked")
        freed = await f.decode[0].was_asked(2)
        assert (freed.json["kv_transfer_params"], freed.json["max_tokens"]) == (OBJECT, 1)
        assert not freed.json.keys() & {"logprobs", "top_logprobs"}
        assert f.metric("penstock_split_leases_given_up_total", reason="refused") == 1
        await f.at_rest()


async def test_a_decoder_that_cannot_be_reached_passes_the_handoff_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Exchange] = []
    replace_method(monkeypatch, Accounting, "close", lambda _, x, *__: ended.append(x))
    async with front(NIXL, [prefills()], [decodes, decodes]) as f:
        f.decode[0].stop()
        f.app.gateway.endpoints.all()[2].load.in_flight += 1  # so that the other is chosen first
        assert (await f.ask()).text == WHOLE
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        assert len(f.prefill[0].asked) == 1, "nothing was prefilled twice"
        assert f.decode[1].asked[0].json["kv_transfer_params"] == OBJECT
        assert f.blamed(f.decode[0]) == 1
        assert f.metric("penstock_retries_total") == 1
        await f.at_rest()
        assert [each.retries for each in ended] == [[f.decode[0].name]], "it stays on record"


async def test_a_decoder_that_refuses_connections_costs_no_turn_of_the_retry_budget() -> None:
    budget = {"budget": 0, "floor": 1, "attempts": 1}
    async with front(NIXL, [prefills()], [decodes, decodes], retries=budget) as f:
        gate = f.app.gateway.gate
        assert gate.try_acquire_retry(), "another request's"
        f.decode[0].stop()
        f.app.gateway.endpoints.all()[2].load.in_flight += 1  # so that the other is chosen first
        assert (await f.ask()).text == WHOLE
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        gate.release_retry()
        assert (len(f.prefill[0].asked), len(f.decode[1].asked)) == (1, 1), "the same handoff"
        assert f.blamed(f.decode[0]) == 1
        assert f.metric("penstock_retries_total") == 1
        await f.at_rest()


async def test_a_prefiller_that_refuses_connections_costs_no_attempt() -> None:
    async with front(NIXL, [prefills()] * 4, [decodes], retries={"attempts": 1}) as f:
        for half in f.prefill[:3]:
            half.stop()
        assert (await f.ask()).text == WHOLE
        await f.at_rest()


async def test_a_decoder_that_could_not_load_the_kv_gets_the_request_without_the_handoff_and_no_blame() -> None:
    async with front(NIXL, [prefills()], [each(refuses(500), decodes)]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        first, second = f.decode[0].asked
        assert "kv_transfer_params" in first.json
        assert "kv_transfer_params" not in second.json
        assert f.blamed(f.decode[0]) == f.blamed(f.prefill[0]) == 0
        assert f.metric("penstock_split_decisions_total", reason="recompute") == 1
        await f.at_rest()


async def test_a_stream_that_fails_after_its_role_is_computed_without_the_handoff() -> None:
    """vLLM answers 200 and a role before it knows that the KV will never come."""

    async def role_then_error(asked: Asked) -> None:
        asked.open_stream()
        asked.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "pad": "x" * 400})
        await asked.writer.drain()
        await asyncio.sleep(0.01)
        asked.event({"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}})
        asked.end_stream()

    async with front(NIXL, [prefills()], [each(role_then_error, decodes)]) as f:
        reply = await f.ask(stream=True)
        assert reply.text == WHOLE
        assert b"error" not in (reply.body or b"")
        assert "kv_transfer_params" not in f.decode[0].asked[1].json
        assert f.blamed(f.decode[0]) == 0
        await f.at_rest()


async def test_events_of_an_unknown_kind_are_not_held_back_for_ever() -> None:
    async with front(NIXL, [prefills()], [sings], split={"transfer_timeout": "100ms"}) as f:
        async with f.listen() as answer:
            assert b"note 3" in await answer.readany()
            f.app.gateway.handoffs.sweep(float("inf"))
            await asyncio.sleep(0.05)
            assert not f.decode[0].asked[0].closed.is_set()
            assert len(f.decode[0].asked) == 1
        await f.at_rest()


async def says_nothing(asked: Asked) -> None:
    """An answer of no token."""
    asked.open_stream()
    asked.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    asked.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    asked.end_stream()


async def test_an_answer_without_a_single_token_is_an_answer() -> None:
    async with front(NIXL, [prefills()], [says_nothing]) as f:
        reply = await f.ask(stream=True)
        assert (reply.status, reply.text, len(reply.events)) == (200, "", 2)
        await f.at_rest()


async def test_a_decoder_that_dies_with_the_handoff_is_blamed_and_the_prompt_goes_to_another_pair() -> None:
    async with front(NIXL, [prefills(), prefills()], [resets, resets, decodes]) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        assert f.blamed(f.prefill[0]) == f.blamed(f.prefill[1]) == 0
        await f.at_rest()


async def test_a_transfer_that_lasts_too_long_is_given_up_and_computed_whole() -> None:
    async with front(NIXL, [prefills()], [each(holds, decodes)], split={"transfer_timeout": "50ms"}) as f:
        reply = await f.ask()
        assert reply.text == WHOLE
        await within(1, f.decode[0].asked[0].closed.wait())
        assert "kv_transfer_params" not in f.decode[0].asked[1].json
        await f.at_rest()


async def test_an_answer_that_breaks_after_its_first_token_ends_with_an_error_event() -> None:
    async with front(NIXL, [prefills()], [breaks_after_a_token]) as f:
        reply = await f.ask(stream=True)
        assert reply.body is not None
        assert b'"error"' in reply.body
        assert b"[DONE]" not in reply.body
        assert f.blamed(f.decode[0]) == 1
        await f.at_rest()


async def test_an_answer_that_ends_with_an_error_event_is_the_decoders_failure() -> None:
    gate = asyncio.Event()

    async def token_then_error(asked: Asked) -> None:
        asked.open_stream()
        asked.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
        await gate.wait()  # the client has the token: what comes now is not what the answer begins with
        asked.event({"error": {"message": "as asked", "type": "InternalServerError", "code": 500}})
        asked.end_stream()

    async with front(NIXL, [prefills()], [token_then_error]) as f:
        async with f.listen() as answer:
            assert TEXT[0].encode() in await answer.readany()
            gate.set()
            assert b'"error"' in await answer.read()
        await f.at_rest()
        assert (f.blamed(f.prefill[0]), f.blamed(f.decode[0])) == (0, 1)
        assert len(f.decode[0].asked) == 1


async def test_a_prefill_is_a_success_of_its_engine() -> None:
    async with front(NIXL, [each(refuses(500), prefills())], [decodes]) as f:
        await f.ask()
        live = f.app.gateway.endpoints.all()[0]
        assert live.health.failures == 1
        await f.ask()
        assert live.health.failures == 0
        await f.at_rest()


async def test_the_bytes_of_a_prefill_are_released_while_its_decoder_works() -> None:
    gate = asyncio.Event()
    async with front(NIXL, [prefills()], [after(gate, decodes)]) as f:
        asking = asyncio.ensure_future(f.ask())
        await f.decode[0].was_asked()
        (attempt,) = f.app.gateway.handoffs.transfers
        assert isinstance(attempt, PairAttempt)
        assert attempt.prefill is not None
        assert attempt.prefill.body == b""
        gate.set()
        assert (await asking).text == WHOLE


async def test_a_request_with_no_endpoint_left_is_a_502() -> None:
    async with front(NIXL, [resets], [resets]) as f:
        reply = await f.ask()
        assert reply.status == 502
        await f.at_rest()


@pytest.mark.parametrize("stage", ["prefilling", "transferring", "decoding"])
async def test_a_client_that_leaves_takes_both_legs_along(stage: str) -> None:
    prefill = holds if stage == "prefilling" else prefills()
    decode = {"prefilling": decodes, "transferring": holds, "decoding": begins}[stage]
    async with front(NIXL, [prefill], [decode]) as f:
        f.have_met()
        half = f.prefill[0] if stage == "prefilling" else f.decode[0]
        await f.ask_and_leave(half.was_asked, stream=True)
        (asked,) = half.asked
        await within(0.25, asked.closed.wait())
        assert asked.closed_at is not None
        if stage == "transferring":
            assert asked.closed_at - asked.came_at > 0.15, "its engine must have seen the handoff, or the KV stays"
        await f.at_rest()
        assert f.metric("penstock_client_disconnects_total") == 1


async def test_cached_tokens_are_the_prefillers_where_the_decoder_cannot_know() -> None:
    cached = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    async with front(NIXL, [prefills(usage=cached)], [decodes]) as f:
        streamed = await f.ask(stream=True, stream_options={"include_usage": True})
        assert streamed.events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        plain = await f.ask(words=500)
        assert plain.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert f.metric("penstock_cached_tokens_total") == 8
        assert "stream_options" not in f.prefill[0].asked[0].json


async def test_cached_tokens_are_the_decoders_where_it_was_told() -> None:
    told = OBJECT | {"remote_prefill_cached_tokens": 4}
    async with front(NIXL, [prefills(told)], [decodes]) as f:
        assert (await f.ask()).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_cached_tokens_are_the_decoders_where_nothing_was_handed_over() -> None:
    async with front(NIXL, [prefills(None)], [decodes]) as f:
        assert (await f.ask()).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        await f.at_rest()
        assert f.metric("penstock_cached_tokens_total") == 8


async def test_a_client_cannot_bring_a_handoff_of_its_own() -> None:
    async with front(NIXL, [prefills()], [decodes]) as f:
        await f.ask(words=3, kv_transfer_params=OBJECT, vllm_xargs={"kv_transfer_params": "x", "kept": 1})
        (decode,) = f.decode[0].asked
        assert "kv_transfer_params" not in decode.json
        assert decode.json["vllm_xargs"] == {"kept": 1}


async def test_endpoints_show_who_is_paired_and_how_it_goes() -> None:
    async with front(NIXL, [prefills()], [decodes]) as f:
        await f.ask()
        shown = await (await f.http.get(f"{f.app.admin_url}/endpoints")).json()
        (group,) = shown["splits"]
        assert (group["prefill"], group["decode"]) == ([f.prefill[0].name], [f.decode[0].name])
        (pair,) = shown["pairs"]
        assert (pair["served"], pair["failed"]) == (1, 0)
        assert pair["handoff_s"] > 0


async def test_whole_requests_never_go_to_a_prefill_endpoint() -> None:
    async with front(NIXL, [prefills()], [decodes]) as f:
        for _ in range(8):
            await f.ask(words=3)
        assert not f.prefill[0].asked


async def test_many_at_once_leave_nothing_behind() -> None:
    async with front(NIXL, [prefills(), each(resets, prefills())], [decodes, each(refuses(500), decodes)]) as f:
        replies = await asyncio.gather(*(f.ask(stream=bool(n % 2)) for n in range(40)))
        assert {reply.text for reply in replies} == {WHOLE}
        await f.at_rest()


async def test_a_pair_that_fails_at_its_booking_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("as asked")

    async with front(NIXL, [prefills()], [decodes]) as f:
        with monkeypatch.context() as broken:
            replace_method(broken, Exchange, "booked", fails)
            assert (await f.ask()).status == 500
        await f.at_rest()
        assert f.app.gateway.handoffs.live_count == 0
        assert (await f.ask()).text == WHOLE


@pytest.mark.parametrize("name", ["interpret", "relay"])
async def test_a_pair_that_fails_at_an_answer_of_one_of_them_ends_and_leaves_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("as asked")

    async with front(NIXL, [prefills()], [decodes]) as f:
        with monkeypatch.context() as broken:
            replace_method(broken, LegRequests, name, fails)
            assert (await f.ask()).status == 500
        assert f.metric("penstock_split_pairs_total", result="failed") == 1
        await f.at_rest()
        assert (await f.ask()).text == WHOLE


async def test_a_pair_that_fails_at_the_end_of_an_answer_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transfer is watched until then: there was no token."""

    def fails(*_: object) -> None:
        raise RuntimeError("as asked")

    async with front(NIXL, [prefills()], [says_nothing]) as f:
        with monkeypatch.context() as broken:
            replace_method(broken, Reservation, "served", fails)
            await f.ask(stream=True)
        await f.at_rest()
        assert f.metric("penstock_split_pairs_total", result="failed") == 1


async def test_the_first_token_of_a_split_request_is_predicted_once_a_handoff_was_measured() -> None:
    async with front(NIXL, [prefills()], [decodes], policy="mooncake") as f:
        for count in (0, 1, 2):
            assert (await f.ask(stream=True, max_tokens=7)).status == 200
            await f.at_rest()
            assert f.metric("penstock_ttft_prediction_error_ratio_count") == count
