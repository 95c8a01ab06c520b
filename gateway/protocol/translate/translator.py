"""Feeds an engine's answer to the translator of an API, as a whole or chunk by chunk. No I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from gateway.protocol.response.stepwise_output import OutputQueue
from gateway.protocol.translate.chat_types import (
    ChatAnswer,
    ChatChoice,
    ChatUsage,
    ErrorDetail,
    TranslationError,
    read_answer,
    read_error,
)
from gateway.protocol.translate.sse import EventReader
from gateway.protocol.upstream_error import UpstreamError

MAX_WHOLE_BYTES = 8 * 1024 * 1024
"""Maximum bytes of an answer that is not streamed, which is decoded at once. A text of a million
tokens takes about five million bytes."""
MAX_EVENT_BYTES = 1024 * 1024
"""Maximum bytes of one event. The text of an honest event is far shorter."""
_MAX_DONE_BYTES = 64
TOO_EARLY = ErrorDetail("The engine's answer ended too early.")


class StreamTranslator(ABC):
    """Translates the bytes of one stream of chat chunks to the events of another API.

    feed() takes bytes in pieces of any size. finish() is called at the end of the engine's answer.
    Both return generators of the client's bytes, which do the work as their output is consumed.
    After the last event or an error, both yield nothing.

    ending  the last choice that had a finish reason
    usage   the last token counts
    """

    __slots__ = ("_events", "_has_started", "_is_over", "ending", "seen_calls", "usage")

    def __init__(self) -> None:
        self._events = EventReader(MAX_EVENT_BYTES)
        self._has_started = self._is_over = False
        self.ending = ChatChoice()
        self.usage = ChatUsage()
        self.seen_calls: set[int] = set()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Translate the engine's next bytes, and yield complete events for the client."""
        return self._translate(lambda: self._events.feed(data))

    def finish(self) -> Iterator[bytes]:
        """Yield the remaining events for the client, at the end of the engine's stream.

        An answer without a finish reason ends with an error event.
        """
        yield from self._translate(self._events.flush)
        if not self._is_over:
            failed = self.ending.finish_reason is None
            yield from self._stop(self._fail(TOO_EARLY) if failed else self._end())

    def finish_with(self, event: bytes) -> Iterator[bytes]:
        """Yield the client's events for `event`, with which the gateway itself ends the stream.

        An incomplete event of the engine is dropped.
        """
        self._events = EventReader(MAX_EVENT_BYTES)
        yield from self.feed(event)
        yield from self.finish()

    @abstractmethod
    def _start(self, answer: ChatAnswer) -> Iterator[bytes]:
        """Yield the client's events before the first piece of a translated answer."""

    @abstractmethod
    def _delta(self, choice: ChatChoice) -> Iterator[bytes]:
        """Yield the client's events for one chunk of a translated stream.

        Raises TranslationError if the chunk is invalid.
        """

    @abstractmethod
    def _end(self) -> Iterator[bytes]:
        """Yield the client's events after the last piece of a complete translated answer."""

    @abstractmethod
    def _fail(self, detail: ErrorDetail) -> Iterator[bytes]:
        """Yield the events in the client's API that report the failure and end the stream."""

    def note_call(self, index: int) -> None:
        """Record that the tool call with this index begins in the stream.

        Raises TranslationError if it has begun before. The engine then writes parts of two calls in
        turn, which the client's API cannot express.
        """
        if index in self.seen_calls:
            raise TranslationError(
                "The engine wrote two tool calls at the same time, which cannot be translated."
            )
        self.seen_calls.add(index)

    def _translate(self, read: Callable[[], list[bytearray]]) -> Iterator[bytes]:
        try:
            for event in () if self._is_over else read():
                yield from self._event(event)
                if self._is_over:
                    break
        except TranslationError as error:
            yield from self._stop(self._fail(ErrorDetail(str(error))))

    def _event(self, data: bytearray) -> Iterator[bytes]:
        if len(data) <= _MAX_DONE_BYTES and data.strip() == b"[DONE]":
            yield from self._stop(self._end())
            return
        answer = read_answer(data)
        if answer.has_error:
            yield from self._stop(self._fail(read_error(answer.error)))
            return
        if answer.usage is not None:
            self.usage = answer.usage
        yield from self._begin(answer)
        if answer.choices:
            choice = answer.choices[0]
            if choice.finish_reason is not None:
                self.ending = choice
            yield from self._delta(choice)

    def _begin(self, answer: ChatAnswer) -> Iterator[bytes]:
        if not self._has_started:
            self._has_started = True
            yield from self._start(answer)

    def _stop(self, last: Iterator[bytes]) -> Iterator[bytes]:
        # Yield the last events, and mark the stream as ended.
        #
        # If no event was sent before, the events that begin a stream precede them.
        yield from self._begin(ChatAnswer())
        self._is_over = True
        yield from last


class AnswerTranslator:
    """Translates one answer of an engine to the format of the client's API.

    The output may be many times as long as the input. Therefore it is returned in steps: after each
    call of feed(), call more() until is_behind is False.

    Each attempt needs a new translator. Only an engine that continues a broken answer uses the
    translator of the previous engine.
    """

    __slots__ = ("_body", "_output", "_stream", "_translate_whole")

    def __init__(
        self,
        translate_whole: Callable[[bytearray], Iterator[bytes]],
        stream: StreamTranslator | None = None,
    ) -> None:
        """Create a translator of answers with functions for a whole answer and for a stream.

        `stream` is None for an API without streams.
        """
        self._translate_whole = translate_whole
        self._stream = stream
        self._body = bytearray()
        self._output = OutputQueue()

    @property
    def is_behind(self) -> bool:
        """Return whether there is more output for the client, which more() returns."""
        return bool(self._output)

    def feed(self, payload: bytes, *, is_sse: bool, is_complete: bool) -> bytes:
        """Translate the engine's next bytes, and return the next bytes for the client.

        Raises UpstreamError if the answer is too long or cannot be translated.
        """
        if is_sse and self._stream is not None:
            self._output.add(self._stream.feed(payload))
            return self._output.take()
        self._body += payload
        if len(self._body) > MAX_WHOLE_BYTES:
            raise UpstreamError("translation", "the engine's answer is too long to be translated")
        if not is_complete:
            return b""
        try:
            self._output.add(self._translate_whole(self._body))
        except TranslationError as error:
            raise UpstreamError("translation", str(error)) from error
        return self._output.take()

    def more(self) -> bytes:
        """Return the next bytes for the client, translated from bytes that feed() got before."""
        return self._output.take()

    def finish_with(self, event: bytes) -> bytes:
        """Return the client's bytes for `event`, which the gateway created to end the stream.

        All earlier output that has not been returned yet precedes them.
        """
        if self._stream is None:
            return event
        return self._output.take_all() + b"".join(self._stream.finish_with(event))
