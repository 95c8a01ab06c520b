"""One request to an OpenAI server and what became of it. Not here: when it is sent (loops.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from planner.bench.plan import Plan
from planner.bench.timeline import Timeline


class BenchError(Exception):
    """The server could not be asked at all; the message says what it answered."""


class Record(msgspec.Struct):
    """One request: moments in seconds of one clock. Written by the client that sends it, read by the report.

    due_s     when it should have been sent: latencies count from here, so that a server which holds up the
              sender is not spared the requests that would have come meanwhile
    error     None, or the kind: http_429, connect, disconnected, timeout, stream_error, truncated, empty, unfinished
    """

    session: int
    turn: int
    due_s: float
    sent_s: float
    ended_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = []
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    status: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def lag_s(self) -> float:
        """How late our own side sent it."""
        return self.sent_s - self.due_s


class Client:
    """A connection pool to one server, for any number of requests at once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._url = plan.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = plan.model
        self._encoder = msgspec.json.Encoder()
        headers = {"content-type": "application/json"}
        if plan.api_key:
            headers["authorization"] = f"Bearer {plan.api_key}"
        timeout = aiohttp.ClientTimeout(total=plan.timeout_s, sock_connect=10.0)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        self._http = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def model(self) -> str:
        """The model that is asked for: the plan's, else the first one listed. Raises BenchError."""
        if self._model is None:
            self._model = await self._first_model()
        return self._model

    async def _first_model(self) -> str:
        try:
            async with self._http.get(f"{self._url}/models") as answer:
                listed: Any = msgspec.json.decode(await answer.read()) if answer.status == 200 else None
        except aiohttp.ClientConnectorError as error:
            raise BenchError(f"nothing listens at {self._plan.url}: {error.strerror}") from None
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise BenchError(f"{self._url}/models does not answer: {error!r}") from None
        try:
            return str(listed["data"][0]["id"])
        except (TypeError, LookupError):
            raise BenchError(f"{self._url}/models lists no model; name one with --model") from None

    async def ask(self, record: Record, messages: Sequence[dict[str, str]], output_tokens: int) -> str:
        """Sends one streaming chat completion, fills the record in, returns the text. Errors end up in the record."""
        body: dict[str, Any] = {"model": await self.model(), "messages": messages, "max_tokens": output_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._plan.ignore_eos:
            body["ignore_eos"] = True
        timeline = Timeline()
        record.sent_s = time.perf_counter()
        try:
            record.error = await self._stream(record, self._encoder.encode(body), timeline)
        except TimeoutError:
            record.error = "timeout"
        except aiohttp.ClientConnectorError:
            record.error = "connect"
        except (aiohttp.ClientError, OSError):
            record.error = "disconnected"
        except asyncio.CancelledError:
            record.error = "unfinished"
            raise
        finally:
            record.ended_s = time.perf_counter()
            _take_over(record, timeline)
        return timeline.text

    async def _stream(self, record: Record, body: bytes, timeline: Timeline) -> str | None:
        async with self._http.post(f"{self._url}/chat/completions", data=body) as answer:
            record.status = answer.status
            if answer.status != 200:
                await answer.read()
                return f"http_{answer.status}"
            while data := await answer.content.readany():
                timeline.feed(data, time.perf_counter())
        return _verdict(timeline)


def _verdict(timeline: Timeline) -> str | None:
    """A stream counts only if it came to its end: an answer that breaks off is not a fast one."""
    if timeline.error is not None:
        return "stream_error"
    if not timeline.done or timeline.broken:
        return "truncated"
    return "empty" if timeline.first_s is None else None


def _take_over(record: Record, timeline: Timeline) -> None:
    record.first_s, record.last_s, record.gaps_s = timeline.first_s, timeline.last_s, timeline.gaps_s
    record.output_tokens = timeline.tokens
    if timeline.usage is not None:
        record.prompt_tokens = timeline.usage.prompt_tokens
        record.cached_tokens = timeline.usage.cached_tokens
