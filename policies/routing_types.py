"""The value types of routing: Endpoint, Request, Candidate, service class (Slo), query, and pick.

All values are immutable. The live numbers of an endpoint are in endpoint_load.py. The gateway
parses HTTP requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from random import Random

import msgspec

from policies.endpoint_load import EndpointLoad
from policies.prefix.fingerprint import Fingerprint
from policies.sizing.parallel_layout import Layout


class Role(StrEnum):
    """Which phases of requests an endpoint may serve: prefill, decode, or both.

    Only endpoints with BOTH may serve whole requests.
    """

    # Enum's own __hash__ is a Python call.
    __hash__ = str.__hash__

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EngineKind(StrEnum):
    """The kind of an endpoint's inference engine, which determines the APIs that it serves.

    OPENAI is any other engine or provider with OpenAI-compatible APIs. The table in
    policies/engine_kinds.py lists the differences.
    """

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    LLAMACPP = "llamacpp"
    TGI = "tgi"
    OLLAMA = "ollama"
    TRANSFORMERS = "transformers"
    OPENAI = "openai"


class TokenPrice(msgspec.Struct, frozen=True):
    """What a provider charges, in dollars per million tokens.

    prompt  price of prompt tokens that are not cached
    cached  price of prompt tokens that the provider reports as cached
    answer  price of generated tokens
    """

    prompt: float
    cached: float
    answer: float

    def usd(self, prompt_tokens: int, cached_tokens: int, answer_tokens: int) -> float:
        """Return the price of one request in dollars.

        `cached_tokens` is the part of `prompt_tokens` that the provider reports as cached.
        """
        uncached = max(0, prompt_tokens - cached_tokens)
        dollars = uncached * self.prompt + cached_tokens * self.cached
        return (dollars + answer_tokens * self.answer) / 1e6


SLOTS_LABEL = "max_num_seqs"
"""Label of an endpoint that states this option of vLLM, or its equivalent in another engine."""

STEP_LABEL = "max_num_batched_tokens"
"""Label of an endpoint that states this option of vLLM, or its equivalent in another engine."""


class Endpoint(msgspec.Struct, frozen=True):
    """One inference engine at one URL, as configured.

    name             its name, for messages, logs and metrics
    url              scheme, host and port
    pool             name of its pool
    served_model     the engine's name for the model; empty: the name that clients use
    role             the phases of requests that it may serve
    engine           kind of its engine
    layout           parallel sizes of its engine
    labels           labels from the configuration, such as `gpu`
    bootstrap        host:port of its bootstrap server, where decode engines find its KV; None: its
                     handoff protocol needs none
    max_concurrency  maximum number of requests to send to it at a time
    context_tokens   longest prompt plus answer that it accepts; None: the model's own limit
    salt_member      JSON field of a request that contains the cache salt; empty: the engine has
                     none
    tenants          tenants that it serves; empty: all
    rank             data-parallel rank of the engine to which all its requests are sent; None: the
                     engine chooses a rank
    token_price      what its provider charges for tokens; None: an engine that you run yourself
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
    rank: int | None = None
    token_price: TokenPrice | None = None

    @property
    def key(self) -> tuple[str, str]:
        return endpoint_key(self.pool, self.url, self.rank)

    @property
    def is_lockstep(self) -> bool:
        """Return whether the endpoint is a rank whose steps end together with all other ranks'.

        They do if the experts of its model are spread over the ranks: each layer waits for all.
        """
        return self.rank is not None and self.layout.ep > self.layout.tp

    @property
    def stated_slots(self) -> float:
        """Return how many sequences the engine runs at a time, from its label max_num_seqs.

        The label holds for each data-parallel rank. Returns inf without the label.
        """
        stated = self.labels.get(SLOTS_LABEL)
        ranks = self.layout.dp if self.rank is None else 1
        return inf if stated is None else float(stated) * ranks

    @property
    def stated_step_tokens(self) -> int | None:
        """Return the maximum tokens of a step of all stages and ranks, from the label
        max_num_batched_tokens.

        Returns None without the label.
        """
        stated, layout = self.labels.get(STEP_LABEL), self.layout
        ranks = layout.dp if self.rank is None else 1
        return None if stated is None else int(stated) * layout.pp * ranks


def endpoint_key(pool: str, url: str, rank: int | None) -> tuple[str, str]:
    """Return (pool, address), which together identify an endpoint.

    If the endpoint is one data-parallel rank, the address ends in `#` and the number of the rank.
    """
    return pool, url if rank is None else f"{url}#dp{rank}"


class Candidate(msgspec.Struct, frozen=True, eq=False):
    """An endpoint that may be chosen for a request, with its live load."""

    endpoint: Endpoint
    load: EndpointLoad


class Slo(msgspec.Struct, frozen=True):
    """A service class: its latency budgets, and the value of a request that is served within them.

    name         name of the class
    ttft_s       maximum seconds from arrival to the first token
    tpot_s       maximum seconds per further output token
    weight       value of one request
    is_promised  whether an operator or a client has set the budgets. Built-in budgets only rank
                 requests; no request is refused because of them
    """

    name: str = "standard"
    ttft_s: float = 5.0
    tpot_s: float = 0.1
    weight: float = 1.0
    is_promised: bool = True


STANDARD = Slo()

INFERRED_SESSION = "prefix"
"""The value of `session_source` for a session that the client did not name.

It was recognised by its growing prompt: each turn repeats the prompt of the turn before.
"""


class SessionHints(msgspec.Struct, frozen=True):
    """What a client has announced about the future of its session.

    is_last  whether this is the last request of the session
    keep_s   seconds to keep its context cached after the answer; None: not announced
    """

    is_last: bool = False
    keep_s: float | None = None


class Request(msgspec.Struct, frozen=True):
    """The properties of a request that a policy may read.

    Token counts are estimates unless the client sent token ids.

    id              id of the request
    model           name of the model
    tenant          the tenant that sent it
    prompt_tokens   tokens of its prompts
    output_tokens   expected output tokens, summed over all choices
    stream          whether the answer is streamed
    slo             its service class
    choices         number of answers to generate, summed over all prompts
    prompts         number of prompts
    priority        among waiting requests, a higher number is served first; the default is 0
    arrived_s       time of arrival at the gateway, on the policy clock
    deadline_s      time at which the client gives up, on the policy clock; None: no deadline
    session         key of its conversation or agent session; "": unknown
    session_source  header or JSON field that contains the session, or "prefix" if the gateway
                    recognised the session by its growing prompt
    session_hints   what the client has announced about the session's future; None: nothing
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
        """Return whether the session was recognised by its growing prompt, not named by the client.

        It is then unknown when the session began.
        """
        return self.session_source == INFERRED_SESSION


NONE_FAILED: frozenset[str] = frozenset()
"""The `failed_endpoints` of a first attempt."""


class RoutingQuery(msgspec.Struct, frozen=True):
    """The question to a policy: which candidate endpoint should serve this request now?

    cached_by_slot    prompt tokens that each endpoint is believed to have cached, by the endpoint's
                      slot (EndpointLoad.slot); empty: the policy does not read prefixes
    failed_endpoints  names of endpoints on which this request has already failed
    fingerprint       hashes of the prompt's prefixes, one per block; None: no policy reads them
    can_return        whether a client may retry this pool after a refusal. False if the pool is
                      only the fallback of another one
    computes_tokens   whether an engine computes tokens for the request. False for requests such as
                      /tokenize, whose times do not show the engine's speed
    rng               random generator; filters and scorers do not use it
    """

    request: Request
    now: float
    rng: Random
    cached_by_slot: Sequence[int] = ()
    failed_endpoints: frozenset[str] = NONE_FAILED
    fingerprint: Fingerprint | None = None
    can_return: bool = True
    computes_tokens: bool = True


class Pick(msgspec.Struct, frozen=True):
    """The endpoint that a policy has chosen for a request, and the reasons for the choice.

    cached_tokens    prompt tokens that the endpoint is believed to have cached
    score            its score: higher is better; the unit depends on the policy
    candidate_count  number of candidates that passed the filters
    candidates       the candidates that were scored; in a large pool, a shortlist
                     (policies/candidate_order.py)
    scores           their scores, in the same order
    """

    candidate: Candidate
    cached_tokens: int
    score: float
    candidate_count: int
    reason: str
    scores: Sequence[float] = ()
    candidates: Sequence[Candidate] = ()
