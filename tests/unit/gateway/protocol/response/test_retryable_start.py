"""Tests that a request is retried if a response breaks before the client has received a byte.

The engines are scripted; the gateway in front of them is real.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.protocol.api_table import CHAT, MESSAGES, RESPONSES, Api
from gateway.protocol.response.named_event_relay import NamedEventRelay
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import MAX_COMMENTS_S, MAX_FIRST_EVENT
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    TEXT,
    EngineRequest,
    Script,
    ScriptedEngine,
    SplitGateway,
    decodes,
    split_gateway,
)
from tests.virtual_time import VIRTUAL_TIME

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = {  # an event so long that the gateway does not hold back the one after it
    "id": "chatcmpl-" + "0" * MAX_FIRST_EVENT,
    "model": MODEL,
    "prompt_token_ids": [1, 2],
    "choices": [{"index": 0, "delta": {"content": "half"}, "token_ids": [7]}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}


def responds(raw: bytes) -> Script:
    async def script(request: EngineRequest) -> None:
        request.writer.write(raw)

    return script


def events(*chunks: object) -> bytes:
    raw = b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in chunks)
    return b"%x\r\n%b\r\n" % (len(raw), raw)


async def until_read(running: SplitGateway, engine: ScriptedEngine) -> None:
    # Wait until the gateway has read the first bytes of a response of this engine.
    (live,) = [
        live for live in running.app.gateway.endpoints.all() if live.endpoint.name == engine.name
    ]
    async with asyncio.timeout(PATIENCE_S):
        while all(
            link._relay is None or link._relay.is_untouched for link in live.upstream.connections
        ):
            await asyncio.sleep(0)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b",
        EVENTS + b"0\r\n\r\n",
        EVENTS + b"zz\r\n" + b"x" * 300,
        EVENTS + events(TOKEN) + b"zz\r\n",
    ],
)
async def test_a_response_that_breaks_at_its_start_is_retried_on_another_engine(
    raw: bytes, resume: bool
) -> None:
    models = [{"name": MODEL, "pool": "main"} | ({"resume": {}} if resume else {})]
    # Bytes that are held back for a token that never comes are retried once the engine counts as
    # stalled: these engines have no metrics, so after 1.8 times `progress` once one of the pool has
    # answered, and 12 times before. So both requests run at once, one at each engine.
    health = {"progress": "2s"}
    sides = {"decode_role": "both", "policy": "round_robin", "health": health}
    async with split_gateway(
        "vllm_nixl", [], [responds(raw), decodes], models=models, **sides
    ) as running:
        for reply in await asyncio.gather(*(running.ask(words=3, stream=True) for _ in range(2))):
            assert (reply.status, reply.text) == (200, "".join(TEXT))
        assert running.error_count(running.decode[0]) > 0
        await running.at_rest()


@pytest.mark.parametrize("end", [events({"error": {"message": "dead"}}), b"0\r\n\r\n"])
async def test_a_retry_after_an_unforwarded_token_sends_the_whole_request(end: bytes) -> None:
    models = [{"name": MODEL, "pool": "main", "resume": {}}]
    sides = {"decode_role": "both", "policy": "round_robin"}
    async with split_gateway(
        "vllm_nixl", [], [responds(EVENTS + events(TOKEN) + end), decodes], models=models, **sides
    ) as running:
        for _ in range(2):
            reply = await running.ask(words=3, stream=True)
            assert (reply.status, reply.text) == (200, "".join(TEXT))
        assert running.error_count(running.decode[0]) > 0
        await running.at_rest()


@pytest.mark.parametrize("end", [None, events({"error": {"message": "dead"}}), b"0\r\n\r\n"])
async def test_a_chat_that_breaks_after_its_role_is_retried_and_the_client_sees_one_response(
    end: bytes | None,
) -> None:
    # Engines send a role before the first token; a retry is possible until it is forwarded.
    role = {
        "id": "dead",
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 0}

    async def dies(request: EngineRequest) -> None:
        request.writer.write(EVENTS + events(role | {"prompt_token_ids": [1, 2], "usage": usage}))
        await until_read(running, running.decode[0])
        if end is None:
            request.writer.transport.abort()
        else:
            request.writer.write(end)

    models = [{"name": MODEL, "pool": "main", "resume": {}}]
    sides = {"decode_role": "both", "policy": "round_robin"}
    async with split_gateway("vllm_nixl", [], [dies, decodes], models=models, **sides) as running:
        for _ in range(2):  # at least one of them goes to the first engine
            reply = await running.ask(words=3, stream=True)
            assert (reply.status, reply.text) == (200, "".join(TEXT))
            assert b"dead" not in (reply.body or b"")
        assert running.error_count(running.decode[0]) > 0
        await running.at_rest()


PING = b"8\r\n: ping\n\n\r\n"


@pytest.mark.parametrize(
    "end",
    [
        None,
        b"0\r\n\r\n",
        b"0\r\nx-trailer: 1\r\n\r\n",
        PING * 40 + events({"error": {"message": "dead", "code": 500}}),
    ],
)
async def test_a_stream_that_breaks_after_comments_is_retried_on_another_engine(
    end: bytes | None,
) -> None:
    async def dies(request: EngineRequest) -> None:
        request.writer.write(EVENTS + PING)
        await until_read(running, running.decode[0])
        if end is None:
            request.writer.transport.abort()
        else:
            request.writer.write(PING + end)

    sides = {"decode_role": "both", "policy": "round_robin", "retries": {"hedge": 0}}
    models = [{"name": MODEL, "pool": "main"}]
    async with split_gateway("vllm_nixl", [], [dies, decodes], models=models, **sides) as running:
        for _ in range(2):  # at least one of them goes to the first engine
            reply = await running.ask(words=3, stream=True)
            assert (reply.status, reply.text) == (200, "".join(TEXT))
        assert running.error_count(running.decode[0]) > 0
        await running.at_rest()


async def test_an_error_of_the_request_after_comments_has_a_status_of_its_own() -> None:
    error = events({"error": {"message": "too long", "code": 400}})
    raw = EVENTS + PING * 40 + error + b"0\r\n\r\n"
    models = [{"name": MODEL, "pool": "main"}]
    sides = {"decode_role": "both", "models": models}
    async with split_gateway("vllm_nixl", [], [responds(raw)], **sides) as running:
        reply = await running.ask(words=3, stream=True)
        assert reply.status == 400
        await running.at_rest()


def test_comments_are_passed_on_after_a_while_to_keep_the_client_connected() -> None:
    relay = Relay(b"x-request-id: req_1\r\n")
    assert relay.feed(EVENTS + PING, 100.0) == b""
    assert relay.feed(PING, 100.0 + MAX_COMMENTS_S - 1.0) == b""
    assert not relay.is_committed
    begun = relay.feed(PING, 100.0 + MAX_COMMENTS_S)
    assert begun.startswith(b"HTTP/1.1 200 OK\r\n")
    assert begun.endswith(3 * PING)
    assert relay.feed(PING, 130.0) == PING


def test_comments_are_held_back_from_the_request_on_and_not_from_the_first_comment() -> None:
    relay = Relay(b"x-request-id: req_1\r\n")
    relay.asked_at = 100.0
    assert relay.feed(EVENTS, 100.1) == b""
    assert relay.feed(PING, 99.0 + MAX_COMMENTS_S) == b""
    assert relay.feed(PING, 100.0 + MAX_COMMENTS_S).endswith(b"\r\n\r\n" + 2 * PING)


@pytest.mark.parametrize(
    ("api", "beat"),
    [
        (MESSAGES, PING),
        (MESSAGES, b'24\r\nevent: ping\ndata: {"type": "ping"}\n\n\r\n'),
        (RESPONSES, PING),
    ],
)
def test_named_events_without_work_are_held_back_no_longer_than_comments(
    api: Api, beat: bytes
) -> None:
    assert api.grammar is not None
    relay = NamedEventRelay(b"", None, False, None, None, api.grammar, api.errors)
    relay.asked_at = 100.0
    assert relay.feed(EVENTS + beat, 101.0) == b""
    assert relay.feed(beat, 99.0 + MAX_COMMENTS_S) == b""
    assert relay.feed(beat, 100.0 + MAX_COMMENTS_S).endswith(b"\r\n\r\n" + 3 * beat)
    assert relay.feed(beat, 101.0 + MAX_COMMENTS_S) == beat


@pytest.mark.parametrize("api", [CHAT, MESSAGES])
def test_an_error_that_comes_late_and_in_parts_is_read_to_its_end(api: Api) -> None:
    error = {"message": "x" * 300, "type": "invalid_request_error", "code": 400}
    event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    relay = Relay(b"")
    if api is MESSAGES:
        assert api.grammar is not None
        relay = NamedEventRelay(b"", None, False, None, None, api.grammar, api.errors)
        event = b"event: error\n" + event
    relay.asked_at = 100.0
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    for piece in (EVENTS + PING, chunk[:80], chunk[80:], b"0\r\n\r\n"):
        at = 101.0 if piece.startswith(EVENTS) else 101.0 + MAX_COMMENTS_S
        assert relay.feed(piece, at) == b""
    assert (relay.is_refused, relay.status) == (True, 400)


def test_a_comment_that_contains_the_word_of_a_data_line_is_a_comment() -> None:
    comment = b": metadata: x\n\n"
    relay = Relay(b"")
    assert relay.feed(EVENTS + b"%x\r\n%b\r\n" % (len(comment), comment), 1.0) == b""
    assert not relay.is_committed
    assert b"half" in relay.feed(events(TOKEN), 2.0)


def test_a_comment_that_ends_in_a_time_does_not_look_like_the_end_of_the_stream() -> None:
    comment = b": ping - 2026-11-29 16:50:10.123456+00:00\r\n\r\n"
    relay = Relay(b"")
    for piece in (EVENTS, b"%x\r\n" % len(comment), comment, b"\r\n"):
        assert relay.feed(piece, 1.0) == b""
    begun = relay.feed(events(TOKEN), 2.0)
    assert begun.endswith(b"\r\n\r\n" + b"%x\r\n%b\r\n" % (len(comment), comment) + events(TOKEN))


@VIRTUAL_TIME
async def test_a_stream_of_comments_begins_twenty_seconds_after_its_request() -> None:
    begun = list[float]()

    async def sends_comments(request: EngineRequest) -> None:
        await asyncio.sleep(15.0)
        request.writer.write(EVENTS + PING)
        while not begun:
            await asyncio.sleep(1.0)
            request.writer.write(PING)
        request.writer.write(events(TOKEN) + b"0\r\n\r\n")

    models = [{"name": MODEL, "pool": "main"}]
    sides = {"models": models, "retries": {"hedge": 0}, "health": {"progress": "600s"}}
    async with split_gateway(
        "vllm_nixl", [], [sends_comments], decode_role="both", **sides
    ) as running:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with running.listen() as stream:
            await stream.readline()
            begun.append(loop.time() - started)
            await stream.read()
        assert begun[0] == pytest.approx(MAX_COMMENTS_S, abs=1.5)
        await running.at_rest()
