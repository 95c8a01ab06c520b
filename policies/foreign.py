"""What other gateways have booked at an endpoint: absolute contributions, each source's replaced as a whole.

They are added to the booked numbers of EndpointLoad, so that caps, scorers and strangers see the fleet's truth, and
`others` keeps their sum, so that what this gateway booked itself can be told. Not here: how word of them comes
(gateway/shared).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from policies.model import EndpointLoad


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


def foreign(load: EndpointLoad, source: bytes, share: Share | None, now: float) -> bool:
    """`source` holds this share at the endpoint now, in place of what it held before; None or NOTHING: none any more.

    False when that is no news.
    """
    others = load.others
    before = others.shares.get(source, NOTHING)
    after = share or NOTHING
    if before == after:
        return False
    if after == NOTHING:
        del others.shares[source]
    else:
        others.shares[source] = after
    for name in FIELDS:
        change = getattr(after, name) - getattr(before, name)
        if change:
            setattr(others, name, getattr(others, name) + change)
            setattr(load, name, getattr(load, name) + change)
    if load.believed:
        load.timeline.advance(load, now)
        load.timeline.refresh(load, now)
    return True


def own(load: EndpointLoad) -> Share:
    """What this gateway itself holds at the endpoint."""
    others = load.others
    return Share(
        load.in_flight - others.in_flight,
        load.decoding - others.decoding,
        load.prefill_tokens - others.prefill_tokens,
        load.decode_tokens - others.decode_tokens,
        load.expected_tokens - others.expected_tokens,
        load.kv_booked - others.kv_booked,
        load.answers - others.answers,
    )
