"""Tests of split requests whose prefill and decode requests are sent at the same time.

They use the protocols of vLLM's push connector and of SGLang, over real sockets.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from gateway.http.engine_connections import ConnectionPool, UpstreamConnection
from tests.duration_limits import PATIENCE_S, within
from tests.replacement import replace_method
from tests.unit.gateway.disagg.bootstrap_server import bootstrap_server, page
from tests.unit.gateway.disagg.scripted_engines import (
    OBJECT,
    PUSHED,
    TEXT,
    EngineRequest,
    Script,
    ScriptedEngine,
    SplitGateway,
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

WHOLE = "".join(TEXT)


def sglang(
    prefill: list[Script], decode: list[Script], **options: object
) -> AbstractAsyncContextManager[SplitGateway]:
    return split_gateway(
        "sglang", prefill, decode, engine="sglang", bootstrap="10.0.0.7:8998", **options
    )  # type: ignore[arg-type]

    # SGLang


@pytest.mark.parametrize("stream", [False, True])
async def test_both_halves_of_sglang_get_the_same_body_and_a_room_of_their_own(
    stream: bool,
) -> None:
    async def in_the_room(request: EngineRequest) -> None:
        while len(f.prefill[0].requests) < len(f.decode[0].requests):
            await asyncio.sleep(0.001)
        await decodes(request)

    async with sglang([decodes], [in_the_room]) as f:
        for _ in range(3):
            assert (await f.ask(stream=stream)).text == WHOLE
        rooms = set()
        for prefill, decode in zip(f.prefill[0].requests, f.decode[0].requests, strict=True):
            assert prefill.json == decode.json
            assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
            assert prefill.json["bootstrap_host"] == "10.0.0.7"
            assert prefill.json["bootstrap_port"] == 8998
            assert prefill.json["stream"] is stream
            rooms.add(prefill.json["bootstrap_room"])
        assert len(rooms) == 3
        assert all(0 <= room < 2**63 for room in rooms)
        await f.at_rest()


async def test_the_decode_request_is_sent_without_waiting_for_the_prefill() -> None:
    async with sglang([never_answers], [decodes]) as f:
        reply = await f.ask(stream=True)
        assert reply.text == WHOLE
        # The prefill engine's answer is not needed any more.
        await within(1, f.prefill[0].requests[0].closed.wait())
        await f.at_rest()


async def test_a_prefill_answer_after_the_first_token_ends_the_test_of_a_link() -> None:
    async with sglang([never_answers], [decodes], policy="priced") as f:
        times, names = f.app.gateway.handoffs.transfer_times, (f.prefill[0].name, f.decode[0].name)
        assert (await f.ask(stream=True)).text == WHOLE
        assert len(f.prefill[0].requests) == 1
        assert times.is_measured(asyncio.get_running_loop().time())
        assert times.speed(names, 0.0, 0.0).service_s(1000) == 0.0
        await f.at_rest()


async def test_short_requests_are_split_if_no_endpoint_serves_whole_requests() -> None:
    async with sglang([decodes], [decodes]) as f:
        assert (await f.ask(words=1, max_tokens=1)).status == 200
        assert len(f.prefill[0].requests) == 1
        assert (
            f.metric(
                "penstock_split_decisions_total", decision="split", reason="no_single_endpoint"
            )
            == 1
        )
        refused = await f.ask(n=2)
        assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")


async def test_a_retry_uses_a_pair_after_the_only_whole_endpoint_failed() -> None:
    # The script applies to whichever decoder is chosen first.
    decoder = in_turn(refuses(500), decodes)
    roles = ["decode", "decode", "both"]
    async with sglang(
        [never_answers] * 2, [decoder, decoder, resets], decode_role=roles, retries={"attempts": 5}
    ) as f:
        alone = f.app.gateway.endpoints.all()[4].load
        alone.in_flight += 1  # so that a decoder is chosen first
        assert (await f.ask()).text == WHOLE
        alone.in_flight -= 1
        assert [len(half.requests) for half in (*f.prefill, *f.decode)] == [1] * 5
        assert f.metric("penstock_split_decisions_total", reason="recompute") == 1
        await f.at_rest()


async def test_a_refused_prefill_closes_its_decode_leg_and_retries_with_a_new_room() -> None:
    gate = asyncio.Event()
    async with sglang(
        [when_open(gate, refuses(503)), decodes], [in_turn(never_answers, decodes)]
    ) as f:
        f.app.gateway.endpoints.all()[1].load.prefill_tokens += 10**6
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].wait_for_request()
        await f.prefill[0].wait_for_request()
        gate.set()
        await within(0.2, waiting.closed.wait())
        assert (await asking).text == WHOLE
        first, second = f.decode[0].requests
        assert first.json["bootstrap_room"] != second.json["bootstrap_room"]
        assert second.headers["x-request-id"] == f"{first.headers['x-request-id']}-1"
        assert f.error_count(f.decode[0]) == 0
        assert f.error_count(f.prefill[0]) == 1
        f.app.gateway.endpoints.all()[1].load.prefill_tokens -= 10**6
        await f.at_rest()


async def test_a_refused_decode_closes_the_prefill() -> None:
    async with sglang([never_answers], [refuses(503), refuses(503)]) as f:
        reply = await f.ask()
        assert reply.status == 502
        for item in f.prefill[0].requests:
            await within(1, item.closed.wait())
        assert f.error_count(f.prefill[0]) == 0
        await f.at_rest()


async def test_a_request_that_one_engine_calls_invalid_is_answered_once() -> None:
    async with sglang([refuses(400)], [never_answers]) as f:
        refused = await f.ask()
        assert (refused.status, refused.headers["x-penstock-endpoint"]) == (400, f.prefill[0].name)
        await within(1, f.decode[0].requests[0].closed.wait())
    async with sglang([never_answers], [refuses(400)]) as f:
        refused = await f.ask()
        assert (refused.status, refused.headers["x-penstock-endpoint"]) == (400, f.decode[0].name)
        await within(1, f.prefill[0].requests[0].closed.wait())
        await f.at_rest()


async def test_a_role_event_before_the_kv_arrives_is_withheld_and_the_request_is_retried() -> None:

    async def shows_a_role(request: EngineRequest) -> None:
        request.open_stream()
        request.event(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            | {"pad": "x" * 300}
        )
        began.set()
        await request.closed.wait()

    began = asyncio.Event()
    async with sglang([when_open(began, resets), decodes], [in_turn(shows_a_role, decodes)]) as f:
        f.app.gateway.endpoints.all()[1].load.prefill_tokens += 10**6
        reply = await f.ask(stream=True)
        assert reply.text == WHOLE
        assert len(f.decode[0].requests) == 2
        f.app.gateway.endpoints.all()[1].load.prefill_tokens -= 10**6
        await f.at_rest()


@pytest.mark.parametrize("stage", ["paired", "transferring", "decoding"])
async def test_a_client_that_disconnects_closes_both_legs(stage: str) -> None:
    prefill = decodes if stage == "transferring" else never_answers
    decode = streams_one_token if stage == "decoding" else never_answers
    async with sglang([prefill], [decode]) as f:
        f.assume_fast_pairs()

        async def there() -> None:
            await f.prefill[0].wait_for_request()
            await f.decode[0].wait_for_request()
            if stage == "transferring":
                while not f.metric("penstock_split_legs_total", role="prefill", outcome="served"):
                    await asyncio.sleep(0.001)

        await f.ask_and_leave(there, stream=True)
        legs = [f.decode[0].requests[0]] + (
            [] if stage == "transferring" else [f.prefill[0].requests[0]]
        )
        for leg in legs:
            await within(0.25, leg.closed.wait())
        await f.at_rest()


class Connecting:
    """Makes every attempt to connect to one of these engines hang until the test lets it continue.

    `begun` waits until a request has tried to connect to each of them.
    """

    def __init__(
        self, f: SplitGateway, monkeypatch: pytest.MonkeyPatch, *halves: ScriptedEngine
    ) -> None:
        upstreams = {
            live.upstream
            for live in f.app.gateway.endpoints.all()
            if live.endpoint.url in {h.url for h in halves}
        }
        self._left, self._all_begun = len(upstreams), asyncio.Event()
        connect = ConnectionPool.connect

        async def slowly(to: ConnectionPool) -> UpstreamConnection:
            if to in upstreams:
                self._left -= 1
                if not self._left:
                    self._all_begun.set()
                await asyncio.Event().wait()
            return await connect(to)

        replace_method(monkeypatch, ConnectionPool, "connect", slowly)

    async def begun(self) -> None:
        await self._all_begun.wait()


async def test_no_decode_request_is_sent_to_free_kv_of_a_closed_sglang_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # SGLang drops the KV of a closed prefill request; a decode request would wait for minutes.
    async with sglang([never_answers], [decodes]) as f:
        connecting = Connecting(f, monkeypatch, f.decode[0])

        async def prefill_has_it() -> None:
            await connecting.begun()
            await f.prefill[0].wait_for_request()

        await f.ask_and_leave(prefill_has_it)
        await within(1, f.prefill[0].requests[0].closed.wait())
        await f.at_rest()
        assert f.metric("penstock_split_leases_given_up_total") == 0
        assert f.metric("penstock_split_legs_total", role="decode", outcome="closed") == 1


@pytest.mark.parametrize("sent", [False, True])
async def test_a_decoder_frees_kv_only_if_the_prefill_request_was_sent(
    sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bootstrap_server([page("one")]) as (address, _),
        split_gateway(
            "mooncake", [in_turn(prefills(None), never_answers)], [decodes], bootstrap=address
        ) as f,
    ):
        assert (await f.ask()).text == WHOLE
        for live in f.app.gateway.endpoints.all():
            live.upstream.close()  # so that both legs have to open a connection
        engines = f.decode if sent else [*f.prefill, *f.decode]
        connecting = Connecting(f, monkeypatch, *engines)

        async def legs_are_out() -> None:
            await connecting.begun()
            if sent:
                await f.prefill[0].wait_for_request(2)

        await f.ask_and_leave(legs_are_out)
        await f.at_rest()
        assert f.metric("penstock_split_leases_given_up_total") == sent


@pytest.mark.parametrize(("details", "shown"), [({"cached_tokens": 4}, 4), (None, 0)])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_sglang_response_has_the_cached_tokens_of_the_prefill_engine(
    stream: bool, details: dict[str, int] | None, shown: int
) -> None:
    # SGLang's decode server counts the transferred KV as cached.
    async def prefill(request: EngineRequest) -> None:
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 1,
            "total_tokens": 10,
            "prompt_tokens_details": details,
        }
        if not stream:
            await prefills(None, usage=usage)(request)
            return
        request.open_stream()
        choice = {"index": 0, "delta": {"content": TEXT[0]}, "finish_reason": "length"}
        request.event({"model": "demo", "choices": [choice]})
        request.event({"model": "demo", "choices": [], "usage": usage})
        request.end_stream()

    gate = asyncio.Event()
    async with sglang([prefill], [when_open(gate, decodes)]) as f:
        members = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        asking = asyncio.ensure_future(f.ask(**members))
        async with asyncio.timeout(PATIENCE_S):
            while not f.metric("penstock_split_legs_total", role="prefill", outcome="served"):
                await asyncio.sleep(0.001)
        gate.set()
        reply = await asking
        usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": shown}
        assert reply.text == WHOLE


async def test_the_probe_of_a_silent_sglang_engine_needs_no_other_engine() -> None:
    quickly = {"progress": "100ms", "timeout": "5s"}
    async with sglang(
        [in_turn(never_answers, decodes)], [in_turn(never_answers, decodes)], health=quickly
    ) as f:
        asking = asyncio.ensure_future(f.ask())
        for half in (*f.prefill, *f.decode):
            canary = (await half.wait_for_request(2)).json
            assert (canary["bootstrap_host"], canary["bootstrap_room"]) == ("2.2.2.2", 0)
            assert canary["max_tokens"] == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await f.at_rest()


async def test_a_stream_that_breaks_in_decode_closes_a_prefill_still_open() -> None:
    async with sglang([never_answers], [breaks_after_a_token]) as f:
        reply = await f.ask(stream=True)
        assert b'"error"' in (reply.body or b"")
        await within(1, f.prefill[0].requests[0].closed.wait())
        assert f.error_count(f.prefill[0]) == 0
        await f.at_rest()


@pytest.mark.parametrize("fails", [resets, refuses(400)], ids=["resets", "refuses"])
async def test_a_prefill_failure_after_the_first_token_does_not_affect_the_response(
    fails: Script,
) -> None:
    # This includes a refusal by the prefill engine, because the client already has a response.
    gate = asyncio.Event()

    async def token_then_rest(request: EngineRequest) -> None:
        request.open_stream()
        request.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
        gate.set()
        while not f.error_count(f.prefill[0]):
            await asyncio.sleep(0.001)
        for word in TEXT[1:]:
            request.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": word}}]})
        request.end_stream()

    async with sglang([when_open(gate, fails)], [token_then_rest]) as f:
        async with asyncio.timeout(PATIENCE_S):
            assert (await f.ask(stream=True)).text == WHOLE
        assert f.error_count(f.decode[0]) == 0
        await f.at_rest()


async def test_an_error_event_in_the_prefills_answer_is_its_failure() -> None:
    async def errs(request: EngineRequest) -> None:
        request.open_stream()
        token = {"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]}
        # Even if both events are read at once, the answer does not begin with the error.
        request.event(token | {"pad": "x" * 400})
        request.event(
            {"error": {"message": "as asked", "type": "InternalServerError", "code": 500}}
        )
        request.end_stream()

    first_errs = in_turn(errs, prefills())
    async with sglang([first_errs, first_errs], [in_turn(never_answers, decodes)]) as f:
        assert (await f.ask(stream=True)).text == WHOLE
        assert sorted(f.error_count(half) for half in f.prefill) == [0, 1]
        assert f.error_count(f.decode[0]) == 0
        await f.at_rest()


async def test_a_decoder_that_fails_every_handoff_and_serves_no_whole_requests_is_blamed() -> None:
    async with sglang([decodes, decodes], [refuses(500), decodes]) as f:
        with f.choosing(f.decode[0]):
            for _ in range(3):
                assert (await f.ask()).text == WHOLE
        assert f.error_count(f.decode[0]) == 3
        broken = next(
            live for live in f.app.gateway.endpoints.all() if live.endpoint.name == f.decode[0].name
        )
        assert not broken.load.is_available, "three failures in a row, then it is ejected"
        assert (
            f.error_count(f.decode[1])
            == f.error_count(f.prefill[0])
            == f.error_count(f.prefill[1])
            == 0
        )
        await f.at_rest()

        # vLLM, pushing


async def test_the_first_push_is_sequential_and_the_next_are_not() -> None:
    async with split_gateway(
        "vllm_push", [in_turn(prefills(PUSHED), never_answers)], [decodes]
    ) as f:
        assert (await f.ask()).text == WHOLE
        (first,) = f.decode[0].requests
        assert first.arrival > f.prefill[0].requests[0].arrival
        params = first.json["kv_transfer_params"]
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "engine-p",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": first.headers["x-request-id"],
        }
        assert (await f.ask()).text == WHOLE  # although the prefill engine never answers
        second = f.decode[0].requests[1]
        assert second.json["kv_transfer_params"] == params | {
            "remote_request_id": second.headers["x-request-id"]
        }
        assert f.prefill[0].requests[1].headers["x-request-id"] == second.headers["x-request-id"]
        await f.at_rest()


async def test_a_prefiller_in_pull_mode_is_not_paired_for_pushes() -> None:
    async with split_gateway("vllm_push", [prefills(OBJECT)], [decodes]) as f:
        assert (await f.ask()).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].requests[0].json
        await f.at_rest()


async def test_a_push_whose_prefill_broke_is_closed_and_the_engine_is_identified_again() -> None:
    reborn = PUSHED | {"remote_engine_id": "engine-reborn"}
    gate = asyncio.Event()
    # The gateway retries a request that failed on a pooled connection.
    prefill = in_turn(prefills(PUSHED), when_open(gate, resets), resets, prefills(reborn))
    async with split_gateway(
        "vllm_push", [prefill], [in_turn(decodes, never_answers, decodes)]
    ) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].wait_for_request(2)
        await f.prefill[0].wait_for_request(2)
        gate.set()
        await within(1, waiting.closed.wait())
        assert (await asking).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].requests[2].json
        f.app.gateway.endpoints.all()[0].load.is_available = True
        assert (await f.ask()).text == WHOLE
        assert (
            f.decode[0].requests[3].json["kv_transfer_params"]["remote_engine_id"]
            == "engine-reborn"
        )
        await f.at_rest()


async def test_a_push_from_a_restarted_engine_is_not_awaited_and_then_uses_its_new_identity() -> (
    None
):
    reborn = PUSHED | {"remote_engine_id": "engine-reborn"}
    gate = asyncio.Event()
    prefill = in_turn(prefills(PUSHED), when_open(gate, prefills(reborn)))
    async with split_gateway(
        "vllm_push", [prefill], [in_turn(decodes, never_answers, decodes)]
    ) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].wait_for_request(
            2
        )  # addressed to the engine before its restart
        gate.set()
        await within(1, waiting.closed.wait())
        assert (await asking).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].requests[2].json
        assert (await f.ask()).text == WHOLE
        assert (
            f.decode[0].requests[3].json["kv_transfer_params"]["remote_engine_id"]
            == "engine-reborn"
        )
        assert f.error_count(f.prefill[0]) == f.error_count(f.decode[0]) == 0
        await f.at_rest()


async def test_a_push_that_its_prefill_engine_does_not_confirm_is_computed_by_the_decoder() -> None:
    gate = asyncio.Event()
    prefill = in_turn(prefills(PUSHED), when_open(gate, prefills(None)))
    async with split_gateway(
        "vllm_push", [prefill], [in_turn(decodes, never_answers, decodes)]
    ) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].wait_for_request(2)
        gate.set()
        await within(1, waiting.closed.wait())
        assert (await asking).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].requests[2].json
        await f.at_rest()


async def test_an_unconfirmed_push_after_the_decoder_began_blames_no_endpoint() -> None:
    gate = asyncio.Event()

    async def token_then_rest(request: EngineRequest) -> None:
        request.open_stream()
        request.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
        gate.set()
        while f.metric("penstock_split_legs_total", role="prefill") < 2:
            await asyncio.sleep(0.001)
        for word in TEXT[1:]:
            request.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": word}}]})
        request.end_stream()

    prefill = in_turn(prefills(PUSHED), when_open(gate, prefills(None)))
    async with split_gateway("vllm_push", [prefill], [in_turn(decodes, token_then_rest)]) as f:
        await f.ask()
        assert (await f.ask(stream=True)).text == WHOLE
        assert f.metric("penstock_split_legs_total", role="prefill", outcome="unusable") == 1
        assert f.error_count(f.prefill[0]) == 0
        await f.at_rest()


async def test_an_unconfirmed_push_after_the_first_bytes_ends_the_response() -> None:
    gate = asyncio.Event()

    prefill = in_turn(prefills(PUSHED), when_open(gate, prefills(None)))
    async with split_gateway(
        "vllm_push", [prefill], [in_turn(decodes, streams_unknown_events)]
    ) as f:
        await f.ask()
        async with f.listen() as answer:
            assert b"note 3" in await answer.readany()
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert b'"error"' in await answer.read()
        assert len(f.decode[0].requests) == 2
        assert f.error_count(f.decode[0]) == 0
        await f.at_rest()


async def test_a_push_has_the_cached_tokens_of_the_prefill_engine() -> None:
    cached = {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    gate = asyncio.Event()
    async with split_gateway(
        "vllm_push", [prefills(PUSHED, usage=cached)], [in_turn(decodes, when_open(gate, decodes))]
    ) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        while f.metric("penstock_split_legs_total", role="prefill", outcome="served") < 2:
            await asyncio.sleep(0.001)
        gate.set()
        assert (await asking).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
