"""Receives generated tokens from the engine (token sinks), and writes them to the client's socket.

A sink writes to the transport directly from the engine's step. This saves a task and an await per
token. Injected faults break responses off here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.http.openai_format import http_chunk
from mockgpu.request_parser import ApiError
from mockgpu.scheduler import Job

KEEP_ALIVE = http_chunk(b": keep-alive\n\n")


class PendingResponse:
    """A response whose choices the engine is still generating; its handler waits for `done`.

    `done` is a future. Its result is None when all choices have ended, or the ApiError of a choice
    that failed.
    """

    __slots__ = ("_open", "done")

    def __init__(self, choices: int, loop: asyncio.AbstractEventLoop) -> None:
        self._open = choices
        self.done: asyncio.Future[ApiError | None] = loop.create_future()

    def on_choice_end(self) -> None:
        self._open -= 1
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Fail the whole response with this error, because one of its choices failed."""
        if not self.done.done():
            self.done.set_result(error)


class TokenEvents(Protocol):
    """The interface that returns the stream events of each token, in the format of one API."""

    def next(self, cached: int | None) -> bytes:
        """Return the HTTP chunks that carry the next token.

        `cached` is the number of prompt tokens found in the prefix cache; None: not reported.
        """
        ...


class WholeSink:
    """Receives the tokens of one choice of a response that is not streamed, and waits for its end.

    `stalled` simulates a response that never arrives: the end of the choice is not reported.
    """

    __slots__ = ("_answer", "_stalled", "on_failure")

    def __init__(self, answer: PendingResponse, stalled: bool = False) -> None:
        self._answer = answer
        self._stalled = stalled
        self.on_failure = answer.fail

    def on_token(self) -> None:
        """Do nothing: a response that is not streamed sends all tokens together at its end."""

    def on_end(self) -> None:
        if not self._stalled:
            self._answer.on_choice_end()


class StreamSink:
    """Receives the tokens of one streamed choice, and writes each to the client immediately."""

    __slots__ = ("_answer", "_cached", "_chunks", "_job", "_transport", "on_failure")

    def __init__(
        self,
        answer: PendingResponse,
        chunks: TokenEvents,
        job: Job,
        transport: asyncio.Transport,
        cached: bool,
    ) -> None:
        self._answer = answer
        self._chunks = chunks
        self._job = job
        self._transport = transport
        self._cached = cached
        self.on_failure = answer.fail

    def on_token(self) -> None:
        """Write the events of the next token. Discard them if the client has disconnected."""
        data = self._chunks.next(self._job.cached if self._cached else None)
        if not self._transport.is_closing():
            self._transport.write(data)

    def on_end(self) -> None:
        self._answer.on_choice_end()


class FaultySink(StreamSink):
    """A StreamSink with an injected fault: it breaks the stream off, or splits its bytes."""

    __slots__ = ("_broken", "_fault", "_made")

    def __init__(
        self,
        answer: PendingResponse,
        chunks: TokenEvents,
        job: Job,
        transport: asyncio.Transport,
        cached: bool,
        fault: InjectedFault,
    ) -> None:
        super().__init__(answer, chunks, job, transport, cached)
        self._fault = fault
        self._made = 0
        self._broken = False

    def on_token(self) -> None:
        """Write the next token, or inject the fault if enough tokens have been written."""
        self._made += 1
        if self._transport.is_closing() or self._broken:
            return
        kind = self._fault.kind
        if kind is FaultKind.SPLIT:
            self._write_split(self._chunks.next(self._job.cached if self._cached else None))
        elif kind is FaultKind.COMMENTS:
            self._transport.write(KEEP_ALIVE)
            super().on_token()
        elif self._made <= self._fault.after:
            super().on_token()
        else:
            self._broken = True
            break_off(self._transport, kind, b"0\r\n\r\n")

    def _write_split(self, events: bytes) -> None:
        size, _, remaining = events.partition(b"\r\n")
        while size:
            length = int(size, 16)
            data, remaining = remaining[:length], remaining[length + 2 :]
            for start in range(0, length, 7):
                piece = data[start : start + 7]
                self._transport.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            size, _, remaining = remaining.partition(b"\r\n")

    def on_end(self) -> None:
        """Write the end of this answer to the client, unless an injected fault cut the stream."""
        if not self._broken:
            super().on_end()


def break_off(transport: asyncio.Transport, kind: FaultKind, last: bytes = b"") -> None:
    """Leave a response unfinished. The kind of fault decides how:

    - cut: write the bytes `last`, as if the response had ended, and close the connection
    - stall: keep the connection open, but send no more bytes
    - any other kind: reset the connection
    """
    if kind is FaultKind.CUT and not transport.is_closing():
        transport.write(last)
        transport.close()
    elif kind is not FaultKind.STALL:
        reset_connection(transport)


def reset_connection(transport: asyncio.Transport) -> None:
    """Close the client's connection with a TCP reset (RST) instead of a normal end (FIN)."""
    if transport.is_closing():
        return
    peer = transport.get_extra_info("socket")
    if peer is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
