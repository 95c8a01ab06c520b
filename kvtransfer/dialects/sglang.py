"""SGLang: the same body to both legs at once, with a room to meet in (engines.md D).

The room belongs to the prefill engine's bootstrap server. The prefill engine caps generation
itself. Its response is discarded; it ends when the KV has been taken, and closing it drops the KV.
Either kind of server answers 400 without a room, so neither serves requests alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtransfer.dialects.contract import (
    Answer,
    Dialect,
    Edits,
    Handover,
    Needs,
    Order,
    Terms,
    Unusable,
    json_of,
    members,
)

# The servers' own probes (/health_generate) use this host: no KV is sent to it or awaited from it.
NOBODY: Mapping[str, str | int] = MappingProxyType(
    {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
)


def prefill(terms: Terms) -> Edits:
    """Name the meeting point.

    Raises ValueError without a bootstrap address; configuration has one.
    """
    if terms.bootstrap is None:
        raise ValueError("a prefill endpoint of SGLang needs a bootstrap address")
    put = {
        "bootstrap_host": json_of(terms.bootstrap.host),
        "bootstrap_port": json_of(terms.bootstrap.port),
        "bootstrap_room": json_of(terms.number),
    }
    return Edits(members(put))


def decode(terms: Terms, answer: Answer | None) -> Handover | Unusable:
    """Send the same edits to the decode server, which reports received KV as cached tokens."""
    return Handover(prefill(terms), reports_own_cache=False)


SGLANG = Dialect(
    "sglang",
    "sglang",
    Order.CONCURRENT,
    prefill,
    decode,
    needs=Needs.ADDRESS,
    reads_answer=False,
    decode_alone=False,
    abort_frees=True,
    by_itself=NOBODY,
)
