"""What other gateways have booked at an endpoint: one absolute share per gateway.

The ledger adds them to the booked numbers of EndpointLoad, so that caps, scorers and the count of
external requests cover the whole fleet. Their sum is stored as well, so that the own part can be
computed. Transport is in the gateway's peers package.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class PeerShare(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway has booked at one endpoint, in the units of EndpointLoad."""

    in_flight: Amount = 0
    decoding: Amount = 0
    prefill_tokens: Amount = 0
    decode_tokens: Amount = 0
    expected_tokens: Amount = 0
    kv_booked: Amount = 0
    answers: Amount = 0


NOTHING = PeerShare()
FIELDS = PeerShare.__struct_fields__


class PeerLoad:
    """The shares of other gateways at one endpoint, and their sum.

    Written by ledger.set_peer_load only.
    """

    __slots__ = (*FIELDS, "shares")

    def __init__(self) -> None:
        self.in_flight = self.answers = self.decoding = 0
        self.prefill_tokens = self.decode_tokens = self.expected_tokens = self.kv_booked = 0
        self.shares: dict[bytes, PeerShare] = {}
