"""The handoff between prefill and decode requests that each engine expects, as pure functions.

This is the gateway's side. There is one module per dialect, each with a frozen Dialect; dialect.py
has the common types. No module here does I/O or knows the endpoints.
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
