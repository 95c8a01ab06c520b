"""PdRole: what a mock engine needs for split requests: KV memory, transfer agent and protocol.

When the engine loses a GPU, all of it stops. When the GPU returns, the role starts with a new
identity, a new agent and no offers of KV, like a restarted engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtransfer.agent import Agent
from kvtransfer.transport_interface import Transport, TransportError
from kvtransfer.transports.inproc import Inproc, InprocWire
from kvtransfer.transports.shm import Shm
from kvtransfer.transports.tcp import Tcp
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import ThreadClock
from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.handoff.bootstrap import BootstrapServer, PeerResolver
from mockgpu.handoff.faulty_link import FaultyRelay
from mockgpu.handoff.interfaces import EngineDialect, EngineIdentity
from mockgpu.handoff.kv_handoff import KvHandoff
from mockgpu.handoff.link_speed import PacedLink
from mockgpu.handoff.mooncake import ABORT_S, MooncakeDialect
from mockgpu.handoff.penstock import WAIT_S, PenstockDialect
from mockgpu.handoff.sglang import BOOTSTRAP_S, SglangDialect
from mockgpu.handoff.trtllm import HOLD_S, TrtllmDialect
from mockgpu.handoff.vllm_nixl import VllmNixlDialect
from mockgpu.handoff.vllm_push import REGISTRATION_S, VllmPushDialect
from mockgpu.kv_bytes import KvMemory, scaled_layout
from mockgpu.kv_options import TransferSpec
from mockgpu.request_parser import MalformedHandoffError, ParsedHandoff, RequestBody
from mockgpu.split_legs import DecodeLeg
from mockgpu.tp_group import TpGroup

# Maximum seconds of a pull that was not refused at once. Only a silent peer ends it earlier.
PULL_S = 30.0


class ProcessWire(InprocWire):
    """The simulated network between KV transfer agents of one process. It has its own clock."""

    def __init__(self) -> None:
        self._own = ThreadClock("kv-wire")
        super().__init__(self._own)

    def close(self) -> None:
        self._own.close()


class PdRole:
    """The parts of a mock engine that serve the prefill or decode half of split requests.

    It owns the KV memory, the agent that transfers KV, and the bootstrap server, where decode
    engines ask for this engine's address. `wire` connects the agents of one process; only the
    transport inproc uses it.
    """

    def __init__(
        self, group: TpGroup, transfer: TransferSpec, host: str, wire: ProcessWire | None = None
    ) -> None:
        spec = group.spec
        self.group = group
        self.transfer = transfer
        self.dialect, self._wait_s = _dialect(transfer)
        self.identity = EngineIdentity(
            "", host, 0, spec.tp, spec.role, transfer.version, transfer.lease_s, self._wait_s
        )
        # The memory has one block more than the scheduler, for KV that is fetched only to be
        # dropped (mockgpu/handoff/kv_handoff.py).
        blocks = group.scheduler.pool.total + 1
        self.memory = KvMemory.create(
            scaled_layout(spec.model, spec.tp, transfer.scale), blocks, spec.role
        )
        self.agent: Agent | None = None
        self._wire = wire
        self._host = host
        self._starts = 0
        self._bootstrap = BootstrapServer(host, transfer.bootstrap_port, transfer.dialect, spec.tp)
        self._resolver = PeerResolver()
        self._relay = FaultyRelay(host)
        self._change_task: asyncio.Task[None] | None = None
        group.attach(self.memory)
        group.on_change = self._on_ranks_changed

    @property
    def bootstrap_url(self) -> str:
        """Return the URL of the engine's bootstrap server, or "" if there is none."""
        return self._bootstrap.url

    async def start(self) -> None:
        """Start the engine's KV transfer agent and bootstrap server.

        Raises OSError if a port is in use. Neither of the two runs then.
        """
        try:
            await self._start()
        except OSError:
            await self.stop()
            raise

    async def _start(self) -> None:
        spec, transfer = self.group.spec, self.transfer
        self._starts += 1
        name = f"{spec.role}-{secrets.token_hex(4)}"
        agent = self.agent = await self._start_agent(name)
        host, port = _host_and_port(agent.address)
        if self.supports_faults:
            await self._relay.start(host, port)
            port = self._relay.port
        self.identity = EngineIdentity(
            name,
            host,
            port,
            spec.tp,
            spec.role,
            transfer.version,
            transfer.lease_s,
            self._wait_s,
            self._starts,
            self.identity.url,
            transfer.transport if transfer.transport in ("tcp", "inproc") else "shm",
        )
        link = PacedLink(spec.model.kv_token_bytes, transfer.gbps * 1e9 / 8, spec.speed)
        connector = "mooncake" if transfer.dialect == "mooncake" else "nixl"
        self.group.kv_handoff = KvHandoff(
            self.group, agent, self._resolver, link, transfer.recompute, transfer.lease_s, connector
        )
        if spec.role != "decode" and self._bootstrap.is_needed:
            await self._bootstrap.start(self.identity)

    async def _start_agent(self, name: str) -> Agent:
        # Start a KV transfer agent and return it. Raises OSError if its port is taken.
        transports = self._transports()
        agent = Agent(
            name,
            self.memory.layout,
            self.memory.regions,
            key=hashlib.sha256(self.transfer.key.encode()).digest(),
            transports=transports,
            # With the inproc transport, the agent's clock stops as well.
            clock=next(
                (
                    transport.agent_clock
                    for transport in transports
                    if isinstance(transport, Inproc)
                ),
                None,
            ),
            options=AgentOptions(
                invite_wait_s=self._wait_s,
                family=_family(self.group.spec.model.name, self.transfer),
            ),
        )
        try:
            await agent.start()
        except TransportError as error:
            await agent.close()
            raise OSError(str(error)) from error
        return agent

    async def stop(self) -> None:
        """Stop the engine's KV transfer agent, and wait until no transfer accesses its KV
        blocks.
        """
        handoff, self.group.kv_handoff = self.group.kv_handoff, None
        await self._bootstrap.stop()
        self._relay.stop()
        if handoff is not None:
            await handoff.close()
        elif self.agent is not None:  # the start failed after creating it
            await self.agent.close()
        self.agent = None

    async def wait_applied(self) -> None:
        """Wait until the latest loss or return of a GPU has stopped or restarted this role."""
        while self._change_task is not None and not self._change_task.done():
            await asyncio.wait((self._change_task,))

    async def close(self) -> None:
        """Stop the engine's prefill or decode role permanently, and release its KV memory."""
        await self.wait_applied()
        await self.stop()
        await self._resolver.close()
        self.memory.close()

    def read(
        self, raw: bytes, body: RequestBody, headers: Mapping[str, str], request_id: str
    ) -> ParsedHandoff:
        """Decide whether a request is a prefill half, a decode half or whole, from its fields.

        Raises ApiError if the real engine would refuse them. Raises MalformedHandoffError for
        malformed fields. They are counted, and stop this engine if they would crash the real one.
        """
        try:
            reading = self.dialect.read(raw, body, headers, request_id, self.identity)
        except MalformedHandoffError as error:
            self.group.metrics.malformed_handoffs += 1
            if error.fatal:
                self.group.fail_rank(0)
            raise
        if isinstance(reading.leg, DecodeLeg) and reading.leg.is_parked:
            self.group.metrics.malformed_handoffs += 1
        return reading

    @property
    def supports_faults(self) -> bool:
        """Return whether peers connect through a relay, so that faults can be injected."""
        return self.transfer.transport == "tcp" and self.transfer.wire_faults

    def set_fault(self, fault: InjectedFault | None) -> None:
        """Apply a fault to the KV transfer connections. None ends the fault."""
        if self._wire is not None and self._starts and self.agent is not None:
            stalls = fault is not None and fault.kind is FaultKind.WIRE_STALL
            (self._wire.freeze if stalls else self._wire.thaw)(self.agent.address)
        self._relay.set(fault)

    def set_url(self, url: str) -> None:
        """Set the URL of this engine's HTTP server, which is sent to other engines."""
        self.identity = msgspec.structs.replace(self.identity, url=url)

    def startup_members(self) -> dict[str, Any]:
        """Return the fields that this role adds to the output of `penstock mock --json`."""
        return {
            "dialect": self.dialect.name,
            "agent": self.identity.address,
            "bootstrap": self.bootstrap_url,
        }

    def state(self) -> dict[str, Any]:
        """Return the engine's identity and its offers, that is, KV kept for other engines.

        For tests.
        """
        stats = self.agent.stats() if self.agent is not None else {}
        return {
            "dialect": self.dialect.name,
            "engine_id": self.identity.engine_id,
            "agent": self.identity.address,
            "bootstrap": self.bootstrap_url,
            "transfers": self.group.kv_handoff.running_tasks
            if self.group.kv_handoff is not None
            else 0,
            "leases": stats.get("leases"),
            "reservations": stats.get("reservations"),
        }

    def _on_ranks_changed(self, alive: bool) -> None:
        earlier = self._change_task
        self._change_task = asyncio.ensure_future(self._apply_change(earlier, alive))

    async def _apply_change(self, earlier: asyncio.Task[None] | None, alive: bool) -> None:
        # Wait for the earlier change, then stop or start the engine.
        #
        # If its port is taken, the engine stays down until its ranks return again.
        if earlier is not None:
            await asyncio.wait((earlier,))
        if not alive:
            await self.stop()
        elif self.agent is None:
            await self.start()

    def _transports(self) -> list[Transport]:
        # Return the KV transports, most preferred first.
        #
        # The first one has the address that peers are given; the others are alternatives.
        kind = self.transfer.transport
        if kind == "inproc":
            if self._wire is None:
                raise ValueError(
                    "the transport inproc requires a ProcessWire, which connects the agents of "
                    "this process"
                )
            return [Inproc(self._wire)]
        # Agents are reached by TCP, the only address that engines' objects can carry. Shared memory
        # is negotiated afterwards.
        try:
            tcp = Tcp(self._host, self.transfer.port, tls=self.transfer.tls)
        except TransportError as error:  # unusable TLS files
            raise ValueError(str(error)) from error
        return [tcp] if kind == "tcp" else [tcp, Shm()]


def _dialect(transfer: TransferSpec) -> tuple[EngineDialect, float]:
    known: dict[str, tuple[EngineDialect, float]] = {
        "vllm_nixl": (VllmNixlDialect(), PULL_S),
        "vllm_push": (VllmPushDialect(), REGISTRATION_S),
        "penstock": (PenstockDialect(), WAIT_S),
        "mooncake": (MooncakeDialect(), ABORT_S),
        "sglang": (SglangDialect(), BOOTSTRAP_S),
        "trtllm": (TrtllmDialect(), HOLD_S),
    }
    dialect, wait_s = known[transfer.dialect]
    return dialect, wait_s if transfer.wait_s is None else transfer.wait_s


def _family(model: str, transfer: TransferSpec) -> str:
    # Return the string that two engines must have in common: kind, version and model.
    kind = (
        "vllm"
        if transfer.dialect.startswith(("vllm", "penstock", "mooncake"))
        else transfer.dialect
    )
    return f"{kind}/{transfer.version[0]}.{transfer.version[1]}/{model}"


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":" if ":" in address else "-")
    return host, int(port)
