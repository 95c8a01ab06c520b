"""Tests of split requests with TensorRT-LLM, whose context server runs before the generation
server.
"""

from __future__ import annotations

import json

import pytest

from tests.unit.gateway.disagg.scripted_engines import (
    TEXT,
    EngineRequest,
    SplitGateway,
    decodes,
    split_gateway,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

WHOLE = "".join(TEXT)
USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}


def context(finish: str = "length", text: str = "one"):  # type: ignore[no-untyped-def]
    async def script(request: EngineRequest) -> None:
        number = request.json["disaggregated_params"]["disagg_request_id"]
        report = {"request_type": "context_only", "disagg_request_id": number, "ctx_request_id": 5}
        report["first_gen_tokens"] = [7]
        content = (
            {"text": text}
            if "prompt" in request.json
            else {"message": {"role": "assistant", "content": text}}
        )
        choice = {"index": 0, **content, "finish_reason": finish, "disaggregated_params": report}
        whole = {
            "id": "c",
            "created": 1,
            "model": "demo",
            "usage": USAGE,
            "prompt_token_ids": [1, 2, 3],
        }
        request.respond(whole | {"object": "chat.completion", "choices": [choice]})

    return script


def trtllm(prefill: list, decode: list, **options: object):  # type: ignore[no-untyped-def, type-arg]
    return split_gateway("trtllm", prefill, decode, engine="trtllm", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("chat", [True, False])
async def test_generation_continues_where_the_context_server_stopped(chat: bool) -> None:
    async with trtllm([context()], [decodes]) as f:
        more = {} if chat else {"path": "/v1/completions", "prompt": "word " * 400}
        await f.ask(
            stream=True, metadata={"a": "b"}, stream_options={"include_usage": True}, **more
        )
        (ctx,), (gen,) = f.prefill[0].requests, f.decode[0].requests
        number = ctx.json["disaggregated_params"]["disagg_request_id"]
        assert ctx.json["disaggregated_params"] == {
            "request_type": "context_only",
            "disagg_request_id": number,
        }
        assert number >= 2**40
        assert (ctx.json["stream"], ctx.json["max_tokens"]) == (False, 8)
        assert not {"metadata", "stream_options", "min_tokens"} & ctx.json.keys()
        assert gen.json["disaggregated_params"] == {
            "request_type": "generation_only",
            "disagg_request_id": number,
            "ctx_request_id": 5,
            "first_gen_tokens": [7],
            "ctx_usage": USAGE,
        }
        assert gen.json["prompt_token_ids" if chat else "prompt"] == [1, 2, 3]
        assert "metadata" not in gen.json
        assert gen.json["stream_options"] == {"include_usage": True}
        await f.at_rest()


@pytest.mark.parametrize("usage", [True, False])
async def test_a_complete_context_response_is_streamed_if_the_client_wants_a_stream(
    usage: bool,
) -> None:
    async with trtllm([context("stop", "yes")], [decodes]) as f:
        reply = await f.ask(
            stream=True, **({"stream_options": {"include_usage": True}} if usage else {})
        )
        assert reply.text == "yes"
        assert (reply.body or b"").endswith(b"data: [DONE]\n\n")
        assert (reply.events[-1].get("usage") == USAGE) is usage
        assert reply.headers["x-penstock-endpoint"] == f.prefill[0].name
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert not f.decode[0].requests
        await _quiet(f)


async def test_a_complete_context_response_is_the_response() -> None:
    async with trtllm([context("stop", "yes")], [decodes]) as f:
        reply = await f.ask()
        assert reply.text == "yes"
        assert b"disaggregated_params" not in (reply.body or b"")
        assert "prompt_token_ids" not in json.loads(reply.body or b"")
        assert f.metric("penstock_completion_tokens_total") == 1
        await _quiet(f)


async def test_a_complete_context_response_with_an_unrepresentable_number_is_recomputed() -> None:
    async def endless(request: EngineRequest) -> None:
        choice = b'{"index":0,"message":{"role":"assistant","content":"no"},"finish_reason":"stop","logprobs":-1e999}'
        request.respond(b'{"id":"c","choices":[%b]}' % choice)

    async with trtllm([endless], [decodes]) as f:
        assert (await f.ask()).text == WHOLE
        await f.at_rest()


async def test_a_context_response_of_another_request_is_rejected() -> None:
    async def foreign(request: EngineRequest) -> None:
        report = {"request_type": "context_only", "disagg_request_id": 2**41, "ctx_request_id": 5}
        choice = {
            "index": 0,
            "message": {"content": "x"},
            "finish_reason": "length",
            "disaggregated_params": report,
        }
        request.respond({"choices": [choice], "prompt_token_ids": [1]})

    async with trtllm([foreign], [decodes]) as f:
        assert (await f.ask()).text == WHOLE
        assert "disaggregated_params" not in f.decode[0].requests[0].json
        await f.at_rest()


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "words", [4, 400], ids=["short, and so whole", "its context answer is unusable"]
)
async def test_a_whole_request_has_only_members_that_a_client_may_send(
    words: int, chat: bool
) -> None:
    asking = (
        {"path": "/v1/chat/completions"}
        if chat
        else {"path": "/v1/completions", "prompt": "word " * words}
    )
    foreign = {
        "metadata": {"a": "b"},
        "prompt_token_ids": [1],
        "return_context_logits": True,
        "lora_request": {},
    }
    async with trtllm([context(finish="")], [decodes]) as f:
        assert (await f.ask(words, temperature=0.5, **foreign, **asking)).text == WHOLE
        assert len(f.prefill[0].requests) == (words > 100)
        (whole,) = f.decode[0].requests
        prompt = "messages" if chat else "prompt"
        assert whole.json.keys() == {"model", "max_tokens", "temperature", prompt}
        await f.at_rest()


async def _quiet(f: SplitGateway) -> None:
    assert f.metric("penstock_split_legs_total", role="prefill", outcome="finished") == 1
    await f.at_rest()
