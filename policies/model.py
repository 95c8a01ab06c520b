"""The vocabulary of routing: frozen values for what is shared, slots for what is counted.

Lives here: Endpoint, Candidate, Slo, Request, Ask, Pick and their parts. Not here: how they are read from the wire
(gateway/openai.py), who writes the live numbers (ledger.py), or any decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random

import msgspec

from policies.fingerprint import Fingerprint
from policies.load import EndpointLoad


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

    `bootstrap` is host:port of its bootstrap server, for dialects whose decoders are told one. `context_tokens` is the
    longest prompt and answer that it takes; None: whatever its model takes. `salt_member` is the request member in
    which it takes a cache salt; empty: it takes none. `tenants` are those that it serves; empty: all.
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
    """An endpoint together with its live load: what filters keep, scorers rate and pickers choose."""

    endpoint: Endpoint
    load: EndpointLoad


class Slo(msgspec.Struct, frozen=True):
    """A service class: what its requests are promised, and what keeping the promise to one of them is worth.

    ttft_s  budget from arrival to the first token, tpot_s  from there per output token; weight  worth of one request
    """

    name: str = "standard"
    ttft_s: float = 5.0
    tpot_s: float = 0.1
    weight: float = 1.0


STANDARD = Slo()


class Request(msgspec.Struct, frozen=True):
    """What a policy may know of a request. Token counts are estimates unless the client sent token ids.

    output_tokens  expected of all answers together; choices  answers wanted, of all prompts; prompts  how many
    priority    higher goes first among those who wait; 0 is everybody's
    arrived_s   policy clock when it reached the gateway
    deadline_s  policy clock when its client gives up; None when it did not say
    session     key of the conversation or agent session it belongs to; "" when unknown
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


class Ask(msgspec.Struct, frozen=True):
    """One routing question: who of the candidates serves this request now?

    cached[slot] is how many prompt tokens the endpoint in that slot is believed to hold; empty when the policy
    does not read prefixes. `fingerprint` is the prompt's chain of block keys, for rules that hash a prefix; None when
    nobody reads prefixes. `tried` holds names of endpoints that failed this request already. `returns` False: it would
    not come back to this pool if it were refused, for it only overflows into it.
    """

    request: Request
    now: float
    rng: Random
    cached: Sequence[int] = ()
    tried: frozenset[str] = frozenset()
    fingerprint: Fingerprint | None = None
    returns: bool = True


class Pick(msgspec.Struct, frozen=True):
    """The routing decision with its reasons. Higher score is better; the unit is the policy's own.

    `scores` and `kept` are aligned: who the filters kept and how each was rated. References, for explaining the pick.
    """

    candidate: Candidate
    cached_tokens: int
    score: float
    considered: int
    reason: str
    scores: Sequence[float] = ()
    kept: Sequence[Candidate] = ()
