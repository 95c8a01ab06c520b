"""Value types of routing: endpoints, requests, candidates, queries and picks.

All are frozen. Live numbers of an endpoint are in load.py; parsing from HTTP is in the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random

import msgspec

from policies.load import EndpointLoad
from policies.prefix.fingerprint import Fingerprint
from policies.sizing.layout import Layout


class Role(StrEnum):
    """What a TP group may serve; only BOTH may serve whole requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EngineKind(StrEnum):
    """The inference engine, and with it the wire dialect, of an endpoint."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


class Endpoint(msgspec.Struct, frozen=True):
    """One TP group behind one URL, as configured.

    bootstrap       host:port of its bootstrap server, for dialects whose decoder needs it; None
                    otherwise
    context_tokens  longest prompt plus answer it accepts; None: the model's own limit
    salt_member     request member that carries the cache salt; empty: the engine takes no salt
    tenants         tenants it serves; empty: all
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
    context_tokens: int | None = None
    salt_member: str = ""
    tenants: frozenset[str] = frozenset()


class Candidate(msgspec.Struct, frozen=True, eq=False):
    """An endpoint with its live load: what filters keep, scorers rate and pickers choose."""

    endpoint: Endpoint
    load: EndpointLoad


class Slo(msgspec.Struct, frozen=True):
    """A service class: its latency budgets, and what one request served within them is worth.

    ttft_s  budget from arrival to the first token; tpot_s  from then on per output token; weight
            value of one request
    """

    name: str = "standard"
    ttft_s: float = 5.0
    tpot_s: float = 0.1
    weight: float = 1.0


STANDARD = Slo()

INFERRED_SESSION = "prefix"
"""The source of sessions that are recognised by their growing prompt."""


class SessionHints(msgspec.Struct, frozen=True):
    """What a client has said about the future of a session.

    is_last  no request of the session follows this one
    keep_s   how long its context should be kept after the answer; None: not said
    """

    is_last: bool = False
    keep_s: float | None = None


class Request(msgspec.Struct, frozen=True):
    """What a policy may know about a request.

    Token counts are estimates unless the client sent token ids.

    output_tokens  expected output tokens, summed over all choices
    choices     answers to generate, summed over all prompts; prompts  number of prompts
    priority    higher is served first among waiting requests; the default is 0
    arrived_s   policy clock at arrival at the gateway
    deadline_s  policy clock at which the client gives up; None if it sent no deadline
    session     key of the conversation or agent session it belongs to; "" if unknown
    session_source  the header or member that names the session, or "prefix" if its growing prompt
                was recognised
    session_hints  what the client has said about the session's future; None: nothing
    """

    id: str
    model: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    stream: bool = False
    slo: Slo = STANDARD
    priority: int = 0
    arrived_s: float = 0.0
    deadline_s: float | None = None
    session: str = ""
    choices: int = 1
    prompts: int = 1
    session_source: str = ""
    session_hints: SessionHints | None = None

    @property
    def is_session_inferred(self) -> bool:
        """Whether no header or member names the session, so that it began an unknown time ago."""
        return self.session_source == INFERRED_SESSION


class RoutingQuery(msgspec.Struct, frozen=True):
    """One routing question: which of the candidates should serve this request now.

    cached_by_slot    prompt tokens that the endpoint in each slot is believed to have cached; empty
                      if the policy does not read prefixes
    failed_endpoints  names of endpoints on which this request has failed already
    fingerprint       the prompt's chain of block keys, for rules that hash a prefix; None if no
                      policy reads prefixes
    can_return        False if a client would not retry this pool after a refusal, because the
                      request only falls back to it
    """

    request: Request
    now: float
    rng: Random
    cached_by_slot: Sequence[int] = ()
    failed_endpoints: frozenset[str] = frozenset()
    fingerprint: Fingerprint | None = None
    can_return: bool = True


class Pick(msgspec.Struct, frozen=True):
    """The routing decision and its reasons. Higher scores are better; the unit is the policy's own.

    `candidates` are those that passed the filters and were scored, `scores` their scores in the
    same order; of a large pool they are a shortlist (policies/candidate_order.py). Both are
    references, kept to explain the pick. `candidate_count` is how many passed the filters.
    """

    candidate: Candidate
    cached_tokens: int
    score: float
    candidate_count: int
    reason: str
    scores: Sequence[float] = ()
    candidates: Sequence[Candidate] = ()
