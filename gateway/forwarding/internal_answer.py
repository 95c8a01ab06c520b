"""Receives an engine's answer that is for the gateway itself and not for a client."""

from __future__ import annotations

from gateway.http.engine_connections import UpstreamConnection

MAX_BYTES = 16 * 1024 * 1024  # enough for the ids of a million tokens, or of far more blocks


class InternalAnswer:
    """Collects the head and the body of an engine's answer that is not for a client.

    If `is_kept` is False, the answer is read and discarded. If the answer is longer than MAX_BYTES,
    its connection is failed.
    """

    __slots__ = ("_answer", "_is_kept", "source")

    def __init__(self, *, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._answer = bytearray()  # not a list, whose items take more memory than a few bytes
        self.source: UpstreamConnection | None = None

    @property
    def is_writing_paused(self) -> bool:
        return False

    @property
    def body(self) -> bytes:
        index = self._answer.find(b"\r\n\r\n")
        return bytes(memoryview(self._answer)[index + 4 :]) if index >= 0 else b""

    def write(self, data: bytes) -> None:
        if not self._is_kept:
            return
        self._answer += data
        if len(self._answer) > MAX_BYTES and self.source is not None:
            self.source.fail("framing", "the engine's answer to the gateway is too long")

    def half_close(self) -> None:
        """Half-close the connection to the engine, if its answer is not complete.

        Engines treat that as an abort of the request.
        """
        if self.source is not None:
            self.source.half_close()

    def set_source(self, source: UpstreamConnection | None) -> None:
        self.source = source
