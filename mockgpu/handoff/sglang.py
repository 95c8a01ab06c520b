"""The mock engine's side of split requests as SGLang serves them: both engines get the same body.

- The two requests are matched by the number `bootstrap_room` in the body.
- A prefill engine stops after one token, and responds when its KV has been fetched.
- A health probe names a host that belongs to no engine. Either engine answers it alone.

Errors are in SGLang's format (mockgpu/engine_formats.py). Source: SGLang 0.5.23.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from mockgpu.handoff.interfaces import EngineIdentity
from mockgpu.request_parser import (
    NO_LEG,
    MalformedHandoffError,
    ParsedHandoff,
    ParsedRequest,
    RequestBody,
)
from mockgpu.split_legs import AnswerTime, BootstrapPeer, DecodeLeg, OfferedKv, PrefillLeg

BOOTSTRAP_S = 300.0
PROBE_HOST = "2.2.2.2"
# Maximum number of past room numbers that are remembered, so that no room is used twice.
MOST_ROOMS = 1 << 16


class SglangDialect:
    """SGLang's protocol for split requests, as an EngineDialect.

    It remembers the numbers of past handoffs (bootstrap rooms), because each may be used only once.
    """

    name = "sglang"

    def __init__(self) -> None:
        self._rooms: OrderedDict[int, None] = OrderedDict()

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        identity: EngineIdentity,
    ) -> ParsedHandoff:
        """Decide which half of a split request this is, and under which number its KV is passed on.

        Both engines get the same body, so the role of this engine decides whether it prefills or
        decodes.
        """
        for field in ("kv_transfer_params", "disaggregated_params"):
            if getattr(body, field) is not None:
                raise MalformedHandoffError(
                    f"{field} must not be set: it belongs to another dialect"
                )
        if identity.role == "both":
            if body.bootstrap_room is not None:
                raise MalformedHandoffError("bootstrap_room must not be set for the role both")
            return NO_LEG
        if body.bootstrap_host == PROBE_HOST and body.bootstrap_room is not None:
            return ParsedHandoff(one_token=identity.role == "prefill")
        room = self._room(body)
        if identity.role == "prefill":
            leg = PrefillLeg(
                str(room), identity.wait_s, is_public=True, answering=AnswerTime.WHEN_TAKEN
            )
            return ParsedHandoff(leg, one_token=True)
        if not isinstance(body.bootstrap_host, str) or not body.bootstrap_host:
            raise MalformedHandoffError("bootstrap_host must be a host name", status=400)
        host, port = body.bootstrap_host, body.bootstrap_port
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        peer = BootstrapPeer(f"http://{host}:{8998 if port is None else port}")
        return ParsedHandoff(DecodeLeg(str(room), peer, identity.wait_s))

    def _room(self, body: RequestBody) -> int:
        room = body.bootstrap_room
        if room is None:
            raise MalformedHandoffError("bootstrap_room is missing; send a number", status=400)
        if type(room) is not int or not 0 <= room < 1 << 63:
            raise MalformedHandoffError("bootstrap_room must be from 0 to 2^63 - 1", status=400)
        if room in self._rooms:
            raise MalformedHandoffError(
                f"bootstrap_room {room} has been used before; each request needs a new number",
                status=400,
            )
        self._rooms[room] = None
        if len(self._rooms) > MOST_ROOMS:
            self._rooms.popitem(last=False)
        return room

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return no fields: both SGLang engines read the room number from the request."""
        return {}

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return no fields: SGLang adds nothing to the choice object of a response."""
        return {}
