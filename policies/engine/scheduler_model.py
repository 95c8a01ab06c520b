"""Simulates one engine's scheduler in a policy: queue of prompts, current step, decoding batch, KV.

EngineModel simulates the engine's scheduler (continuous batching with chunked prefill) with learned
step times. It corrects itself at every observed first token.

- first_token_calibration.py learns from first tokens.
- load_forecast.py computes the forecast for a new request.
- step_time.py has the step times, load_ledger.py the reserved requests.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from policies.engine import first_token_calibration
from policies.engine.output_length import RecentLengths
from policies.engine.recent_work_averages import EngineAverages
from policies.engine.running_answer_lengths import LengthGroup, RunningAnswers
from policies.engine.shared_prefix_kv import SharedPrefixKv

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.engine.queued_prompt import QueuedPrompt

TOGETHER = 0.25
"""Largest distance of two first tokens of the same engine step, as a share of a decode step."""

LATE_SHARE = 0.1
"""How long a prompt's first token may come after those of its step, as a share of the step.

A server writes the first tokens of a step one after another, and may be interrupted meanwhile.
"""

OVERDUE = 0.5
"""From which delay a predicted prefill step is assumed not to have begun, as a share of its length.

A late first token usually means a slow step. While KV memory is nearly full it more probably means
that the prompt still waits for KV, so only then this value applies.
"""

NEARLY_FULL = 0.03
"""Share of free KV memory (0 to 1) below which the memory counts as nearly full.

A prompt that was predicted to fit may then in fact be waiting for KV.
"""


class EngineModel:
    """A model of one inference engine: its queue of prompts, its running batch, and its KV memory.

    The model predicts the engine's next steps; a step is one pass over its batch. Observed events
    correct it. Times are on the policy clock.

    queue                  prompts with tokens that no step computes yet, in order of arrival
    queued_tokens          number of those tokens
    queued_pairs           number of their query-key pairs
    is_busy                whether a step with prompt chunks is running
    step_began_at          begin of that step; if there is none, the end of a decode step
    step_ends_at           predicted end of that step
    completing             the prompts that this step completes
    awaited                prompts of the step that a first token has just ended; empty once the
                           last of these prompts has its first token
    ended_step_s           seconds that this step took
    unplanned_tokens       prompt tokens that this step computed although they were not planned
    step_tokens            prompt tokens of this step
    first_tokens_at        when first tokens ended a step while the next one is not planned yet;
                           -inf otherwise
    batch                  number of decoding sequences
    steps                  number of decode steps so far
    context_base           the total context of these sequences is `context_base + batch * steps`
                           tokens
    batch_changed_at_step  value of `steps` when the batch last grew
    kv_prompts             prompt tokens that have KV and do not decode
    incoming_kv_tokens     prompt tokens whose KV another endpoint computes
    prefixes               cached prefixes of all prompts with KV, and how much of that KV is really
                           stored
    kv_ratio               really stored KV divided by KV in the model, as a mean over some seconds;
                           the forecast uses it
    decode_s               seconds of a decode step with the present batch (load_forecast.py)
    raw_base_s             the uncorrected prediction of decode_s, without reading the context
    raw_context_s          the uncorrected prediction of the seconds for reading the context
    planned_tokens         prompt tokens planned since the means were last updated
    prefill_steps          number of steps with prompts so far
    prefill_s              total seconds of these steps
    decode_base_s          total uncorrected seconds of decode steps, without reading the context
    decode_context_s       total uncorrected seconds of decode steps for reading the context
    averages               running means of the engine's work
    lengths                lengths of the pool's recent answers relative to the expected ones. The
                           endpoints of a pool share it
    answers                the running answers by age
    answers_due_at         until when their groups are valid if no event comes before; -inf after
                           one
    idle_delay_s           seconds from a pick to the first step of an idle engine
    step_overhead_s        the part of a step with prompts that is not prefill, in seconds
    forecast_at            when the forecast was computed
    is_stale               whether something has changed since the forecast
    span                   the steps since the engine's state was last observed, with which the next
                           first token is compared
    """

    __slots__ = (
        *(
            "batch",
            "step_began_at",
            "is_busy",
            "decode_base_s",
            "decode_context_s",
            "decode_s",
            "step_ends_at",
            "completing",
            "forecast_at",
        ),
        *(
            "idle_delay_s",
            "incoming_kv_tokens",
            "kv_prompts",
            "kv_ratio",
            "averages",
            "step_overhead_s",
            "planned_tokens",
            "prefill_s",
            "prefill_steps",
        ),
        *(
            "prefixes",
            "queue",
            "queued_pairs",
            "queued_tokens",
            "raw_base_s",
            "raw_context_s",
            "batch_changed_at_step",
            "span",
            "is_stale",
        ),
        *(
            "answers",
            "answers_due_at",
            "awaited",
            "context_base",
            "lengths",
            "step_tokens",
            "steps",
            "ended_step_s",
            "first_tokens_at",
            "unplanned_tokens",
        ),
    )

    def __init__(self, now: float = 0.0, lengths: RecentLengths | None = None) -> None:
        self.queue: deque[QueuedPrompt] = deque()
        self.queued_tokens, self.queued_pairs = 0, 0.0
        self.is_busy = False
        self.first_tokens_at = -inf
        self.step_began_at = self.step_ends_at = now
        self.completing: list[QueuedPrompt] = []
        self.unplanned_tokens = 0
        self.awaited: list[QueuedPrompt] = []
        self.ended_step_s = 0.0
        self.batch = self.kv_prompts = self.incoming_kv_tokens = self.planned_tokens = (
            self.prefill_steps
        ) = self.step_tokens = 0
        self.context_base = self.steps = self.batch_changed_at_step = 0.0
        self.kv_ratio = 1.0
        self.prefixes = SharedPrefixKv()
        self.prefill_s = self.decode_s = 0.0
        self.decode_base_s = self.decode_context_s = self.raw_base_s = self.raw_context_s = 0.0
        self.averages = EngineAverages(now)
        self.lengths = RecentLengths() if lengths is None else lengths
        self.answers = RunningAnswers(self.lengths)
        self.answers_due_at = -inf
        self.forecast_at, self.is_stale = -inf, False
        self.idle_delay_s = self.step_overhead_s = 0.0
        self.span = first_token_calibration.StepSpan()

    def advance(self, load: EngineLoad, now: float) -> None:
        """Simulate the engine's steps up to the time `now`.

        A step that completes a prompt does not end at its predicted time. It lasts until the
        prompt's first token is reported.
        """
        if self.first_tokens_at > -inf and not self._plan_next(load, now):
            return
        while True:
            if self.is_busy:
                ends_at = self.step_ends_at
                if ends_at > now:
                    return
                if self.completing and self._has_awaited_token():
                    if not self._is_waiting_for_kv(load, now):
                        return
                    self._undo_step(load)
                    continue
                self.close_step(ends_at)
                if self.queue:
                    self._plan(load, ends_at)
            elif self.queue:
                starts_at = self.queue[0].enters_at
                if self.batch:  # the engine ends its running decode step first
                    self._decode_until(starts_at if starts_at < now else now)
                    starts_at = (
                        self.step_began_at
                        if self.step_began_at >= starts_at
                        else self.step_began_at + self.decode_s
                    )
                if starts_at > now or not self._begin(load, starts_at):
                    break
            else:
                break
        if self.batch:
            self._decode_until(now)

    def is_same_step(self, now: float) -> bool:
        """Return whether a first token that comes now may belong to the step that has just ended.

        First tokens of one step do not arrive at exactly the same time.
        """
        spread_s = TOGETHER * self.decode_s
        if self.awaited:
            spread_s = max(spread_s, LATE_SHARE * self.ended_step_s)
        return now - self.first_tokens_at <= spread_s

    def _plan_next(self, load: EngineLoad, now: float) -> bool:
        # Plan the step after the one that first tokens have ended.
        #
        # Return whether that could be done. False means that other first tokens of the ended step
        # may still arrive.
        ended_at = self.first_tokens_at
        if self.is_same_step(now):
            return False
        self.first_tokens_at = -inf
        if self.awaited or self.unplanned_tokens:
            self._correct_step(load)
        is_due = first_token_calibration.is_due(self.span, load, ended_at)
        if is_due:
            self._learn(load, ended_at)
        if not (self.queue and self._plan(load, ended_at)) and not is_due:
            self._learn(load, ended_at)
        return True

    def _correct_step(self, load: EngineLoad) -> None:
        # Correct the step that has ended by the prompts whose first token it brought.
        #
        # An engine takes prompts in order, so it has begun no prompt behind the last one with a
        # first token. Those prompts reached it later than predicted, or its steps hold fewer tokens
        # than modelled. They are queued again.
        awaited, self.awaited = self.awaited, []
        tokens = self.step_tokens + self.unplanned_tokens
        self.unplanned_tokens = 0
        while awaited and not awaited[-1].is_decoding:
            prompt = awaited.pop()
            self._put_back(prompt)
            tokens -= prompt.uncached_tokens
        if tokens != self.step_tokens and tokens > 0:
            self.planned_tokens += tokens - self.step_tokens
            shape, share = load.belief.shape, tokens / self.step_tokens
            prefill_s = load.belief.prompts_s(tokens, 0.0) + share * self.span.last[2]
            self.span.resize_last(prefill_s, shape.filling(tokens), share)

    def _put_back(self, prompt: QueuedPrompt) -> None:
        # Put a prompt of a step that did not compute it back at the head of the queue.
        prompt.remaining_tokens = prompt.uncached_tokens
        prompt.computed_tokens = prompt.prompt_tokens - prompt.uncached_tokens
        prompt.is_planned = prompt.has_kv = False
        self.queue.appendleft(prompt)
        self.queued_tokens += prompt.remaining_tokens
        self.queued_pairs += prompt.remaining_tokens * (
            prompt.computed_tokens + 0.5 * prompt.remaining_tokens
        )
        self.kv_prompts -= prompt.prompt_tokens
        self.prefixes.remove(prompt.prefix_tokens)

    def _learn(self, load: EngineLoad, ended_at: float) -> None:
        # Correct the learned speed. The forecast is then stale, because it was computed with the
        # earlier speed, while prices already divide by the corrected factor.
        first_token_calibration.learn(self.span, load, self.step_ends_at, ended_at)
        self.is_stale = True

    def complete_only_prompt(self, prompt: QueuedPrompt, now: float) -> None:
        """Complete the engine's only queued prompt without simulating the step that computed it.

        This is faster than a simulation, for prompts from which no speed needs to be learned.
        """
        # The prompt may have waited for a slot until the current step began.
        began_at = min(now, max(prompt.enters_at, self.step_began_at))
        if self.batch:
            self._decode_until(began_at)
        self.queue.clear()
        self.planned_tokens += prompt.remaining_tokens
        self.queued_tokens, self.queued_pairs, prompt.remaining_tokens = 0, 0.0, 0
        self.prefill_steps += 1
        self.prefill_s += now - began_at
        self.steps += 1
        self.step_began_at, prompt.is_planned = now, True

    def _begin(self, load: EngineLoad, start: float) -> bool:
        # Begin a step with prompts after decode-only steps; return False if no prompt fits.
        #
        # The time of the next first token is measured from `start`.
        if self.batch:
            self._decode_until(start)
        self.span.begin(start, 0.5 * self.decode_s if self.batch else 0.0, self.queue[0].enters_at)
        return self._plan(load, start)

    def _decode_until(self, until: float) -> None:
        steps = int((until - self.step_began_at) / self.decode_s + 1e-9)
        if steps > 0:
            self.steps += steps
            self.step_began_at += steps * self.decode_s
            self.decode_base_s += steps * self.raw_base_s
            self.decode_context_s += steps * self.raw_context_s

    def _plan(self, load: EngineLoad, now: float) -> bool:
        # Begin a step with the prompts that have reached the engine by `now`.
        #
        # Return False if none fits.
        belief, queue = load.belief, self.queue
        shape = belief.shape
        budget_tokens = shape.budget_tokens - self.batch
        batch: float = self.batch
        context: float = self.context_base + batch * self.steps
        tokens, pairs = 0, 0.0
        while queue and budget_tokens > tokens:
            head = queue[0]
            if head.enters_at > now or not (head.has_kv or self._fits(load, head)):
                break
            take, capacity = head.remaining_tokens, budget_tokens - tokens
            if take > capacity:
                take = capacity
            pairs += take * (head.computed_tokens + 0.5 * take)
            head.computed_tokens += take
            head.remaining_tokens -= take
            tokens += take
            if not head.remaining_tokens:
                head.is_planned = True
                self.completing.append(queue.popleft())
        if not tokens:
            return False
        self.queued_tokens -= tokens
        self.queued_pairs = max(0.0, self.queued_pairs - pairs) if queue else 0.0
        prefill_s = belief.prompts_s(tokens, pairs)
        decode_s = belief.decoding_batch_s(self.batch, context)
        filling = part, beyond = shape.filling(tokens)
        pace = belief.paces[part]
        pace += beyond * (belief.paces[part + 1] - pace)
        self.planned_tokens += tokens
        self.step_tokens = tokens
        self.is_busy, self.step_began_at = True, now
        self.step_ends_at = now + pace * prefill_s + decode_s + belief.layers_s
        pairs_s, peer_tokens = belief.area_s * pairs, load.peer_load.prefill_tokens
        self.span.add(prefill_s, filling, pairs_s, decode_s, peer_tokens)
        if self.batch + len(self.completing) >= load.slots:
            # The last slot may have become free only after the previous step.
            self.span.waits_for_kv = True
        return True

    def _fits(self, load: EngineLoad, prompt: QueuedPrompt) -> bool:
        # Allocate KV for all of the prompt if a slot and enough KV are free.
        #
        # Return whether they were.
        if self.batch + len(self.completing) >= load.slots:
            self.span.waits_for_kv = True
            return False
        if load.kv_tokens is not None and self.needed_kv_tokens(prompt) > self.free_kv_tokens(load):
            self.span.waits_for_kv = True
            if self.batch or self.kv_prompts:
                return False
        prompt.has_kv = True
        self.kv_prompts += prompt.prompt_tokens
        self.prefixes.add(prompt.prefix_tokens)
        return True

    def needed_kv_tokens(self, prompt: QueuedPrompt) -> float:
        """Return the KV tokens that must be free before the engine begins this prompt."""
        return prompt.uncached_tokens + self.prefixes.exclusive_share() * prompt.prefix_tokens

    def free_kv_tokens(self, load: EngineLoad) -> float:
        """Return the free KV memory of the modelled engine in tokens; inf: capacity unknown."""
        if load.kv_tokens is None:
            return inf
        used = self.context_base + self.batch * self.steps + self.kv_prompts
        return load.kv_tokens - (used - self.prefixes.tokens + self.prefixes.distinct)

    def _is_waiting_for_kv(self, load: EngineLoad, now: float) -> bool:
        # Return whether the overdue step has not really begun, because KV or all slots are
        # occupied.
        #
        # Only a step whose prompts all began in it, according to the model, can be undone.
        if (
            now - self.step_ends_at < OVERDUE * (self.step_ends_at - self.step_began_at)
            or load.kv_tokens is None
        ):
            return False
        if self.batch < load.slots and self.free_kv_tokens(load) > NEARLY_FULL * load.kv_tokens:
            return False
        if not self.batch and self.kv_prompts <= sum(
            prompt.prompt_tokens for prompt in self.completing
        ):
            return False
        return sum(prompt.uncached_tokens for prompt in self.completing) <= self.step_tokens

    def _undo_step(self, load: EngineLoad) -> None:
        # Undo a planned step that never started, and put its prompts back into the queue.
        #
        # The prompts wait for KV, so free KV was overestimated. Meanwhile the engine ran steps
        # that only decoded.
        finishing, self.completing = self.completing, []
        for prompt in reversed(finishing):
            self._put_back(prompt)
        if self.batch < load.slots:
            self.prefixes.distinct += max(
                0.0, self.free_kv_tokens(load) - self.needed_kv_tokens(finishing[0]) + 1.0
            )
        self.is_busy, self.span.waits_for_kv = False, True

    def close_step(self, now: float) -> None:
        """End the engine's current simulated step at `now`.

        Prompts that this step completed start to decode, if their first token will not be reported.
        """
        self.prefill_steps += 1
        self.prefill_s += now - self.step_began_at
        self.steps += 1
        self.is_busy, self.step_began_at = False, now
        finishing, self.completing = self.completing, []
        for prompt in finishing:
            if not prompt.sees_first_token:
                prompt.mark_decoding()
                self.start_decoding(prompt, now)

    def _has_awaited_token(self) -> bool:
        # The first prompt nearly always decides, for which any() would be slower than this loop.
        for prompt in self.completing:  # noqa: SIM110
            if prompt.sees_first_token:
                return True
        return False

    def start_decoding(self, prompt: QueuedPrompt, now: float) -> None:
        """Move a prompt into the engine's decoding batch: its first token has arrived at `now`."""
        prompt.decode_began_at, prompt.decode_begin_step = now, self.steps
        self.batch_changed_at_step = self.steps
        prompt.prefill_steps, prompt.prefill_s = self.prefill_steps, self.prefill_s
        prompt.decode_base_s, prompt.decode_context_s = self.decode_base_s, self.decode_context_s
        if prompt.awaits_kv:
            self.on_kv_arrived(prompt)
        if prompt.has_kv:
            prompt.has_kv = False
            self.kv_prompts -= prompt.prompt_tokens
        else:
            self.prefixes.add(prompt.prefix_tokens)
        self.answers.add(prompt)
        self.batch += prompt.sequences
        self.context_base += prompt.sequences * (prompt.prompt_tokens - self.steps)

    def answer_groups(self, load: EngineLoad, now: float) -> list[LengthGroup]:
        """Return the engine's running answers, grouped by their probable final length."""
        self.update_answers(load, now)
        return list(self.answers.length_groups())

    def update_answers(self, load: EngineLoad, now: float) -> None:
        """Update the estimated final lengths of the running answers to the time `now`.

        While the engine only decodes, the steps since the last event are counted too.
        """
        steps = self.steps
        is_decoding = self.decode_s > 0.0 and not (self.is_busy or self.queue)
        if is_decoding and now > self.step_began_at:
            steps += (now - self.step_began_at) / self.decode_s
        following = self.answers.update(load, steps, self.prefill_s)
        self.answers_due_at = (
            self.step_began_at + (following - self.steps) * self.decode_s if is_decoding else inf
        )

    def on_kv_arrived(self, prompt: QueuedPrompt) -> None:
        """Reserve KV memory in the model for a prompt whose KV has arrived from another
        endpoint.
        """
        prompt.awaits_kv, prompt.has_kv = False, True
        self.incoming_kv_tokens -= prompt.prompt_tokens
        self.kv_prompts += prompt.prompt_tokens

    def catch_up_to(self, load: EngineLoad, prompt: QueuedPrompt, now: float) -> None:
        """Advance the model to the step that completes this prompt: its first token has come.

        The real engine was faster than the model predicted.
        """
        if prompt.enters_at > now:
            belief = load.belief
            belief.observe_api_latency(belief.request_s - (prompt.enters_at - now))
        if not self.is_busy and not self.span.waits_for_kv:
            # The time since the last span is idle or only decodes, so it is not counted as prefill.
            wait_s = 0.5 * self.decode_s if self.batch else 0.0
            self.span.begin(min(now, self.queue[0].enters_at), wait_s)
        prompt.enters_at = min(prompt.enters_at, now)
        while not prompt.is_planned:
            if self.is_busy:
                self.close_step(min(self.step_ends_at, now))
            for queued in self.queue:
                queued.enters_at = min(queued.enters_at, now)
                if queued is prompt:
                    break
            if self.queue:  # the prompt got its KV, so less KV is in use than modelled
                missing = self.needed_kv_tokens(self.queue[0]) - self.free_kv_tokens(load)
                self.prefixes.distinct = max(0.0, self.prefixes.distinct - max(0.0, missing))
            if self._plan(load, now):
                self._rewind()
            else:
                self.remove_from_queue(prompt)
                prompt.is_planned = True

    def _rewind(self) -> None:
        if self.batch:
            steps = min(
                int((self.step_ends_at - self.step_began_at) / self.decode_s + 0.5),
                self.steps - self.batch_changed_at_step,
            )
            self.steps -= steps
            self.step_began_at -= steps * self.decode_s
            self.decode_base_s -= steps * self.raw_base_s
            self.decode_context_s -= steps * self.raw_context_s

    def remove_from_queue(self, prompt: QueuedPrompt) -> None:
        """Remove the prompt from the modelled engine's queue. Does nothing if it is not queued."""
        if prompt.remaining_tokens and prompt in self.queue:
            self.queue.remove(prompt)
            self.queued_tokens -= prompt.remaining_tokens
            self.queued_pairs = max(
                0.0,
                self.queued_pairs
                - prompt.remaining_tokens
                * (prompt.computed_tokens + 0.5 * prompt.remaining_tokens),
            )
