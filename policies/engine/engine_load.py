"""The part of an endpoint's live load that the engine model reads and writes.

It is the base of EndpointLoad (load.py), in its own module so that the engine model need not import
that.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from policies.engine.peer_load import Others
from policies.engine.step_time import Belief

if TYPE_CHECKING:
    from policies.engine.queued_prompt import Prompt


class EngineLoad:
    """Bookings, learned speed and forecast of one engine.

    Written by ledger.py:

    answers            booked requests that expect more than one output token; not the prefill half
                       of a split request
    expected_tokens    expected output tokens of all booked requests, subtracted again when each of
                       them ends
    external_requests  requests from outside the gateway fleet: the smaller unexplained_requests of
                       the last two scrapes
    kv_tokens          KV capacity in tokens; None while unknown
    peer_load          the part of the booked numbers that belongs to other gateways (peer_load.py)
    bookings           the bookings, in booking order
    belief             learned speed (policies/engine/step_time.py)

    The forecast, written by load_forecast.py and engine_timeline.py on every ledger event. It is
    plain floats, so that a scorer costs a few attribute loads per candidate:

    prefill_done_at       policy clock when all booked prompts should be computed; not in the future
                          if none is waiting
    next_first_token_at   policy clock when the next first token of a booked prompt is expected; inf
                          if none is
    prefill_s_per_token   seconds per additional uncached prompt token, including its share of the
                          step overhead
    attention_s_per_pair  seconds per (prompt token x context token) of prefill attention
    fixed_ttft_s          seconds every request pays: API latency, the rest of the current decode
                          step, one step's overhead
    decode_s_per_token    seconds per output token at the present load: a decode step plus the
                          prefill steps in between
    decode_s_per_sequence       increase of decode_s_per_token per additional sequence in the batch
    decode_s_per_context_token  increase of decode_s_per_token per additional context token in the
                                batch
    free_kv_tokens        free KV once every queued prompt has its blocks, as if no prefixes were
                          shared; inf if unknown
    s_per_freed_kv_token  seconds until one more KV token becomes free
    """

    __slots__ = (
        *(
            "answers",
            "belief",
            "context_s",
            "due_at",
            "entries",
            "expected_tokens",
            "fixed_s",
            "kv_free",
            "kv_s",
        ),
        *(
            "kv_tokens",
            "others",
            "pair_s",
            "ready_at",
            "sequence_s",
            "step_s",
            "strangers",
            "token_s",
        ),
    )

    def __init__(self, belief: Belief | None = None) -> None:
        self.answers = self.expected_tokens = self.strangers = 0
        self.kv_tokens: float | None = None
        self.others = Others()
        self.entries: dict[Prompt, None] = {}
        self.belief: Belief = Belief() if belief is None else belief
        self.ready_at = self.token_s = self.pair_s = self.fixed_s = 0.0
        self.step_s = self.sequence_s = self.context_s = 0.0
        self.due_at = self.kv_free = inf
        self.kv_s = 0.0
