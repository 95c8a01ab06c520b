"""SGLang: the same body to both at once, with a room of the prefill's bootstrap server to meet in (engines.md D).

The prefill server caps generation itself and its answer is dropped; it is over when the KV has been taken, and a closed
one gives up its KV. A server of either kind answers 400 without a room: it serves nobody alone.
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

# The servers' own probes (/health_generate) meet nobody so: no KV is sent or awaited for this host.
NOBODY: Mapping[str, str | int] = MappingProxyType(
    {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
)


def prefill(terms: Terms) -> Edits:
    """Where to meet. Raises ValueError without a bootstrap address, which the configuration refuses."""
    if terms.bootstrap is None:
        raise ValueError("a prefill endpoint of SGLang has a bootstrap address")
    put = {
        "bootstrap_host": json_of(terms.bootstrap.host),
        "bootstrap_port": json_of(terms.bootstrap.port),
        "bootstrap_room": json_of(terms.number),
    }
    return Edits(members(put))


def decode(terms: Terms, answer: Answer | None) -> Handover | Unusable:
    """The same to the decode server, which reports the KV it was sent as cached tokens."""
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
