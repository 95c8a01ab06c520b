"""Forecasts for a new request at an endpoint: seconds in the queue, free KV, and time per token.

The results are plain floats in EngineLoad. They are computed from the engine model
(scheduler_model.py) and the learned speed (step_time.py). ttft_simulation.py simulates the first
token of one prompt.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.engine.queued_prompt import QueuedPrompt
    from policies.engine.scheduler_model import EngineModel

# Share of new prompts that routing still sends to an endpoint while a prompt waits there.
BEHIND = 0.2
FRESH_S = 0.5  # maximum age of the averages
MOST_BUSY = 0.95  # upper bound of the share of time that prefill is predicted to take


def add_sequence(load: EngineLoad, prompt_tokens: int) -> None:
    """Add a decoding sequence with `prompt_tokens` tokens of context to an endpoint's forecast."""
    load.decode_s_per_token += (
        load.decode_s_per_sequence + load.decode_s_per_context_token * prompt_tokens
    )


def predict_tpot_s(
    timeline: EngineModel, load: EngineLoad, prompt_tokens: int, output_tokens: int, first_s: float
) -> float:
    """Return the expected seconds per output token of a new request.

    prompt_tokens  tokens of its prompt
    output_tokens  expected tokens of its answer
    first_s        seconds until its first token

    `decode_s_per_token` holds for the present batch; this function adds the request itself, and the
    requests expected to arrive during its answer. Their number is a mean: most answers are
    interrupted by fewer requests, and a few by many more.
    """
    belief, lately = load.belief, timeline.averages
    share = lately.share if lately.share < MOST_BUSY else MOST_BUSY
    step_s = timeline.decode_s + belief.sequence_s + belief.context_s * prompt_tokens
    # Steps that compute prompts generate tokens as well.
    expected = step_s / (1.0 - share + lately.pace * step_s)
    # Requests that arrive while this one waits are computed while it decodes.
    if output_tokens > 0:
        expected += BEHIND * share * first_s / output_tokens
    return expected


def refresh_forecast(timeline: EngineModel, load: EngineLoad, now: float) -> None:
    """Forecast an endpoint's load (queue, free KV memory, time per token) from its engine model.

    EngineLoad describes the fields that this sets.
    """
    timeline.forecast_at, timeline.is_stale, timeline.answers_due_at = now, False, -inf
    belief, others = load.belief, load.peer_load
    running: float = timeline.batch
    batch: float = running + load.external_requests + others.decoding
    context: float = timeline.context_base + running * timeline.steps + others.decode_tokens
    decode = belief.context_s * context + belief.sequence_s * batch
    flops, floor = belief.flop_s * batch, belief.floor_s
    timeline.step_overhead_s = over = decode + flops + belief.layers_s
    timeline.decode_s = step_s = (floor if floor > flops else flops) + belief.base_s + decode
    timeline.raw_base_s = (step_s - belief.context_s * context) / belief.decodes.factors[0]
    timeline.raw_context_s = belief.shape.context_s * context
    budget_tokens: float = belief.budget_tokens - batch
    load.prefill_s_per_token = belief.token_s + over / (budget_tokens if budget_tokens > 1 else 1)
    load.attention_s_per_pair = belief.pair_s
    timeline.idle_delay_s = idle_s = belief.request_s + (0.5 * step_s if batch else 0.0)
    load.fixed_ttft_s = idle_s + over
    if timeline.queue or others.prefill_tokens:
        _queue(timeline, load, budget_tokens, now)
    else:
        base = timeline.step_ends_at if timeline.is_busy else timeline.step_began_at
        load.prefill_done_at = base
        load.next_first_token_at = base if timeline.completing else inf
    lately = timeline.averages
    if now - lately.at > FRESH_S:
        lately.update(timeline.planned_tokens, timeline.prefill_s, timeline.prefill_steps, now)
        timeline.planned_tokens = 0
    busy = lately.rate * belief.token_s
    stretch = 1.0 / (1.0 - (busy if busy < MOST_BUSY else MOST_BUSY))
    load.decode_s_per_sequence = stretch * belief.sequence_s
    load.decode_s_per_context_token = stretch * belief.context_s
    load.decode_s_per_token = step_s * stretch
    _forecast_kv(timeline, load, context)


def _queue(timeline: EngineModel, load: EngineLoad, budget_tokens: float, now: float) -> None:
    others, tokens = load.peer_load, timeline.queued_tokens
    base = timeline.step_ends_at if timeline.is_busy else timeline.step_began_at
    if others.prefill_tokens:  # the engine also computes prompts of other gateways
        base = max(base, now) + others.prefill_tokens * load.prefill_s_per_token
    queued_s = tokens * load.prefill_s_per_token + timeline.queued_pairs * load.attention_s_per_pair
    load.prefill_done_at = base + queued_s
    if timeline.completing:
        load.next_first_token_at = base
    elif timeline.queue:
        # The first step may compute the whole prompt.
        first_s = queued_s * budget_tokens / tokens if tokens > budget_tokens > 0 else queued_s
        enters = timeline.queue[0].enters_at
        load.next_first_token_at = (
            (base if base > enters else enters) + first_s + timeline.step_overhead_s
        )
    else:
        load.next_first_token_at = inf


def _forecast_kv(timeline: EngineModel, load: EngineLoad, context: float) -> None:
    # Set the used and free KV after all queued prompts have begun, and the rate at which KV is
    # freed.
    waiting = uncached = load.peer_load.prefill_tokens
    prompt: QueuedPrompt
    for prompt in timeline.queue:
        if not prompt.has_kv:
            waiting += prompt.prompt_tokens
            new = prompt.prompt_tokens - prompt.prefix_tokens
            uncached += new if new > 0 else 1  # as in prompt.uncached_tokens, without its call
    prefixes = timeline.prefixes
    own: float = context + timeline.kv_prompts + timeline.incoming_kv_tokens
    used: float = own + uncached + prefixes.distinct - prefixes.tokens
    load.kv_used_tokens = used if used > 0.0 else 0.0
    if load.kv_tokens is None:
        return
    load.free_kv_tokens = load.kv_tokens / timeline.kv_ratio - own - waiting
    # While prompts wait for KV, no prefill runs between decode steps, so these are not stretched.
    load.s_per_freed_kv_token = (
        load.expected_tokens * timeline.decode_s / ((load.answers or 1) * context)
        if context > 0
        else 0.0
    )
