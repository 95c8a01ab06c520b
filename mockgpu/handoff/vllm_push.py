"""The engine's side of vLLM's NixlPushConnector (0.24 and later): both legs at once.

Legs are matched by their X-Request-Id. Decode names the prefill engine, which the caller must know
beforehand, and waits for its write. If the prefill leg fails, decode is not informed and times out.
Source: engines.md B.0, B.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mockgpu.handoff.contract import Here, joined
from mockgpu.handoff.vllm_nixl import FIELD, checked_object, given_prompt, told_object
from mockgpu.leg_params import At, Give, Offered, Take
from mockgpu.request_parser import NO_LEG, Ask, Body, MalformedHandoffError, Reading, request_name

# A missing one is a KeyError in the engine's scheduler, which kills it.
NEEDED = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
REGISTRATION_S = 480.0


class VllmPush:
    """The EngineDialect of the push connector."""

    name = "vllm_push"

    def read(
        self, raw: bytes, body: Body, headers: Mapping[str, str], request_id: str, here: Here
    ) -> Reading:
        """Return the leg of a request. Both legs have the same X-Request-Id, which matches them."""
        params = checked_object(body)
        if params is None:
            return NO_LEG
        name = request_name(headers)
        if params.get("do_remote_decode"):
            return Reading(Give(name or request_id, here.lease_s, public=True))
        if not params.get("do_remote_prefill"):
            return NO_LEG
        for field in NEEDED:
            if params.get(field) is None:
                raise MalformedHandoffError(f"{FIELD}.{field}", fatal=True)
        wanted = params.get("remote_request_id")
        peer = At(joined(str(params["remote_host"]), params["remote_port"]))
        # An id that differs from the other leg's never matches: the request waits in vain.
        take = Take(str(wanted or name), peer, here.wait_s, parked=not wanted or wanted != name)
        return Reading(take, given_prompt(params, body))

    def told(self, ask: Ask, give: Give, offered: Offered | None, here: Here) -> dict[str, Any]:
        """Return the object of a pull with its mode and without a ticket.

        It identifies this engine.
        """
        return {FIELD: None if offered is None else told_object(offered, here, "push")}

    def told_in_choice(
        self, ask: Ask, offered: Offered | None, first: bytes, here: Here
    ) -> dict[str, Any]:
        """Return nothing: vLLM's object is at the top level."""
        return {}
