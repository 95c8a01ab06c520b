"""Authenticates frames between gateways: the sender is valid, and the frame is neither modified nor
replayed.

One secret yields three keys. The first authenticates frames (keyed BLAKE2b). The second is for
prompt fingerprints, so that all gateways compute the same ones. The third is for digests of names,
so that names are not sent in clear text. Frames are not encrypted: use TLS where others may read
them.
"""

from __future__ import annotations

import hashlib
import hmac
from struct import Struct

from gateway.peers.bus import BROADCAST, FRAME_CAP_BYTES, ID_BYTES

MAGIC = b"PSv1"
TAG_BYTES = 16
SENDERS_REMEMBERED = 1024

_HEAD = Struct(f"<4s{ID_BYTES}s{ID_BYTES}sQ")


class FrameRejectedError(Exception):
    """Raised for a frame from another gateway that is not authentic.

    reason  too_long, foreign, forged or replayed
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FrameAuth:
    """Adds authentication tags to outgoing frames and verifies those of incoming frames.

    fingerprint_secret  equal in all gateways with the same `secret`
    """

    def __init__(self, secret: bytes, me: bytes) -> None:
        self.own_id = me
        self.fingerprint_secret = _key(secret, b"ps-fingerprint")
        self._frame_key = _key(secret, b"ps-frames")
        self._name_key = _key(secret, b"ps-names")
        self._count = 0
        self._last_counts: dict[tuple[bytes, bool], int] = {}

    def seal(self, body: bytes, to: bytes = BROADCAST) -> bytes:
        """Return a frame with `body`, the ids of sender and recipient, a counter, and an
        authentication tag.

        The tag authenticates all of these.
        """
        self._count += 1
        data = _HEAD.pack(MAGIC, self.own_id, to, self._count) + body
        return data + self._tag(data)

    def verify(self, frame: bytes) -> tuple[bytes, memoryview] | None:
        """Verify a frame from another gateway and return (sender, body).

        Returns None for this gateway's own frames and for frames to other recipients. Raises
        FrameRejectedError when the verification fails.
        """
        if len(frame) > FRAME_CAP_BYTES:
            raise FrameRejectedError("too_long")
        if len(frame) < _HEAD.size + TAG_BYTES or frame[:4] != MAGIC:
            raise FrameRejectedError("foreign")
        _, sender, to, count = _HEAD.unpack_from(frame)
        if sender == self.own_id or to not in (BROADCAST, self.own_id):
            return None
        data = memoryview(frame)[:-TAG_BYTES]
        if not hmac.compare_digest(self._tag(data), frame[-TAG_BYTES:]):
            raise FrameRejectedError("forged")
        self._check_replay((sender, to == BROADCAST), count)
        return sender, data[_HEAD.size :]

    def _check_replay(self, stream: tuple[bytes, bool], count: int) -> None:
        # Raise FrameRejectedError unless the count is larger than the last one of this stream.
        #
        # A sender's broadcasts and direct frames are two streams.
        if count <= self._last_counts.get(stream, 0):
            raise FrameRejectedError("replayed")
        # Re-insert at the end, so that the stream that was idle longest is dropped first.
        self._last_counts.pop(stream, None)
        self._last_counts[stream] = count
        if len(self._last_counts) > SENDERS_REMEMBERED:
            del self._last_counts[next(iter(self._last_counts))]

    def _tag(self, data: bytes | memoryview) -> bytes:
        return hashlib.blake2b(data, key=self._frame_key, digest_size=TAG_BYTES).digest()

    def digest(self, name: str) -> int:
        """Return the 64-bit number for a name, equal in all gateways with the same secret."""
        encoded = name.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(encoded, key=self._name_key, digest_size=8)
        return int.from_bytes(digest.digest(), "little")


def _key(secret: bytes, use: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=use).digest()
