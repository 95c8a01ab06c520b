"""Tickets: a source's written leave to fetch one offer, once. Opaque text that travels through gateways and engines.

A ticket says which offer of which agent's which life, for whom, which blocks of which generations, until when; an HMAC
says that the agent itself wrote it. Not here: the offers (source.py), or proof of who presents a ticket.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from enum import StrEnum
from heapq import heappop, heappush
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

MOST_CHARS = 1024
_MAC_BYTES = 32
_LEAST_KEY_BYTES = 16
_DOMAIN = b"penstock kv ticket 1\0"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Refusal(StrEnum):
    """Why a ticket is not honoured. Metrics count each apart: a restart is no attack, and an attack is no delay."""

    MALFORMED = "malformed"
    FORGED = "forged"
    WRONG_EPOCH = "wrong_epoch"
    WRONG_SINK = "wrong_sink"
    EXPIRED = "expired"
    SPENT = "spent"
    TOO_MANY = "too_many"


class Refused(Exception):
    """The ticket gives no leave. `reason` for those who count; the message never quotes the ticket."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a ticket says.

    offer       name of the offer at its source
    agent       name of the source, and `epoch`, 16 bytes drawn anew at every start of it
    digest      `digest_of` the blocks and generations that were promised
    not_after   seconds on the source's own monotonic clock, which minted it and will check it
    nonce       16 random bytes: what "once" is counted by
    sink        the only agent that may present it; None for any of the fleet

    No direction: it is always the source that writes, into blocks that the sink has named. And no size:
    it is the offer that says how many tokens there are.
    """

    offer: _Name
    agent: _Name
    epoch: _Nonce
    digest: _Nonce
    not_after: float
    nonce: _Nonce
    sink: _Name | None = None


# Made here and not at the first ticket: two threads that both meet a type first crash msgspec.
_DECODER = msgspec.msgpack.Decoder(Ticket)


def renewed(nonce: bytes) -> bytes:
    """The nonce of the next ticket for the same offer: another ticket, which serves once of its own."""
    return hashlib.blake2b(nonce, digest_size=16, person=b"kv-renewed").digest()


def digest_of(blocks: NDArray[np.int64], generations: NDArray[np.uint32]) -> bytes:
    """16 bytes that stand for these blocks, in this order, at these generations."""
    hashed = hashlib.blake2b(digest_size=16, person=b"kv-blocks")
    hashed.update(len(blocks).to_bytes(8, "little"))
    hashed.update(np.ascontiguousarray(blocks, "<i8").tobytes())
    hashed.update(np.ascontiguousarray(generations, "<u4").tobytes())
    return hashed.digest()


def mint(key: bytes, ticket: Ticket) -> str:
    """The ticket as ASCII text, safe in JSON, headers and URLs. ValueError if its names make it too long."""
    body = msgspec.msgpack.encode(ticket)
    text = base64.urlsafe_b64encode(body + _mac(key, body)).rstrip(b"=").decode()
    if len(text) > MOST_CHARS:
        raise ValueError(f"a ticket of {len(text)} characters is over the limit of {MOST_CHARS}")
    return text


def check(key: bytes, text: str, now: float, *, epoch: bytes, sink: str | None = None) -> Ticket:
    """What `text` says, if this agent (of this `epoch`) wrote it, it has time left, and `sink` may present it.

    Raises Refused. Nothing in the text is read as fields before its HMAC is found right. About 3 us.
    """
    data = _bytes(text)
    body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise Refused(Refusal.FORGED, "this agent has written no such ticket")
    try:
        ticket = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise Refused(Refusal.MALFORMED, "the ticket is of another version") from wrong
    if ticket.epoch != epoch:
        raise Refused(Refusal.WRONG_EPOCH, "the ticket is from before its source was started anew")
    if ticket.sink is not None and ticket.sink != sink:
        raise Refused(Refusal.WRONG_SINK, "the ticket was written for another agent")
    if not now < ticket.not_after:
        raise Refused(Refusal.EXPIRED, f"the ticket ran out {now - ticket.not_after:.3f} s ago")
    return ticket


class Used:
    """Which tickets have been spent: remembers each until it would be refused as expired anyway.

    Holds at most `most` (refusing more) so that nobody can fill the memory. Owned by one book, not thread-safe.
    """

    def __init__(self, most: int = 1 << 18) -> None:
        self._most = most
        self._nonces: set[bytes] = set()
        self._by_end: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._nonces)

    def look(self, ticket: Ticket, now: float) -> None:
        """Raises Refused if a checked ticket was used before, or if too many are remembered."""
        while self._by_end and self._by_end[0][0] <= now:
            self._nonces.discard(heappop(self._by_end)[1])
        if ticket.nonce in self._nonces:
            raise Refused(Refusal.SPENT, "the ticket has been used")
        if len(self._nonces) >= self._most:
            raise Refused(Refusal.TOO_MANY, f"{self._most} tickets are in use")

    def spend(self, ticket: Ticket, now: float) -> None:
        """Use a checked ticket: it has served. Raises Refused as `look` does."""
        self.look(ticket, now)
        self._nonces.add(ticket.nonce)
        heappush(self._by_end, (ticket.not_after, ticket.nonce))


def _mac(key: bytes, body: bytes) -> bytes:
    if len(key) < _LEAST_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes can be guessed: at least {_LEAST_KEY_BYTES}")
    return hmac.digest(key, _DOMAIN + body, "sha256")


def _bytes(text: str) -> bytes:
    """The bytes that `text` is the one encoding of: a ticket has no second spelling."""
    if not _MAC_BYTES < len(text) <= MOST_CHARS:
        raise Refused(
            Refusal.MALFORMED, f"a ticket has at most {MOST_CHARS} characters, this has {len(text)}"
        )
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as wrong:
        raise Refused(Refusal.MALFORMED, "the ticket is no base64url text") from wrong
    if base64.urlsafe_b64encode(data).rstrip(b"=") != text.encode() or len(data) <= _MAC_BYTES:
        raise Refused(Refusal.MALFORMED, "the ticket is no base64url text")
    return data
