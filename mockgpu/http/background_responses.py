"""Generates responses of the Responses API in the background: clients poll, follow or cancel them.

The events of each response's stream are recorded. A client may read them at any time, from any
sequence number on. The behaviour is vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from aiohttp import web

from mockgpu.http.response_sinks import PendingResponse, TokenEvents
from mockgpu.request_parser import ApiError
from mockgpu.scheduler import Job

EVENT_STREAM = "text/event-stream; charset=utf-8"
_END = b"\n\n"
_RUNNING = ("queued", "in_progress")


class BackgroundRun:
    """One response that is generated in the background.

    response  the response object as clients get it now
    events    the events of its stream so far; the index of each is its sequence number
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.events: list[bytes] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.response["status"] in _RUNNING

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine that generates the response in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(work)

    def add(self, chunk: bytes) -> None:
        """Record events of the response's stream, and pass them to the clients that follow it.

        `chunk` has the events as one HTTP chunk (its size, a line end, data, a line end).
        """
        _, _, data = chunk.partition(b"\r\n")
        self.events += [event + _END for event in data[:-2].split(_END)[:-1]]
        self._changed.set()

    def update(self, members: Mapping[str, Any]) -> None:
        """Change members of the response object, and wake the clients that follow the response."""
        self.response.update(members)
        self._changed.set()

    def cancel(self) -> dict[str, Any]:
        """Stop the generation, return the response. Raises ApiError if the response has ended."""
        if not self.is_running:
            raise ApiError(400, "Cannot cancel a synchronous response.", "response_id")
        if self._task is not None:
            self._task.cancel()
        self.update({"status": "cancelled"})
        return self.response

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Yield the events from number `first` on, until the response has ended."""
        while True:
            if first < len(self.events):
                yield self.events[first]
                first += 1
            elif not self.is_running:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


class RecordingSink:
    """Receives the tokens of a response in the background, and records their stream events."""

    __slots__ = ("_answer", "_cached", "_chunks", "_job", "_run", "on_failure")

    def __init__(
        self,
        answer: PendingResponse,
        chunks: TokenEvents,
        job: Job,
        run: BackgroundRun,
        cached: bool,
    ) -> None:
        # Record into `run`; `cached` says whether the events report cached tokens.
        self._answer = answer
        self._chunks = chunks
        self._job = job
        self._run = run
        self._cached = cached
        self.on_failure = answer.fail

    def on_token(self) -> None:
        self._run.add(self._chunks.next(self._job.cached if self._cached else None))

    def on_end(self) -> None:
        self._answer.on_choice_end()


async def send_events(request: web.Request, run: BackgroundRun, first: int) -> web.StreamResponse:
    """Send a background response's events to a client as a stream, from event number `first` on."""
    response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
    await response.prepare(request)
    async for event in run.follow(first):
        await response.write(event)
    await response.write_eof()
    return response
