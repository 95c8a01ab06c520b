"""What every dialect module gives the server, and what the desk needs of an agent: the seams of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvtransfer.ends import End
from mockgpu.ask import Ask, Body, Reading
from mockgpu.handoff.legs import Give, Offered


class Here(msgspec.Struct, frozen=True):
    """Who this engine is to the other leg: its identity, its agent's address and its shape.

    `generation` counts registrations of memory; `version` is the engine's, as (0, 33); `url` is where it is served.
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
        """Where the agent is dialled."""
        return joined(self.host, self.port)


def joined(host: str, port: int) -> str:
    """An agent's address of what engines tell of it; agents of one process have no host (kvtransfer's inproc)."""
    return f"inproc-{port}" if host == "inproc" else f"{host}:{port}"


class Dialect(Protocol):
    """One engine's contract for split requests. Stateless but for what it must remember of names already used."""

    name: str

    def read(
        self, raw: bytes, body: Body, headers: Mapping[str, str], request_id: str, here: Here
    ) -> Reading:
        """The leg that a request asks for. Raises ApiError as the engine would; MalformedHandoffError is counted."""
        ...

    def told(self, ask: Ask, give: Give, offered: Offered | None, here: Here) -> dict[str, Any]:
        """What a prefill leg's answer says besides. `offered` None: nothing is kept (it ended by itself)."""
        ...

    def told_in_choice(
        self, ask: Ask, offered: Offered | None, first: bytes, here: Here
    ) -> dict[str, Any]:
        """The same for what stands in the choice; `first` are the tokens made."""
        ...


class OfferPort(Protocol):
    """kvtransfer.agent's offer, as far as an engine uses it."""

    name: str
    ticket: str

    def renew(self, ttl_s: float) -> bool: ...

    def revoke(self, detail: str = ...) -> None: ...

    async def ended(self) -> End: ...


class LandingPort(Protocol):
    """kvtransfer.agent's landing, as far as an engine uses it."""

    def cancel(self, detail: str = ...) -> None: ...

    async def ended(self) -> End: ...


class AgentPort(Protocol):
    """kvtransfer.agent.Agent, as far as an engine uses it."""

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

    def figures(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...
