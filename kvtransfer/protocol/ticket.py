"""Tickets: signed texts with which an agent permits another one to fetch some KV, once.

A ticket names an offer of KV, the agent that made it (the source) and that agent's current run. It
also has the agent that may fetch, the promised blocks and an end time. Gateways and engines pass it
on as opaque text.

An HMAC proves that it was issued by a holder of the fleet's key. This is the source, or another
process of the same engine before the offer is made. source.py manages the offers.
session_authentication.py proves the identity of the agent that presents a ticket.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.protocol.message_mac import MessageMac

MAX_CHARS = 1024
_MAC_BYTES = 32
_LEAST_KEY_BYTES = 16
_DOMAIN = b"penstock kv ticket 1\0"
AHEAD = bytes(16)
"""The digest in a ticket that is issued before its offer.

Usually the digest covers the offer's blocks, which are not known at that time.
"""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class TicketRefusal(StrEnum):
    """The reasons why a ticket (permission to fetch an offer) is refused.

    Reasons are counted separately, because a restart or a delay is not an attack.
    """

    MALFORMED = "malformed"
    FORGED = "forged"
    WRONG_EPOCH = "wrong_epoch"
    WRONG_SINK = "wrong_sink"
    EXPIRED = "expired"
    SPENT = "spent"
    TOO_MANY = "too_many"


class TicketRefused(Exception):
    """Raised when a ticket is refused for `reason`; the message never quotes the ticket."""

    def __init__(self, reason: TicketRefusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a ticket: permission to fetch one offer of KV once.

    offer       name of the offer
    agent       name of the source, which made the offer
    epoch       16 random bytes, drawn at every start of the source
    digest      `block_digest` of the promised blocks, or AHEAD if the offer is not yet made
    not_after   end of validity, in seconds on the monotonic clock of the source's host
    nonce       16 random bytes that identify the ticket, so that it is used only once
    sink        the only agent that may present it; None: any agent with the fleet's key

    A ticket permits only the transfer from the source into blocks that the sink names. Its size is
    not stated, because the offer has the number of tokens.
    """

    offer: _Name
    agent: _Name
    epoch: _Nonce
    digest: _Nonce
    not_after: float
    nonce: _Nonce
    sink: _Name | None = None


# The decoder is created at import, because msgspec crashes if two threads use a type for the first
# time at once.
_DECODER = msgspec.msgpack.Decoder(Ticket)


def mint_ahead(
    key: bytes, offer: str, agent: str, epoch: bytes, nonce: bytes, not_after: float
) -> str:
    """Return a ticket for an offer of KV that an agent has not made yet.

    The agent then makes the offer with the same nonce. The caller needs the fleet's key. It must
    run on the agent's host, because `not_after` is on that host's monotonic clock.
    """
    return mint(key, Ticket(offer, agent, epoch, AHEAD, not_after, nonce))


def renewed_nonce(nonce: bytes) -> bytes:
    """Return the nonce of a further ticket for the same offer of KV; each works once."""
    return hashlib.blake2b(nonce, digest_size=16, person=b"kv-renewed").digest()


def block_digest(blocks: NDArray[np.int64], generations: NDArray[np.uint32]) -> bytes:
    """Return a 16-byte hash by which a ticket identifies KV blocks and their present content.

    It changes when a block of the list is released for reuse.

    blocks       numbers of the blocks, in order
    generations  for each block, its reuse counter, which is raised when the block is released
    """
    hashed = hashlib.blake2b(digest_size=16, person=b"kv-blocks")
    hashed.update(len(blocks).to_bytes(8, "little"))
    hashed.update(np.ascontiguousarray(blocks, "<i8").tobytes())
    hashed.update(np.ascontiguousarray(generations, "<u4").tobytes())
    return hashed.digest()


def mint(key: bytes, ticket: Ticket) -> str:
    """Sign a ticket, and encode it as ASCII text that is safe in JSON, headers and URLs.

    Raises ValueError if the names in it make it too long.
    """
    body = msgspec.msgpack.encode(ticket)
    text = base64.urlsafe_b64encode(body + _mac(key, body)).rstrip(b"=").decode()
    if len(text) > MAX_CHARS:
        raise ValueError(f"a ticket of {len(text)} characters exceeds the limit of {MAX_CHARS}")
    return text


def check(key: bytes, text: str, now: float, *, epoch: bytes, sink: str | None = None) -> Ticket:
    """Verify a ticket (permission to fetch KV) that another agent presents, and return its content.

    key    the fleet's key
    text   the signed text
    now    current time on this host's monotonic clock, before which the ticket must not expire
    epoch  random bytes of this run of the agent, which the ticket must contain
    sink   the agent that presents the ticket; it must be the one that the ticket names, if any

    Raises TicketRefused. No field is read before the signature is verified.
    """
    data = _decode_text(text)
    body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise TicketRefused(
            TicketRefusal.FORGED,
            "the ticket's signature is invalid: it was made with another key, or altered",
        )
    try:
        ticket = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TicketRefused(
            TicketRefusal.MALFORMED, "the ticket has another protocol version than this agent"
        ) from error
    if ticket.epoch != epoch:
        raise TicketRefused(
            TicketRefusal.WRONG_EPOCH, "the ticket was issued before a restart of its source agent"
        )
    if ticket.sink is not None and ticket.sink != sink:
        raise TicketRefused(
            TicketRefusal.WRONG_SINK,
            f"the ticket was issued for the agent {ticket.sink!r}, not for {sink!r}",
        )
    if not now < ticket.not_after:
        raise TicketRefused(
            TicketRefusal.EXPIRED, f"the ticket expired {now - ticket.not_after:.3f} s ago"
        )
    return ticket


def _mac(key: bytes, body: bytes) -> bytes:
    if len(key) < _LEAST_KEY_BYTES:
        raise ValueError(f"a key must have at least {_LEAST_KEY_BYTES} bytes, not {len(key)}")
    return _mac_of(bytes(key)).digest(_DOMAIN + body)


# A process has the key of one fleet, or of few.
@lru_cache(8)
def _mac_of(key: bytes) -> MessageMac:
    return MessageMac(key)


def _decode_text(text: str) -> bytes:
    # Decode base64url text. Raises TicketRefused for any but the canonical encoding.
    if not _MAC_BYTES < len(text) <= MAX_CHARS:
        raise TicketRefused(
            TicketRefusal.MALFORMED,
            f"a ticket may have at most {MAX_CHARS} characters, not {len(text)}",
        )
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise TicketRefused(TicketRefusal.MALFORMED, "the ticket is not base64url text") from error
    if base64.urlsafe_b64encode(data).rstrip(b"=") != text.encode() or len(data) <= _MAC_BYTES:
        raise TicketRefused(TicketRefusal.MALFORMED, "the ticket is not base64url text")
    return data
