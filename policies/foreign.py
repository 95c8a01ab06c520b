"""What other gateways have booked at an endpoint: absolute contributions, each source's replaced as a whole.

They are added (ledger.py) to the booked numbers of EndpointLoad, so that caps, scorers and strangers see the fleet's truth, and
`others` keeps their sum, so that what this gateway booked itself can be told. Not here: how word of them comes
(gateway/shared).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway holds at one endpoint, in the units of EndpointLoad."""

    in_flight: Amount = 0
    decoding: Amount = 0
    prefill_tokens: Amount = 0
    decode_tokens: Amount = 0
    expected_tokens: Amount = 0
    kv_booked: Amount = 0
    answers: Amount = 0


NOTHING = Share()
FIELDS = Share.__struct_fields__


class Others:
    """The sum of other gateways' shares at one endpoint, and each of them. One writer: `foreign`."""

    __slots__ = (*FIELDS, "shares")

    def __init__(self) -> None:
        self.in_flight = self.answers = self.decoding = 0
        self.prefill_tokens = self.decode_tokens = self.expected_tokens = self.kv_booked = 0
        self.shares: dict[bytes, Share] = {}
