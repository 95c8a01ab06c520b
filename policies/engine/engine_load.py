"""The fields of an endpoint's live load that the engine model reads and writes.

EngineLoad is the base class of EndpointLoad (endpoint_load.py). It has its own module, so that the
engine model does not import EndpointLoad.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from policies.engine.peer_load import PeerLoad
from policies.engine.step_time import SpeedBelief

if TYPE_CHECKING:
    from policies.engine.queued_prompt import QueuedPrompt


class EngineLoad:
    """The load of one inference engine as a policy knows it: requests, learned speed, and forecast.

    The load ledger (load_ledger.py), which counts the requests sent to the engine, writes:

    answers            reserved requests that expect more than one output token. The prefill half of
                       a split request is not one
    expected_tokens    expected output tokens of all reserved requests
    external_requests  requests that came to the engine from outside the gateways: the smaller
                       `unexplained_requests` (endpoint_load.py) of the last two scrapes, because
                       one scrape may be out of step with the gateway's own count
    kv_tokens          KV capacity in tokens; None: unknown
    slots              maximum number of sequences that the engine runs at a time; inf until a
                       prompt has waited although KV was free
    peer_load          the part of these numbers that other gateways have reserved (peer_load.py)
    reservations       the requests in flight, in order of reservation
    belief             learned speed (policies/engine/step_time.py)

    The forecast, which load_forecast.py and engine_model_updates.py write at every event of a
    request. Its fields are plain floats, so that a scorer is fast:

    prefill_done_at             time (policy clock) by which all waiting prompts should be computed;
                                not in the future if none is waiting
    next_first_token_at         time at which the next first token is expected; inf: none is
    prefill_s_per_token         seconds per additional uncached prompt token, including its share of
                                the step overhead
    attention_s_per_pair        seconds per (prompt token x context token) of prefill attention
    fixed_ttft_s                seconds that every request takes: API latency, the rest of the
                                current decode step, and the overhead of one step
    decode_s_per_token          seconds per output token at the present load: a decode step, plus
                                the prefill steps between two decode steps
    decode_s_per_sequence       increase of decode_s_per_token per additional sequence in the batch
    decode_s_per_context_token  increase of decode_s_per_token per additional context token in the
                                batch
    free_kv_tokens              free KV after every queued prompt has its blocks, as if no prefixes
                                were shared; inf: unknown
    kv_used_tokens              KV in use after every queued prompt has its blocks, with shared
                                prefixes counted once
    s_per_freed_kv_token        seconds until one more KV token becomes free
    """

    __slots__ = (
        *(
            "answers",
            "belief",
            "decode_s_per_context_token",
            "next_first_token_at",
            "reservations",
            "expected_tokens",
            "fixed_ttft_s",
            "free_kv_tokens",
            "kv_used_tokens",
            "s_per_freed_kv_token",
            "slots",
        ),
        *(
            "kv_tokens",
            "peer_load",
            "attention_s_per_pair",
            "prefill_done_at",
            "decode_s_per_sequence",
            "decode_s_per_token",
            "external_requests",
            "prefill_s_per_token",
        ),
    )

    def __init__(self, belief: SpeedBelief | None = None) -> None:
        self.answers = self.expected_tokens = self.external_requests = 0
        self.kv_tokens: float | None = None
        self.peer_load = PeerLoad()
        self.reservations: dict[QueuedPrompt, None] = {}
        self.belief: SpeedBelief = SpeedBelief() if belief is None else belief
        self.prefill_done_at = self.prefill_s_per_token = self.attention_s_per_pair = (
            self.fixed_ttft_s
        ) = 0.0
        self.decode_s_per_token = self.decode_s_per_sequence = self.decode_s_per_context_token = 0.0
        self.next_first_token_at = self.free_kv_tokens = inf
        self.s_per_freed_kv_token = 0.0
        self.kv_used_tokens = 0.0
        self.slots = inf

    def copy_engine_values(self, other: EngineLoad) -> None:
        """Take over the values of another load, except `belief` and `reservations`."""
        self.answers = other.answers
        self.decode_s_per_context_token = other.decode_s_per_context_token
        self.next_first_token_at = other.next_first_token_at
        self.expected_tokens = other.expected_tokens
        self.fixed_ttft_s = other.fixed_ttft_s
        self.free_kv_tokens = other.free_kv_tokens
        self.kv_used_tokens = other.kv_used_tokens
        self.s_per_freed_kv_token = other.s_per_freed_kv_token
        self.slots = other.slots
        self.kv_tokens = other.kv_tokens
        self.peer_load = other.peer_load
        self.attention_s_per_pair = other.attention_s_per_pair
        self.prefill_done_at = other.prefill_done_at
        self.decode_s_per_sequence = other.decode_s_per_sequence
        self.decode_s_per_token = other.decode_s_per_token
        self.external_requests = other.external_requests
        self.prefill_s_per_token = other.prefill_s_per_token
