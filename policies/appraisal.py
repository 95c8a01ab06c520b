"""What a request would cost and how soon its first token could come: one look over the candidates.

Read from the outlook of EndpointLoad (written by ledger.py). Not here: who is picked, or whether it may enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from policies.model import Ask, Candidate


class Appraisal(msgspec.Struct, frozen=True):
    """One request against the candidates of the moment, times in seconds.

    ttft_s         from now to the first token where that is soonest, queue included; inf with nobody available
    queue_s        the mean queue over all of them; count: how many they are
    prefill_s      computing the prompt where least of it is missing, without any queue
    decode_s       what its decoding takes of an engine: share of KV memory times residence, or of the steps if more
    cached_tokens  the most of the prompt that any candidate is believed to hold
    """

    ttft_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    count: int

    @property
    def work_s(self) -> float:
        """Seconds of one TP group that serving it is expected to take."""
        return self.prefill_s + self.decode_s


def left_s(ask: Ask) -> float:
    """Seconds left of the request's TTFT budget; negative when it is late already."""
    return (ask.request.arrived_s or ask.now) + ask.request.slo.ttft_s - ask.now


def appraise(ask: Ask, candidates: Sequence[Candidate]) -> Appraisal:
    """Appraise the request over the available candidates. O(candidates), about half a microsecond each."""
    request, cached, now = ask.request, ask.cached, ask.now
    prompt, known = request.prompt_tokens, len(ask.cached)
    soonest = least = inf
    queues, most, count, best = 0.0, 0, 0, None
    for candidate in candidates:
        load = candidate.load
        if not load.available:
            continue
        held = cached[load.slot] if load.slot < known else 0
        missing = prompt - held if held < prompt else 1
        alone = load.fixed_s + missing * (load.token_s + load.pair_s * (held + missing / 2))
        count += 1
        backlog = load.ready_at - now
        if backlog > 0.0:
            queues += backlog
        else:
            backlog = 0.0
        if backlog + alone < soonest:
            soonest = backlog + alone
        if alone < least:
            least, best = alone, load
        if held > most:
            most = held
    if best is None:
        return Appraisal(inf, inf, 0.0, 0.0, 0, 0)
    output, context = request.output_tokens, prompt + request.output_tokens / 2
    steps = output * (best.sequence_s + best.context_s * context)
    memory = output * best.step_s * context / best.kv_tokens if best.kv_tokens else 0.0
    return Appraisal(soonest, queues / count, least, max(steps, memory), most, count)
