"""The interfaces of split requests in a mock engine: handoff protocol and KV transfer agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvtransfer.protocol.outcomes import TransferOutcome
from mockgpu.request_parser import ParsedHandoff, ParsedRequest, RequestBody
from mockgpu.split_legs import OfferedKv, PrefillLeg


class EngineIdentity(msgspec.Struct, frozen=True):
    """The identity of this engine as sent to the other engine of a split request.

    generation   number of times that the engine has registered its memory
    version      version of the engine, such as (0, 33)
    url          URL of the engine's HTTP server
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
        return agent_address(self.host, self.port)


def agent_address(host: str, port: int) -> str:
    """Return the address of a KV transfer agent from the host and port that engines report.

    The host "inproc" means an agent of the same process, which has no network address.
    """
    return f"inproc-{port}" if host == "inproc" else f"{host}:{port}"


class EngineDialect(Protocol):
    """The protocol by which one kind of engine handles split requests.

    The protocol object only remembers which transfer names have been used.
    """

    name: str

    def read(
        self,
        raw: bytes,
        body: RequestBody,
        headers: Mapping[str, str],
        request_id: str,
        identity: EngineIdentity,
    ) -> ParsedHandoff:
        """Parse the handoff fields of a request: which half of a split request it is, if any.

        raw       the request's body as bytes
        body      its parsed members
        identity  this engine

        Raises ApiError where the real engine answers with an error, and MalformedHandoffError for
        fields that the caller counts as malformed.
        """
        ...

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the handoff fields to add to a prefill response at its top level.

        `offered` describes the KV that can be fetched, and is None if none is kept.
        """
        ...

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the handoff fields to add to the choice object of a prefill response.

        `first` has the tokens that were generated; `offered` is None if no KV is kept.
        """
        ...


class OfferPort(Protocol):
    """What a mock engine uses of kvtransfer's Offer, the handle of KV that another engine may
    fetch.
    """

    name: str
    ticket: str

    def renew(self, ttl_s: float) -> bool: ...

    def revoke(self, detail: str = ...) -> None: ...

    async def wait_ended(self) -> TransferOutcome: ...


class LandingPort(Protocol):
    """The methods of kvtransfer's Landing (an incoming KV transfer) that are used here."""

    def cancel(self, detail: str = ...) -> None: ...

    async def wait_ended(self) -> TransferOutcome: ...


class AgentPort(Protocol):
    """The methods of kvtransfer's Agent (one end of KV transfers) that are used here."""

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
