"""The handoff that each engine expects between prefill and decode, as data and pure functions.

This is the gateway's side. One module per dialect, each with a frozen Dialect; contract.py has the
common types. Nothing here does I/O or knows the endpoints.
"""

from kvtransfer.dialects.catalogue import DIALECTS, get_dialect, known_members, standalone_members
from kvtransfer.dialects.contract import (
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
from kvtransfer.dialects.events import as_events

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
