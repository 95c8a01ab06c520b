"""The interfaces between a mock engine and the two parts it needs for split requests.

These are the protocol of the imitated engine, and the agent that transfers KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvtransfer.protocol.outcomes import TransferOutcome
from mockgpu.request_parser import ParsedHandoff, ParsedRequest, RequestBody
from mockgpu.split_legs import OfferedKv, PrefillLeg


class EngineIdentity(msgspec.Struct, frozen=True):
    """What the other engine of a split request learns about this engine.

    generation  how many times the engine has registered its KV memory; a restart adds one
    version     version of the engine, such as (0, 33)
    url         URL of the engine's HTTP server
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
    """Join the host and port of a KV transfer agent to one address.

    The host "inproc" is an agent in the same process. It has no network address.
    """
    return f"inproc-{port}" if host == "inproc" else f"{host}:{port}"


class EngineDialect(Protocol):
    """The interface of a protocol by which one kind of engine passes KV from prefill to decode.

    A mock engine calls it to read the protocol's fields in requests, and to write those of
    responses. Its only state is the set of transfer names that have been used, because a name must
    not be reused.
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
        """Decide whether a request is a prefill half, a decode half or whole, from its fields.

        raw       the request's body as bytes
        body      the request's parsed fields
        identity  the identity of this engine

        Raises ApiError where the real engine responds with an error. Raises MalformedHandoffError
        for malformed fields, which the caller counts.
        """
        ...

    def response_members(
        self,
        parsed: ParsedRequest,
        leg: PrefillLeg,
        offered: OfferedKv | None,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the fields that the protocol adds to the top level of a prefill response.

        offered  the KV that the decode engine may fetch; None: the engine keeps no KV
        """
        ...

    def choice_members(
        self,
        parsed: ParsedRequest,
        offered: OfferedKv | None,
        first: bytes,
        identity: EngineIdentity,
    ) -> dict[str, Any]:
        """Return the fields that the protocol adds to the choice object of a prefill response.

        offered  the KV that the decode engine may fetch; None: the engine keeps no KV
        first    the tokens that the prefill engine generated
        """
        ...


class OfferPort(Protocol):
    """The methods of kvtransfer's class Offer that a mock engine uses.

    An offer is KV that stays in memory so that one other engine can fetch it.
    """

    name: str
    ticket: str

    def renew(self, ttl_s: float) -> bool: ...

    def revoke(self, detail: str = ...) -> None: ...

    async def wait_ended(self) -> TransferOutcome: ...


class LandingPort(Protocol):
    """The methods of kvtransfer's class Landing that a mock engine uses.

    A landing is KV that this engine fetches from another one.
    """

    def cancel(self, detail: str = ...) -> None: ...

    async def wait_ended(self) -> TransferOutcome: ...


class AgentPort(Protocol):
    """The methods of kvtransfer's class Agent that a mock engine uses.

    An agent does the KV transfers of an engine, both outgoing and incoming.
    """

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
