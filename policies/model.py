"""The vocabulary of routing: frozen values for what is shared, slots for what is counted.

Lives here: Endpoint, Candidate, Request, Ask, Pick and their parts. Not here: how they are read from the wire
(gateway/openai.py), who writes the live numbers (gateway/endpoints.py), or any decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random

import msgspec

from policies.fingerprint import Fingerprint


class Role(StrEnum):
    """What a TP group may be asked to do. BOTH serves whole requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EngineKind(StrEnum):
    """Whose wire dialect an endpoint speaks."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


class Layout(msgspec.Struct, frozen=True):
    """How one engine process spreads a model over GPUs: tensor, pipeline, expert and data parallel sizes."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1


class Endpoint(msgspec.Struct, frozen=True):
    """One TP group behind one URL, as configured. Live numbers are in EndpointLoad.

    `bootstrap` is host:port of its bootstrap server, for dialects whose decoders are told one.
    """

    name: str
    url: str
    pool: str
    served_model: str
    role: Role = Role.BOTH
    engine: EngineKind = EngineKind.VLLM
    layout: Layout = Layout()
    labels: Mapping[str, str] = {}
    max_concurrency: int = 24
    bootstrap: str | None = None


class EndpointLoad:
    """The live numbers of one endpoint. One writer: gateway's EndpointTable (a simulator's table offline).

    slot             small stable integer, the endpoint's place in Ask.cached and in the prefix index
    in_flight        requests booked and not yet given back
    prefill_tokens   uncached prompt tokens booked whose first token has not been seen
    decode_tokens    context tokens of booked requests past their first token
    expected_tokens  output tokens expected of the booked requests (an expectation, given back at the end)
    held_tokens      prompt tokens that its prefix cache is believed to hold, of all requests together
    available        False while ejected by health or draining: never a candidate
    running, waiting, kv_usage, scraped_at   the engine's own view at its last scrape; None before the first
    strangers        requests in that view beyond in_flight at that moment: what others sent
    """

    __slots__ = (
        "available",
        "decode_tokens",
        "expected_tokens",
        "held_tokens",
        "in_flight",
        "kv_usage",
        "prefill_tokens",
        "running",
        "scraped_at",
        "slot",
        "strangers",
        "waiting",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.in_flight = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.expected_tokens = 0
        self.held_tokens = 0.0
        self.available = True
        self.running: int | None = None
        self.waiting: int | None = None
        self.kv_usage: float | None = None
        self.scraped_at: float | None = None
        self.strangers = 0


class Candidate(msgspec.Struct, frozen=True, eq=False):
    """An endpoint together with its live load: what filters keep, scorers rate and pickers choose."""

    endpoint: Endpoint
    load: EndpointLoad


class Request(msgspec.Struct, frozen=True):
    """What a policy may know of a request. Token counts are estimates unless the client sent token ids."""

    id: str
    model: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    stream: bool = False


class Ask(msgspec.Struct, frozen=True):
    """One routing question: who of the candidates serves this request now?

    cached[slot] is how many prompt tokens the endpoint in that slot is believed to hold; empty when the policy
    does not read prefixes. `fingerprint` is the prompt's chain of block keys, for rules that hash a prefix; None when
    nobody reads prefixes. `tried` holds names of endpoints that failed this request already.
    """

    request: Request
    now: float
    rng: Random
    cached: Sequence[int] = ()
    tried: frozenset[str] = frozenset()
    fingerprint: Fingerprint | None = None


class Pick(msgspec.Struct, frozen=True):
    """The routing decision with its reasons. Higher score is better; the unit is the policy's own."""

    candidate: Candidate
    cached_tokens: int
    score: float
    considered: int
    reason: str
