"""The vocabulary of routing: frozen values for what is shared, slots for what is counted.

Lives here: Endpoint, Candidate, Slo, Request, Ask, Pick and their parts. Not here: how they are read from the wire
(gateway/openai.py), who writes the live numbers (ledger.py), or any decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from random import Random

import msgspec

from policies.fingerprint import Fingerprint
from policies.foreign import Others
from policies.latency import Belief
from policies.paper import Prompt
from policies.timeline import Timeline


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


NO_CEILING = 1 << 30


class EndpointLoad:
    """The live numbers of one endpoint. What is booked there is written by ledger.py alone, the rest by who scrapes.

    slot             small stable integer, the endpoint's place in Ask.cached and in the prefix index
    in_flight        requests booked and not yet given back
    answers          those of them with more than one output token: who only prefills for another endpoint makes one
    prefill_tokens   uncached prompt tokens booked whose first token has not been seen
    decode_tokens    prompt tokens of booked requests past their first token
    expected_tokens  output tokens expected of the booked requests (an expectation, given back at the end)
    held_tokens      prompt tokens that its prefix cache is believed to hold, of all requests together
    regret           share of what aged out of its prefix cache that was asked for again when nobody held it, 0 to 1
    decoding         booked requests past their first token
    kv_tokens        tokens of KV the endpoint can hold; None while unknown
    kv_booked        prompt and expected output tokens of all booked requests: what they lock or will lock there
    available        False while ejected by health or draining: never a candidate
    is_proven        no failure there, or a success since the last one: where retries go first
    ceiling          requests at once while others have room: fewer than its cap as long as it warms up (warmup.py)
    running, waiting, kv_usage, scraped_at   the engine's own view at its last scrape; None before the first
    beyond           requests in that view beyond in_flight at that moment
    strangers        as many as were beyond at each of the last two scrapes: what strangers to the fleet's gateways sent
    others           what other gateways booked here, contained in the booked numbers above (foreign.py)
    belief           how fast the endpoint is, learnt (latency.py)
    timeline         what its engine is believed to be doing, step by step (timeline.py, paper.py)
    believed         whether anybody reads beliefs here; if not, timeline and outlook rest, and nothing is predicted
    entries          the places taken, in the order in which they were

    The outlook, refreshed by the ledger's events, so that a scorer costs a few attribute loads per candidate:

    ready_at    policy clock at which the booked prompts are expected to be computed; not after now: none are waiting
    due_at      policy clock when the next first token of a booked prompt is expected; infinite while there is none
    token_s     seconds per further uncached prompt token, its share of the steps' overhead included
    pair_s      seconds per (prompt token x context token) of prefill attention
    fixed_s     seconds that any request pays: the API's cost, what is left of a decode step, one step's overhead
    step_s      seconds per output token as things stand: a decode step, stretched by the prefills in between
    sequence_s  what one more sequence in the batch adds to step_s
    context_s   what one more token of context in the batch adds to step_s
    kv_free     tokens of KV that are not taken yet, by those in the queue neither, if every sequence took all of its
                prompt; infinite while unknown
    kv_s        seconds until one more token of KV comes free
    """

    __slots__ = (
        *("answers", "available", "belief", "believed", "beyond", "ceiling", "decode_tokens", "decoding", "entries"),
        *("expected_tokens", "held_tokens", "in_flight", "is_proven"),
        *("kv_booked", "kv_tokens", "kv_usage", "others", "prefill_tokens", "regret", "running", "scraped_at", "slot"),
        *("strangers", "timeline", "waiting"),
        *("context_s", "due_at", "fixed_s", "kv_free", "kv_s", "pair_s", "ready_at", "sequence_s"),
        *("step_s", "token_s"),
    )

    def __init__(self, slot: int, belief: Belief | None = None) -> None:
        self.slot = slot
        self.in_flight = self.answers = self.decoding = 0
        self.prefill_tokens = self.decode_tokens = self.expected_tokens = 0
        self.held_tokens = self.regret = 0.0
        self.kv_booked = 0
        self.kv_tokens: float | None = None
        self.available = self.is_proven = True
        self.ceiling = NO_CEILING
        self.running: int | None = None
        self.waiting: int | None = None
        self.kv_usage: float | None = None
        self.scraped_at: float | None = None
        self.beyond = self.strangers = 0
        self.others = Others()
        self.belief: Belief = Belief() if belief is None else belief
        self.timeline = Timeline()
        self.believed = True
        self.entries: dict[Prompt, None] = {}
        self.ready_at = self.token_s = self.pair_s = self.fixed_s = 0.0
        self.step_s = self.sequence_s = self.context_s = 0.0
        self.due_at = self.kv_free = inf
        self.kv_s = 0.0
        self.timeline.refresh(self, 0.0)


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
