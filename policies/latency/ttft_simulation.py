"""Predicts the time of one prompt's first token, by simulating the engine model step by step.

The simulation runs on copies of a few numbers, once per reserved request. To compare candidates,
the cheaper but less accurate expected_latency.ttft_s is used.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING

from policies.latency import expected_latency

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policies.engine.engine_load import EngineLoad
    from policies.engine.engine_model_updates import EngineTimeline
    from policies.engine.queued_prompt import QueuedPrompt

# Maximum number of simulated steps; for a longer queue, latency.ttft_s is accurate enough.
MOST_STEPS = 64
# A prompt that lacks less than this share of KV is assumed to fit: the model is not more accurate.
UNSURE = 0.012
GOLDEN = 0.618034  # golden ratio: fractions of its multiples are evenly spread over 0 to 1


class QueuedWork:
    """The part of a prompt that is not computed yet, in the simulation of an engine.

    computed_tokens   prompt tokens computed so far
    remaining_tokens  prompt tokens not computed yet
    enters_at         time on the policy clock at which the engine's scheduler receives the prompt
    needed_kv_tokens  KV tokens that must be free before the engine begins the prompt
    """

    __slots__ = ("computed_tokens", "enters_at", "needed_kv_tokens", "prompt", "remaining_tokens")

    def __init__(self, prompt: QueuedPrompt, enters_at: float, needed_kv_tokens: float) -> None:
        self.prompt, self.enters_at, self.needed_kv_tokens = prompt, enters_at, needed_kv_tokens
        self.computed_tokens, self.remaining_tokens = (
            prompt.computed_tokens,
            prompt.remaining_tokens,
        )


class EngineSimulation:
    """Simulates the future steps of one inference engine.

    clock    begin of the next step on the policy clock
    steps    number of steps simulated so far
    batch    number of decoding sequences
    context  their total context in tokens
    kv_free  KV tokens that are not in use
    waited   whether a queued prompt has waited for KV
    ends     running answers as (step, KV freed, context, sequences); the last one ends first. None:
             no prompt has waited for KV yet, and no answer is assumed to end
    """

    __slots__ = (
        "batch",
        "clock",
        "context",
        "ends",
        "kv_free",
        "load",
        "queue",
        "steps",
        "timeline",
        "waited",
    )

    def __init__(self, timeline: EngineTimeline, load: EngineLoad, now: float) -> None:
        others = load.peer_load
        self.timeline, self.load, self.queue = timeline, load, deque[QueuedWork]()
        self.batch = timeline.batch + load.external_requests + others.decoding
        self.context = (
            timeline.context_base + timeline.batch * timeline.steps + others.decode_tokens
        )
        self.kv_free = timeline.free_kv_tokens(load) + UNSURE * (load.kv_tokens or 0)
        self.ends: list[tuple[float, float, float, int]] | None = None
        self.steps, self.waited = 0, False
        self.clock = timeline.step_began_at
        if timeline.is_busy:
            # A late step was mispredicted: expect it to take as long again.
            self.clock = (
                timeline.step_ends_at
                if timeline.step_ends_at >= now
                else now + now - timeline.step_ends_at
            )
            self._start_decoding(timeline.completing)

    def first_token(self) -> tuple[float, float]:
        """Simulate steps until the last queued prompt is computed.

        Returns when the step that completes it begins, on the policy clock, and how many seconds it
        takes. Prompts that arrive before that step begins are computed in it too.
        """
        now = self.queue[-1].enters_at - self.load.belief.request_s
        while True:
            tokens, pairs, completed = self._plan()
            if not tokens:
                self._skip_idle()
            elif self.queue:
                self.clock += self._step_s(tokens, pairs)
                self._count_steps(1)
                self._start_decoding(completed)
            else:
                budget_tokens = self._prompt_budget() - tokens
                if budget_tokens > 0 and not self.waited:
                    arriving = min(
                        budget_tokens,
                        self.timeline.arrivals.expected_tokens_behind(self.clock - now),
                    )
                    tokens, pairs = tokens + arriving, pairs + 0.5 * arriving * arriving
                return self.clock, self._step_s(tokens, pairs)

    def _prompt_budget(self) -> int:
        return max(1, self.load.belief.budget_tokens - self.batch)

    def _plan(self) -> tuple[float, float, list[QueuedPrompt]]:
        # Plan the next step as the engine would.
        #
        # Return its prompt tokens, its query-key pairs, and the prompts it completes.
        queue, budget_tokens, clock = self.queue, self._prompt_budget(), self.clock
        completed: list[QueuedPrompt] = []
        tokens, pairs = 0, 0.0
        while queue and budget_tokens > tokens:
            head = queue[0]
            if head.enters_at > clock or (
                head.needed_kv_tokens > self.kv_free and (self.batch or tokens)
            ):
                break
            self.kv_free, head.needed_kv_tokens = self.kv_free - head.needed_kv_tokens, 0.0
            take = min(head.remaining_tokens, budget_tokens - tokens)
            pairs += take * (head.computed_tokens + 0.5 * take)
            head.computed_tokens, tokens = head.computed_tokens + take, tokens + take
            head.remaining_tokens -= take
            if not head.remaining_tokens:
                completed.append(queue.popleft().prompt)
        return tokens, pairs, completed

    def _step_s(self, tokens: float, pairs: float) -> float:
        belief = self.load.belief
        prompts_s = belief.prompts_s(tokens, pairs)
        decoding_batch_s = belief.decoding_batch_s(self.batch, self.context)
        return prompts_s * belief.pace(tokens) + decoding_batch_s + belief.layers_s

    def _decode_s(self) -> float:
        belief = self.load.belief
        compute_s = max(belief.floor_s, belief.flop_s * self.batch)
        return (
            compute_s
            + belief.base_s
            + belief.context_s * self.context
            + belief.sequence_s * self.batch
        )

    def _skip_idle(self) -> None:
        # Advance to the time when the next prompt arrives or gets KV, because none can begin now.
        head = self.queue[0]
        if head.enters_at <= self.clock:
            self._free_kv(head.needed_kv_tokens)
            # no more than that will be free before it begins
            head.needed_kv_tokens = min(head.needed_kv_tokens, self.kv_free)
            self.waited = True
        elif self.batch:
            self._run_decode_steps(head.enters_at - self.clock)
        else:
            self.clock = head.enters_at

    def _run_decode_steps(self, seconds: float) -> None:
        step_s = self._decode_s()
        steps = max(1, ceil(seconds / step_s - 1e-9))
        self.clock += steps * step_s
        self._count_steps(steps)

    def _free_kv(self, needed_kv_tokens: float) -> None:
        # Simulate decoding until ending answers have freed enough KV, or all answers have ended.
        if self.ends is None:
            self.ends = self._predict_ends()
        while self.kv_free < needed_kv_tokens and self.ends:
            steps = max(1, ceil(self.ends[-1][0] - self.steps))
            self.clock += steps * self._decode_s()
            self._count_steps(steps)

    def _count_steps(self, steps: int) -> None:
        self.steps += steps
        self.context += steps * self.batch
        self.kv_free -= steps * self.batch
        ends = self.ends
        while ends and ends[-1][0] <= self.steps:
            _, kv, context, sequences = ends.pop()
            self.kv_free += kv
            self.context -= context
            self.batch -= sequences

    def _start_decoding(self, prompts: Iterable[QueuedPrompt]) -> None:
        for prompt in prompts:
            self.batch += prompt.sequences
            self.context += prompt.sequences * prompt.prompt_tokens

    def _predict_ends(self) -> list[tuple[float, float, float, int]]:
        # Predict at which step each running answer ends, from the lengths of earlier answers.
        #
        # Each answer gets a different quantile of these lengths, so that short and long ones occur
        # as often as before.
        timeline, ends, quantile = self.timeline, [], 0.0
        alone = timeline.prefixes.exclusive_share()
        for prompt in self.load.reservations:
            if prompt.is_decoding:
                quantile = (quantile + GOLDEN) % 1.0
                generated = timeline.steps - prompt.decode_begin_step
                remaining = timeline.lengths.remaining_tokens(
                    generated, prompt.output_tokens, quantile
                )
                context = prompt.sequences * (prompt.prompt_tokens + generated + remaining)
                kv = context - (1.0 - alone) * prompt.prefix_tokens
                ends.append((self.steps + remaining, kv, context, prompt.sequences))
        ends.sort(reverse=True)
        return ends


def simulate_ttft_s(
    timeline: EngineTimeline, load: EngineLoad, prompt: QueuedPrompt, now: float
) -> float:
    """Return the expected seconds until the first token of a prompt that is sent now.

    The prompt must not be in the engine model's queue yet. The timeline must have been advanced to
    `now`.
    """
    if not (
        timeline.is_busy or timeline.queue or load.external_requests or load.peer_load.decoding
    ):
        if not timeline.batch:
            if prompt.remaining_tokens <= load.belief.budget_tokens:
                return idle_ttft_s(timeline, load, prompt)
        elif (seconds := decoding_ttft_s(timeline, load, prompt, now)) is not None:
            return seconds
    if (
        max(
            len(timeline.queue),
            timeline.queued_tokens / max(1, load.belief.budget_tokens - timeline.batch),
        )
        > MOST_STEPS
    ):
        return expected_latency.ttft_s(load, prompt.remaining_tokens, prompt.computed_tokens, now)
    return run_simulation(timeline, load, prompt, now)


def run_simulation(
    timeline: EngineTimeline, load: EngineLoad, prompt: QueuedPrompt, now: float
) -> float:
    """Simulate an engine until it has computed a new prompt; return the seconds to its first token.

    For an idle engine, idle_ttft_s() is faster. The timeline, which models the engine, must have
    been advanced to `now`.
    """
    simulation = EngineSimulation(timeline, load, now)
    for queued in timeline.queue:
        simulation.queue.append(
            QueuedWork(
                queued,
                queued.enters_at,
                0.0 if queued.has_kv else timeline.needed_kv_tokens(queued),
            )
        )
    simulation.queue.append(
        QueuedWork(prompt, now + load.belief.request_s, timeline.needed_kv_tokens(prompt))
    )
    begins, spent_s = simulation.first_token()
    return begins + spent_s - now


def idle_ttft_s(timeline: EngineTimeline, load: EngineLoad, prompt: QueuedPrompt) -> float:
    """Return the seconds to the first token of a prompt at an idle engine, which needs one step.

    The result equals that of simulate_ttft_s(), but is computed faster.
    """
    belief, tokens = load.belief, float(prompt.remaining_tokens)
    pairs = tokens * (prompt.computed_tokens + 0.5 * tokens)
    budget_tokens = max(1, belief.budget_tokens) - tokens
    if budget_tokens > 0:
        arriving = min(budget_tokens, timeline.arrivals.expected_tokens_behind(belief.request_s))
        tokens, pairs = tokens + arriving, pairs + 0.5 * arriving * arriving
    decoding_batch_s = belief.decoding_batch_s(
        0, timeline.context_base + load.peer_load.decode_tokens
    )
    prompts_s = belief.prompts_s(tokens, pairs) * belief.pace(tokens)
    return belief.request_s + prompts_s + decoding_batch_s + belief.layers_s


def decoding_ttft_s(
    timeline: EngineTimeline, load: EngineLoad, prompt: QueuedPrompt, now: float
) -> float | None:
    """Return the seconds to the first token of a prompt at an engine that only decodes.

    Returns None if the prompt must wait for KV, or needs several steps. The result equals that of
    simulate_ttft_s(), but is computed faster.
    """
    belief, batch = load.belief, timeline.batch
    tokens, budget_tokens = float(prompt.remaining_tokens), belief.budget_tokens - batch
    context = timeline.context_base + batch * timeline.steps + load.peer_load.decode_tokens
    kv_free = timeline.free_kv_tokens(load) + UNSURE * (load.kv_tokens or 0)
    clock, enters_at = timeline.step_began_at, now + belief.request_s
    if enters_at > clock:  # the prompt waits for the end of a decode step
        step_s = max(belief.floor_s, belief.flop_s * batch) + belief.base_s
        step_s = step_s + belief.context_s * context + belief.sequence_s * batch
        steps = max(1, ceil((enters_at - clock) / step_s - 1e-9))
        clock += steps * step_s
        context += steps * batch
        kv_free -= steps * batch
    if clock < enters_at or tokens >= budget_tokens or timeline.needed_kv_tokens(prompt) > kv_free:
        return None
    pairs = tokens * (prompt.computed_tokens + 0.5 * tokens)
    behind_s = clock - (enters_at - belief.request_s)
    arriving = timeline.arrivals.expected_tokens_behind(behind_s)
    if arriving > 0.0:
        arriving = min(budget_tokens - tokens, arriving)
        tokens, pairs = tokens + arriving, pairs + 0.5 * arriving * arriving
    prompts_s = belief.prompts_s(tokens, pairs) * belief.pace(tokens)
    return clock + (prompts_s + belief.decoding_batch_s(batch, context) + belief.layers_s) - now
