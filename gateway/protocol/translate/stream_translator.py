"""The common base of stream translations: reads chat chunks, and decides how a stream ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from gateway.protocol.translate.chat_answers import (
    ChatAnswer,
    ChatChoice,
    ChatUsage,
    ErrorDetail,
    TranslationError,
    read_answer,
    read_error,
)
from gateway.protocol.translate.event_stream import EventReader

TOO_EARLY = ErrorDetail("The engine's answer ended too early.")


class StreamTranslator(ABC):
    """Translates the bytes of one stream of chat chunks to the events of another API.

    feed() takes bytes in any pieces; finish() marks the end of the engine's answer. After the last
    event, or an error, both return nothing.

    ending  the last choice that had a finish reason
    usage   the last token counts
    """

    __slots__ = ("_events", "_has_started", "_is_over", "ending", "seen_calls", "usage")

    def __init__(self) -> None:
        self._events = EventReader()
        self._has_started = self._is_over = False
        self.ending = ChatChoice()
        self.usage = ChatUsage()
        self.seen_calls: set[int] = set()

    def feed(self, data: bytes) -> bytes:
        """Translate the engine's next bytes of a stream, and return the complete events for the
        client.
        """
        return self._translate(lambda: self._events.feed(data))

    def finish(self) -> bytes:
        """Return the remaining events for the client when the engine's stream is over.

        An answer without a finish reason ends with an error event.
        """
        left = self._translate(self._events.flush)
        if self._is_over:
            return left
        if self.ending.finish_reason is None:
            return left + self._stop(self._fail(TOO_EARLY))
        return left + self._stop(self._end())

    def finish_with(self, event: bytes) -> bytes:
        """Return the client's events for `event`, the last event of a stream, which the gateway
        itself created.

        An event that the engine has not finished is dropped.
        """
        self._events = EventReader()
        return self.feed(event) + self.finish()

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
        """Yield the client's events that end a translated stream which has failed."""

    def note_call(self, index: int) -> None:
        """Record the start of a tool call in the stream.

        Raises TranslationError if it was started before.
        """
        if index in self.seen_calls:
            raise TranslationError(
                "The engine wrote two tool calls at the same time, which cannot be translated."
            )
        self.seen_calls.add(index)

    def _translate(self, read: Callable[[], list[bytes]]) -> bytes:
        out: list[bytes] = []
        try:
            for event in () if self._is_over else read():
                out.append(self._event(event))
                if self._is_over:
                    break
        except TranslationError as error:
            out.append(self._stop(self._fail(ErrorDetail(str(error)))))
        return b"".join(out)

    def _event(self, data: bytes) -> bytes:
        if data.strip() == b"[DONE]":
            return self._stop(self._end())
        answer = read_answer(data)
        if answer.error is not None:
            return self._stop(self._fail(read_error(answer.error)))
        if answer.usage is not None:
            self.usage = answer.usage
        started = self._begin(answer)
        if not answer.choices:
            return started
        choice = answer.choices[0]
        if choice.finish_reason is not None:
            self.ending = choice
        return started + b"".join(self._delta(choice))

    def _begin(self, answer: ChatAnswer) -> bytes:
        if self._has_started:
            return b""
        self._has_started = True
        return b"".join(self._start(answer))

    def _stop(self, last: Iterator[bytes]) -> bytes:
        # Return the last events, and mark the stream as ended.
        #
        # If no event was sent before, the events that begin a stream precede them.
        started = self._begin(ChatAnswer())
        self._is_over = True
        return started + b"".join(last)
