"""Seal: AES-128-GCM over windows, for links that leave the machine room. Needs the extra `seal` (cryptography).

Not here: the key's origin (session.py), control messages (sealed by the agents, always).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtransfer.transports.base import TransportError

_KEY_BYTES = 16
_SLACK = 16  # the cipher wants room for a block more than it writes


class SealBroken(Exception):
    """Not what the holder of the key has sent, or not in this order."""


class Seal:
    """One direction of one link: the n-th window is sealed with nonce n, so none can be repeated or left out.

    A void window (no bytes) has nonces of its own: it may stand in for the n-th one after that was sealed already.
    """

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as missing:
            raise TransportError(
                "sealed windows need the package cryptography: install the extra `seal`"
            ) from missing
        self._make: Any = Cipher
        self._mode: Any = modes.GCM
        self._key: Any = algorithms.AES(key[:_KEY_BYTES])
        self._invalid: type[Exception] = InvalidTag
        self._count = 0
        self._buffer = bytearray()

    def void(self, about: bytes, *, instead: bool) -> bytes:
        """The tag of a window without bytes. `instead`: of the one that was closed last, which is not sent."""
        self._count -= instead
        return self.close((), 0, about)[1]

    def close(
        self, parts: Iterable[memoryview], size: int, about: bytes
    ) -> tuple[memoryview, bytes]:
        """Ciphertext of `size` bytes in parts, and its tag. `about` is covered, but not hidden.

        The ciphertext lies in this seal's own memory, until the next call.
        """
        cipher = self._make(self._key, self._mode(self._nonce(size))).encryptor()
        cipher.authenticate_additional_data(about)
        view, at = self._room(size), 0
        for part in parts:
            at += cipher.update_into(part, view[at:])
        cipher.finalize()
        return view[:size], cipher.tag

    def open(self, sealed: bytearray, tag: bytes, about: bytes) -> memoryview:
        """The plain bytes, in this seal's own memory until the next call. SealBroken if anything was touched."""
        cipher = self._make(self._key, self._mode(self._nonce(len(sealed)), tag)).decryptor()
        cipher.authenticate_additional_data(about)
        view = self._room(len(sealed))
        cipher.update_into(sealed, view)
        try:
            cipher.finalize()
        except self._invalid as wrong:
            raise SealBroken("a window's seal does not hold") from wrong
        return view[: len(sealed)]

    def _room(self, size: int) -> memoryview:
        if len(self._buffer) < size + _SLACK:
            self._buffer = bytearray(size + _SLACK)
        return memoryview(self._buffer)

    def _nonce(self, size: int) -> bytes:
        self._count += 1
        return (2 * self._count + (size == 0)).to_bytes(12, "big")
