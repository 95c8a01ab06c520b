"""HTTP routes for tests of a mock engine: its state, its injected faults, and longer keeping of KV.

Real engines do not have these routes. All paths start with /mock/. Tests and `penstock chaos` use
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from mockgpu.fault_grammar import FaultError, parse_faults
from mockgpu.group_faults import GroupFaults
from mockgpu.http.handler_helpers import json_answer
from mockgpu.request_parser import ApiError, decode_body
from mockgpu.tp_group import TpGroup

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.prefill_decode_role import PdRole


class FaultRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON body that sets the faults of a mock engine.

    `spec` is a fault specification such as "5xx@0.1" (mockgpu/fault_grammar.py); "" ends all
    faults.
    """

    spec: str


class RenewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /mock/renew, with which a decode engine asks for KV to be kept longer.

    It names the KV, and has the ticket (permission to fetch it). Real engines use a separate
    connection for this.
    """

    name: str
    ticket: str


class ControlPages:
    """The test routes below /mock/ of one mock engine, except /mock/kv_blocks.

    `pd_role` serves one half (prefill or decode) of split requests. It is None if the engine serves
    only whole requests.
    """

    def __init__(self, group: TpGroup, faults: GroupFaults, pd_role: PdRole | None) -> None:
        self._group, self._faults, self._pd_role = group, faults, pd_role

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/mock/state", self.state),
            web.post("/mock/renew", self.renew),
            web.get("/mock/fault", self.show_faults),
            web.post("/mock/fault", self.set_faults),
            web.delete("/mock/fault", self.clear_faults),
        ]

    async def state(self, _: web.Request) -> web.Response:
        """Serve GET /mock/state, for tests: role, use of KV memory, and KV kept for others."""
        scheduler, metrics = self._group.scheduler, self._group.metrics
        state: dict[str, Any] = {
            "role": self._group.spec.role,
            "jobs": self._group.in_flight,
            "blocks_total": scheduler.pool.total,
            "blocks_in_use": scheduler.pool.total - scheduler.pool.free,
            "blocks_kept": scheduler.kept_blocks,
            "malformed_handoffs": metrics.malformed_handoffs,
            "tainted_answers": metrics.tainted,
        }
        return json_answer(state | (self._pd_role.state() if self._pd_role is not None else {}))

    async def renew(self, request: web.Request) -> web.Response:
        """Serve POST /mock/renew `{"name", "ticket"}`: keep KV longer for a request that is still
        queued.

        The response is 404 if the KV has already been freed.
        """
        renewal = decode_body(await request.read(), RenewRequest)
        ticket = (
            None
            if self._group.kv_handoff is None
            else self._group.kv_handoff.renew(renewal.name, renewal.ticket)
        )
        if ticket is None:
            raise ApiError(404, f"no KV is offered as {renewal.name}, or it has been freed")
        return json_answer({"ticket": ticket})

    async def show_faults(self, _: web.Request) -> web.Response:
        """Serve GET /mock/fault: the faults that are injected now, in the syntax of `--fault`."""
        return json_answer({"spec": self._faults.spec})

    async def set_faults(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /mock/fault `{"spec": "..."}`: replace all faults by the specified ones.

        The response is sent before the faults start. Otherwise a fault that closes connections
        would also close this one.
        """
        if "Origin" in request.headers:
            raise ApiError(403, "web pages may not set faults: the request has an Origin header")
        spec = decode_body(await request.read(), FaultRequest).spec
        try:
            self._faults.check(parse_faults(spec))
        except FaultError as error:
            raise ApiError(400, str(error), "spec") from None
        response = json_answer({"spec": spec})
        await response.prepare(request)
        await response.write_eof()
        self._faults.apply(spec)
        return response

    async def clear_faults(self, request: web.Request) -> web.Response:
        """Serve DELETE /mock/fault: end all faults, and restore lost ranks (GPUs)."""
        self._faults.apply("")
        if self._pd_role is not None:
            await self._pd_role.wait_applied()
        return await self.show_faults(request)
