"""How each kind of engine passes KV from a prefill to a decode request: one module per protocol.

Such a protocol is called a dialect here. It says which JSON members the gateway adds to the two
requests, and what it reads from the prefill response. All of it is data and pure functions, without
I/O; dialect.py has the types.
"""

from kvtransfer.dialects.catalogue import DIALECTS, get_dialect, known_members, standalone_members
from kvtransfer.dialects.dialect import (
    BootstrapAddress,
    DecodeRequest,
    Dialect,
    FinishedResponse,
    HandoffTerms,
    LegOrder,
    PrefillIdentity,
    PrefillResponse,
    Prerequisite,
    RequestEdits,
    UnusableResponse,
    encode_members,
    parse_response,
)
from kvtransfer.dialects.finished_prefill import as_events

__all__ = [
    "DIALECTS",
    "BootstrapAddress",
    "DecodeRequest",
    "Dialect",
    "FinishedResponse",
    "HandoffTerms",
    "LegOrder",
    "PrefillIdentity",
    "PrefillResponse",
    "Prerequisite",
    "RequestEdits",
    "UnusableResponse",
    "as_events",
    "encode_members",
    "get_dialect",
    "known_members",
    "parse_response",
    "standalone_members",
]
