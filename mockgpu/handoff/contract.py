"""The interfaces of this package: a dialect for the server, and an agent for KvHandoff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvtransfer.protocol.outcomes import TransferOutcome
from mockgpu.leg_params import OfferedKv, PrefillLeg
from mockgpu.request_parser import ParsedHandoff, ParsedRequest, RequestBody


class EngineIdentity(msgspec.Struct, frozen=True):
    """This engine's identity for the other leg: its id, its agent's address and its shape.

    generation   counts registrations of memory
    version      the engine's, as (0, 33)
    url          where the group is served
    """

    engine_id: str
    host: str
    port: int
    tp: int
    role: str
    version: tuple[int, int]
    lease_s: float
    wait_s: float
    generation: int = 0
    url: str = ""
    transport: str = ""

    @property
    def address(self) -> str:
        """The agent's address."""
        return agent_address(self.host, self.port)


def agent_address(host: str, port: int) -> str:
    """Return an agent's address from the host and port that engines report.

    Agents of one process have no host (kvtransfer's inproc).
    """
    return f"inproc-{port}" if host == "inproc" else f"{host}:{port}"


class EngineDialect(Protocol):
    """One engine's contract for split requests. Its only state are the names already used."""

    name: str

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        here: EngineIdentity,
    ) -> ParsedHandoff:
        """Return the leg that a request asks for.

        Raises ApiError as the engine would; MalformedHandoffError is also counted.
        """
        ...

    def response_members(
        self, ask: ParsedRequest, give: PrefillLeg, offered: OfferedKv | None, here: EngineIdentity
    ) -> dict[str, Any]:
        """Return the members to add to a prefill leg's response. `offered` None: no KV is kept."""
        ...

    def choice_members(
        self, ask: ParsedRequest, offered: OfferedKv | None, first: bytes, here: EngineIdentity
    ) -> dict[str, Any]:
        """Return the members to add to its choice. `first` are the tokens made."""
        ...


class OfferPort(Protocol):
    """The part of kvtransfer's Offer that is used here."""

    name: str
    ticket: str

    def renew(self, ttl_s: float) -> bool: ...

    def revoke(self, detail: str = ...) -> None: ...

    async def wait_ended(self) -> TransferOutcome: ...


class LandingPort(Protocol):
    """The part of kvtransfer's Landing that is used here."""

    def cancel(self, detail: str = ...) -> None: ...

    async def wait_ended(self) -> TransferOutcome: ...


class AgentPort(Protocol):
    """The part of kvtransfer's Agent that is used here."""

    address: str

    def offer(
        self,
        name: str,
        blocks: Sequence[int],
        tokens: int,
        *,
        ttl_s: float = ...,
        public: bool = ...,
    ) -> OfferPort: ...

    def fetch(
        self,
        address: str,
        name: str,
        blocks: Sequence[int],
        tokens: int,
        *,
        ticket: str | None = ...,
        skip_tokens: int = ...,
        timeout_s: float = ...,
    ) -> LandingPort: ...

    def stats(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...
