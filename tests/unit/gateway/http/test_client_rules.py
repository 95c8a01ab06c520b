"""Tests of HTTP rules that clients rely on, one for each rule, over a raw socket."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from gateway.protocol.api_table import APIS, Api
from gateway.protocol.request.http2_refusal import PREFACE
from gateway.util.version import program_version
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.fleet.test_served_models import (
    CHAT,
    COMPLETIONS,
    Engine,
    models,
    running,
)
from tests.unit.gateway.protocol.test_api_table import BODIES, encoded

BODY = {"messages": [{"role": "user", "content": "hi"}]}
DATE = re.compile(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT")
ORIGIN = "https://app.example.com"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Socket:
    def __init__(self, url: str, engine: Engine) -> None:
        self.port, self.engine = urlsplit(url).port, engine

    async def raw(self, *pieces: bytes) -> bytes:
        # Send the pieces one by one; return all that the gateway sends until it closes.
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        text = None if body is None else json.dumps(body).encode()
        return await self.send(method, path, text, **headers)

    async def send(self, method: str, path: str, text: bytes | None, **headers: str) -> Reply:
        fields = {"host": "gateway", "connection": "close", **headers}
        if text is not None:
            fields["content-length"] = str(len(text))
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        answer = await self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + (text or b""))
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *others = head.decode().split("\r\n")
        pairs = [line.split(": ", 1) for line in others]
        assert len({name.lower() for name, _ in pairs}) == len(pairs), pairs
        return Reply(int(first.split()[1]), {name.lower(): text for name, text in pairs}, rest)


@asynccontextmanager
async def gateway(names: Sequence[str] = ("llama",), **settings: Any) -> AsyncIterator[Socket]:
    engine = Engine(*names, is_strict=False)
    async with running([engine], models(*names), **settings) as running_gateway:
        yield Socket(running_gateway.app.url, engine)


def listening(**api: Any) -> dict[str, Any]:
    return {"listeners": {"api": {"port": 0, **api}, "admin": {"port": 0}}}


@pytest.mark.parametrize("cut", [len(PREFACE) + 24, len(PREFACE), 10, 3])
async def test_cleartext_http2_is_refused_in_its_own_frames(cut: int) -> None:
    sent = PREFACE + b"SM\r\n\r\n" + bytes.fromhex("000000040000000000")
    async with gateway() as client:
        answer = await client.raw(sent[:cut], sent[cut:])
    assert answer[:9] == bytes.fromhex("000000040000000000")  # an empty SETTINGS frame of stream 0
    goaway = answer[9:]
    assert int.from_bytes(goaway[:3], "big") == len(goaway) - 9
    assert goaway[3:9] == bytes([7, 0, 0, 0, 0, 0])
    assert goaway[9:17] == bytes([0, 0, 0, 0, 0, 0, 0, 13])  # no stream; HTTP_1_1_REQUIRED


async def test_http2_begins_with_the_connection_or_not_at_all() -> None:
    async with gateway() as client:
        body = json.dumps(BODY).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        answer = await client.raw(head + body, PREFACE + b"SM\r\n\r\n")
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"200", b"400"]


async def test_other_verbs_of_the_same_beginning_are_no_http2() -> None:
    async with gateway() as client:
        assert (await client.raw(b"PRI / HTTP/1.1\r\nhost: a\r\n\r\n")).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, {"POST"}),
        ("DELETE", COMPLETIONS, {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/v1/models/llama", {"GET", "HEAD"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
        ("OPTIONS", CHAT, {"POST"}),
    ],
)
async def test_a_wrong_method_is_answered_with_the_right_ones(
    method: str, path: str, allowed: set[str]
) -> None:
    async with gateway() as client:
        reply = await client.ask(method, path)
    assert reply.status == 405
    assert set(reply.headers["allow"].split(", ")) == allowed
    assert json.loads(reply.body)["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/v1/models/llama", "/health", "/ping", "/version"]
)
async def test_head_gets_the_headers_of_get_without_its_body(path: str) -> None:
    async with gateway() as client:
        head, get = await client.ask("HEAD", path), await client.ask("GET", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers.get("content-length", "0") == str(len(get.body))
    assert head.headers.get("content-type") == get.headers.get("content-type") or not get.body


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CHAT, BODY | {"model": "llama"}),
        ("POST", CHAT, BODY | {"model": "llama", "stream": True}),
        ("POST", CHAT, BODY | {"model": "other"}),
        ("POST", CHAT, {}),
        ("GET", CHAT, None),
        ("GET", "/v1/models", None),
        ("GET", "/nothing", None),
        ("GET", "/v1/models\x01", None),
    ],
)
async def test_every_answer_has_one_date(method: str, path: str, body: Any) -> None:
    async with gateway() as client:
        reply = await client.ask(method, path, body)
    assert DATE.fullmatch(reply.headers["date"])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n"])
@pytest.mark.parametrize("value", [3.0, "3", " 3 ", "3.0"])
async def test_a_number_may_be_a_whole_float_or_text(name: str, value: object) -> None:
    async with gateway() as client:
        reply = await client.ask("POST", CHAT, BODY | {"model": "llama", name: value})
        assert reply.status == 200
        assert client.engine.bodies[-1][name] == 3


@pytest.mark.parametrize("value", [3.5, "three", True, "0", -1.0, 1e300])
async def test_other_values_of_a_number_are_refused_by_its_name(value: object) -> None:
    async with gateway() as client:
        reply = await client.ask("POST", CHAT, BODY | {"model": "llama", "max_tokens": value})
        assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "max_tokens")
        assert client.engine.bodies == []


@pytest.mark.parametrize("value", [0, 0.0, "0"])
async def test_a_completion_may_generate_nothing_if_it_echoes_the_prompt(value: object) -> None:
    body = {"model": "llama", "prompt": "hi", "max_tokens": value}
    async with gateway() as client:
        assert (await client.ask("POST", COMPLETIONS, body)).status == 400
        assert (await client.ask("POST", COMPLETIONS, body | {"echo": False})).status == 400
        assert (await client.ask("POST", COMPLETIONS, body | {"echo": True})).status == 200
        assert [sent["max_tokens"] for sent in client.engine.bodies] == [0]


@pytest.mark.parametrize("members", [{}, {"model": None}])
async def test_a_missing_model_is_the_only_one_that_is_served(members: dict[str, Any]) -> None:
    async with gateway() as client:
        reply = await client.ask("POST", CHAT, BODY | members)
        assert (reply.status, json.loads(reply.body)["model"]) == (200, "llama")
        assert client.engine.bodies == [BODY | {"model": "llama"}]
    async with gateway(("llama", "qwen")) as client:
        reply = await client.ask("POST", CHAT, BODY | members)
        assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "model")


async def test_a_model_of_another_type_is_not_taken_for_a_missing_one() -> None:
    async with gateway() as client:
        for model in (3, ["llama"], True):
            reply = await client.ask("POST", CHAT, BODY | {"model": model})
            assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "model")


class EveryApi(Engine):
    """A fake engine that answers every API in that API's own format, whole or as a stream."""

    def application(self) -> web.Application:
        application = super().application()
        application.router.add_post("/{path:.*}", self.name_model)
        return application

    async def name_model(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return web.json_response({"text": "hi", "model": "llama"})
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"id": "x", "model": body["model"]})
        member, kinds = STREAMS[request.path]
        events = [{"type": kind, member: {"model": body["model"]}} for kind in kinds]
        text = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
        return web.Response(text=text, content_type="text/event-stream")


STREAMS = {
    "/v1/messages": ("message", ("message_start", "content_block_delta", "message_stop")),
    "/v1/responses": (
        "response",
        ("response.created", "response.output_text.delta", "response.completed"),
    ),
}


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_an_answer_names_the_model_as_it_was_asked_for(api: Api) -> None:
    body = {"model": "asked", **BODIES[api.path]}
    content_type = "multipart/form-data; boundary=x9" if api.is_form else "application/json"
    model = {"name": "asked", "pool": "main", "served_model": "llama"}
    engine = EveryApi("llama", is_strict=False)
    pool = {"policy": "round_robin", "native_apis": ["messages", "responses"]}
    async with running([engine], [model], pool=pool) as started:
        client = Socket(started.app.url, engine)
        for members in ({}, {"stream": True}) if api.generates and not api.is_form else ({},):
            text = encoded(api, body | members)
            reply = await client.send("POST", api.path, text, content_type=content_type)
            assert reply.status == 200, reply.body
            names = re.findall(rb'"model": ?"([^"]*)"', reply.body)
            assert set(names) == {b"asked"}


@pytest.mark.parametrize("tools", [[], None])
async def test_empty_tools_reach_the_engine_as_they_are(tools: object) -> None:
    body = BODY | {"model": "llama", "tools": tools}
    async with gateway() as client:
        assert (await client.ask("POST", CHAT, body)).status == 200
        assert client.engine.bodies == [body]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("HEAD", "/"), ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")],
)
async def test_health_needs_no_key_and_shows_nothing(method: str, path: str) -> None:
    async with gateway(tenants=[{"name": "acme", "key": "sk-acme"}]) as client:
        reply = await client.ask(method, path)
        assert (reply.status, reply.body) == (200, b"")
        reply = await client.ask("GET", "/version")
        assert json.loads(reply.body) == {"version": program_version()}


async def test_a_page_of_a_listed_origin_may_call_the_api() -> None:
    async with gateway(**listening(cors_origins=[ORIGIN])) as client:
        asked = {
            "origin": ORIGIN,
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization,content-type",
        }
        reply = await client.ask("OPTIONS", CHAT, **asked)
        assert (reply.status, reply.body) == (204, b"")
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
        for body in (
            {"model": "llama"},
            {"model": "llama", "stream": True},
            {"model": "other"},
            {"n": 0},
        ):
            reply = await client.ask("POST", CHAT, BODY | body, origin=ORIGIN)
            assert reply.headers["access-control-allow-origin"] == ORIGIN
            assert reply.headers["vary"] == "origin"
        reply = await client.ask("GET", "/v1/models", origin=ORIGIN)
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        reply = await client.ask("GET", "/nothing", origin=ORIGIN)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (404, ORIGIN)


@pytest.mark.parametrize("settings", [{}, listening(cors_origins=[ORIGIN])])
async def test_a_page_of_another_origin_may_not(settings: dict[str, Any]) -> None:
    async with gateway(**settings) as client:
        evil = "https://evil.example"
        asked = {"origin": evil, "access_control_request_method": "POST"}
        for reply in (
            await client.ask("OPTIONS", CHAT, **asked),
            await client.ask("POST", CHAT, BODY | {"model": "llama"}, origin=evil),
            await client.ask("GET", "/v1/models", origin=evil),
        ):
            assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("headers", "recorded"),
    [
        ({"x_request_id": "mine-1"}, "mine-1"),
        ({"x_client_request_id": "mine-2"}, "mine-2"),
        ({"x_client_request_id": "mine-3", "x_request_id": "other"}, "mine-3"),
        ({"x_client_request_id": 'a"b', "x_request_id": "plain"}, "plain"),
        ({"x_request_id": "x" * 129}, None),
        ({}, None),
    ],
)
async def test_the_clients_own_id_stands_in_the_access_line_only(
    tmp_path: Path, headers: dict[str, str], recorded: str | None
) -> None:
    file = tmp_path / "access.log"
    async with gateway(observability={"access_log": str(file)}) as client:
        reply = await client.ask("POST", CHAT, BODY | {"model": "llama"}, **headers)
        (seen,) = client.engine.headers
    line = json.loads(file.read_text())
    assert line.get("client_request_id") == recorded
    assert line["id"] == reply.headers["x-request-id"] == seen["x-request-id"]
    assert "x-client-request-id" not in seen


async def test_the_session_of_an_agent_stands_in_the_access_line(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    async with gateway(observability={"access_log": str(file)}) as client:
        for headers, body in (
            ({"session_id": "s1"}, {}),
            ({}, {"prompt_cache_key": "s2"}),
            ({"x_client_request_id": "r1"}, {}),
        ):
            await client.ask("POST", CHAT, BODY | {"model": "llama"} | body, **headers)
    lines = [json.loads(line).get("session") for line in file.read_text().splitlines()]
    assert lines == ["session-id", "prompt_cache_key", None]
