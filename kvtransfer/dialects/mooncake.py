"""The KV handoff protocol of vLLM's MooncakeConnector, as the gateway uses it.

Prefill and decode request are sent at once, and contain the same transfer id. Beside each prefill
engine, a bootstrap server lists the engine's ranks. The gateway caches this list. It reads it again
after a request failed there, because a restart changes the identifiers.

Source: MooncakeConnector of vLLM 0.33.
"""

from __future__ import annotations

import msgspec

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
)
from kvtransfer.dialects.vllm_nixl import NOT_FOR_PREFILL, ONE_TOKEN, Name


class _Rank(msgspec.Struct, frozen=True):
    engine_id: Name


_page = msgspec.json.Decoder(dict[str, _Rank]).decode


def prefill(terms: HandoffTerms) -> RequestEdits:
    """Return the edits of a prefill request for Mooncake.

    It generates one token and has a transfer id. A header names the engine's data-parallel rank, if
    that is known, so that the decode engine can find it.
    """
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": _transfer_id(terms),
    }
    rank = terms.identity.rank if terms.identity is not None else None
    headers = () if rank is None else (("x-data-parallel-rank", str(rank)),)
    return RequestEdits(
        ONE_TOKEN + encode_members({"kv_transfer_params": encode_json(params)}),
        NOT_FOR_PREFILL,
        headers=headers,
    )


def decode(terms: HandoffTerms, answer: PrefillResponse | None) -> DecodeRequest | UnusableResponse:
    """Return Mooncake's decode request, which has the address of the prefill's bootstrap server."""
    if terms.bootstrap is None or terms.identity is None:
        return UnusableResponse("the prefill engine's bootstrap server has not answered yet")
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": f"http://{terms.bootstrap.netloc}",
        "remote_engine_id": terms.identity.engine_id,
        "transfer_id": _transfer_id(terms),
    }
    return DecodeRequest(
        RequestEdits(encode_members({"kv_transfer_params": encode_json(params)})),
        reports_own_cache=False,
    )


def identify(body: bytes) -> tuple[PrefillIdentity, ...]:
    """Return the identities of a prefill engine's ranks, in order, from its bootstrap server's
    answer.

    `body` is the answer to `GET /query`. Returns () if it is invalid.
    """
    try:
        page = _page(body)
        ranks = sorted((int(rank), entry.engine_id) for rank, entry in page.items())
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ()
    return tuple(PrefillIdentity(engine_id, rank=rank) for rank, engine_id in ranks)


def check(answer: PrefillResponse) -> UnusableResponse | None:
    """Return why a prefill response shows that Mooncake keeps no KV; None if it keeps the KV.

    It keeps the KV only if the response ended at its length limit.
    """
    if answer.finish_reason == "length":
        return None
    return UnusableResponse(
        f"the prefill response ended with {str(answer.finish_reason)[:32]} instead of length, so "
        "the engine keeps no KV"
    )


def _transfer_id(terms: HandoffTerms) -> str:
    return f"xfer-{terms.request_id}"


MOONCAKE = Dialect(
    "mooncake",
    "vllm",
    LegOrder.CONCURRENT,
    prefill,
    decode,
    needs=Prerequisite.QUERY,
    identify=identify,
    check=check,
)
