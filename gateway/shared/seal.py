"""Sealing: a frame is from a gateway of this fleet, as it was sent, and was not heard before.

One secret makes three keys: for the frames' authentication (keyed BLAKE2b), for prompts' fingerprints, which therefore
agree between gateways, and for digests of names, which therefore do not travel in clear. Nothing is encrypted: use TLS
where others may listen.
"""

from __future__ import annotations

import hashlib
import hmac
from struct import Struct

from gateway.shared.bus import EVERYBODY, FRAME_CAP_BYTES, ID_BYTES

MAGIC = b"PSv1"
TAG_BYTES = 16
SENDERS_REMEMBERED = 1024

_HEAD = Struct(f"<4s{ID_BYTES}s{ID_BYTES}sQ")


class Refused(Exception):
    """A frame that nobody of the fleet sent to us now. `reason`: too_long, foreign, forged, replayed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Seal:
    """Seals what `me` says and opens what others said. `fingerprint_secret` is the same for all who share `secret`."""

    def __init__(self, secret: bytes, me: bytes) -> None:
        self.me = me
        self.fingerprint_secret = _key(secret, b"ps-fingerprint")
        self._frames = _key(secret, b"ps-frames")
        self._names = _key(secret, b"ps-names")
        self._count = 0
        self._heard: dict[tuple[bytes, bool], int] = {}

    def close(self, body: bytes, to: bytes = EVERYBODY) -> bytes:
        """The frame that carries `body`."""
        self._count += 1
        told = _HEAD.pack(MAGIC, self.me, to, self._count) + body
        return told + self._tag(told)

    def open(self, frame: bytes) -> tuple[bytes, memoryview] | None:
        """(sender, body); None for what we said ourselves or what is for another. Raises Refused."""
        if len(frame) > FRAME_CAP_BYTES:
            raise Refused("too_long")
        if len(frame) < _HEAD.size + TAG_BYTES or frame[:4] != MAGIC:
            raise Refused("foreign")
        _, sender, to, count = _HEAD.unpack_from(frame)
        if sender == self.me or to not in (EVERYBODY, self.me):
            return None
        told = memoryview(frame)[:-TAG_BYTES]
        if not hmac.compare_digest(self._tag(told), frame[-TAG_BYTES:]):
            raise Refused("forged")
        self._is_new((sender, to == EVERYBODY), count)
        return sender, told[_HEAD.size :]

    def _is_new(self, line: tuple[bytes, bool], count: int) -> None:
        """What a sender says to all and what it says to us are two lines, each in order."""
        if count <= self._heard.get(line, 0):
            raise Refused("replayed")
        self._heard.pop(line, None)  # whoever spoke last is forgotten last
        self._heard[line] = count
        if len(self._heard) > SENDERS_REMEMBERED:
            del self._heard[next(iter(self._heard))]

    def _tag(self, told: bytes | memoryview) -> bytes:
        return hashlib.blake2b(told, key=self._frames, digest_size=TAG_BYTES).digest()

    def digest(self, name: str) -> int:
        """64 bits that stand for a name among those who share the secret."""
        made = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._names, digest_size=8)
        return int.from_bytes(made.digest(), "little")


def _key(secret: bytes, use: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=use).digest()
