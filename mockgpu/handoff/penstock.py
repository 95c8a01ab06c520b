"""The mock engine's side of Penstock's vLLM connector, in which both requests start at once.

- Prefill and decode request have the same value in the field `kv_transfer`.
- The decode request contains the prefill engine's card (address and identity) in `kv_engine`. The
  router must know the card in advance.
- The decode engine waits until the prefill engine has sent the KV.

A prefill request without `kv_transfer` is answered like one of NixlConnector, with one field more:
`kv_handoff`. A decode request with it fetches the KV of its prompt, or of its beginning.

The card and the handoff are plain text here, and a permission to fetch is not bound to one prompt.
Source: kvtransfer/engines/vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mockgpu.handoff.interfaces import EngineIdentity
from mockgpu.handoff.vllm_nixl import (
    FIELD,
    build_object,
    checked_object,
    given_prompt,
    prefill_leg,
)
from mockgpu.request_parser import (
    NO_LEG,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
)
from mockgpu.split_legs import AgentPeer, DecodeLeg, OfferedKv, PrefillLeg

WAIT_S = 30.0
HANDOFF = "kv_handoff"

_decode_handoff = msgspec.json.Decoder(tuple[str, str, int, str]).decode


class PenstockDialect:
    """The mock engine's side of Penstock's vLLM connector. It implements EngineDialect."""

    name = "penstock"

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        identity: EngineIdentity,
    ) -> ParsedHandoff:
        """Find out which half of a split request this is. Both have the same `kv_transfer`."""
        params = checked_object(body)
        if params is None:
            return NO_LEG
        transfer = params.get("kv_transfer")
        if params.get("do_remote_decode"):
            leg = PrefillLeg(str(transfer), identity.lease_s, is_public=True)
            return ParsedHandoff(leg if transfer else prefill_leg(request_id, identity))
        if not params.get("do_remote_prefill"):
            return NO_LEG
        if HANDOFF in params:
            return ParsedHandoff(_given_leg(params[HANDOFF], identity), given_prompt(params, body))
        _, separator, address = str(params.get("kv_engine")).partition("@")
        if not separator or not transfer:
            raise MalformedHandoffError(f"{FIELD}.kv_engine must have the form ID@ADDRESS")
        fetch = DecodeLeg(str(transfer), AgentPeer(address), identity.wait_s)
        return ParsedHandoff(fetch, given_prompt(params, body))

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the object `kv_transfer_params` with this engine's card (its address and
        identity).

        The object is null if the engine keeps no KV.
        """
        if offered is None:
            return {FIELD: None}
        if not leg.is_public:
            return {FIELD: _handoff_object(offered, identity)}
        card = f"{identity.engine_id}@{identity.address}"
        return {
            FIELD: {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": identity.engine_id,
                "tp_size": identity.tp,
                "kv_engine": card,
            }
        }

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return no fields: vLLM's handoff object is at the top level of the response."""
        return {}


def _handoff_object(offered: OfferedKv, identity: EngineIdentity) -> dict[str, Any]:
    handoff = [offered.name, offered.ticket, offered.tokens, identity.address]
    params = build_object(offered, identity, "pull")
    return params | {HANDOFF: msgspec.json.encode(handoff).decode()}


def _given_leg(handoff: object, identity: EngineIdentity) -> DecodeLeg:
    # Return the leg of a decode request that fetches the KV of its prompt, or of its beginning.
    try:
        name, ticket, tokens, address = _decode_handoff(str(handoff))
    except msgspec.DecodeError as error:
        raise MalformedHandoffError(f"{FIELD}.{HANDOFF}: {error}") from None
    return DecodeLeg(name, AgentPeer(address), identity.wait_s, ticket=ticket, tokens=tokens)
