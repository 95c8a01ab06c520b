"""Translates the payload of one answer on its way through a relay, as a whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gateway.protocol.response.output_queue import StepQueue
from gateway.protocol.translate.chat_types import TranslationError
from gateway.protocol.translate.stream_translator import StreamTranslator
from gateway.protocol.upstream_error import UpstreamError

MAX_WHOLE_BYTES = 8 * 1024 * 1024
"""Maximum bytes of an answer that is not streamed, which is decoded at once. A text of a million
tokens takes about five million bytes."""


class AnswerTranslator:
    """Translates one answer of an engine to the format of the client's API.

    Its output may be many times as long as its input. It is therefore returned in steps: after each
    call of feed(), call more() until is_behind is false.

    Each attempt needs a new translator. Only an engine that continues a broken answer uses the
    translator of the engine before.
    """

    __slots__ = ("_body", "_output", "_stream", "_translate_whole")

    def __init__(
        self,
        translate_whole: Callable[[bytearray], Iterator[bytes]],
        stream: StreamTranslator | None = None,
    ) -> None:
        """Initialize a translator of answers with functions for a whole answer and for a stream.

        `stream` is None for an API without streams.
        """
        self._translate_whole = translate_whole
        self._stream = stream
        self._body = bytearray()
        self._output = StepQueue()

    @property
    def is_behind(self) -> bool:
        """Return whether there may be more output for the client: call more() for it."""
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
        """Return the next bytes for the client that earlier input has led to."""
        return self._output.take()

    def finish_with(self, event: bytes) -> bytes:
        """Return the client's bytes for `event`, the last event of a stream, which the gateway
        itself created.

        All bytes that are still to come precede them.
        """
        if self._stream is None:
            return event
        return self._output.take_all() + b"".join(self._stream.finish_with(event))
