"""Half: all that makes a group one half of split requests: its KV memory, its agent, its desk, its dialect.

It dies with the group's ranks and comes back with them, as another engine: new identity, new agent, nothing offered.
What each part does is memory.py's, desk.py's and the dialect modules'.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtransfer.agent import Agent
from kvtransfer.clock import ThreadClock
from kvtransfer.options import Options
from kvtransfer.transports.base import Transport, TransportError
from kvtransfer.transports.inproc import Inproc, Wire
from kvtransfer.transports.shm import Shm
from kvtransfer.transports.tcp import Tcp
from mockgpu.ask import Body, MalformedHandoffError, Reading
from mockgpu.faults import Fault, FaultKind
from mockgpu.group import TpGroup
from mockgpu.handoff.bootstrap import Bootstrap, Resolver
from mockgpu.handoff.contract import Dialect, Here
from mockgpu.handoff.desk import Desk
from mockgpu.handoff.legs import Take
from mockgpu.handoff.mooncake import ABORT_S, Mooncake
from mockgpu.handoff.pace import Link
from mockgpu.handoff.sglang import BOOTSTRAP_S, Sglang
from mockgpu.handoff.spec import Transfer
from mockgpu.handoff.trtllm import HOLD_S, Trtllm
from mockgpu.handoff.vllm_nixl import VllmNixl
from mockgpu.handoff.vllm_push import REGISTRATION_S, VllmPush
from mockgpu.handoff.wire import BadWire
from mockgpu.kv import scaled_layout
from mockgpu.memory import KvMemory

# A pull that is not refused at once is under way: only a peer that falls silent ends it earlier.
PULL_S = 30.0


class ProcessWire(Wire):
    """Joins the agents of one process, on a clock of its own."""

    def __init__(self) -> None:
        self._own = ThreadClock("kv-wire")
        super().__init__(self._own)

    def close(self) -> None:
        """No agent moves anything any more."""
        self._own.close()


class Half:
    """Sole owner of a group's memory, agent, desk and bootstrap server.

    `wire` joins the agents of one process where the transport is inproc.
    """

    def __init__(
        self, group: TpGroup, transfer: Transfer, host: str, wire: ProcessWire | None = None
    ) -> None:
        spec = group.spec
        self.group = group
        self.transfer = transfer
        self.dialect, self._wait_s = _dialect(transfer)
        self.here = Here(
            "", host, 0, spec.tp, spec.role, transfer.version, transfer.lease_s, self._wait_s
        )
        # One block more than are given out: what is declined is fetched into it (desk.py).
        blocks = group.scheduler.pool.total + 1
        self.memory = KvMemory.create(
            scaled_layout(spec.model, spec.tp, transfer.scale), blocks, spec.role
        )
        self.agent: Agent | None = None
        self._wire = wire
        self._host = host
        self._starts = 0
        self._bootstrap = Bootstrap(host, transfer.bootstrap_port, transfer.dialect, spec.tp)
        self._resolver = Resolver()
        self._bad_wire = BadWire(host)
        self._changing: asyncio.Task[None] | None = None
        group.attach(self.memory)
        group.on_change = self._changed

    @property
    def bootstrap_url(self) -> str:
        """Where the bootstrap server is, on groups that have one."""
        return self._bootstrap.url

    async def start(self) -> None:
        """Become an engine that can be reached. Raises OSError when a port is taken; then it is none."""
        try:
            await self._start()
        except OSError:
            await self.stop()
            raise

    async def _start(self) -> None:
        spec, transfer = self.group.spec, self.transfer
        self._starts += 1
        name = f"{spec.role}-{secrets.token_hex(4)}"
        agent = self.agent = await self._started(name)
        host, port = _host_and_port(agent.address)
        if self.harmable:
            await self._bad_wire.start(host, port)
            port = self._bad_wire.port
        self.here = Here(
            name,
            host,
            port,
            spec.tp,
            spec.role,
            transfer.version,
            transfer.lease_s,
            self._wait_s,
            self._starts,
            self.here.url,
            transfer.transport if transfer.transport in ("tcp", "inproc") else "shm",
        )
        link = Link(spec.model.kv_token_bytes, transfer.gbps * 1e9 / 8, spec.speed)
        connector = "mooncake" if transfer.dialect == "mooncake" else "nixl"
        self.group.desk = Desk(
            self.group, agent, self._resolver, link, transfer.recompute, transfer.lease_s, connector
        )
        if spec.role != "decode" and self._bootstrap.wanted:
            await self._bootstrap.start(self.here)

    async def _started(self, name: str) -> Agent:
        """An agent of that name that listens. Raises OSError when its port is taken; then nothing of it is left."""
        transports = self._transports()
        agent = Agent(
            name,
            self.memory.layout,
            self.memory.regions,
            key=hashlib.sha256(self.transfer.key.encode()).digest(),
            transports=transports,
            # On a wire of this process the agent's time stops with it.
            clock=next((each.agent_clock for each in transports if isinstance(each, Inproc)), None),
            options=Options(
                patience_s=self._wait_s, family=_family(self.group.spec.model.name, self.transfer)
            ),
        )
        try:
            await agent.start()
        except TransportError as error:
            await agent.close()
            raise OSError(str(error)) from error
        return agent

    async def stop(self) -> None:
        """Cease to be reachable; every block is the group's own again."""
        desk, self.group.desk = self.group.desk, None
        await self._bootstrap.stop()
        self._bad_wire.stop()
        if desk is not None:
            await desk.close()
        elif self.agent is not None:  # it got no further than that when it started
            await self.agent.close()
        self.agent = None

    async def settled(self) -> None:
        """Return when what the group's ranks last did has been followed, whether that went well or not."""
        while self._changing is not None and not self._changing.done():
            await asyncio.wait((self._changing,))

    async def close(self) -> None:
        """The end: give the memory back as well."""
        await self.settled()
        await self.stop()
        await self._resolver.close()
        self.memory.close()

    def read(self, raw: bytes, body: Body, headers: Mapping[str, str], request_id: str) -> Reading:
        """The leg that a request is. What is malformed is counted, and kills the engine where it would kill a real one.

        Raises MalformedHandoffError, or ApiError for what an engine merely refuses.
        """
        try:
            reading = self.dialect.read(raw, body, headers, request_id, self.here)
        except MalformedHandoffError as error:
            self.group.metrics.malformed_handoffs += 1
            if error.fatal:
                self.group.lose_rank(0)
            raise
        if isinstance(reading.leg, Take) and reading.leg.parked:
            self.group.metrics.malformed_handoffs += 1
        return reading

    @property
    def harmable(self) -> bool:
        """Whether peers reach the agent by a way on which their bytes can come to harm."""
        return self.transfer.transport == "tcp" and self.transfer.wire_faults

    def harm(self, fault: Fault | None) -> None:
        """This is wrong with that way from now on; None: all is well."""
        if self._wire is not None and self._starts and self.agent is not None:
            stalls = fault is not None and fault.kind is FaultKind.WIRE_STALL
            (self._wire.freeze if stalls else self._wire.thaw)(self.agent.address)
        self._bad_wire.set(fault)

    def served_at(self, url: str) -> None:
        """The group's HTTP server listens there."""
        self.here = msgspec.structs.replace(self.here, url=url)

    def told(self) -> dict[str, Any]:
        """What the line says that tells of a group's start."""
        return {
            "dialect": self.dialect.name,
            "agent": self.here.address,
            "bootstrap": self.bootstrap_url,
        }

    def state(self) -> dict[str, Any]:
        """Who it is and what it holds for others, for tests."""
        figures = self.agent.figures() if self.agent is not None else {}
        return {
            "dialect": self.dialect.name,
            "engine_id": self.here.engine_id,
            "agent": self.here.address,
            "bootstrap": self.bootstrap_url,
            "transfers": self.group.desk.under_way if self.group.desk is not None else 0,
            "leases": figures.get("leases"),
            "reservations": figures.get("reservations"),
        }

    def _changed(self, alive: bool) -> None:
        """The group has lost its ranks, or has them back."""
        before = self._changing
        self._changing = asyncio.ensure_future(self._follow(before, alive))

    async def _follow(self, before: asyncio.Task[None] | None, alive: bool) -> None:
        """One change after another. An engine that finds its port taken stays away until its ranks come back again."""
        if before is not None:
            await asyncio.wait((before,))
        if not alive:
            await self.stop()
        elif self.agent is None:
            await self.start()

    def _transports(self) -> list[Transport]:
        """The first is how the agent is reached; the others are taken where both ends have them."""
        kind = self.transfer.transport
        if kind == "inproc":
            if self._wire is None:
                raise ValueError("agents of one process need a wire to be joined by")
            return [Inproc(self._wire)]
        # An agent is always reached by TCP, which is what engines' objects can name; shared memory is agreed on then.
        try:
            tcp = Tcp(self._host, self.transfer.port, tls=self.transfer.tls)
        except TransportError as error:  # files that cannot be used
            raise ValueError(str(error)) from error
        return [tcp] if kind == "tcp" else [tcp, Shm()]


def _dialect(transfer: Transfer) -> tuple[Dialect, float]:
    """The dialect, and how long its legs wait for each other unless told otherwise."""
    known: dict[str, tuple[Dialect, float]] = {
        "vllm_nixl": (VllmNixl(), PULL_S),
        "vllm_push": (VllmPush(), REGISTRATION_S),
        "mooncake": (Mooncake(), ABORT_S),
        "sglang": (Sglang(), BOOTSTRAP_S),
        "trtllm": (Trtllm(), HOLD_S),
    }
    dialect, wait_s = known[transfer.dialect]
    return dialect, wait_s if transfer.wait_s is None else transfer.wait_s


def _family(model: str, transfer: Transfer) -> str:
    """What the handshake of two engines compares: kind and version, and whose weights the cache is of."""
    kind = "vllm" if transfer.dialect.startswith(("vllm", "mooncake")) else transfer.dialect
    return f"{kind}/{transfer.version[0]}.{transfer.version[1]}/{model}"


def _host_and_port(address: str) -> tuple[str, int]:
    """An agent's address as engines tell it: a host and a number."""
    host, _, port = address.rpartition(":" if ":" in address else "-")
    return host, int(port)
