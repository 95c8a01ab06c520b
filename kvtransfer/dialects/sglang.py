"""The KV handoff protocol of SGLang, as the gateway uses it.

Both engines get the same body at the same time. It contains a room, a number under which the decode
engine finds the request at the prefill engine's bootstrap server. The prefill engine itself stops
after one token. Its response ends when the KV has been fetched. The gateway discards the response,
but must read it to its end, because closing it earlier drops the KV.

Both kinds of engine answer 400 to a request without a room, so neither serves whole requests.
Source: SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtransfer.dialects.dialect import (
    DecodeRequest,
    Dialect,
    HandoffTerms,
    LegOrder,
    PrefillResponse,
    Prerequisite,
    RequestEdits,
    UnusableResponse,
    encode_json,
    encode_members,
)

# The servers' own probes (/health_generate) use this host: no KV is sent to it or awaited from it.
STANDALONE: Mapping[str, str | int] = MappingProxyType(
    {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
)


def prefill(terms: HandoffTerms) -> RequestEdits:
    """Return the edits of a prefill request for SGLang: the bootstrap address and the room number.

    Raises ValueError without a bootstrap address; the configuration guarantees one.
    """
    if terms.bootstrap is None:
        raise ValueError(
            "a prefill endpoint of SGLang needs the address of its bootstrap server; set it "
            "in the configuration"
        )
    put = {
        "bootstrap_host": encode_json(terms.bootstrap.host),
        "bootstrap_port": encode_json(terms.bootstrap.port),
        "bootstrap_room": encode_json(terms.number),
    }
    return RequestEdits(encode_members(put))


def decode(terms: HandoffTerms, answer: PrefillResponse | None) -> DecodeRequest | UnusableResponse:
    """Return the decode request for SGLang, with the same edits as the prefill request.

    The decode server reports received KV as cached tokens.
    """
    return DecodeRequest(prefill(terms), reports_own_cache=False)


SGLANG = Dialect(
    "sglang",
    "sglang",
    LegOrder.CONCURRENT,
    prefill,
    decode,
    needs=Prerequisite.ADDRESS,
    reads_answer=False,
    can_decode_alone=False,
    abort_frees=True,
    standalone_members=STANDALONE,
)
