"""One engine on paper: its queue of prompts, the step under way, the batch that decodes, its KV.

Lives here: the chunked-prefill scheduler played forward with the believed step times, and set right by every first
token that really comes. Not here: what that teaches (lessons.py), what a newcomer would meet (outlook.py), step times
(latency.py), what is booked for whom (ledger.py).
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from policies import lessons
from policies.averages import Averages
from policies.held import Prefixes

if TYPE_CHECKING:
    from policies.engine_load import EngineLoad
    from policies.queued_prompt import Prompt

TOGETHER = 0.25
"""First tokens within so much of a decode step were made by one step."""

OVERDUE = 0.5
"""By how much of its length a step is late that has not begun, where KV is as good as full."""

NEARLY_FULL = 0.03
"""Share of an engine's KV: with less of it free, a prompt that was believed to have room may be waiting for it."""


class Paper:
    """The steps of one engine, believed. Written here, by Timeline's events, and by lessons.py and outlook.py for them.

    queue                         prompts with tokens in no step yet, first come first served
    queued_tokens, queued_pairs   those tokens, and their query-key pairs
    busy, began, ends, finishing  whether a step with prompt chunks is under way, when it began and should end, and the
                                  prompts that it completes; when not busy, `began` is a boundary of decode steps
    step_tokens                   prompt tokens of that step
    told_at                       when first tokens ended a step after which none is planned yet; -inf: no such step
    batch, starts, tick, since    sequences that decode; `starts + batch * tick` is their context; steps so far, and
                                  how many they were when the last of these sequences began
    kv_prompts, kv_coming         prompt tokens that have KV and do not decode; those whose KV is computed elsewhere
    prefixes                      what of all who have KV was cached, and how much of that the engine really holds
    kv_ratio                      the same for all KV that is held on paper, as a mean of some seconds, for the outlook
    decode_s                      a decode step as things stand (outlook.py)
    raw_base_s, raw_context_s     what it takes by the prior, and to read the context
    planned, prefill_*, decode_*  prompt tokens put in steps since anybody asked; steps with prompts and their time, and
                                  the time of steps without by the prior in those two parts, ever
    lately                        what it has been doing lately, in averages
    idle_s, over_s                seconds from a pick to the first step of an idle engine; what a step with prompts pays
                                  besides them (outlook.py)
    fresh_at, stale               when the outlook was refreshed, and whether something was left out of it since
    span                          the steps since somebody knew the clock: what the next first token judges
    """

    __slots__ = (
        *("batch", "began", "busy", "decode_base_s", "decode_context_s", "decode_s", "ends", "finishing", "fresh_at"),
        *("idle_s", "kv_coming", "kv_prompts", "kv_ratio", "lately", "over_s", "planned", "prefill_s", "prefill_steps"),
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
        self.batch = self.kv_prompts = self.kv_coming = self.planned = self.prefill_steps = self.step_tokens = 0
        self.starts = self.tick = self.since = 0.0
        self.kv_ratio = 1.0
        self.prefixes = Prefixes()
        self.prefill_s = self.decode_s = 0.0
        self.decode_base_s = self.decode_context_s = self.raw_base_s = self.raw_context_s = 0.0
        self.lately = Averages(now)
        self.fresh_at, self.stale = -inf, False
        self.idle_s = self.over_s = 0.0
        self.span = lessons.Span()

    def advance(self, load: EngineLoad, now: float) -> None:
        """Play the believed steps up to now. A step that completes a prompt lasts until its first token says so."""
        if self.told_at > -inf and not self._go_on(load, now):
            return
        while True:
            if self.busy:
                ends = self.ends
                if ends > now:
                    return
                if self.finishing and self._awaited():
                    if not self._starved(load, now):
                        return
                    self._retract(load)
                    continue
                self.close(ends)
                if self.queue:
                    self._plan(load, ends)
            elif self.queue:
                start = self.queue[0].enters
                if self.batch:  # the decode step under way comes to its end first
                    self._decode(start if start < now else now)
                    start = self.began if self.began >= start else self.began + self.decode_s
                if start > now or not self._begin(load, start):
                    break
            else:
                break
        if self.batch:
            self._decode(now)

    def together(self, now: float) -> bool:
        """Whether first tokens have just ended a step, so that others of its may be on their way still."""
        return now - self.told_at <= TOGETHER * self.decode_s

    def _go_on(self, load: EngineLoad, now: float) -> bool:
        """Plan the step after the one that first tokens ended, if all of them have come."""
        at = self.told_at
        if self.together(now):
            return False
        self.told_at = -inf
        if at - self.span.anchor > lessons.LEARN_S:
            lessons.learn(self.span, load, self.ends, at)
        if not (self.queue and self._plan(load, at)):
            lessons.learn(self.span, load, self.ends, at)
        return True

    def skip(self, prompt: Prompt, now: float) -> None:
        """The one prompt there was has been computed since anybody looked, and no lesson is due: no step is planned."""
        begun = prompt.enters if prompt.enters < now else now
        if self.batch:
            self._decode(begun)
        self.queue.clear()
        self.planned += prompt.left
        self.queued_tokens, self.queued_pairs, prompt.left = 0, 0.0, 0
        self.prefill_steps += 1
        self.prefill_s += now - begun
        self.tick += 1
        self.began, prompt.planned = now, True

    def _begin(self, load: EngineLoad, start: float) -> bool:
        """Begin a step with prompts after steps without, from where the next first token is measured."""
        if self.batch:
            self._decode(start)
        self.span.begin(start, 0.5 * self.decode_s if self.batch else 0.0, self.queue[0].enters)
        return self._plan(load, start)

    def _decode(self, until: float) -> None:
        """Whole decode steps up to a moment, while anybody decodes."""
        steps = int((until - self.began) / self.decode_s + 1e-9)
        if steps > 0:
            self.tick += steps
            self.began += steps * self.decode_s
            self.decode_base_s += steps * self.raw_base_s
            self.decode_context_s += steps * self.raw_context_s

    def _plan(self, load: EngineLoad, at: float) -> bool:
        """Begin a step with the prompts that have entered by then; False when there are none that fit."""
        belief, queue = load.belief, self.queue
        shape = belief.shape
        room = shape.budget_tokens - self.batch
        context = self.starts + self.batch * self.tick
        tokens, pairs = 0, 0.0
        while queue and room > tokens:
            head = queue[0]
            if head.enters > at or not (head.locked or self._fits(load, head)):
                break
            take, left = head.left, room - tokens
            if take > left:
                take = left
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
        self.busy, self.began = True, at
        self.ends = at + belief.pace(tokens) * prefill + decode + belief.layers_s
        self.span.add(prefill, shape.filling(tokens), belief.area_s * pairs, decode, load.others.prefill_tokens)
        return True

    def _fits(self, load: EngineLoad, prompt: Prompt) -> bool:
        """Whether there is KV for all of the prompt, as engines ask before they begin one; then it is locked."""
        if self.needs(prompt) > self.kv_free(load):
            self.span.tight = True
            if self.batch or self.kv_prompts:
                return False
        prompt.locked = True
        self.kv_prompts += prompt.prompt_tokens
        self.prefixes.hold(prompt.had)
        return True

    def needs(self, prompt: Prompt) -> float:
        """KV tokens that the engine must have free to begin it."""
        return prompt.fresh + self.prefixes.alone() * prompt.had

    def kv_free(self, load: EngineLoad) -> float:
        """KV tokens that nobody holds now; infinite while it is unknown how many there are."""
        if load.kv_tokens is None:
            return inf
        held = self.starts + self.batch * self.tick + self.kv_prompts
        return load.kv_tokens - (held - self.prefixes.tokens + self.prefixes.distinct)

    def _starved(self, load: EngineLoad, now: float) -> bool:
        """Whether the step that is overdue has not begun, for others hold KV until it is full: all its prompts began
        with it, on paper."""
        if now - self.ends < OVERDUE * (self.ends - self.began) or load.kv_tokens is None:
            return False
        if self.kv_free(load) > NEARLY_FULL * load.kv_tokens:
            return False
        if not self.batch and self.kv_prompts <= sum(prompt.prompt_tokens for prompt in self.finishing):
            return False
        return sum(prompt.fresh for prompt in self.finishing) <= self.step_tokens

    def _retract(self, load: EngineLoad) -> None:
        """The step was none: its prompts wait for KV, and there is less of it than was believed. Others decoded on."""
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

    def close(self, at: float) -> None:
        """The step under way is over."""
        self.prefill_steps += 1
        self.prefill_s += at - self.began
        self.tick += 1
        self.busy, self.began = False, at
        finishing, self.finishing = self.finishing, []
        for prompt in finishing:
            if not prompt.told:
                prompt.computed()
                self.start(prompt, at)

    def _awaited(self) -> bool:
        """Whether somebody will tell when the step under way has ended."""
        for prompt in self.finishing:  # noqa: SIM110  # any() costs twice as much, and nearly always there is one
            if prompt.told:
                return True
        return False

    def start(self, prompt: Prompt, now: float) -> None:
        """A prompt is past its first token: it decodes."""
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
        """Its KV is no longer computed elsewhere: it has its room here."""
        prompt.coming, prompt.locked = False, True
        self.kv_coming -= prompt.prompt_tokens
        self.kv_prompts += prompt.prompt_tokens

    def hurry(self, load: EngineLoad, prompt: Prompt, now: float) -> None:
        """The engine is faster than believed: plan on to the step that completes this prompt."""
        prompt.enters = min(prompt.enters, now)
        while not prompt.planned:
            if self.busy:
                self.close(min(self.ends, now))
            for each in self.queue:
                each.enters = min(each.enters, now)
                if each is prompt:
                    break
            if self.queue:  # its KV was there: less is held than was believed
                lacking = self.needs(self.queue[0]) - self.kv_free(load)
                self.prefixes.distinct = max(0.0, self.prefixes.distinct - max(0.0, lacking))
            if self._plan(load, now):
                self._rewind()
            else:
                self.remove(prompt)
                prompt.planned = True

    def _rewind(self) -> None:
        """The step just planned ends now: of the decode steps since a batch was known, those in its time were none."""
        if self.batch:
            steps = min(int((self.ends - self.began) / self.decode_s + 0.5), self.tick - self.since)
            self.tick -= steps
            self.began -= steps * self.decode_s
            self.decode_base_s -= steps * self.raw_base_s
            self.decode_context_s -= steps * self.raw_context_s

    def remove(self, prompt: Prompt) -> None:
        """Out of the queue, if it is there."""
        if prompt.left and prompt in self.queue:
            self.queue.remove(prompt)
            self.queued_tokens -= prompt.left
            self.queued_pairs = max(0.0, self.queued_pairs - prompt.left * (prompt.at + 0.5 * prompt.left))
