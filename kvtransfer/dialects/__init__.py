"""The handoff that each engine expects between prefill and decode, as data and pure functions.

This is the gateway's side. One module per dialect, each with a frozen Dialect; contract.py has the
common types. Nothing here does I/O or knows the endpoints.
"""

from kvtransfer.dialects.catalogue import DIALECTS, by_itself, known_members, named
from kvtransfer.dialects.contract import (
    Answer,
    Bootstrap,
    Dialect,
    Edits,
    Finished,
    Handover,
    Identity,
    Needs,
    Order,
    Terms,
    Unusable,
    members,
    read_answer,
)
from kvtransfer.dialects.events import as_events

__all__ = [
    "DIALECTS",
    "Answer",
    "Bootstrap",
    "Dialect",
    "Edits",
    "Finished",
    "Handover",
    "Identity",
    "Needs",
    "Order",
    "Terms",
    "Unusable",
    "as_events",
    "by_itself",
    "known_members",
    "members",
    "named",
    "read_answer",
]
