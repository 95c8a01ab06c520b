"""Authenticates frames between gateways: frames that are forged, modified or replayed are rejected.

One secret yields three keys:

- The first authenticates frames (keyed BLAKE2b).
- The second hashes prompts, so that all gateways compute the same hashes.
- The third hashes names, so that names are not sent in clear text.

Frames are not encrypted; use TLS where others may read them. During a change of the secret, frames
with the old and with the new one are accepted. If `cache.secret` is set, the keys for prompts and
names come from it instead, so that a change of the secret does not affect them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from struct import Struct
from typing import NamedTuple

from gateway.config import Config
from gateway.peers.bus_interface import BROADCAST, FRAME_CAP_BYTES, ID_BYTES

MAGIC = b"PSv1"
TAG_BYTES = 16
SENDERS_REMEMBERED = 1024

_HEAD = Struct(f"<4s{ID_BYTES}s{ID_BYTES}sQ")


class FrameRejectedError(Exception):
    """Raised for a frame from another gateway that fails the authentication.

    reason  too_long, foreign, forged or replayed
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class VerifiedFrame(NamedTuple):
    """A frame from another gateway that has passed the authentication.

    has_known_blocks  whether the sender hashes prompts with the same key as this gateway
    """

    sender: bytes
    body: memoryview
    has_known_blocks: bool


class FrameAuth:
    """Adds authentication tags to outgoing frames, and verifies the tags of incoming frames.

    fingerprint_secret  key of the hashes of prompts; it is equal in all gateways with the same
                        `secret` or the same `stable_secret`
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
        other_secret   also accepted for incoming frames, during a change of the secret; None: no
                       other secret is accepted
        stable_secret  yields the keys for prompts and names, so that a change of `secret` does not
                       affect them; None: `secret` and `other_secret` yield these keys
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
        """Return a frame that contains `body`, the ids of sender and recipient, and a counter.

        Its authentication tag covers all of these.
        """
        self._count += 1
        data = _HEAD.pack(MAGIC, self.own_id, to, self._count) + body
        return data + _tag(data, self._frame_key)

    def verify(self, frame: bytes) -> VerifiedFrame | None:
        """Verify a frame from another gateway, and return its sender and body.

        Returns None for frames that this gateway has sent itself, and for frames to other gateways.
        Raises FrameRejectedError if the frame fails the authentication.
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
        """Return a 64-bit keyed hash of a name, equal in all gateways with the same secret."""
        return _digest(name, self._name_key)

    def digests(self, name: str) -> tuple[int, ...]:
        """Return the digests that may stand for a name in incoming frames.

        The first is the digest that this gateway sends. During a change of the secret, there is a
        second one.
        """
        own, other_key = self.digest(name), self._other_name_key
        return (own,) if other_key is None else (own, _digest(name, other_key))


def create_frame_auth(config: Config, local_secret: bytes | None) -> FrameAuth | None:
    """Return the authentication of frames; None if this gateway shares no state with others.

    `local_secret` is the secret of the worker processes of one machine, for a configuration without
    a `shared` section.
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
    """Return the key with which this gateway hashes prompts.

    Gateways that share state derive it from `cache.secret` if that is set, else from their shared
    key. A gateway without others takes the key `inherited` from the process that it replaces,
    derives it from `cache.secret`, or creates a random one.
    """
    if auth is not None:
        return auth.fingerprint_secret
    if inherited:
        return inherited
    if config.cache.secret is None:
        return secrets.token_bytes(32)
    secret = config.cache.secret.reveal().encode()
    return hmac.digest(secret, b"penstock fingerprints", "sha256")
