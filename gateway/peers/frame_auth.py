"""Authenticates frames between gateways: the sender is valid, and the frame is neither modified nor
replayed.

One secret yields three keys. The first authenticates frames (keyed BLAKE2b). The second is for
prompt fingerprints, so that all gateways compute the same ones. The third is for digests of names,
so that names are not sent in clear text. Frames are not encrypted: use TLS where others may read
them.

While gateways change to a new secret, frames under both secrets are accepted. If `cache.secret` is
set, it yields the keys of fingerprints and names instead, so that a change of secrets does not
affect them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from struct import Struct
from typing import NamedTuple

from gateway.config import Config
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


class VerifiedFrame(NamedTuple):
    """An authentic frame from another gateway.

    has_known_blocks  whether the sender computes block keys of prompts with the same secret as this
                      gateway
    """

    sender: bytes
    body: memoryview
    has_known_blocks: bool


class FrameAuth:
    """Adds authentication tags to outgoing frames, and verifies those of incoming frames.

    fingerprint_secret  key of prompt fingerprints, equal in all gateways with the same `secret` or
                        the same `stable_secret`
    """

    def __init__(
        self,
        secret: bytes,
        own_id: bytes,
        other_secret: bytes | None = None,
        stable_secret: bytes | None = None,
    ) -> None:
        """Derive the keys from the secrets.

        secret         authenticates outgoing and incoming frames
        other_secret   authenticates incoming frames too; None: only `secret` does
        stable_secret  yields the keys of fingerprints and names, which thus survive a change of
                       `secret`; None: `secret` and `other_secret` yield them
        """
        self.own_id = own_id
        self.fingerprint_secret = _key(stable_secret or secret, b"ps-fingerprint")
        self._frame_key = _key(secret, b"ps-frames")
        self._name_key = _key(stable_secret or secret, b"ps-names")
        self._other_frame_key = None if other_secret is None else _key(other_secret, b"ps-frames")
        self._other_name_key = (
            None
            if other_secret is None or stable_secret is not None
            else _key(other_secret, b"ps-names")
        )
        self._count = 0
        self._last_counts: dict[tuple[bytes, bool], int] = {}

    def seal(self, body: bytes, to: bytes = BROADCAST) -> bytes:
        """Return a frame with `body`, the ids of sender and recipient, a counter, and an
        authentication tag.

        The tag authenticates all of these.
        """
        self._count += 1
        data = _HEAD.pack(MAGIC, self.own_id, to, self._count) + body
        return data + _tag(data, self._frame_key)

    def verify(self, frame: bytes) -> VerifiedFrame | None:
        """Verify a frame from another gateway and return its sender and body.

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
        tag, other_key = frame[-TAG_BYTES:], self._other_frame_key
        is_own = hmac.compare_digest(_tag(data, self._frame_key), tag)
        if not is_own and (
            other_key is None or not hmac.compare_digest(_tag(data, other_key), tag)
        ):
            raise FrameRejectedError("forged")
        self._check_replay((sender, to == BROADCAST), count)
        return VerifiedFrame(sender, data[_HEAD.size :], is_own or self._other_name_key is None)

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

    def digest(self, name: str) -> int:
        """Return the 64-bit number for a name, equal in all gateways with the same secret."""
        return _digest(name, self._name_key)

    def digests(self, name: str) -> tuple[int, ...]:
        """Return the numbers that may stand for a name in incoming frames; this gateway's own comes
        first.
        """
        own, other_key = self.digest(name), self._other_name_key
        return (own,) if other_key is None else (own, _digest(name, other_key))


def create_frame_auth(config: Config, local_secret: bytes | None) -> FrameAuth | None:
    """Return the authentication of messages to other gateways, or None if there are no others.

    `local_secret` is the secret of the worker processes of one machine, which have no `shared`.
    """
    if config.shared is not None:
        key, other, stable = config.shared.key, config.shared.other_key, config.cache.secret
        return FrameAuth(
            key.reveal().encode(),
            secrets.token_bytes(ID_BYTES),
            None if other is None else other.reveal().encode(),
            None if stable is None else stable.reveal().encode(),
        )
    return None if local_secret is None else FrameAuth(local_secret, secrets.token_bytes(ID_BYTES))


def _tag(data: bytes | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=TAG_BYTES).digest()


def _digest(name: str, key: bytes) -> int:
    encoded = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, key=key, digest_size=8).digest(), "little")


def _key(secret: bytes, use: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=use).digest()


def fingerprint_secret(config: Config, auth: FrameAuth | None, inherited: bytes | None) -> bytes:
    """Return the key of prompt fingerprints.

    It is shared with other gateways, `inherited` from a predecessor process, derived from
    `cache.secret`, or random. Gateways with `shared` derive it from `cache.secret` if that is set,
    else from their key.
    """
    if auth is not None:
        return auth.fingerprint_secret
    if inherited:
        return inherited
    if config.cache.secret is None:
        return secrets.token_bytes(32)
    secret = config.cache.secret.reveal().encode()
    return hmac.digest(secret, b"penstock fingerprints", "sha256")
