"""The KV handoff protocol of vLLM's NixlPushConnector (since 0.24), as the gateway uses it.

Prefill and decode request are sent at once, with the same X-Request-Id, and the prefill engine
writes the KV to the decode engine. The decode request must name the prefill engine. The gateway
takes this name from the engine's first response. Until then it sends the two requests one after the
other. It forgets the name if a request fails there, because a restart changes it.

Source: vLLM 0.33.
"""

from __future__ import annotations

from functools import partial

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
from kvtransfer.dialects.vllm_nixl import Name, Port, Size


class _EngineParams(msgspec.Struct, frozen=True):
    remote_engine_id: Name
    remote_host: Name
    remote_port: Port
    tp_size: Size
    pp_size: Size = 1
    transfer_mode: str | None = None


_decode_params = msgspec.json.Decoder(_EngineParams).decode


def decode(terms: HandoffTerms, answer: PrefillResponse | None) -> DecodeRequest | UnusableResponse:
    """Return the decode request for NixlPushConnector.

    It names the engine that will write the KV, and the identifier of the request there.
    """
    identity = engine_identity.find_identity(_identity, terms, answer)
    if identity is None or identity.host is None:
        return UnusableResponse("the prefill engine's identity is unknown")
    host = terms.prefill_host if vllm_nixl.is_loopback(identity.host) else identity.host
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": identity.engine_id,
        "remote_host": host,
        "remote_port": identity.port,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
        "remote_request_id": terms.request_id,
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
    if params.transfer_mode not in (None, "push"):
        return None
    return PrefillIdentity(
        params.remote_engine_id,
        params.remote_host,
        params.remote_port,
        params.tp_size,
        params.pp_size,
    )


identify, check = (
    partial(engine_identity.identify, _identity),
    partial(engine_identity.check, _identity),
)

VLLM_PUSH = Dialect(
    "vllm_push",
    "vllm",
    LegOrder.CONCURRENT,
    vllm_nixl.prefill,
    decode,
    needs=Prerequisite.FIRST_ANSWER,
    identify=identify,
    check=check,
)
