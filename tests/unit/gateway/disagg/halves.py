"""Scripted prefill and decode engines in the test's own loop: each records its requests and follows a script.

Every connection of the gateway is served; what is said on it is up to `script`, a coroutine that gets the request and
may answer, hold, refuse or hang up. A health probe or a list of models is answered by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

import aiohttp

from gateway.app import App
from gateway.config import Config
from gateway.disagg.handoffs import PairFigures
from tests.fair_time import PATIENCE_S
from tests.patient import patient
from tests.scraped import total

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


class Asked:
    """One request of the gateway's. `closed` once its connection has ended."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self.writer = writer
        self.came_at = monotonic()
        self.closed_at: float | None = None
        self.closed = asyncio.Event()

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def say(self, body: object, status: int = 200, kind: bytes = b"application/json") -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(raw))
        self.writer.write(head + raw)

    def open_stream(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(self, event: object) -> None:
        raw = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
        self.writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))

    def end_stream(self) -> None:
        self.event(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")


Script = Callable[[Asked], Awaitable[None]]


class Half:
    """One scripted engine: `url`, what it was `asked`, and what it does about it.

    is_dead    every connection is accepted and closed; is_silent: no probe is answered
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.came = asyncio.Event()
        self.url = ""
        self.is_dead = self.is_silent = False
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Stop listening and cut all connections."""
        assert self._server is not None
        self._server.close()
        self._abort()

    def die(self) -> None:
        """From now on every connection is accepted and closed, as by a proxy whose engine is dead."""
        self.is_dead = True
        self._abort()

    def _abort(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def was_asked(self, times: int = 1) -> Asked:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.asked) < times:
                self.came.clear()
                await self.came.wait()
        return self.asked[times - 1]

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_dead:
            writer.transport.abort()
            return
        self._writers.add(writer)
        here: list[Asked] = []
        telling: set[asyncio.Task[None]] = set()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET") and self.is_silent:
                    continue
                if head.startswith(b"GET"):
                    self._ordinary(head, writer)
                    continue
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                asked = Asked(head, await reader.readexactly(int(length[15:])), writer)
                here.append(asked)
                self.asked.append(asked)
                self.came.set()
                telling.add(asyncio.ensure_future(self._tell(asked)))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            for asked in here:
                asked.closed_at = asked.closed_at or monotonic()
                asked.closed.set()
            for task in telling:
                task.cancel()
            writer.close()

    async def _tell(self, asked: Asked) -> None:
        await self.script(asked)

    def _ordinary(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode() if b"/v1/models" in head else b""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


# What an engine may do


def prefills(handoff: object = OBJECT, **members: Any) -> Script:
    """Answers with one token and the object."""

    async def script(asked: Asked) -> None:
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        choice = {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "length"}
        told = {"kv_transfer_params": handoff} if handoff is not None else {}
        asked.say({"id": "p", "model": MODEL, "choices": [choice], "usage": usage, **told, **members})

    return script


async def decodes(asked: Asked) -> None:
    """Answers with TEXT, as asked: events or one object."""
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    if asked.json.get("stream"):
        asked.open_stream()
        for word in TEXT:
            asked.event({"model": MODEL, "choices": [{"index": 0, "delta": {"content": word}}]})
        if asked.json.get("stream_options"):
            asked.event({"model": MODEL, "choices": [], "usage": usage})
        asked.end_stream()
    else:
        message = {"role": "assistant", "content": "".join(TEXT)}
        asked.say(
            {"model": MODEL, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
        )


async def holds(asked: Asked) -> None:
    """Answers nothing until the gateway goes."""
    await asked.closed.wait()


async def begins(asked: Asked) -> None:
    """One token, and then nothing more."""
    asked.open_stream()
    asked.event({"model": MODEL, "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
    await asked.closed.wait()


async def sings(asked: Asked) -> None:
    """Events of an unknown kind, and then nothing more."""
    asked.open_stream()
    for note in range(6):
        asked.event({"choices": [{"index": 0, "delta": {"audio": f"note {note}"}}]})
    await asked.closed.wait()


async def breaks_after_a_token(asked: Asked) -> None:
    asked.open_stream()
    asked.event({"model": MODEL, "choices": [{"index": 0, "delta": {"content": TEXT[0]}}]})
    await asked.writer.drain()
    asked.writer.transport.abort()


async def resets(asked: Asked) -> None:
    asked.writer.transport.abort()


def refuses(status: int) -> Script:
    async def script(asked: Asked) -> None:
        asked.say({"error": {"message": "as asked", "type": "X", "param": None, "code": status}}, status)

    return script


def after(gate: asyncio.Event, script: Script) -> Script:
    """Does so when the gate opens."""

    async def waiting(asked: Asked) -> None:
        await gate.wait()
        await script(asked)

    return waiting


def each(*scripts: Script) -> Script:
    """One after the other, the last for all that follow."""
    left = list(scripts)

    async def script(asked: Asked) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(asked)

    return script


# The gateway in front of them


class Front:
    """A gateway with its halves, and a client."""

    def __init__(self, app: App, prefill: list[Half], decode: list[Half], http: aiohttp.ClientSession) -> None:
        self.app = app
        self.prefill = prefill
        self.decode = decode
        self.http = http
        self._asked = 0

    async def ask(self, words: int = 400, *, path: str = "/v1/chat/completions", **members: Any) -> Reply:
        """One request: a new prompt of `words` words, unless the members contain one."""
        self._asked += 1
        body = {"model": MODEL, "max_tokens": 8, **members}
        if "messages" not in body and "prompt" not in body:
            body["messages"] = [{"role": "user", "content": f"{self._asked} " + "word " * words}]
        async with self.http.post(f"{self.app.url}{path}", json=body) as answer:
            try:
                return Reply(answer.status, answer.headers, await answer.read())
            except aiohttp.ClientError:
                return Reply(answer.status, answer.headers, None)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[aiohttp.StreamReader]:
        """A long prompt's stream, read as it comes."""
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "word " * 400}]}
        async with self.http.post(f"{self.app.url}/v1/chat/completions", json=body) as answer:
            yield answer.content

    async def ask_and_leave(self, when: Callable[[], Awaitable[object]], **members: Any) -> None:
        """A client that closes its connection as soon as `when` has happened."""
        leaving = asyncio.ensure_future(self.ask(**members))
        await when()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    def loads(self) -> list[int]:
        """Everything booked anywhere, and whatever is watched. All zero at rest."""
        gate, handoffs = self.app.gateway.gate, self.app.gateway.handoffs
        held = [gate.active_requests, gate.body_bytes, gate.retries_running, handoffs.live_count, len(handoffs.transfers)]
        for live in self.app.gateway.endpoints.all():
            load = live.load
            held += [load.in_flight, load.prefill_tokens, load.decode_tokens, load.expected_tokens]
        return held

    def have_met(self) -> None:
        """All pairs have been seen at work, and are quick."""
        names = itertools.product((half.name for half in self.prefill), (half.name for half in self.decode))
        for pair in names:
            figures = self.app.gateway.handoffs.pairs[pair] = PairFigures()
            figures.served, figures.prefill_s, figures.handoff_s = 1, 0.01, 0.01

    async def at_rest(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while any(self.loads()):
                await asyncio.sleep(0.005)

    def metric(self, name: str, **labels: str) -> float:
        return total(self.app.metrics.render().decode(), name, **labels)

    def blamed(self, half: Half) -> float:
        """How often a failure was taken for this engine's."""
        return self.metric("penstock_upstream_errors_total", endpoint=half.name)


class Reply:
    """What a client read; `body` is None when the connection broke."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes | None) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"")

    @property
    def events(self) -> list[Any]:
        raw = [event.removeprefix(b"data: ") for event in (self.body or b"").split(b"\n\n") if event]
        return [json.loads(event) for event in raw if event != b"[DONE]"]

    @property
    def text(self) -> str:
        body = self.body or b""
        if not body.startswith(b"data:"):
            choice = self.json["choices"][0]
            return str(choice["message"]["content"] if "message" in choice else choice["text"])
        deltas = [event["choices"][0] for event in self.events if event.get("choices")]
        return "".join(each.get("delta", each).get("content", each.get("text", "")) or "" for each in deltas)


@asynccontextmanager
async def front(
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
    **sections: Any,
) -> AsyncIterator[Front]:
    """A gateway that splits prompts of 100 tokens and more between so many scripted halves; `contexts` are the longest
    that the decoders take, `reserved` the tenants that they serve."""
    async with AsyncExitStack() as stack:
        halves = [Half(script) for script in (*prefill, *decode)]
        for half in halves:
            await half.start()
            stack.callback(half.stop)
        decoders = [decode_role] * len(decode) if isinstance(decode_role, str) else list(decode_role)
        roles = ["prefill"] * len(prefill) + decoders
        endpoints: list[dict[str, Any]] = [
            {"url": half.url, "role": role, "engine": engine} for half, role in zip(halves, roles, strict=True)
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
        rule = {"dialect": dialect, "threshold_tokens": 100, "hysteresis": 0.0} | dict(split or {})
        config = Config.model_validate(
            {
                "version": 1,
                "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
                "observability": {"access_log": "off"},
                "models": [{"name": MODEL, "pool": "main", "split": rule}],
                "pools": {"main": {"policy": policy, "endpoints": endpoints}},
            }
            | patient(sections)
        )
        app = App(config)
        await app.start()
        stack.push_async_callback(app.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Front(app, halves[: len(prefill)], halves[len(prefill) :], http)
