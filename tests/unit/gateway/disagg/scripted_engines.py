"""Scripted prefill and decode engines on the test's event loop, with a gateway in front of them.

Each engine records its requests and runs a script for each of them. A script is a coroutine that
can answer, hold, refuse or close. Health checks and model lists are answered without a script.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from time import monotonic
from typing import Any

import aiohttp

from gateway.app import App
from gateway.config import Config
from gateway.disagg.handoffs import PairFigures
from tests.duration_limits import PATIENCE_S
from tests.long_timeouts import patient
from tests.metrics_page import total

MODEL = "demo"
TEXT = ["one", " two", " three"]
OBJECT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "chatcmpl-x-0a1b2c3d",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "transfer_mode": "pull",
}
PUSHED = OBJECT | {"transfer_mode": "push", "pp_size": 1}


_arrivals = itertools.count()


class EngineRequest:
    # One received request; `arrival` counts the requests of all engines.

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.arrival = next(_arrivals)
        self.head = head
        self.body = body
        self.writer = writer
        self.received_at = monotonic()
        self.closed_at: float | None = None
        self.closed = asyncio.Event()

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def respond(self, body: object, status: int = 200, kind: bytes = b"application/json") -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (
            status,
            kind,
            len(raw),
        )
        self.writer.write(head + raw)

    def open_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def event(self, event: object) -> None:
        raw = (
            b"data: "
            + (event if isinstance(event, bytes) else json.dumps(event).encode())
            + b"\n\n"
        )
        self.writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))

    def end_stream(self) -> None:
        self.event(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")


Script = Callable[[EngineRequest], Awaitable[None]]


class ScriptedEngine:
    """A fake engine whose answers a test scripts. `requests` has the requests that it received.

    is_dead      whether it accepts connections and closes them at once
    is_silent    whether it does not answer health checks
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[EngineRequest] = []
        self.request_arrived = asyncio.Event()
        self.url = ""
        self.is_dead = self.is_silent = False
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve_connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._abort()

    def die(self) -> None:
        self.is_dead = True
        self._abort()

    def _abort(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def wait_for_request(self, times: int = 1) -> EngineRequest:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.requests) < times:
                self.request_arrived.clear()
                await self.request_arrived.wait()
        return self.requests[times - 1]

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.is_dead:
            writer.transport.abort()
            return
        self._writers.add(writer)
        own_requests: list[EngineRequest] = []
        scripts_running: set[asyncio.Task[None]] = set()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET") and self.is_silent:
                    continue
                if head.startswith(b"GET"):
                    self._answer_get(head, writer)
                    continue
                length = next(
                    line
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                body = await reader.readexactly(int(length[15:]))
                if body == b"{}":  # the gateway tries whether the engine has the API
                    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                    continue
                request = EngineRequest(head, body, writer)
                own_requests.append(request)
                self.requests.append(request)
                self.request_arrived.set()
                scripts_running.add(asyncio.ensure_future(self._run_script(request)))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            for request in own_requests:
                request.closed_at = request.closed_at or monotonic()
                request.closed.set()
            for task in scripts_running:
                task.cancel()
            writer.close()

    async def _run_script(self, request: EngineRequest) -> None:
        await self.script(request)

    def _answer_get(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        body = (
            json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode()
            if b"/v1/models" in head
            else b""
        )
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

        # Scripts


def prefills(handoff: object = OBJECT, **members: Any) -> Script:
    async def script(request: EngineRequest) -> None:
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "one"},
            "finish_reason": "length",
        }
        params = {"kv_transfer_params": handoff} if handoff is not None else {}
        request.respond(
            {"id": "p", "model": MODEL, "choices": [choice], "usage": usage, **params, **members}
        )

    return script


async def decodes(request: EngineRequest) -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    if request.json.get("stream"):
        request.open_stream()
        for word in TEXT:
            request.event({"model": MODEL, "choices": [{"index": 0, "delta": {"content": word}}]})
        if request.json.get("stream_options"):
            request.event({"model": MODEL, "choices": [], "usage": usage})
        request.end_stream()
    else:
        message = {"role": "assistant", "content": "".join(TEXT)}
        request.respond(
            {
                "model": MODEL,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": usage,
            }
        )


async def never_answers(request: EngineRequest) -> None:
    await request.closed.wait()


async def streams_one_token(request: EngineRequest) -> None:
    request.open_stream()
    request.event({"model": MODEL, "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
    await request.closed.wait()


async def answers_without_tokens(request: EngineRequest) -> None:
    request.open_stream()
    request.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    request.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    request.end_stream()


async def streams_unknown_events(request: EngineRequest) -> None:
    request.open_stream()
    for note in range(6):
        request.event({"choices": [{"index": 0, "delta": {"audio": f"note {note}"}}]})
    await request.closed.wait()


async def breaks_after_a_token(request: EngineRequest) -> None:
    request.open_stream()
    request.event({"model": MODEL, "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
    await request.writer.drain()
    request.writer.transport.abort()


async def resets(request: EngineRequest) -> None:
    request.writer.transport.abort()


def refuses(status: int) -> Script:
    async def script(request: EngineRequest) -> None:
        request.respond(
            {"error": {"message": "as asked", "type": "X", "param": None, "code": status}}, status
        )

    return script


def when_open(gate: asyncio.Event, script: Script) -> Script:
    async def waiting(request: EngineRequest) -> None:
        await gate.wait()
        await script(request)

    return waiting


def in_turn(*scripts: Script) -> Script:
    left = list(scripts)

    async def script(request: EngineRequest) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request)

    return script

    # The gateway in front of the engines


class SplitGateway:
    def __init__(
        self,
        app: App,
        prefill: list[ScriptedEngine],
        decode: list[ScriptedEngine],
        http: aiohttp.ClientSession,
    ) -> None:
        self.app = app
        self.prefill = prefill
        self.decode = decode
        self.http = http
        self._request_count = 0

    async def ask(
        self, words: int = 400, *, path: str = "/v1/chat/completions", **members: Any
    ) -> Reply:
        # Send one request, with a new prompt of `words` words unless the members contain one.
        self._request_count += 1
        body = {"model": MODEL, "max_tokens": 8, **members}
        if "messages" not in body and "prompt" not in body:
            body["messages"] = [
                {"role": "user", "content": f"{self._request_count} " + "word " * words}
            ]
        async with self.http.post(f"{self.app.url}{path}", json=body) as answer:
            try:
                return Reply(answer.status, answer.headers, await answer.read())
            except aiohttp.ClientError:
                return Reply(answer.status, answer.headers, None)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[aiohttp.StreamReader]:
        # Send a streamed request with a long prompt; yield its response as a reader.
        body = {
            "model": MODEL,
            "stream": True,
            "messages": [{"role": "user", "content": "word " * 400}],
        }
        async with self.http.post(f"{self.app.url}/v1/chat/completions", json=body) as answer:
            yield answer.content

    async def ask_and_leave(self, when: Callable[[], Awaitable[object]], **members: Any) -> None:
        leaving = asyncio.ensure_future(self.ask(**members))
        await when()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    def loads(self) -> list[int]:
        # Return all load counters, and the number of KV transfers in progress.
        #
        # All are zero when no request is in progress.
        gate, handoffs = self.app.gateway.gate, self.app.gateway.handoffs
        amounts = [
            gate.active_requests,
            gate.bodies.used_bytes,
            gate.retries.running,
            handoffs.live_count,
            len(handoffs.transfers),
        ]
        for live in self.app.gateway.endpoints.all():
            load = live.load
            amounts += [
                load.in_flight,
                load.prefill_tokens,
                load.decode_tokens,
                load.expected_tokens,
            ]
        return amounts

    def assume_fast_pairs(self) -> None:
        # Record one fast handoff for every pair of engines, so that requests are split.
        names = itertools.product(
            (half.name for half in self.prefill), (half.name for half in self.decode)
        )
        for pair in names:
            figures = self.app.gateway.handoffs.pairs[pair] = PairFigures()
            figures.served, figures.prefill_s, figures.handoff_s = 1, 0.01, 0.01

    @contextmanager
    def choosing(self, half: ScriptedEngine) -> Iterator[None]:
        # Make the gateway choose `half` among engines of its role that are idle: the others are
        # busier during the block. Otherwise it chooses at random.
        others = [
            live.load for live in self.app.gateway.endpoints.all() if live.endpoint.url != half.url
        ]
        for load in others:
            load.in_flight += 1
            load.prefill_tokens += 10**6
            load.mark_changed()
        yield
        for load in others:
            load.in_flight -= 1
            load.prefill_tokens -= 10**6
            load.mark_changed()

    async def at_rest(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while any(self.loads()):
                await asyncio.sleep(0.005)

    def metric(self, name: str, **labels: str) -> float:
        self.app.gateway.accounts.account_ended()  # as a page does
        return total(self.app.metrics.render().decode(), name, **labels)

    def error_count(self, engine: ScriptedEngine) -> float:
        return self.metric("penstock_upstream_errors_total", endpoint=engine.name)


class Reply:
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes | None) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"")

    @property
    def events(self) -> list[Any]:
        raw = [
            event.removeprefix(b"data: ") for event in (self.body or b"").split(b"\n\n") if event
        ]
        return [json.loads(event) for event in raw if event != b"[DONE]"]

    @property
    def text(self) -> str:
        body = self.body or b""
        if not body.startswith(b"data:"):
            choice = self.json["choices"][0]
            return str(choice["message"]["content"] if "message" in choice else choice["text"])
        deltas = [event["choices"][0] for event in self.events if event.get("choices")]
        return "".join(
            delta.get("delta", delta).get("content", delta.get("text", "")) or ""
            for delta in deltas
        )


@asynccontextmanager
async def split_gateway(
    dialect: str,
    prefill: list[Script],
    decode: list[Script],
    *,
    engine: str = "vllm",
    bootstrap: str | None = None,
    split: Mapping[str, Any] | None = None,
    decode_role: str | Sequence[str] = "decode",
    max_concurrency: int | None = None,
    contexts: Sequence[int] = (),
    reserved: Sequence[Sequence[str]] = (),
    policy: str = "prefix_aware",
    admission: str | None = None,
    **sections: Any,
) -> AsyncIterator[SplitGateway]:
    # Run a gateway that splits prompts of 100 tokens or more, with one engine per script.
    #
    # dialect      handoff protocol of the engines
    # bootstrap    address of the prefill engines' bootstrap server
    # contexts     context tokens of the decode engines
    # reserved     tenants that the decode engines serve
    async with AsyncExitStack() as stack:
        halves = [ScriptedEngine(script) for script in (*prefill, *decode)]
        for half in halves:
            await half.start()
            stack.callback(half.stop)
        decoders = (
            [decode_role] * len(decode) if isinstance(decode_role, str) else list(decode_role)
        )
        roles = ["prefill"] * len(prefill) + decoders
        endpoints: list[dict[str, Any]] = [
            {"url": half.url, "role": role, "engine": engine}
            for half, role in zip(halves, roles, strict=True)
        ]
        if max_concurrency is not None:
            endpoints = [spec | {"max_concurrency": max_concurrency} for spec in endpoints]
        for spec, tokens in zip(endpoints[len(prefill) :], contexts, strict=False):
            spec["context_tokens"] = tokens
        for spec, tenants in zip(endpoints[len(prefill) :], reserved, strict=False):
            spec["tenants"] = tenants
        for spec in endpoints[: len(prefill)]:
            if bootstrap is not None:
                spec["bootstrap"] = bootstrap
        pool = {"policy": policy, "endpoints": endpoints}
        if admission is not None:
            pool["admission"] = admission
        rule = {"dialect": dialect, "threshold_tokens": 100, "hysteresis": 0.0} | dict(split or {})
        config = Config.model_validate(
            {
                "version": 1,
                "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
                "observability": {"access_log": "off"},
                "models": [{"name": MODEL, "pool": "main", "split": rule}],
                "pools": {"main": pool},
            }
            | patient(sections)
        )
        app = App(config)
        await app.start()
        stack.push_async_callback(app.stop)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        yield SplitGateway(app, halves[: len(prefill)], halves[len(prefill) :], http)
