"""The mock engine's side of vLLM's NixlPushConnector (0.24 and later): both requests start at once.

- Prefill and decode request have the same X-Request-Id.
- The decode request contains the prefill engine's address, which the router must know in advance.
- The decode engine waits until the prefill engine has written the KV.
- If prefill fails, the decode engine is not notified and times out.

Source: vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mockgpu.handoff.interfaces import EngineIdentity, agent_address
from mockgpu.handoff.vllm_nixl import FIELD, build_object, checked_object, given_prompt
from mockgpu.request_parser import (
    NO_LEG,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
    client_request_id,
)
from mockgpu.split_legs import AgentPeer, DecodeLeg, OfferedKv, PrefillLeg

# Members that vLLM's scheduler reads without a check: a missing one raises KeyError there, and ends
# the engine.
NEEDED = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
REGISTRATION_S = 480.0


class VllmPushDialect:
    """The mock engine's side of vLLM's NixlPushConnector. It implements EngineDialect."""

    name = "vllm_push"

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        identity: EngineIdentity,
    ) -> ParsedHandoff:
        """Decide whether a request is a prefill half, a decode half or whole, from its fields.

        The two halves have the same X-Request-Id.
        """
        params = checked_object(body)
        if params is None:
            return NO_LEG
        name = client_request_id(headers)
        if params.get("do_remote_decode"):
            return ParsedHandoff(PrefillLeg(name or request_id, identity.lease_s, is_public=True))
        if not params.get("do_remote_prefill"):
            return NO_LEG
        for field in NEEDED:
            if params.get(field) is None:
                raise MalformedHandoffError(
                    f"{FIELD}.{field} is missing, which a decode request needs", fatal=True
                )
        wanted = params.get("remote_request_id")
        peer = AgentPeer(agent_address(str(params["remote_host"]), params["remote_port"]))
        # If the ids of prefill and decode request differ, they never match: the request times out.
        leg = DecodeLeg(
            str(wanted or name), peer, identity.wait_s, is_parked=not wanted or wanted != name
        )
        return ParsedHandoff(leg, given_prompt(params, body))

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the handoff object `kv_transfer_params`, which contains this engine's address.

        Push mode needs no ticket, because the prefill engine writes the KV itself.
        """
        return {FIELD: None if offered is None else build_object(offered, identity, "push")}

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return no fields: vLLM's handoff object is at the top level of the response."""
        return {}
