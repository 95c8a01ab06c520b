"""Seal: AES-128-GCM over windows, for links that leave the machine room. Needs the extra `seal` (cryptography).

Not here: the key's origin (session.py), control messages (sealed by the agents, always).
"""

from __future__ import annotations

from typing import Any

from kvtransfer.transports.base import TransportError

TAG_BYTES = 16
_KEY_BYTES = 16


class SealBroken(Exception):
    """Not what the holder of the key has sent, or not in this order."""


class Seal:
    """One direction of one link: the n-th window is sealed with nonce n, so none can be repeated or left out."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as missing:
            raise TransportError("sealed windows need the package cryptography: install the extra `seal`") from missing
        self._cipher: Any = AESGCM(key[:_KEY_BYTES])
        self._count = 0

    def close(self, data: bytes | bytearray, about: bytes) -> tuple[bytes, bytes]:
        """(ciphertext, tag). `about` is covered, but not hidden."""
        sealed = self._cipher.encrypt(self._nonce(), data, about)
        return sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]

    def open(self, data: bytes | bytearray, about: bytes) -> bytes:
        """The plain bytes of ciphertext with its tag behind it. SealBroken if anything was touched."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._cipher.decrypt(self._nonce(), data, about)
        except InvalidTag as wrong:
            raise SealBroken("a window's seal does not hold") from wrong
        return opened

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")
