"""Starts and stops the mock engines of `penstock mock` in one process, each with its own port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from aiohttp import web

from mockgpu.group_faults import GroupFaults
from mockgpu.http.server import MockServer
from mockgpu.kv_events.numbered_event_batches import KvEventSpec
from mockgpu.rank_dispatcher import RankDispatcher
from mockgpu.tp_group import GroupSpec, TpGroup

if TYPE_CHECKING:  # groups without real KV start without numpy and kvtransfer's agents
    from mockgpu.kv_events.zmq_publisher import KvPublisher
    from mockgpu.kv_options import StoreSpec, TransferSpec
    from mockgpu.kv_store import StoreTier
    from mockgpu.prefill_decode_role import PdRole, ProcessWire

KEEP_ALIVE_S = 5.0


class GroupListener:
    """The listening port of one mock engine. Faults can close it and open it again."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self.port = port
        self._server: web.Server | None = None
        self._listening: asyncio.Server | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_open = False

    async def start(self, server: web.Server) -> None:
        """Start to listen for HTTP connections.

        Port 0 chooses a free port, which a later `open()` uses again. Raises OSError if the port is
        in use.
        """
        self._server, self._is_open = server, True
        await self._listen(server)

    async def _listen(self, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(server, self._host, self.port, backlog=1024)
        self.port = listening.sockets[0].getsockname()[1]
        if self._is_open:
            self._listening = listening
        else:  # close() was called before the listener was open
            listening.close()

    def shut(self) -> None:
        self._is_open = False
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._server is not None:
            for connection in list(self._server.connections):
                connection.force_close()

    def open(self) -> None:
        """Start to listen again in a background task, on the same port as before."""
        self._is_open = True
        opening = self._opening is not None and not self._opening.done()
        if self._listening is None and self._server is not None and not opening:
            self._opening = asyncio.ensure_future(self._listen(self._server))

    async def wait_rebound(self) -> None:
        """Wait until the port accepts connections, which open() causes in the background."""
        if self._opening is not None:
            await asyncio.wait((self._opening,))


class FleetGroup:
    """One mock engine of a fleet, with its HTTP server, faults and port.

    pd_role  serves one half (prefill or decode) of split requests; None: the engine serves only
             whole requests
    """

    def __init__(
        self, spec: GroupSpec, host: str, port: int, rng: Random, wire: ProcessWire | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.host = host
        self.listener = GroupListener(host, port)
        self.ranks = _ranks(spec, loop)
        self.group = self.ranks[0]
        self.pd_role = (
            None if spec.transfer is None else _half(self.group, spec.transfer, host, wire)
        )
        self.kv_store = None if spec.kv_store is None else _store(self.group, spec.kv_store)
        self.faults = GroupFaults(self.group, self.listener, loop, rng, self.pd_role)
        if spec.kv_events is not None:
            for rank, group in enumerate(self.ranks):
                events = spec.kv_events.of_rank(rank, spec.ranks)
                group.kv_events = _publisher(group, events, host)
                group.kv_events.stream.delivery.strikes = self.faults.strikes_events
                if self.kv_store is not None:
                    self.kv_store.announce_on(group.kv_events.stream)
        self.server = MockServer(self.group, self.faults, self.pd_role)

    def app(self) -> web.Application:
        """Return the HTTP application of the mock engine.

        If the engine has several ranks, it dispatches requests to them.
        """
        if len(self.ranks) == 1:
            return self.server.app()
        servers = [MockServer(group, self.faults) for group in self.ranks[1:]]
        return self.server.app(RankDispatcher([self.server, *servers]).dispatch)

    def close_ranks(self) -> None:
        for group in self.ranks:
            group.close()
            if group.kv_events is not None:
                group.kv_events.close()

    async def close_store(self) -> None:
        """Disconnect from the host's KV store, and release the engine's KV memory.

        If the engine serves prefill or decode halves of requests, its PdRole releases the memory.
        """
        if self.kv_store is not None:
            await self.kv_store.close()
            if self.pd_role is None and self.group.memory is not None:
                self.group.memory.close()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.listener.port}"


def _ranks(spec: GroupSpec, loop: asyncio.AbstractEventLoop) -> list[TpGroup]:
    # Return the data-parallel ranks of an engine, which step together if they are in lockstep.
    lockstep: list[TpGroup] | None = [] if spec.is_lockstep else None
    return [TpGroup(spec, loop, rank, lockstep) for rank in range(spec.ranks)]


def _inproc(spec: GroupSpec) -> bool:
    return spec.transfer is not None and spec.transfer.transport == "inproc"


def _wire() -> ProcessWire:
    from mockgpu.prefill_decode_role import ProcessWire

    return ProcessWire()


def _half(group: TpGroup, transfer: TransferSpec, host: str, wire: ProcessWire | None) -> PdRole:
    from mockgpu.prefill_decode_role import PdRole

    return PdRole(group, transfer, host, wire)


def _store(group: TpGroup, spec: StoreSpec) -> StoreTier:
    # Let a group use a store of KV. Raises ValueError if there is none that fits.
    from mockgpu.kv_bytes import KvMemory, scaled_layout
    from mockgpu.kv_store import StoreTier

    model = group.spec.model
    if group.memory is None:
        layout = scaled_layout(model, group.spec.tp, spec.scale)
        group.attach(KvMemory.create(layout, group.scheduler.pool.total, "kv"))
    assert group.memory is not None
    compatibility = f"{model.name}/{group.memory.layout.fingerprint()}"
    tier = StoreTier(group, spec, model.kv_token_bytes, compatibility, group.spec.speed)
    group.kv_store, group.metrics.store_lines = tier, tier.lines
    return tier


def _publisher(group: TpGroup, spec: KvEventSpec, host: str) -> KvPublisher:
    # Start publishing a group's KV events. Raises ValueError if pyzmq is not installed.
    try:
        from mockgpu.kv_events.zmq_publisher import KvPublisher
    except ModuleNotFoundError:
        raise ValueError(
            "KV events need the Python package pyzmq; install it with: pip install "
            "'penstock[events]'"
        ) from None
    return KvPublisher(spec, group.scheduler, asyncio.get_running_loop(), host)


async def _close(members: Sequence[FleetGroup], runners: Sequence[web.AppRunner]) -> None:
    for member in members:
        member.faults.clear()
        member.listener.shut()
        await member.listener.wait_rebound()
        member.close_ranks()
    for runner in runners:
        await runner.cleanup()
    for member in members:
        await member.close_store()
    for member in members:
        if member.pd_role is not None:
            await member.pd_role.close()


async def _serve_http(
    member: FleetGroup, runners: list[web.AppRunner], keep_alive_s: float
) -> None:
    # Start a mock engine's HTTP server, and append its runner to `runners`.
    runner = web.AppRunner(
        member.app(), handler_cancellation=True, keepalive_timeout=keep_alive_s, access_log=None
    )
    await runner.setup()
    runners.append(runner)
    assert runner.server is not None
    await member.listener.start(runner.server)


@asynccontextmanager
async def run_fleet(
    specs: Sequence[GroupSpec],
    host: str = "127.0.0.1",
    port: int = 0,
    fault: str = "",
    seed: int = 0,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> AsyncIterator[list[FleetGroup]]:
    """Serve mock engines during an `async with` block, and yield them.

    specs         the parameters of each engine
    host          address to listen on
    port          port of the first engine, and the others use the following ports; 0: free ports
    fault         specification of faults to inject from the start (fault_grammar.py)
    seed          random seed for faults with a probability
    keep_alive_s  seconds after which an idle client connection is closed

    Raises OSError if a port is in use, and FaultError if the fault specification is invalid.
    """
    # Inproc agents need a shared wire.
    wire = _wire() if any(_inproc(spec) for spec in specs) else None
    members: list[FleetGroup] = []
    runners: list[web.AppRunner] = []
    try:
        for i, spec in enumerate(specs):
            members.append(FleetGroup(spec, host, port + i if port else 0, Random(seed + i), wire))
        for member in members:
            if member.pd_role is not None:
                await member.pd_role.start()
            await _serve_http(member, runners, keep_alive_s)
            if member.pd_role is not None:
                member.pd_role.set_url(member.url)
        for member in members:
            member.faults.apply(fault)
        yield members
    finally:
        await _close(members, runners)
        if wire is not None:
            wire.close()
