"""The part of an endpoint's load that other gateways have reserved, with one share per gateway.

load_ledger.py adds the shares to the numbers of EndpointLoad, so that caps, scorers and the count
of external requests cover all gateways. Their sum is kept here, so that this gateway's own part can
be computed. The gateway's package `peers` transports the shares.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class PeerShare(msgspec.Struct, frozen=True, array_like=True):
    """The load that one gateway has reserved at one endpoint.

    The fields are those of EndpointLoad and EngineLoad with the same names, for this gateway's
    requests only.
    """

    in_flight: Amount = 0
    decoding: Amount = 0
    prefill_tokens: Amount = 0
    decode_tokens: Amount = 0
    expected_tokens: Amount = 0
    kv_reserved: Amount = 0
    answers: Amount = 0


NOTHING = PeerShare()
FIELDS = PeerShare.__struct_fields__


class PeerLoad:
    """The load that other gateways have reserved at one endpoint, by gateway, and its sum.

    Only ledger.set_peer_load changes it.
    """

    __slots__ = (*FIELDS, "shares")

    def __init__(self) -> None:
        self.in_flight = self.answers = self.decoding = 0
        self.prefill_tokens = self.decode_tokens = self.expected_tokens = self.kv_reserved = 0
        self.shares: dict[bytes, PeerShare] = {}
