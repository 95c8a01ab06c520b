"""Encrypts KV on a connection by AES-128-GCM; needs the extra `seal` (cryptography).

protocol/session_authentication.py derives the key. The agents themselves sign control messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtransfer.transport_interface import TransportError

_KEY_BYTES = 16
_SLACK = 16  # the cipher needs room for one more block than it writes


class WindowSealError(Exception):
    """Raised for received KV that was altered, is out of order, or was encrypted with another
    key.
    """


class WindowSeal:
    """Encrypts or decrypts the KV of one direction of a connection, one unit (window) at a time.

    The n-th window uses nonce n, so a repeated or missing window is detected. A window whose bytes
    are not sent, because they became invalid, is called void. It has separate nonces, because it
    can replace the n-th window after that was encrypted.
    """

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise TransportError(
                "encryption of KV needs the Python package cryptography; install penstock-kv[seal]"
            ) from error
        self._make: Any = Cipher
        self._mode: Any = modes.GCM
        self._key: Any = algorithms.AES(key[:_KEY_BYTES])
        self._invalid: type[Exception] = InvalidTag
        self._count = 0
        self._buffer = bytearray()

    def void(self, about: bytes, *, instead: bool) -> bytes:
        """Return the tag of a window (unit of KV) whose bytes became invalid and are not sent.

        instead  whether the tag replaces that of the window which was encrypted last
        """
        self._count -= instead
        return self.close((), 0, about)[1]

    def close(
        self, parts: Iterable[memoryview], size: int, about: bytes
    ) -> tuple[memoryview, bytes]:
        """Encrypt a unit of KV (window) of `size` bytes; return the ciphertext and the
        authentication tag.

        parts  its bytes, in pieces
        about  bytes that are authenticated but not encrypted

        The ciphertext is valid until the next call.
        """
        cipher = self._make(self._key, self._mode(self._nonce(size))).encryptor()
        cipher.authenticate_additional_data(about)
        view, offset = self._room(size), 0
        for part in parts:
            offset += cipher.update_into(part, view[offset:])
        cipher.finalize()
        return view[:size], cipher.tag

    def open(self, sealed: bytearray, tag: bytes, about: bytes) -> memoryview:
        """Decrypt a unit of KV (window) and return its bytes, which are valid until the next call.

        sealed  the ciphertext
        tag     its authentication tag
        about   bytes that are authenticated but not encrypted

        Raises WindowSealError if the bytes were altered.
        """
        cipher = self._make(self._key, self._mode(self._nonce(len(sealed)), tag)).decryptor()
        cipher.authenticate_additional_data(about)
        view = self._room(len(sealed))
        cipher.update_into(sealed, view)
        try:
            cipher.finalize()
        except self._invalid as error:
            raise WindowSealError(
                "a received window (piece of KV) was altered, is out of order, or was "
                "encrypted with another key"
            ) from error
        return view[: len(sealed)]

    def _room(self, size: int) -> memoryview:
        if len(self._buffer) < size + _SLACK:
            self._buffer = bytearray(size + _SLACK)
        return memoryview(self._buffer)

    def _nonce(self, size: int) -> bytes:
        self._count += 1
        return (2 * self._count + (size == 0)).to_bytes(12, "big")
