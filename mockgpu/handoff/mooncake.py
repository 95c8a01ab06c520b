"""The mock engine's side of vLLM's MooncakeConnector, which pushes KV to the decode engine.

- Prefill and decode request have the same transfer id.
- A bootstrap server has the addresses of the KV transfer agents.
- A prefill response has no handoff object.
- The KV is kept only if the answer was cut after its one token, not if it ended by itself.

Source: vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mockgpu.handoff.interfaces import EngineIdentity
from mockgpu.handoff.vllm_nixl import FIELD, checked_object, given_prompt
from mockgpu.request_parser import (
    NO_LEG,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
)
from mockgpu.split_legs import BootstrapPeer, DecodeLeg, OfferedKv, PrefillLeg

ABORT_S = 480.0
# Members of a decode request without which it waits for KV that never arrives.
NEEDED = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


class MooncakeDialect:
    """The mock engine's side of vLLM's MooncakeConnector. It implements EngineDialect."""

    name = "mooncake"

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        identity: EngineIdentity,
    ) -> ParsedHandoff:
        """Parse the handoff fields of a request in Mooncake's protocol.

        Fields that lack a transfer id, or that are for an engine of the other role, crash the real
        engine. Here they raise MalformedHandoffError with `fatal=True`.
        """
        params = checked_object(body)
        if params is None:
            return NO_LEG
        if params.get("do_remote_decode"):
            if identity.role == "decode":
                raise MalformedHandoffError(
                    f"{FIELD}.do_remote_decode was sent to a decode engine", fatal=True
                )
            name = params.get("transfer_id")
            if name is None:
                raise MalformedHandoffError(f"{FIELD}.transfer_id is missing", fatal=True)
            return ParsedHandoff(
                PrefillLeg(str(name), identity.wait_s, is_public=True, if_ended=False)
            )
        if not params.get("do_remote_prefill"):
            return NO_LEG
        if identity.role == "prefill":
            raise MalformedHandoffError(
                f"{FIELD}.do_remote_prefill was sent to a prefill engine", fatal=True
            )
        parked = any(params.get(field) is None for field in NEEDED)
        peer = BootstrapPeer(
            str(params.get("remote_bootstrap_addr")), str(params.get("remote_engine_id"))
        )
        leg = DecodeLeg(str(params.get("transfer_id")), peer, identity.wait_s, is_parked=parked)
        return ParsedHandoff(leg, given_prompt(params, body))

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return no fields: a decode engine of Mooncake does not read the prefill response."""
        return {}

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return no fields: Mooncake adds nothing to the choice object of a response."""
        return {}
