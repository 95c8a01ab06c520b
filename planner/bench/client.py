"""Client of an OpenAI-compatible server: sends a request, and measures its streamed answer.

open_and_closed_loop.py decides when a request is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from planner.bench.answer_timeline import AnswerTimeline
from planner.bench.bench_options import BenchPlan


class BenchError(Exception):
    """Raised if the server cannot be used at all. The message contains its response."""


class BenchRecord(msgspec.Struct):
    """What a benchmark measured of one request. All times are in seconds of one clock.

    session  number of its session
    turn     number of the request within the session
    due_s    when it should have been sent. Latencies count from here, so that they include delays
             of the sender that a slow server has caused
    sent_s   when it was sent
    ended_s  when its answer ended
    first_s  time of the first token; None: there was none
    last_s   time of the last token
    gaps_s   seconds between events with tokens
    status   HTTP status; None: no response
    error    what went wrong: http_429, connect, disconnected, timeout, stream_error, truncated,
             empty or unfinished. None: the answer is complete
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
        """Return the mean seconds per output token after the first; None: fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def lag_s(self) -> float:
        """Return by how many seconds the benchmark sent the request later than planned."""
        return self.sent_s - self.due_s


class BenchClient:
    """A client that measures one server, with a pool of connections for concurrent requests."""

    def __init__(self, plan: BenchPlan) -> None:
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

    async def __aenter__(self) -> BenchClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def model(self) -> str:
        """Return the model to request: the plan's model, or the first one that the server lists.

        Raises BenchError if the server lists none.
        """
        if self._model is None:
            self._model = await self._first_model()
        return self._model

    async def _first_model(self) -> str:
        try:
            async with self._http.get(f"{self._url}/models") as response:
                listed: Any = (
                    msgspec.json.decode(await response.read()) if response.status == 200 else None
                )
        except aiohttp.ClientConnectorError as error:
            raise BenchError(
                f"the server {self._plan.url} cannot be reached: {error.strerror}"
            ) from None
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise BenchError(
                f"the server did not answer the request for {self._url}/models: {error!r}"
            ) from None
        try:
            return str(listed["data"][0]["id"])
        except (TypeError, LookupError):
            raise BenchError(
                f"the server lists no model at {self._url}/models; name one with --model"
            ) from None

    async def send(
        self, record: BenchRecord, messages: Sequence[dict[str, str]], output_tokens: int
    ) -> str:
        """Send a streaming chat request, and return the generated text.

        record         where the measurements and errors are stored
        messages       the messages of the chat
        output_tokens  maximum tokens of the answer
        """
        body: dict[str, Any] = {
            "model": await self.model(),
            "messages": messages,
            "max_tokens": output_tokens,
        }
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._plan.ignore_eos:
            body["ignore_eos"] = True
        timeline = AnswerTimeline()
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
            _copy_result(record, timeline)
        return timeline.text

    async def _stream(
        self, record: BenchRecord, body: bytes, timeline: AnswerTimeline
    ) -> str | None:
        async with self._http.post(f"{self._url}/chat/completions", data=body) as response:
            record.status = response.status
            if response.status != 200:
                await response.read()
                return f"http_{response.status}"
            while data := await response.content.readany():
                timeline.feed(data, time.perf_counter())
        return _stream_error(timeline)


def _stream_error(timeline: AnswerTimeline) -> str | None:
    # Return the kind of error of a stream, or None if it is complete.
    #
    # A truncated answer is an error, so that it does not count as a fast one.
    if timeline.error is not None:
        return "stream_error"
    if not timeline.done or timeline.broken:
        return "truncated"
    return "empty" if timeline.first_s is None else None


def _copy_result(record: BenchRecord, timeline: AnswerTimeline) -> None:
    record.first_s = timeline.first_s
    record.last_s = timeline.last_s
    record.gaps_s = timeline.gaps_s
    record.output_tokens = timeline.tokens
    if timeline.usage is not None:
        record.prompt_tokens = timeline.usage.prompt_tokens
        record.cached_tokens = timeline.usage.cached_tokens
