"""The mock engine's side of vLLM's NixlConnector in pull mode (versions 0.20 to 0.33).

- A prefill request has `do_remote_decode`.
- Its response describes this engine and the KV blocks. One extra field contains the ticket, the
  permission to fetch them.
- A decode request contains that object, and the decode engine pulls the KV.

A malformed object has the same effect as on the real engine. Source: vLLM 0.20 to 0.33.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from mockgpu.handoff.interfaces import EngineIdentity, agent_address
from mockgpu.mock_tokenizer import token_bytes
from mockgpu.request_parser import (
    NO_LEG,
    ApiError,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
)
from mockgpu.split_legs import AgentPeer, DecodeLeg, OfferedKv, PrefillLeg

FIELD = "kv_transfer_params"
TICKET = "penstock_ticket"
# Until 0.20, blocks were kept for a fixed time, and freed at once if the answer ended itself.
LEASES_SINCE, OLD_HOLD_S = (0, 22), 480.0
# Members without which a decode request waits for KV that is never fetched.
NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class VllmNixlDialect:
    """The protocol of vLLM's NixlConnector for split requests, as an EngineDialect.

    The decode engine reads the KV from the prefill engine (pull).
    """

    name = "vllm_nixl"

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        identity: EngineIdentity,
    ) -> ParsedHandoff:
        """Parse the handoff object of a request.

        If it is absent or empty, this engine serves the whole request alone.
        """
        params = checked_object(body)
        if params is None:
            return NO_LEG
        if params.get("do_remote_decode"):
            return ParsedHandoff(prefill_leg(request_id, identity))
        if not params.get("do_remote_prefill"):
            return NO_LEG
        return ParsedHandoff(_take(params, identity), given_prompt(params, body))

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the object `kv_transfer_params` of a prefill response; null: the engine keeps
        no KV.
        """
        return {FIELD: None if offered is None else build_object(offered, identity, "pull")}

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return no fields: vLLM's handoff object is at the top level of the response."""
        return {}


def checked_object(body: RequestBody) -> dict[str, Any] | None:
    """Return the object `kv_transfer_params` of a request, which says what happens with its KV.

    Returns None if it is absent. Raises MalformedHandoffError if the request has fields of another
    engine's protocol, and ApiError if the object has the wrong type.
    """
    for field in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disaggregated_params"):
        if getattr(body, field) is not None:
            # vLLM ignores unknown fields. Here they show that the gateway uses the wrong dialect.
            raise MalformedHandoffError(f"{field} must not be set: it belongs to another dialect")
    params = body.kv_transfer_params
    if params is None:
        return None
    if not isinstance(params, dict):
        raise ApiError(
            400, "1 validation error: kv_transfer_params: Input should be a valid dictionary", FIELD
        )
    return params


def prefill_leg(request_id: str, identity: EngineIdentity) -> PrefillLeg:
    """Return the leg of a prefill request in pull mode: keep the KV until it has been read.

    The KV is kept for a limited time, which the decode engine can extend. Old versions of vLLM keep
    the KV for a fixed time instead.
    """
    leases = identity.version >= LEASES_SINCE
    return PrefillLeg(
        f"{request_id}-{secrets.token_hex(4)}",
        identity.lease_s if leases else OLD_HOLD_S,
        if_ended=leases,
    )


def _take(params: dict[str, Any], identity: EngineIdentity) -> DecodeLeg:
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, list) or not blocks or blocks[0] == []:
        raise MalformedHandoffError(
            f"{FIELD}.remote_block_ids must be a list with at least one block id", fatal=True
        )
    parked = any(params.get(field) is None for field in NEEDED)
    ticket_field = params.get(TICKET)
    ticket = ticket_field if isinstance(ticket_field, dict) else {}
    return DecodeLeg(
        name=str(params.get("remote_request_id")),
        peer=AgentPeer(
            agent_address(str(params.get("remote_host")), params.get("remote_port") or 0)
        ),
        wait_s=identity.wait_s,
        ticket=str(ticket.get("ticket", "")),
        renew=str(ticket.get("renew", "")),
        cached=_cached_tokens(params) if identity.version >= (0, 33) else None,
        is_parked=parked,
    )


def _cached_tokens(params: dict[str, Any]) -> int | None:
    cached = params.get("remote_prefill_cached_tokens")
    if cached is not None and (type(cached) is not int or cached < 0):
        raise MalformedHandoffError(
            f"{FIELD}.remote_prefill_cached_tokens must be an integer of at least 0, not {cached!r}"
        )
    return cached


def given_prompt(params: dict[str, Any], body: RequestBody) -> bytes | None:
    """Return the prompt's tokens from the ids in the handoff object; None: it has no ids.

    Only chats without `echo` use them. Raises ApiError 400 if the field is not a list of token ids.
    """
    ids = params.get("prompt_token_ids")
    if ids is None or body.messages is None or body.echo:
        return None
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(i) is int and 0 <= i < 1 << 32 for i in ids)
    ):
        raise ApiError(
            400,
            "kv_transfer_params.prompt_token_ids must be a list of non-negative integers",
            FIELD,
        )
    return token_bytes(ids)


def build_object(offered: OfferedKv, identity: EngineIdentity, mode: str) -> dict[str, Any]:
    """Return `kv_transfer_params` of a prefill response in the format of this engine's version."""
    blocks: list[Any] = offered.blocks if identity.version < (0, 18) else [offered.blocks]
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": blocks,
        "remote_engine_id": identity.engine_id,
        "remote_request_id": offered.name,
        "remote_host": identity.host,
        "remote_port": identity.port,
        "tp_size": identity.tp,
    }
    if identity.version >= LEASES_SINCE:
        params["remote_num_tokens"] = offered.tokens
    if identity.version >= (0, 28):
        params |= {"remote_blocks_expiry_time": None, "transfer_mode": mode}
    if identity.version >= (0, 30):
        params |= {"dcp_size": 1, "pp_size": 1}
    if identity.version >= (0, 33):
        params["remote_registration_generation"] = identity.generation
        params["remote_prefill_cached_tokens"] = offered.cached
    if mode == "pull":
        params[TICKET] = {"ticket": offered.ticket, "renew": f"{identity.url}/mock/renew"}
    params["transport"] = identity.transport
    return params
