"""Signs messages with HMAC-SHA256 without releasing Python's interpreter lock.

hmac.digest releases the lock even for a few bytes. Another thread may then take it to compute in
Python, and the message waits until that thread releases it.
"""

from __future__ import annotations

import hashlib

_SHA256_BLOCK_BYTES = 64
# The most bytes that hashlib hashes while it holds the interpreter lock.
_PART_BYTES = 2047
# Maximum size of a message that is hashed while the interpreter lock is held. Hashing a larger one
# would block other threads for too long.
_MOST_HELD_BYTES = 32 << 10


class MessageMac:
    """Computes HMAC-SHA256 of messages under one key. May be used by several threads."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if len(key) > _SHA256_BLOCK_BYTES:
            key = hashlib.sha256(key).digest()
        padded = key.ljust(_SHA256_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def digest(self, message: bytes) -> bytes:
        """Return the HMAC-SHA256 of a message, the same as hmac.digest(key, message, "sha256")."""
        inner, outer = self._inner.copy(), self._outer.copy()
        if _PART_BYTES < len(message) <= _MOST_HELD_BYTES:
            view = memoryview(message)
            for begin in range(0, len(view), _PART_BYTES):
                inner.update(view[begin : begin + _PART_BYTES])
        else:
            inner.update(message)
        outer.update(inner.digest())
        return outer.digest()
