"""The handoff each engine wants between a prefill and a decode group, as data and pure functions: the gateway's side.

One module per dialect, each a frozen Dialect; contract.py is what they have in common. Nothing here does I/O, and
nothing here knows who serves: that is the gateway's business.
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
