"""Model of one engine: its queue of prompts, current step, decoding batch and KV.

Plays the chunked-prefill scheduler forward with the learned step times, and corrects itself at
every real first token. What first tokens teach is in calibration.py, the forecast for a new request
in load_forecast.py, step times in policies/engine/step_time.py, bookings in ledger.py.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from policies.engine import calibration
from policies.engine.running_averages import Averages
from policies.engine.shared_prefix_kv import Prefixes

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.engine.queued_prompt import Prompt

TOGETHER = 0.25
"""First tokens within this share of a decode step belong to one step."""

OVERDUE = 0.5
"""A step late by this share of its length has not begun, if KV is nearly full."""

NEARLY_FULL = 0.03
"""Share of KV: with less of it free, a prompt that was predicted to have room may be waiting for
KV.
"""


class Paper:
    """The predicted steps of one engine.

    Written by EngineTimeline's events, and by calibration.py and load_forecast.py for them.

    queue                          prompts with tokens in no step yet, first come first served
    queued_tokens, queued_pairs    those tokens, and their query-key pairs
    is_busy, step_began_at, step_ends_at, completing
                                   whether a step with prompt chunks is running, its begin and
                                   predicted end, and the prompts it completes; when idle,
                                   `step_began_at` is the end of a decode step
    step_tokens                    prompt tokens of that step
    first_tokens_at                when first tokens ended a step and the next one is not planned
                                   yet; -inf otherwise
    batch, context_base, steps, batch_changed_at_step
                                   decoding sequences; `context_base + batch * steps` is their
                                   context; steps so far; steps when the batch last grew
    kv_prompts, kv_coming          prompt tokens that have KV and do not decode; prompt tokens whose
                                   KV is computed elsewhere
    prefixes                       cached prefixes of all prompts that have KV, and how much of that
                                   the engine really stores
    kv_ratio                       the same ratio for all KV in the model, averaged over some
                                   seconds, for the forecast
    decode_s                       duration of a decode step at the present batch (load_forecast.py)
    raw_base_s, raw_context_s      its prior without context, and its prior for reading the context
    planned_tokens, prefill_*, decode_*
                                   prompt tokens planned since last read; number and total time of
                                   steps with prompts; total prior time of decode steps, in two
                                   parts
    averages                       running averages of the engine's work
    idle_delay_s, step_overhead_s  seconds from a pick to the first step of an idle engine; the part
                                   of a step with prompts that is not prefill
    forecast_at, is_stale          when the forecast was computed, and whether it has left out a
                                   change since
    span                           the steps since the last known moment, which the next first token
                                   is compared with
    """

    __slots__ = (
        *(
            "batch",
            "began",
            "busy",
            "decode_base_s",
            "decode_context_s",
            "decode_s",
            "ends",
            "finishing",
            "fresh_at",
        ),
        *(
            "idle_s",
            "kv_coming",
            "kv_prompts",
            "kv_ratio",
            "lately",
            "over_s",
            "planned",
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
            "since",
            "span",
            "stale",
        ),
        *("starts", "step_tokens", "tick", "told_at"),
    )

    def __init__(self, now: float = 0.0) -> None:
        self.queue: deque[Prompt] = deque()
        self.queued_tokens, self.queued_pairs = 0, 0.0
        self.busy = False
        self.told_at = -inf
        self.began = self.ends = now
        self.finishing: list[Prompt] = []
        self.batch = self.kv_prompts = self.kv_coming = self.planned = self.prefill_steps = (
            self.step_tokens
        ) = 0
        self.starts = self.tick = self.since = 0.0
        self.kv_ratio = 1.0
        self.prefixes = Prefixes()
        self.prefill_s = self.decode_s = 0.0
        self.decode_base_s = self.decode_context_s = self.raw_base_s = self.raw_context_s = 0.0
        self.lately = Averages(now)
        self.fresh_at, self.stale = -inf, False
        self.idle_s = self.over_s = 0.0
        self.span = calibration.Span()

    def advance(self, load: EngineLoad, now: float) -> None:
        """Play the predicted steps up to `now`.

        A step that completes a prompt lasts until its first token is reported.
        """
        if self.told_at > -inf and not self._plan_next(load, now):
            return
        while True:
            if self.busy:
                ends_at = self.ends
                if ends_at > now:
                    return
                if self.finishing and self._has_awaited_token():
                    if not self._is_waiting_for_kv(load, now):
                        return
                    self._undo_step(load)
                    continue
                self.close(ends_at)
                if self.queue:
                    self._plan(load, ends_at)
            elif self.queue:
                starts_at = self.queue[0].enters
                if self.batch:  # the running decode step ends first
                    self._decode_until(starts_at if starts_at < now else now)
                    starts_at = (
                        self.began if self.began >= starts_at else self.began + self.decode_s
                    )
                if starts_at > now or not self._begin(load, starts_at):
                    break
            else:
                break
        if self.batch:
            self._decode_until(now)

    def together(self, now: float) -> bool:
        """Return whether first tokens have just ended a step, so that others of that step may still
        arrive.
        """
        return now - self.told_at <= TOGETHER * self.decode_s

    def _plan_next(self, load: EngineLoad, now: float) -> bool:
        """Plan the step after the one that first tokens ended.

        False while others of that step may still arrive.
        """
        ended_at = self.told_at
        if self.together(now):
            return False
        self.told_at = -inf
        if ended_at - self.span.anchor > calibration.LEARN_S:
            calibration.learn(self.span, load, self.ends, ended_at)
        if not (self.queue and self._plan(load, ended_at)):
            calibration.learn(self.span, load, self.ends, ended_at)
        return True

    def skip(self, prompt: Prompt, now: float) -> None:
        """Complete the only queued prompt without planning its step: it was computed since the last
        event.

        For prompts that would not teach anything, which saves the planning.
        """
        began_at = prompt.enters if prompt.enters < now else now
        if self.batch:
            self._decode_until(began_at)
        self.queue.clear()
        self.planned += prompt.left
        self.queued_tokens, self.queued_pairs, prompt.left = 0, 0.0, 0
        self.prefill_steps += 1
        self.prefill_s += now - began_at
        self.tick += 1
        self.began, prompt.planned = now, True

    def _begin(self, load: EngineLoad, start: float) -> bool:
        """Begin a step with prompts after steps without.

        The next first token is measured from here.
        """
        if self.batch:
            self._decode_until(start)
        self.span.begin(start, 0.5 * self.decode_s if self.batch else 0.0, self.queue[0].enters)
        return self._plan(load, start)

    def _decode_until(self, until: float) -> None:
        """Advance by whole decode steps up to `until`."""
        steps = int((until - self.began) / self.decode_s + 1e-9)
        if steps > 0:
            self.tick += steps
            self.began += steps * self.decode_s
            self.decode_base_s += steps * self.raw_base_s
            self.decode_context_s += steps * self.raw_context_s

    def _plan(self, load: EngineLoad, now: float) -> bool:
        """Begin a step with the prompts that have entered by then. Returns False if none fits."""
        belief, queue = load.belief, self.queue
        shape = belief.shape
        room = shape.budget_tokens - self.batch
        context = self.starts + self.batch * self.tick
        tokens, pairs = 0, 0.0
        while queue and room > tokens:
            head = queue[0]
            if head.enters > now or not (head.locked or self._fits(load, head)):
                break
            take, capacity = head.left, room - tokens
            if take > capacity:
                take = capacity
            pairs += take * (head.at + 0.5 * take)
            head.at += take
            head.left -= take
            tokens += take
            if not head.left:
                head.planned = True
                self.finishing.append(queue.popleft())
        if not tokens:
            return False
        self.queued_tokens -= tokens
        self.queued_pairs = max(0.0, self.queued_pairs - pairs) if queue else 0.0
        prefill, decode = belief.prompts_s(tokens, pairs), belief.beside_s(self.batch, context)
        self.planned += tokens
        self.step_tokens = tokens
        self.busy, self.began = True, now
        self.ends = now + belief.pace(tokens) * prefill + decode + belief.layers_s
        self.span.add(
            prefill,
            shape.filling(tokens),
            belief.area_s * pairs,
            decode,
            load.others.prefill_tokens,
        )
        return True

    def _fits(self, load: EngineLoad, prompt: Prompt) -> bool:
        """Return whether KV is free for all of the prompt, and allocate it.

        Engines check this before they begin one.

        If nothing else occupies KV the prompt begins in any case.
        """
        if self.needs(prompt) > self.kv_free(load):
            self.span.tight = True
            if self.batch or self.kv_prompts:
                return False
        prompt.locked = True
        self.kv_prompts += prompt.prompt_tokens
        self.prefixes.hold(prompt.had)
        return True

    def needs(self, prompt: Prompt) -> float:
        """Return the KV tokens that must be free before the engine begins this prompt."""
        return prompt.fresh + self.prefixes.alone() * prompt.had

    def kv_free(self, load: EngineLoad) -> float:
        """Return the free KV tokens; inf while the capacity is unknown."""
        if load.kv_tokens is None:
            return inf
        used = self.starts + self.batch * self.tick + self.kv_prompts
        return load.kv_tokens - (used - self.prefixes.tokens + self.prefixes.distinct)

    def _is_waiting_for_kv(self, load: EngineLoad, now: float) -> bool:
        """Return whether the overdue step has not begun in reality, because other sequences fill
        KV.

        Only steps whose prompts all began in them, in the model, can be undone.
        """
        if now - self.ends < OVERDUE * (self.ends - self.began) or load.kv_tokens is None:
            return False
        if self.kv_free(load) > NEARLY_FULL * load.kv_tokens:
            return False
        if not self.batch and self.kv_prompts <= sum(
            prompt.prompt_tokens for prompt in self.finishing
        ):
            return False
        return sum(prompt.fresh for prompt in self.finishing) <= self.step_tokens

    def _undo_step(self, load: EngineLoad) -> None:
        """Undo a planned step that never started.

        Its prompts are waiting for KV, so free KV was overestimated; meanwhile the engine ran
        decode-only steps.
        """
        finishing, self.finishing = self.finishing, []
        for prompt in reversed(finishing):
            prompt.left, prompt.at = prompt.fresh, prompt.prompt_tokens - prompt.fresh
            prompt.planned = prompt.locked = False
            self.queue.appendleft(prompt)
            self.queued_tokens += prompt.left
            self.queued_pairs += prompt.left * (prompt.at + 0.5 * prompt.left)
            self.kv_prompts -= prompt.prompt_tokens
            self.prefixes.release(prompt.had)
        self.prefixes.distinct += max(0.0, self.kv_free(load) - self.needs(finishing[0]) + 1.0)
        self.busy, self.span.tight = False, True

    def close(self, now: float) -> None:
        """End the current step."""
        self.prefill_steps += 1
        self.prefill_s += now - self.began
        self.tick += 1
        self.busy, self.began = False, now
        finishing, self.finishing = self.finishing, []
        for prompt in finishing:
            if not prompt.told:
                prompt.computed()
                self.start(prompt, now)

    def _has_awaited_token(self) -> bool:
        """Return whether a first token of the current step will be reported."""
        # any() is slower, and nearly always the first prompt decides
        for prompt in self.finishing:  # noqa: SIM110
            if prompt.told:
                return True
        return False

    def start(self, prompt: Prompt, now: float) -> None:
        """Move a prompt past its first token into the decoding batch."""
        prompt.began, prompt.tick = now, self.tick
        self.since = self.tick
        prompt.prefill_steps, prompt.prefill_s = self.prefill_steps, self.prefill_s
        prompt.decode_base_s, prompt.decode_context_s = self.decode_base_s, self.decode_context_s
        if prompt.coming:
            self.come(prompt)
        if prompt.locked:
            prompt.locked = False
            self.kv_prompts -= prompt.prompt_tokens
        else:
            self.prefixes.hold(prompt.had)
        self.batch += prompt.sequences
        self.starts += prompt.sequences * (prompt.prompt_tokens - self.tick)

    def come(self, prompt: Prompt) -> None:
        """Allocate the KV of a prompt whose KV was computed elsewhere."""
        prompt.coming, prompt.locked = False, True
        self.kv_coming -= prompt.prompt_tokens
        self.kv_prompts += prompt.prompt_tokens

    def hurry(self, load: EngineLoad, prompt: Prompt, now: float) -> None:
        """Plan ahead to the step that completes this prompt, because the engine is faster."""
        prompt.enters = min(prompt.enters, now)
        while not prompt.planned:
            if self.busy:
                self.close(min(self.ends, now))
            for queued in self.queue:
                queued.enters = min(queued.enters, now)
                if queued is prompt:
                    break
            if self.queue:  # Its KV was allocated, so less KV is in use than modelled.
                missing = self.needs(self.queue[0]) - self.kv_free(load)
                self.prefixes.distinct = max(0.0, self.prefixes.distinct - max(0.0, missing))
            if self._plan(load, now):
                self._rewind()
            else:
                self.remove(prompt)
                prompt.planned = True

    def _rewind(self) -> None:
        """End the step that was just planned now, and take back the decode steps counted in its
        time.
        """
        if self.batch:
            steps = min(int((self.ends - self.began) / self.decode_s + 0.5), self.tick - self.since)
            self.tick -= steps
            self.began -= steps * self.decode_s
            self.decode_base_s -= steps * self.raw_base_s
            self.decode_context_s -= steps * self.raw_context_s

    def remove(self, prompt: Prompt) -> None:
        """Remove the prompt from the queue if it is there."""
        if prompt.left and prompt in self.queue:
            self.queue.remove(prompt)
            self.queued_tokens -= prompt.left
            self.queued_pairs = max(
                0.0, self.queued_pairs - prompt.left * (prompt.at + 0.5 * prompt.left)
            )
