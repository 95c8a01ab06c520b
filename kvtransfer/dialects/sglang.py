"""SGLang: the same body to both at once, with a room of the prefill's bootstrap server to meet in (engines.md D).

The prefill server caps generation itself and its answer is dropped. A decode server without a room answers 400: it
serves nobody alone.
"""

from __future__ import annotations

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
)


def prefill(terms: Terms) -> Edits:
    """Where to meet. Raises ValueError without a bootstrap address, which the configuration refuses."""
    if terms.bootstrap is None:
        raise ValueError("a prefill endpoint of SGLang has a bootstrap address")
    return Edits(
        {
            "bootstrap_host": json_of(terms.bootstrap.host),
            "bootstrap_port": json_of(terms.bootstrap.port),
            "bootstrap_room": json_of(terms.number),
        }
    )


def decode(terms: Terms, answer: Answer | None) -> Handover | Unusable:
    """The same to the decode server."""
    return Handover(prefill(terms))


SGLANG = Dialect(
    "sglang",
    "sglang",
    Order.CONCURRENT,
    prefill,
    decode,
    needs=Needs.ADDRESS,
    reads_answer=False,
    decode_alone=False,
)
