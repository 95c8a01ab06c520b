"""An answer that breaks before a byte of it has gone to the client: the request is tried elsewhere, whole.

The engines are scripted, raw bytes where it matters, and the gateway is a real one between two of them.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.told import FIRST_EVENT
from tests.fair_time import PATIENCE_S
from tests.unit.gateway.split.halves import MODEL, TEXT, Asked, Script, decodes, front

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = {
    "id": "chatcmpl-"
    + "0" * FIRST_EVENT,  # so long that what follows is not its first event any more
    "model": MODEL,
    "prompt_token_ids": [1, 2],
    "choices": [{"index": 0, "delta": {"content": "half"}, "token_ids": [7]}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}


def says(raw: bytes) -> Script:
    async def script(asked: Asked) -> None:
        asked.writer.write(raw)

    return script


def events(*told: object) -> bytes:
    raw = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in told)
    return b"%x\r\n%b\r\n" % (len(raw), raw)


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
async def test_what_an_engine_garbles_from_the_start_is_answered_by_another(
    raw: bytes, resume: bool
) -> None:
    models = [{"name": MODEL, "pool": "main"} | ({"resume": {}} if resume else {})]
    sides = {"decode_role": "both", "policy": "round_robin"}
    async with front("vllm_nixl", [], [says(raw), decodes], models=models, **sides) as running:
        for _ in range(2):  # one of them at least is given to the first engine
            reply = await running.ask(words=3, stream=True)
            assert (reply.status, reply.text) == (200, "".join(TEXT))
        assert running.blamed(running.decode[0]) > 0
        await running.at_rest()


@pytest.mark.parametrize("end", [events({"error": {"message": "dead"}}), b"0\r\n\r\n"])
async def test_what_is_tried_again_though_a_token_had_come_is_asked_for_in_full(end: bytes) -> None:
    models = [{"name": MODEL, "pool": "main", "resume": {}}]
    sides = {"decode_role": "both", "policy": "round_robin"}
    async with front(
        "vllm_nixl", [], [says(EVENTS + events(TOKEN) + end), decodes], models=models, **sides
    ) as running:
        for _ in range(2):
            reply = await running.ask(words=3, stream=True)
            assert (reply.status, reply.text) == (200, "".join(TEXT))
        assert running.blamed(running.decode[0]) > 0
        await running.at_rest()


@pytest.mark.parametrize("end", [None, events({"error": {"message": "dead"}}), b"0\r\n\r\n"])
async def test_a_chat_that_breaks_behind_its_role_is_asked_anew_and_its_client_sees_one_answer(
    end: bytes | None,
) -> None:
    """An engine shows a role before there is a token: as long as nobody was shown it, anybody may begin again."""
    role = {
        "id": "dead",
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 0}

    async def dies(asked: Asked) -> None:
        asked.writer.write(EVENTS + events(role | {"prompt_token_ids": [1, 2], "usage": usage}))
        (dead,) = [
            each
            for each in running.app.gateway.endpoints.all()
            if each.endpoint.name == running.decode[0].name
        ]
        async with asyncio.timeout(PATIENCE_S):
            while all(
                each._relay is None or each._relay.untouched for each in dead.upstream.connections
            ):
                await asyncio.sleep(0)
        if end is None:
            asked.writer.transport.abort()
        else:
            asked.writer.write(end)

    models = [{"name": MODEL, "pool": "main", "resume": {}}]
    sides = {"decode_role": "both", "policy": "round_robin"}
    async with front("vllm_nixl", [], [dies, decodes], models=models, **sides) as running:
        for _ in range(2):  # one of them at least is given to the first engine
            reply = await running.ask(words=3, stream=True)
            assert (reply.status, reply.text) == (200, "".join(TEXT))
            assert b"dead" not in (reply.body or b"")
        assert running.blamed(running.decode[0]) > 0
        await running.at_rest()
