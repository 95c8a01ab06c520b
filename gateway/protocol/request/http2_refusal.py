"""Detects and refuses cleartext HTTP/2 (prior knowledge), which the gateway does not support.

An HTTP/2 client understands the refusal, and may repeat its requests over HTTP/1.1 (RFC 9113, 3.4
and 7).
"""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
"""The first bytes that an HTTP/2 client sends. `SM` and frames follow."""

_SETTINGS, _GOAWAY = 4, 7
_HTTP_1_1_REQUIRED = 0xD


def _frame(kind: int, payload: bytes = b"") -> bytes:
    # Return an HTTP/2 frame of this type for stream 0, without flags.
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload


REFUSAL = _frame(_SETTINGS) + _frame(
    _GOAWAY,
    (0).to_bytes(4, "big") + _HTTP_1_1_REQUIRED.to_bytes(4, "big") + b"This server speaks HTTP/1.1",
)
"""The response to an HTTP/2 client: the server's preface, and GOAWAY with HTTP_1_1_REQUIRED.

It states that no stream was or will be processed.
"""
