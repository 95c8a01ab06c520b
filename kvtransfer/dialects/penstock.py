"""The KV handoff protocol of PenstockConnector, our plug-in for vLLM, as the gateway uses it.

Prefill and decode request are sent at once, and contain the same transfer id. The decode engine
reserves blocks first. The prefill engine then sends the KV layer by layer while it computes the
prompt (docs/vllm-connector.md).

The decode request must contain the prefill engine's card, a text with its addresses and KV layout.
The gateway takes the card from the engine's first response. Until then it sends the two requests
one after the other. It forgets the card if a request fails, because a restart changes it.

The KV of a prompt's beginning is handed over in the form of NixlConnector, one request after the
other: PULLS. The first request has the same prompt, which its engine shortens. The decode engine
checks that the handoff is for a beginning of its own prompt.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from kvtransfer.dialects import engine_identity, vllm_nixl
from kvtransfer.dialects.dialect import (
    DecodeRequest,
    Dialect,
    HandoffTerms,
    LegOrder,
    PrefillIdentity,
    PrefillResponse,
    Prerequisite,
    RequestEdits,
    UnusableResponse,
    encode_json,
    encode_members,
    is_null,
)
from kvtransfer.dialects.vllm_nixl import NOT_FOR_PREFILL, ONE_TOKEN, Name, Size

_MOST_CARD_CHARS = 1 << 20


class _EngineParams(msgspec.Struct, frozen=True):
    remote_engine_id: Name
    kv_engine: Annotated[str, msgspec.Meta(min_length=1, max_length=_MOST_CARD_CHARS)]
    tp_size: Size = 1


_decode_params = msgspec.json.Decoder(_EngineParams).decode


def _transfer_id(terms: HandoffTerms) -> str:
    return f"{terms.number:x}-{terms.request_id}"[:512]


def prefill(terms: HandoffTerms) -> RequestEdits:
    """Return the edits of a prefill request for PenstockConnector: one token, and a transfer id."""
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "kv_transfer": _transfer_id(terms),
    }
    return RequestEdits(
        ONE_TOKEN + encode_members({"kv_transfer_params": encode_json(params)}), NOT_FOR_PREFILL
    )


def decode(terms: HandoffTerms, answer: PrefillResponse | None) -> DecodeRequest | UnusableResponse:
    """Return the decode request for PenstockConnector.

    It has the prefill engine's card, a text with the engine's addresses and KV layout.
    """
    identity = engine_identity.find_identity(_identity, terms, answer)
    if identity is None or identity.card is None:
        return UnusableResponse("the prefill engine's card (its addresses) is unknown")
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kv_transfer": _transfer_id(terms),
        "kv_engine": identity.card,
    }
    return DecodeRequest(
        RequestEdits(encode_members({"kv_transfer_params": encode_json(params)})),
        reports_own_cache=False,
    )


def _identity(answer: PrefillResponse) -> PrefillIdentity | None:
    if is_null(answer.handoff):
        return None
    try:
        params = _decode_params(answer.handoff)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    engine, card = params.remote_engine_id, params.kv_engine
    return PrefillIdentity(engine, tp_size=params.tp_size, card=card)


def decode_pull(
    terms: HandoffTerms, answer: PrefillResponse | None
) -> DecodeRequest | UnusableResponse:
    """Return the decode request with the KV of the prompt's beginning.

    Only PenstockConnector takes such a handoff: NixlConnector would expect the whole prompt.
    """
    if answer is None or b'"kv_handoff"' not in bytes(answer.handoff):
        return UnusableResponse("the response has no kv_handoff, so that its KV cannot be pulled")
    return vllm_nixl.decode(terms, answer)


def truncate(tokens: int) -> bytes:
    """Return the members by which vLLM keeps the first tokens of a prompt."""
    return encode_members({"truncate_prompt_tokens": b"%d" % tokens, "truncation_side": b'"right"'})


identify, check = (
    partial(engine_identity.identify, _identity),
    partial(engine_identity.check, _identity),
)

PULLS = Dialect(
    "penstock",
    "vllm",
    LegOrder.SEQUENTIAL,
    vllm_nixl.prefill,
    decode_pull,
    cache_salt_member="cache_salt",
    truncate=truncate,
)

PENSTOCK = Dialect(
    "penstock",
    "vllm",
    LegOrder.CONCURRENT,
    prefill,
    decode,
    needs=Prerequisite.FIRST_ANSWER,
    identify=identify,
    check=check,
    pulls=PULLS,
)
