"""Tests of errors that engines send with status 200 and without an object `error` around them.

Older releases of vLLM, SGLang and TensorRT-LLM write `{"object": "error", "message": ...}`, which
OpenAI's SDKs do not take for an error.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.protocol.errors import Failure
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import LONGEST_MATCH
from gateway.protocol.upstream_error import UpstreamError
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    TEXT,
    EngineRequest,
    decodes,
    split_gateway,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = {"model": MODEL, "choices": [{"index": 0, "delta": {"content": "half"}}]}


def flat_error(code: int) -> dict[str, Any]:
    kind = "BadRequestError" if code == 400 else "InternalServerError"
    return {"object": "error", "message": "a reason", "type": kind, "param": None, "code": code}


def chunked(raw: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(raw), raw)


def chunk(event: object) -> bytes:
    return chunked(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("code", [400, 500])
async def test_a_flat_error_with_status_200_is_an_error(is_stream: bool, code: int) -> None:
    async def fails(request: EngineRequest) -> None:
        if is_stream:
            request.open_stream()
            request.event(flat_error(code))
            request.end_stream()
        else:
            request.respond(flat_error(code))

    sides = {"decode_role": "both", "policy": "round_robin", "retries": {"hedge": 0}}
    models = [{"name": MODEL, "pool": "main"}]
    async with split_gateway("vllm_nixl", [], [fails, decodes], models=models, **sides) as running:
        statuses = set()
        for _ in range(2):  # at least one of them goes to the first engine
            reply = await running.ask(words=3, stream=is_stream)
            statuses.add(reply.status)
            if reply.status == 400:
                error = reply.json["error"]
                assert (error["message"], error["type"]) == ("a reason", "invalid_request_error")
            elif is_stream:
                assert reply.text == "".join(TEXT)
        assert statuses == ({200, 400} if code == 400 else {200})
        assert (running.error_count(running.decode[0]) > 0) is (code == 500)
        await running.at_rest()


@pytest.mark.parametrize("cut", ["", "after a size line", "in a chunk", "between chunks"])
@pytest.mark.parametrize("rest", [b"", b"e\r\ndata: [", b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"])
def test_a_flat_error_after_tokens_ends_the_stream_with_an_error_that_sdks_see(
    cut: str, rest: bytes
) -> None:
    relay = Relay(b"")
    assert b"half" in relay.feed(HEAD + chunk({**TOKEN, "id": "x" * 300}), 1.0)
    raw = b"data: " + json.dumps(flat_error(500)).encode() + b"\n\n"
    pieces = [chunked(raw)]
    if cut == "after a size line":
        pieces = [b"%x\r\n" % len(raw), raw + b"\r\n"]
    elif cut == "in a chunk":
        pieces = [pieces[0][:20], pieces[0][20:]]
    elif cut == "between chunks":
        pieces = [chunked(raw[:20]), chunked(raw[20:])]
    for piece in pieces[:-1]:
        assert relay.feed(piece, 2.0)
    with pytest.raises(UpstreamError) as raised:
        relay.feed(pieces[-1] + rest, 2.0)
    assert raised.value.kind == "engine_error"
    assert not relay.is_connection_reusable
    end = relay.end_with_error(Failure.UPSTREAM_FAILED, "the engine failed")
    # A client that has a part of the event or of its chunk can be shown only the connection's end.
    assert (b'data: {"error":' in end) is not bool(cut)


def test_an_answer_about_the_word_error_is_none() -> None:
    relay = Relay(b"")
    text = {**TOKEN, "choices": [{"delta": {"content": '{"object": "error"}'}}]}
    assert b"object" in relay.feed(HEAD + chunk(text), 1.0)
    assert not relay.has_error_event
    assert len(b'data:{"object":"error"') + 2 * 64 + 2 * 4 <= LONGEST_MATCH
