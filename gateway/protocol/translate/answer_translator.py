"""Translates the payload of one answer on its way through a relay, as a whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable

from gateway.protocol.translate.chat_answers import TranslationError
from gateway.protocol.translate.stream_translator import StreamTranslator
from gateway.protocol.upstream_error import UpstreamError

MAX_WHOLE_BYTES = 64 * 1024 * 1024
"""Maximum bytes of an answer that is not streamed, which must be complete before it can be
translated."""


class AnswerTranslator:
    """Translates one answer of an engine to the format of the client's API.

    Each attempt needs a new translator. Only an engine that continues a broken answer uses the
    translator of the engine before.
    """

    __slots__ = ("_body", "_stream", "_translate_whole")

    def __init__(
        self, translate_whole: Callable[[bytes], bytes], stream: StreamTranslator | None = None
    ) -> None:
        """Initialize a translator of answers with functions for a whole answer and for a stream.

        `stream` is None for an API without streams.
        """
        self._translate_whole = translate_whole
        self._stream = stream
        self._body = bytearray()

    def feed(self, payload: bytes, *, is_sse: bool, is_complete: bool) -> bytes:
        """Translate the engine's next bytes, and return the bytes for the client.

        Raises UpstreamError if the answer is too long or cannot be translated.
        """
        if is_sse and self._stream is not None:
            return self._stream.feed(payload)
        self._body += payload
        if len(self._body) > MAX_WHOLE_BYTES:
            raise UpstreamError("translation", "the engine's answer is too long to be translated")
        if not is_complete:
            return b""
        try:
            return self._translate_whole(bytes(self._body))
        except TranslationError as error:
            raise UpstreamError("translation", str(error)) from error

    def finish_with(self, event: bytes) -> bytes:
        """Return the client's bytes for `event`, the last event of a stream, which the gateway
        itself created.
        """
        return event if self._stream is None else self._stream.finish_with(event)
