"""The part of an endpoint's load that other gateways have reserved, by gateway.

load_ledger.py adds it to the numbers of EndpointLoad. So caps, scorers and the count of external
requests cover all gateways. The sum is also stored here, so that this gateway's own part can be
computed. The package gateway/peers exchanges the loads between gateways.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class PeerShare(msgspec.Struct, frozen=True, array_like=True):
    """The load that one other gateway has reserved at one endpoint which both use.

    The fields are those of EndpointLoad and EngineLoad with the same names, such as the number of
    requests and their prompt tokens, but count only the requests of that gateway.
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

    Only load_ledger.set_peer_load changes it.
    """

    __slots__ = (*FIELDS, "shares")

    def __init__(self) -> None:
        self.in_flight = self.answers = self.decoding = 0
        self.prefill_tokens = self.decode_tokens = self.expected_tokens = self.kv_reserved = 0
        self.shares: dict[bytes, PeerShare] = {}
