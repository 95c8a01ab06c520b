"""Updates the model of an endpoint's engine by events: request sent, first token, ended, scraped.

EngineTimeline translates events into changes of its base class EngineModel (scheduler_model.py).

- load_ledger.py sends the events.
- first_token_calibration.py learns from first tokens.
- load_forecast.py computes the forecast.
- step_time.py has the step times.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from policies.engine import first_token_calibration, load_forecast
from policies.engine.recent_work_averages import ArrivalAverages
from policies.engine.scheduler_model import EngineModel

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.engine.output_length import RecentLengths
    from policies.engine.queued_prompt import QueuedPrompt

# The weight of one scrape; it counts only if this share of KV is in use.
KV_GAIN, LEAST_KV = 0.1, 0.05
STALE_S = 0.002
"""Maximum age in seconds of the load forecast while no prompt is queued."""


class EngineTimeline(EngineModel):
    """Follows one engine through the events of its requests, so that its load can be forecast.

    It updates its base class, a model of the engine's scheduler, when a prompt is sent, when its
    first token comes, when it ends, and when metrics are read.

    arrivals  running means of the prompts recently sent to the endpoint
    """

    __slots__ = ("arrivals",)

    def __init__(self, now: float = 0.0, lengths: RecentLengths | None = None) -> None:
        super().__init__(now, lengths)
        self.arrivals = ArrivalAverages(now)

    def on_sent(self, load: EngineLoad, prompt: QueuedPrompt, now: float) -> None:
        """Add a prompt that was sent to the engine to the model's queue; update the forecast."""
        left = prompt.remaining_tokens
        self.answers_due_at = -inf
        uncached: float = left
        pairs: float = uncached * (prompt.computed_tokens + 0.5 * uncached)
        self.arrivals.record(left, now)
        self.queue.append(prompt)
        self.queued_tokens += left
        self.queued_pairs += pairs
        load.free_kv_tokens -= prompt.prompt_tokens
        load.kv_used_tokens += uncached
        ready_at: float = load.prefill_done_at
        if ready_at < now:
            ready_at = now + self.idle_delay_s
        load.prefill_done_at = (
            ready_at + uncached * load.prefill_s_per_token + pairs * load.attention_s_per_pair
        )
        if load.next_first_token_at == inf:
            load.next_first_token_at = load.prefill_done_at + self.step_overhead_s

    def expect_kv(self, load: EngineLoad, prompt: QueuedPrompt) -> None:
        """Record a prompt that another engine computes, and that will be decoded here.

        The prompt is not queued here, because its KV cache will be sent. The forecast counts its KV
        memory immediately, but other prompts may still begin before that KV arrives.
        """
        prompt.remaining_tokens, prompt.is_planned, prompt.awaits_kv = 0, True, True
        self.answers_due_at = -inf
        self.incoming_kv_tokens += prompt.prompt_tokens
        load.free_kv_tokens -= prompt.prompt_tokens
        load.kv_used_tokens += prompt.prompt_tokens

    def on_handoff(self, load: EngineLoad, prompt: QueuedPrompt, now: float) -> None:
        """Let a prompt decode, because its KV cache has arrived from another engine."""
        self.advance(load, now)
        self.start_decoding(prompt, now)
        self._update_forecast(load, now)

    def on_first_token(self, load: EngineLoad, prompt: QueuedPrompt, now: float) -> None:
        """Record the first token of a prompt: the engine step that computed it has ended."""
        # The prompt belongs to the step that has ended, and no step was planned since.
        if not prompt.is_planned and self.is_same_step(now):
            self.unplanned_tokens += prompt.remaining_tokens
            self.remove_from_queue(prompt)
            prompt.is_planned = True
        elif (
            not self.is_busy
            and len(self.queue) == 1
            and not prompt.is_planned
            and self._was_taught_recently(now)
        ):
            self.complete_only_prompt(prompt, now)
        else:
            self.advance(load, now)
            if not prompt.is_planned:
                self.catch_up_to(load, prompt, now)
        if prompt in self.completing:
            awaited = self.completing
            self.ended_step_s = now - self.step_began_at
            self.close_step(now)
            self.awaited, self.first_tokens_at = awaited, now
        self.start_decoding(prompt, now)
        if self.awaited and self.awaited[-1].is_decoding:
            self.awaited = []  # prompts behind the first one can no longer be queued again
        self._update_forecast(load, now)

    def _was_taught_recently(self, now: float) -> bool:
        return now - self.span.corrected_at < first_token_calibration.LESSON_S

    def on_ended(
        self, load: EngineLoad, prompt: QueuedPrompt, now: float, output_tokens: int | None
    ) -> None:
        """Remove the prompt of a request that has ended from the engine model, computed or not.

        output_tokens  length of the answer; None: it is incomplete, or its length is unknown

        The model must have been advanced to `now`.
        """
        if prompt.output_tokens > 1.0:
            length = None if output_tokens is None else output_tokens / prompt.sequences
            self.lengths.end(prompt, length, prompt.output_tokens)
        if prompt.is_decoding or prompt.has_kv:
            self.prefixes.remove(prompt.prefix_tokens)
        if prompt.is_decoding:
            if output_tokens is not None and prompt.sees_first_token:
                self._learn_decode_steps(load, prompt, output_tokens, now)
            self.answers.remove(prompt)
            self.batch -= prompt.sequences
            self.context_base -= prompt.sequences * (
                prompt.prompt_tokens - prompt.decode_begin_step
            )
            if not self.batch:
                self.context_base = 0.0
            if not self.is_busy:
                self.step_began_at = now
        else:
            self.remove_from_queue(prompt)
            for prompts in (self.completing, self.awaited):
                if prompt in prompts:
                    prompts.remove(prompt)
            if prompt.has_kv:
                self.kv_prompts -= prompt.prompt_tokens
            elif prompt.awaits_kv:
                self.incoming_kv_tokens -= prompt.prompt_tokens
        self._update_forecast(load, now)

    def on_scrape(self, load: EngineLoad, kv_usage: float | None, now: float) -> None:
        """Correct the engine model by metrics that the engine has reported.

        `kv_usage` is the fraction of KV in use, 0 to 1; None: unknown.
        """
        self.advance(load, now)
        if kv_usage is not None:
            self._learn_kv_sharing(load, kv_usage)
        self.refresh_forecast(load, now)

    def _learn_decode_steps(
        self, load: EngineLoad, prompt: QueuedPrompt, output_tokens: int, now: float
    ) -> None:
        span = self.span
        if now - span.decoded_at < first_token_calibration.LESSON_S:
            return
        prefills = self.prefill_steps - prompt.prefill_steps
        steps = output_tokens / prompt.sequences - 1 - prefills
        base_s = self.decode_base_s - prompt.decode_base_s
        context_s = self.decode_context_s - prompt.decode_context_s
        modelled = self.steps - prompt.decode_begin_step - prefills
        spent_s = now - prompt.decode_began_at - (self.prefill_s - prompt.prefill_s)
        # Steps that were undone have been subtracted with the durations that they had then.
        if steps >= 8 and modelled > 0 and base_s > 0 and context_s >= 0 and spent_s > 0:
            span.decoded_at = now
            load.belief.observe_decode(
                spent_s * modelled / steps, base_s, context_s, 1.0 / (steps * steps)
            )

    def _learn_kv_sharing(self, load: EngineLoad, kv_usage: float) -> None:
        # Learn how much of the modelled KV the engine really stores, since sequences share
        # prefixes.
        #
        # The model gives each sequence its own copy of the prompt. A scrape some seconds old is
        # good enough, because sharing changes slowly. Without scrapes the capacity is unknown, and
        # no wait for KV is predicted. KV that another endpoint still computes is excluded on both
        # sides.
        if load.kv_tokens is None:
            return
        modelled = (
            self.context_base
            + self.batch * self.steps
            + sum(prompt.prompt_tokens for prompt in self.completing)
        )
        if self.queue and self.queue[0].has_kv:
            # Engines allocate a prompt's blocks chunk by chunk.
            modelled += self.queue[0].computed_tokens
        prefixes = self.prefixes
        prefixes.distinct = max(0.0, kv_usage * load.kv_tokens - (modelled - prefixes.tokens))
        if modelled > LEAST_KV * load.kv_tokens:
            self.kv_ratio += KV_GAIN * (
                max(LEAST_KV, min(1.0, kv_usage * load.kv_tokens / modelled)) - self.kv_ratio
            )

    def refresh_forecast(self, load: EngineLoad, now: float) -> None:
        load_forecast.refresh_forecast(self, load, now)

    def _update_forecast(self, load: EngineLoad, now: float) -> None:
        # Update the forecast after a change.
        #
        # The times of prompts are updated immediately, the rest only if it is older than STALE_S.
        if now - self.forecast_at >= STALE_S or self.queue or load.peer_load.shares:
            load_forecast.refresh_forecast(self, load, now)
            return
        self.is_stale, self.answers_due_at = True, -inf
        load.prefill_done_at = self.step_ends_at if self.is_busy else self.step_began_at
        load.next_first_token_at = load.prefill_done_at if self.completing else inf
