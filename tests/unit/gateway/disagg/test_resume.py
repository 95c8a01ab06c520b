"""Tests of split requests that are continued on another engine if the decode engine dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from gateway.protocol.response.usage_and_error_search import MAX_HELD_BYTES
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    OBJECT,
    PUSHED,
    EngineRequest,
    Script,
    SplitGateway,
    in_turn,
    prefills,
    refuses,
    resets,
    split_gateway,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

PROMPT = [11, 12, 13]
WORDS = ["one", " two", " three", " four"]
CACHED = 5  # prompt tokens that the prefiller had cached
USAGE = {"prompt_tokens": len(PROMPT), "completion_tokens": 1, "total_tokens": 4}
PREFILL_USAGE = {"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": CACHED}}}


def pair(
    dialect: str, prefill: Sequence[Script], decode: Sequence[Script], **options: Any
) -> AbstractAsyncContextManager[SplitGateway]:
    split = {"dialect": dialect, "threshold_tokens": 100, "hysteresis": 0.0}
    resume = options.pop("resume", {})
    models = [{"name": MODEL, "pool": "main", "split": split, "resume": resume}]
    settings = {"health": {"failures": 1000}} | options
    return split_gateway(dialect, list(prefill), list(decode), models=models, **settings)


def streams_words(first: int = 0, last: int | None = None) -> Script:
    # Return a script that streams the words from `first` on with token ids.
    #
    # If `last` is given, it breaks the connection before that word.
    async def script(request: EngineRequest) -> None:
        body = request.json
        assert body["return_token_ids"] is True
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        request.open_stream()
        for index in range(first, len(WORDS) if last is None else last):
            request.event(chunk(body, index, index - first + 1))
        if last is not None:
            await request.writer.drain()
            request.writer.transport.abort()
            return
        details = {"prompt_tokens_details": {"cached_tokens": len(body.get("prompt", PROMPT))}}
        usage = USAGE | {"completion_tokens": len(WORDS) - first} | details
        request.event({"id": "d", "created": 1, "model": MODEL, "choices": [], "usage": usage})
        request.end_stream()

    return script


def chunk(body: dict[str, Any], index: int, result: int) -> dict[str, Any]:
    text, ids = WORDS[index], {"token_ids": [100 + index]}
    shown = {"delta": {"content": text}} if "messages" in body else {"text": text}
    choice = {"index": 0, **shown, **ids, "finish_reason": None}
    if index == len(WORDS) - 1:
        choice["finish_reason"] = "length"
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": result, "total_tokens": 9}
    event = {"id": "d", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}
    return event | ({"prompt_token_ids": PROMPT} if result == 1 else {})


def results(running: SplitGateway) -> dict[str, float]:
    names = ("resumed", "broke", "no_endpoint", "attempts")
    counts = {name: running.metric("penstock_resumes_total", result=name) for name in names}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(("dialect", "handoff"), [("vllm_nixl", OBJECT), ("vllm_push", PUSHED)])
async def test_the_rest_of_a_broken_answer_is_asked_of_another_decoder_by_token_ids(
    dialect: str, handoff: dict[str, Any]
) -> None:
    decoders = in_turn(streams_words(0, 2), streams_words(2))
    async with pair(dialect, [prefills(handoff, **PREFILL_USAGE)], [decoders] * 2) as f:
        options = {"stream_options": {"include_usage": True}}
        reply = await f.ask(stream=True, max_tokens=len(WORDS), **options)
        assert (reply.status, reply.text) == (200, "".join(WORDS))
        requests = sorted(
            (request for half in f.decode for request in half.requests), key=lambda a: a.arrival
        )
        first, rest = requests[0].json, requests[1].json
        assert "kv_transfer_params" in first
        assert "return_token_ids" not in f.prefill[0].requests[0].json
        assert "kv_transfer_params" not in rest
        assert (rest["prompt"], rest["max_tokens"]) == ([*PROMPT, 100, 101], 2)
        assert requests[0].writer is not requests[1].writer
        assert len(f.prefill[0].requests) == 1, "the rest is computed without a prefiller"
        assert not any("token_ids" in choice for e in reply.events for choice in e["choices"])
        assert results(f) == {"resumed": 1}
        await f.at_rest()


async def test_the_client_is_shown_the_prefiller_s_cached_tokens_after_a_break_too() -> None:
    decoders = in_turn(streams_words(0, 2), streams_words(2))
    async with pair("vllm_push", [prefills(PUSHED, **PREFILL_USAGE)], [decoders] * 2) as f:
        reply = await f.ask(stream=True, max_tokens=4, stream_options={"include_usage": True})
        details = reply.events[-1]["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": CACHED}
        assert reply.events[-1]["usage"]["completion_tokens"] == len(WORDS)
        await f.at_rest()


async def test_an_answer_that_does_not_break_shows_the_prefiller_s_cached_tokens() -> None:
    async with pair("vllm_push", [prefills(PUSHED, **PREFILL_USAGE)], [streams_words()]) as f:
        reply = await f.ask(stream=True, max_tokens=4, stream_options={"include_usage": True})
        assert reply.text == "".join(WORDS)
        details = reply.events[-1]["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": CACHED}
        assert results(f) == {}


async def test_a_request_of_a_split_model_that_is_served_whole_is_continued_as_well() -> None:
    async with pair(
        "vllm_nixl", [prefills()], [in_turn(streams_words(0, 2), streams_words(2))] * 2
    ) as f:
        reply = await f.ask(words=3, stream=True, max_tokens=4)
        assert reply.text == "".join(WORDS)
        assert not f.prefill[0].requests
        assert results(f) == {"resumed": 1}
        await f.at_rest()


async def test_an_answer_computed_without_its_handoff_is_continued_as_well() -> None:
    decoders = in_turn(refuses(500), streams_words(0, 2), streams_words(2))
    async with pair("vllm_nixl", [prefills()], [decoders] * 2) as f:
        reply = await f.ask(stream=True, max_tokens=4)
        assert reply.text == "".join(WORDS)
        assert results(f) == {"resumed": 1}
        await f.at_rest()


def streams_two_words_at_once() -> Script:
    # Return a script that streams one word, then two in one piece of text, and breaks.
    async def script(request: EngineRequest) -> None:
        request.open_stream()
        request.event(chunk(request.json, 0, 1))
        both = chunk(request.json, 1, 3)
        (choice,) = both["choices"]
        choice["token_ids"] = [101, 102]
        choice["delta"]["content"] = WORDS[1] + WORDS[2]
        request.event(both)
        await request.writer.drain()
        request.writer.transport.abort()

    return script


@pytest.mark.parametrize("is_same", [True, False])
async def test_text_of_several_tokens_is_generated_again_and_left_out_if_it_is_the_same(
    is_same: bool,
) -> None:
    async def differs(request: EngineRequest) -> None:
        request.open_stream()
        other = chunk(request.json, 1, 1)
        other["choices"][0]["text"] = " other"
        request.event(other)
        await request.closed.wait()

    again = streams_words(1) if is_same else differs
    decoders = in_turn(streams_two_words_at_once(), again)
    async with pair("vllm_nixl", [prefills()], [decoders] * 2) as f:
        reply = await f.ask(words=3, stream=True, max_tokens=4)
        (_, rest) = sorted(
            (request for half in f.decode for request in half.requests), key=lambda a: a.arrival
        )
        assert (rest.json["prompt"], rest.json["max_tokens"]) == ([*PROMPT, 100], 3)
        if is_same:
            assert reply.text == "one two three four"
            assert results(f) == {"resumed": 1}
        else:
            assert b"one" in (reply.body or b"")
            assert b"stream_interrupted" in (reply.body or b"")
            assert f.metric("penstock_resumes_total", result="ambiguous_ids") == 1
            errors = [f.error_count(half) for half in f.decode]
            assert sorted(errors) == [0, 1], "the second engine is not to blame"
        await f.at_rest()


async def test_an_endpoint_that_prefills_only_is_not_asked_for_the_rest() -> None:
    async with pair("vllm_nixl", [prefills()] * 2, [streams_words(0, 2)]) as f:
        reply = await f.ask(stream=True, max_tokens=4)
        assert b'"stream_interrupted"' in (reply.body or b"")
        assert sum(len(half.requests) for half in f.prefill) == 1
        assert results(f) == {"no_endpoint": 1}
        await f.at_rest()


async def test_no_endpoint_is_tried_twice_and_resume_limits_the_attempts() -> None:
    decoders = in_turn(
        streams_words(0, 1), streams_words(1, 2), streams_words(2, 3), streams_words(3)
    )
    async with pair("vllm_nixl", [prefills()], [decoders] * 4, resume={"attempts": 3}) as f:
        reply = await f.ask(stream=True, max_tokens=4)
        assert b'"stream_interrupted"' in (reply.body or b"")
        assert [len(half.requests) for half in f.decode].count(1) == 3
        assert results(f) == {"broke": 2, "attempts": 1}
        await f.at_rest()


async def test_the_rest_may_exceed_a_cap_because_a_pair_takes_two_places_for_one_permit() -> None:
    decoders = in_turn(streams_words(0, 2), streams_words(2))
    options = {"decode_role": "both", "max_concurrency": 1}
    async with pair("vllm_nixl", [prefills()], [decoders] * 2, **options) as f:
        f.app.gateway.endpoints.all()[2].load.in_flight += 1
        reply = await f.ask(stream=True, max_tokens=4)
        f.app.gateway.endpoints.all()[2].load.in_flight -= 1
        assert reply.text == "".join(WORDS)
        await f.at_rest()


async def test_a_decoder_that_breaks_before_its_first_token_is_retried_as_a_pair() -> None:
    async with pair(
        "vllm_nixl", [prefills()] * 2, [resets, in_turn(streams_words()), streams_words()]
    ) as f:
        reply = await f.ask(stream=True, max_tokens=4)
        assert reply.text == "".join(WORDS)
        assert results(f) == {}
        await f.at_rest()


@pytest.mark.parametrize("more", [{"stop": ["zebra"]}, {"logprobs": True}, {"n": 1, "tools": [{}]}])
async def test_what_could_not_be_exact_is_sent_and_ended_as_without_resume(
    more: dict[str, Any],
) -> None:
    async def breaks(request: EngineRequest) -> None:
        assert "return_token_ids" not in request.json
        request.open_stream()
        request.event({"model": MODEL, "choices": [{"index": 0, "delta": {"content": "one"}}]})
        await request.writer.drain()
        request.writer.transport.abort()

    async with pair("vllm_nixl", [prefills()], [breaks, breaks]) as f:
        reply = await f.ask(stream=True, max_tokens=4, **more)
        assert b'"stream_interrupted"' in (reply.body or b"")
        assert results(f) == {}
        await f.at_rest()


async def test_a_plain_answer_of_such_a_model_passes_as_it_came() -> None:
    async def whole(request: EngineRequest) -> None:
        assert "return_token_ids" not in request.json
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}}
        request.respond(
            {"model": MODEL, "choices": [choice | {"finish_reason": "stop"}], "usage": USAGE}
        )

    async with pair("vllm_nixl", [prefills()], [whole]) as f:
        assert (await f.ask()).text == "yes"
        await f.at_rest()


async def test_a_long_prompt_s_ids_do_not_begin_the_answer_before_its_first_token() -> None:
    # The decode engine sends a role with all ids before it knows that the KV will never arrive.
    ids = list(range(100_000, 120_000))

    async def role_then_error(request: EngineRequest) -> None:
        request.open_stream()
        delta = {"role": "assistant", "content": ""}
        request.event({"prompt_token_ids": ids, "choices": [{"index": 0, "delta": delta}]})
        await request.writer.drain()
        await asyncio.sleep(0.02)
        error = {"message": "KV load failed", "type": "InternalServerError", "code": 500}
        request.event({"error": error})
        request.end_stream()

    assert len(json.dumps(ids)) > 2 * MAX_HELD_BYTES
    decoders = in_turn(role_then_error, streams_words())
    async with pair("vllm_nixl", [prefills()], [decoders] * 2) as f:
        reply = await f.ask(stream=True, max_tokens=4)
        assert reply.text == "".join(WORDS)
        assert b"error" not in (reply.body or b"")
        assert results(f) == {}
        await f.at_rest()
