"""A downstream that is nobody's connection: it keeps an answer, or lets it go by."""

from __future__ import annotations

from gateway.upstream import Connection

MOST_BYTES = 16 * 1024 * 1024  # a million token ids, or block ids of far more


class Inbox:
    """What an engine answers to the gateway itself, as a relay for HTTP/1.0 clients writes it: a head, then the body.

    With `keep` False nothing is kept. Too long an answer is failed rather than kept.
    """

    __slots__ = ("_keep", "_kept", "_size", "source")

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._kept: list[bytes] = []
        self._size = 0
        self.source: Connection | None = None

    @property
    def writing_paused(self) -> bool:
        return False

    @property
    def body(self) -> bytes:
        """The answer's body as far as it has come."""
        kept = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
        at = kept.find(b"\r\n\r\n")
        return kept[at + 4 :] if at >= 0 else b""

    def write(self, data: bytes) -> None:
        if not self._keep:
            return
        self._kept.append(data)
        self._size += len(data)
        if self._size > MOST_BYTES and self.source is not None:
            self.source.fail("framing", "the engine's answer to the gateway is too long")

    def call_off(self) -> None:
        """Tell the engine that nobody asks any more, if it still answers."""
        if self.source is not None:
            self.source.call_off()

    def set_source(self, source: Connection | None) -> None:
        self.source = source
