"""Both legs at once: pushing vLLM and SGLang, over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from gateway.http.upstream import ConnectionPool, UpstreamConnection
from tests.fair_time import PATIENCE_S, within
from tests.replaced import replace_method
from tests.unit.gateway.disagg.bootstraps import bootstrap_server, page
from tests.unit.gateway.disagg.halves import (
    OBJECT,
    PUSHED,
    TEXT,
    Asked,
    Front,
    Half,
    Script,
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

WHOLE = "".join(TEXT)


def sglang(prefill: list[Script], decode: list[Script], **options: object) -> AbstractAsyncContextManager[Front]:
    return front("sglang", prefill, decode, engine="sglang", bootstrap="10.0.0.7:8998", **options)  # type: ignore[arg-type]


# SGLang


@pytest.mark.parametrize("stream", [False, True])
async def test_both_halves_of_sglang_get_the_same_body_and_a_room_of_their_own(stream: bool) -> None:
    async def in_the_room(asked: Asked) -> None:
        while len(f.prefill[0].asked) < len(f.decode[0].asked):
            await asyncio.sleep(0.001)
        await decodes(asked)

    async with sglang([decodes], [in_the_room]) as f:
        for _ in range(3):
            assert (await f.ask(stream=stream)).text == WHOLE
        rooms = set()
        for prefill, decode in zip(f.prefill[0].asked, f.decode[0].asked, strict=True):
            assert prefill.json == decode.json
            assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
            assert prefill.json["bootstrap_host"] == "10.0.0.7"
            assert prefill.json["bootstrap_port"] == 8998
            assert prefill.json["stream"] is stream
            rooms.add(prefill.json["bootstrap_room"])
        assert len(rooms) == 3
        assert all(0 <= room < 2**63 for room in rooms)
        await f.at_rest()


async def test_the_decoder_is_asked_without_waiting_for_the_prefill() -> None:
    async with sglang([holds], [decodes]) as f:
        reply = await f.ask(stream=True)
        assert reply.text == WHOLE
        await within(1, f.prefill[0].asked[0].closed.wait())  # its answer is not needed any more
        await f.at_rest()


async def test_short_requests_are_split_where_no_endpoint_serves_them_alone() -> None:
    async with sglang([decodes], [decodes]) as f:
        assert (await f.ask(words=1, max_tokens=1)).status == 200
        assert len(f.prefill[0].asked) == 1
        assert f.metric("penstock_split_decisions_total", decision="split", reason="nobody_alone") == 1
        refused = await f.ask(n=2)
        assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")


async def test_a_pair_of_others_is_asked_when_the_only_one_who_serves_alone_broke_too() -> None:
    decoder = each(refuses(500), decodes)  # whichever of the two is asked first
    roles = ["decode", "decode", "both"]
    async with sglang([holds] * 2, [decoder, decoder, resets], decode_role=roles, retries={"attempts": 5}) as f:
        alone = f.app.gateway.endpoints.all()[4].load
        alone.in_flight += 1  # so that a decoder is chosen first
        assert (await f.ask()).text == WHOLE
        alone.in_flight -= 1
        assert [len(half.asked) for half in (*f.prefill, *f.decode)] == [1] * 5
        assert f.metric("penstock_split_decisions_total", reason="recompute") == 1
        await f.at_rest()


async def test_a_refused_prefill_closes_its_waiting_decoder_and_takes_a_new_room_elsewhere() -> None:
    gate = asyncio.Event()
    async with sglang([after(gate, refuses(503)), decodes], [each(holds, decodes)]) as f:
        f.app.gateway.endpoints.all()[1].load.prefill_tokens += 10**6
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].was_asked()
        await f.prefill[0].was_asked()
        gate.set()
        await within(0.2, waiting.closed.wait())
        assert (await asking).text == WHOLE
        first, second = f.decode[0].asked
        assert first.json["bootstrap_room"] != second.json["bootstrap_room"]
        assert second.headers["x-request-id"] == f"{first.headers['x-request-id']}-1"
        assert f.blamed(f.decode[0]) == 0
        assert f.blamed(f.prefill[0]) == 1
        f.app.gateway.endpoints.all()[1].load.prefill_tokens -= 10**6
        await f.at_rest()


async def test_a_refused_decode_closes_the_prefill() -> None:
    async with sglang([holds], [refuses(503), refuses(503)]) as f:
        reply = await f.ask()
        assert reply.status == 502
        for asked in f.prefill[0].asked:
            await within(1, asked.closed.wait())
        assert f.blamed(f.prefill[0]) == 0
        await f.at_rest()


async def test_a_request_that_one_half_calls_wrong_is_answered_once() -> None:
    async with sglang([refuses(400)], [holds]) as f:
        refused = await f.ask()
        assert (refused.status, refused.headers["x-penstock-endpoint"]) == (400, f.prefill[0].name)
        await within(1, f.decode[0].asked[0].closed.wait())
    async with sglang([holds], [refuses(400)]) as f:
        refused = await f.ask()
        assert (refused.status, refused.headers["x-penstock-endpoint"]) == (400, f.decode[0].name)
        await within(1, f.prefill[0].asked[0].closed.wait())
        await f.at_rest()


async def test_a_role_shown_before_the_kv_is_there_is_held_and_the_request_tried_again() -> None:

    async def shows_a_role(asked: Asked) -> None:
        asked.open_stream()
        asked.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]} | {"pad": "x" * 300})
        began.set()
        await asked.closed.wait()

    began = asyncio.Event()
    async with sglang([after(began, resets), decodes], [each(shows_a_role, decodes)]) as f:
        f.app.gateway.endpoints.all()[1].load.prefill_tokens += 10**6
        reply = await f.ask(stream=True)
        assert reply.text == WHOLE
        assert len(f.decode[0].asked) == 2
        f.app.gateway.endpoints.all()[1].load.prefill_tokens -= 10**6
        await f.at_rest()


@pytest.mark.parametrize("stage", ["paired", "transferring", "decoding"])
async def test_a_client_that_leaves_takes_both_legs_along(stage: str) -> None:
    prefill = decodes if stage == "transferring" else holds
    decode = begins if stage == "decoding" else holds
    async with sglang([prefill], [decode]) as f:
        f.have_met()

        async def there() -> None:
            await f.prefill[0].was_asked()
            await f.decode[0].was_asked()
            if stage == "transferring":
                while not f.metric("penstock_split_legs_total", role="prefill", outcome="served"):
                    await asyncio.sleep(0.001)

        await f.ask_and_leave(there, stream=True)
        legs = [f.decode[0].asked[0]] + ([] if stage == "transferring" else [f.prefill[0].asked[0]])
        for asked in legs:
            await within(0.25, asked.closed.wait())
        await f.at_rest()


class Connecting:
    """Connecting to these engines never ends; `begun` once a request waits for each of them."""

    def __init__(self, f: Front, monkeypatch: pytest.MonkeyPatch, *halves: Half) -> None:
        held = {live.upstream for live in f.app.gateway.endpoints.all() if live.endpoint.url in {h.url for h in halves}}
        self._left, self._all_begun = len(held), asyncio.Event()
        connect = ConnectionPool.connect

        async def slowly(to: ConnectionPool) -> UpstreamConnection:
            if to in held:
                self._left -= 1
                if not self._left:
                    self._all_begun.set()
                await asyncio.Event().wait()
            return await connect(to)

        replace_method(monkeypatch, ConnectionPool, "connect", slowly)

    async def begun(self) -> None:
        await self._all_begun.wait()


async def test_a_decoder_is_not_sent_to_a_room_without_a_prefiller_when_the_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's P gives up the KV of a request that is closed: a D sent to free it would wait for minutes."""
    async with sglang([holds], [decodes]) as f:
        connecting = Connecting(f, monkeypatch, f.decode[0])

        async def prefill_has_it() -> None:
            await connecting.begun()
            await f.prefill[0].was_asked()

        await f.ask_and_leave(prefill_has_it)
        await within(1, f.prefill[0].asked[0].closed.wait())
        await f.at_rest()
        assert f.metric("penstock_split_leases_given_up_total") == 0
        assert f.metric("penstock_split_legs_total", role="decode", outcome="closed") == 1


@pytest.mark.parametrize("sent", [False, True])
async def test_only_kv_of_a_prefill_that_was_asked_for_is_freed_by_a_decoder(
    sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        bootstrap_server([page("one")]) as (address, _),
        front("mooncake", [each(prefills(None), holds)], [decodes], bootstrap=address) as f,
    ):
        assert (await f.ask()).text == WHOLE
        for live in f.app.gateway.endpoints.all():
            live.upstream.close()  # both legs have to connect
        held = f.decode if sent else [*f.prefill, *f.decode]
        connecting = Connecting(f, monkeypatch, *held)

        async def legs_are_out() -> None:
            await connecting.begun()
            if sent:
                await f.prefill[0].was_asked(2)

        await f.ask_and_leave(legs_are_out)
        await f.at_rest()
        assert f.metric("penstock_split_leases_given_up_total") == sent


@pytest.mark.parametrize(("details", "shown"), [({"cached_tokens": 4}, 4), (None, 0)])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_of_sglang_shows_what_the_prefiller_had_cached(
    stream: bool, details: dict[str, int] | None, shown: int
) -> None:
    """Its decode server counts the KV that it was sent as cached."""

    async def prefill(asked: Asked) -> None:
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "prompt_tokens_details": details}
        if not stream:
            await prefills(None, usage=usage)(asked)
            return
        asked.open_stream()
        choice = {"index": 0, "delta": {"content": TEXT[0]}, "finish_reason": "length"}
        asked.event({"model": "demo", "choices": [choice]})
        asked.event({"model": "demo", "choices": [], "usage": usage})
        asked.end_stream()

    gate = asyncio.Event()
    async with sglang([prefill], [after(gate, decodes)]) as f:
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


async def test_a_silent_half_of_sglang_is_asked_for_a_token_that_needs_no_other_half() -> None:
    """Without a room it would answer 400 at its door, which says nothing about the engine behind it."""
    quickly = {"progress": "100ms", "timeout": "5s"}
    async with sglang([each(holds, decodes)], [each(holds, decodes)], health=quickly) as f:
        asking = asyncio.ensure_future(f.ask())
        for half in (*f.prefill, *f.decode):
            canary = (await half.was_asked(2)).json
            assert (canary["bootstrap_host"], canary["bootstrap_room"]) == ("2.2.2.2", 0)
            assert canary["max_tokens"] == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await f.at_rest()


async def test_a_stream_that_breaks_in_decode_closes_a_prefill_still_open() -> None:
    async with sglang([holds], [breaks_after_a_token]) as f:
        reply = await f.ask(stream=True)
        assert b'"error"' in (reply.body or b"")
        await within(1, f.prefill[0].asked[0].closed.wait())
        assert f.blamed(f.prefill[0]) == 0
        await f.at_rest()


@pytest.mark.parametrize("fails", [resets, refuses(400)], ids=["resets", "refuses"])
async def test_a_late_failure_of_the_prefill_is_its_own_affair(fails: Script) -> None:
    """A refusal too: the client has an answer already."""
    gate = asyncio.Event()

    async def token_then_rest(asked: Asked) -> None:
        asked.open_stream()
        asked.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
        gate.set()
        while not f.blamed(f.prefill[0]):
            await asyncio.sleep(0.001)
        for word in TEXT[1:]:
            asked.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": word}}]})
        asked.end_stream()

    async with sglang([after(gate, fails)], [token_then_rest]) as f:
        async with asyncio.timeout(PATIENCE_S):
            assert (await f.ask(stream=True)).text == WHOLE
        assert f.blamed(f.decode[0]) == 0
        await f.at_rest()


async def test_an_error_event_in_the_prefills_answer_is_its_failure() -> None:
    async def errs(asked: Asked) -> None:
        asked.open_stream()
        token = {"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]}
        asked.event(token | {"pad": "x" * 400})  # in one read as well, the error is not what the answer begins with
        asked.event({"error": {"message": "as asked", "type": "InternalServerError", "code": 500}})
        asked.end_stream()

    first_errs = each(errs, prefills())
    async with sglang([first_errs, first_errs], [each(holds, decodes)]) as f:
        assert (await f.ask(stream=True)).text == WHOLE
        assert sorted(f.blamed(half) for half in f.prefill) == [0, 1]
        assert f.blamed(f.decode[0]) == 0
        await f.at_rest()


async def test_a_decoder_that_fails_every_handoff_and_cannot_do_without_one_is_held_to_account() -> None:
    async with sglang([decodes, decodes], [refuses(500), decodes]) as f:
        for _ in range(60):  # equals are asked by lot
            assert (await f.ask()).text == WHOLE
            if f.blamed(f.decode[0]) == 3:
                break
        broken = next(live for live in f.app.gateway.endpoints.all() if live.endpoint.name == f.decode[0].name)
        assert not broken.load.is_available, "three failures in a row, then it is ejected"
        assert f.blamed(f.decode[1]) == f.blamed(f.prefill[0]) == f.blamed(f.prefill[1]) == 0
        await f.at_rest()


# vLLM, pushing


async def test_the_first_push_is_sequential_and_the_next_are_not() -> None:
    async with front("vllm_push", [each(prefills(PUSHED), holds)], [decodes]) as f:
        assert (await f.ask()).text == WHOLE
        (first,) = f.decode[0].asked
        assert first.came_at > f.prefill[0].asked[0].came_at
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
        assert (await f.ask()).text == WHOLE  # its prefill never answers
        second = f.decode[0].asked[1]
        assert second.json["kv_transfer_params"] == params | {"remote_request_id": second.headers["x-request-id"]}
        assert f.prefill[0].asked[1].headers["x-request-id"] == second.headers["x-request-id"]
        await f.at_rest()


async def test_a_prefiller_in_pull_mode_is_not_paired_for_pushes() -> None:
    async with front("vllm_push", [prefills(OBJECT)], [decodes]) as f:
        assert (await f.ask()).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].asked[0].json
        await f.at_rest()


async def test_a_push_whose_prefill_broke_is_never_left_waiting_and_the_engine_is_asked_anew_who_it_is() -> None:
    reborn = PUSHED | {"remote_engine_id": "engine-reborn"}
    gate = asyncio.Event()
    prefill = each(
        prefills(PUSHED), after(gate, resets), resets, prefills(reborn)
    )  # a pooled connection is tried again
    async with front("vllm_push", [prefill], [each(decodes, holds, decodes)]) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].was_asked(2)
        await f.prefill[0].was_asked(2)
        gate.set()
        await within(1, waiting.closed.wait())
        assert (await asking).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].asked[2].json
        f.app.gateway.endpoints.all()[0].load.is_available = True
        assert (await f.ask()).text == WHOLE
        assert f.decode[0].asked[3].json["kv_transfer_params"]["remote_engine_id"] == "engine-reborn"
        await f.at_rest()


async def test_a_push_of_an_engine_that_restarted_unseen_is_not_waited_for_and_the_next_names_the_new_one() -> None:
    reborn = PUSHED | {"remote_engine_id": "engine-reborn"}
    gate = asyncio.Event()
    prefill = each(prefills(PUSHED), after(gate, prefills(reborn)))
    async with front("vllm_push", [prefill], [each(decodes, holds, decodes)]) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].was_asked(2)  # for an engine that is no more
        gate.set()
        await within(1, waiting.closed.wait())
        assert (await asking).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].asked[2].json
        assert (await f.ask()).text == WHOLE
        assert f.decode[0].asked[3].json["kv_transfer_params"]["remote_engine_id"] == "engine-reborn"
        assert f.blamed(f.prefill[0]) == f.blamed(f.decode[0]) == 0
        await f.at_rest()


async def test_a_push_that_its_prefiller_does_not_promise_is_computed_by_the_decoder() -> None:
    gate = asyncio.Event()
    prefill = each(prefills(PUSHED), after(gate, prefills(None)))
    async with front("vllm_push", [prefill], [each(decodes, holds, decodes)]) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        waiting = await f.decode[0].was_asked(2)
        gate.set()
        await within(1, waiting.closed.wait())
        assert (await asking).text == WHOLE
        assert "kv_transfer_params" not in f.decode[0].asked[2].json
        await f.at_rest()


async def test_a_push_that_is_not_promised_after_its_decoder_has_begun_blames_no_endpoint() -> None:
    gate = asyncio.Event()

    async def token_then_rest(asked: Asked) -> None:
        asked.open_stream()
        asked.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
        gate.set()
        while f.metric("penstock_split_legs_total", role="prefill") < 2:
            await asyncio.sleep(0.001)
        for word in TEXT[1:]:
            asked.event({"model": "demo", "choices": [{"index": 0, "delta": {"content": word}}]})
        asked.end_stream()

    prefill = each(prefills(PUSHED), after(gate, prefills(None)))
    async with front("vllm_push", [prefill], [each(decodes, token_then_rest)]) as f:
        await f.ask()
        assert (await f.ask(stream=True)).text == WHOLE
        assert f.metric("penstock_split_legs_total", role="prefill", outcome="unusable") == 1
        assert f.blamed(f.prefill[0]) == 0
        await f.at_rest()


async def test_a_push_that_is_not_promised_when_bytes_have_flowed_ends_the_answer() -> None:
    """Nothing is computed again after the client has tokens."""
    gate = asyncio.Event()

    prefill = each(prefills(PUSHED), after(gate, prefills(None)))
    async with front("vllm_push", [prefill], [each(decodes, sings)]) as f:
        await f.ask()
        async with f.listen() as answer:
            assert b"note 3" in await answer.readany()
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert b'"error"' in await answer.read()
        assert len(f.decode[0].asked) == 2
        assert f.blamed(f.decode[0]) == 0
        await f.at_rest()


async def test_a_push_shows_what_the_prefiller_had_cached() -> None:
    cached = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    gate = asyncio.Event()
    async with front("vllm_push", [prefills(PUSHED, usage=cached)], [each(decodes, after(gate, decodes))]) as f:
        await f.ask()
        asking = asyncio.ensure_future(f.ask())
        while f.metric("penstock_split_legs_total", role="prefill", outcome="served") < 2:
            await asyncio.sleep(0.001)
        gate.set()
        assert (await asking).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
