"""What one engine is believed to be doing: its queue of prompts, the step under way, the batch that decodes.

Lives here: the chunked-prefill scheduler on paper, played forward with the believed step times and set right by every
first token that really comes. Not here: step times (latency.py), what is booked for whom (ledger.py).
"""

from __future__ import annotations

from collections import deque
from math import exp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.model import EndpointLoad

RATE_S = 20.0  # over how long arriving prompt tokens are averaged
MOST_BUSY = 0.95  # no prediction lets prefill take more of the time than this


class Prompt:
    """One booked prompt on the timeline.

    enters  policy clock when the engine's scheduler sees it; left  tokens in no step yet; at  tokens before those
    planned  its last chunk is in a step; decoding  it is past its first token
    """

    __slots__ = (
        *("at", "began", "decode_raw_s", "decoding", "enters", "left", "locked", "planned", "prefill_s"),
        *("prefill_steps", "prompt_tokens", "tick"),
    )

    def __init__(self, prompt_tokens: int, cached_tokens: int, enters: float) -> None:
        self.prompt_tokens = prompt_tokens
        # The last token is always computed: its logits are what the first output token is drawn from.
        self.left = max(1, prompt_tokens - cached_tokens)
        self.at = prompt_tokens - self.left
        self.enters = enters
        self.planned = self.decoding = self.locked = False
        self.began = self.tick = self.prefill_s = self.decode_raw_s = 0.0
        self.prefill_steps = 0


class Timeline:
    """The steps of one engine, believed. One writer: the ledger, through the methods here.

    queue                         prompts with tokens in no step yet, first come first served
    queued_tokens, queued_pairs   those tokens, and their query-key pairs
    busy, began, ends, finishing  whether a step with prompt chunks is under way, when it began and should end, and the
                                  prompts that it completes; when not busy, `began` is a boundary of decode steps
    batch, starts, tick           sequences that decode; `starts + batch * tick` is their context; steps so far
    anchor, raw_*                 since when, and with how much work by the prior, no first token has set the clock
    """

    __slots__ = (
        *(
            "anchor",
            "batch",
            "began",
            "busy",
            "chunk_tokens",
            "decode_raw_s",
            "decode_raw_step_s",
            "decode_s",
            "ends",
            "finishing",
        ),
        *("kv_prompts", "prefill_s", "prefill_steps", "queue", "queued_pairs", "queued_tokens", "rate", "rate_at"),
        *("raw_decode", "raw_prefill", "slack_s", "starts", "tick"),
    )

    def __init__(self) -> None:
        self.queue: deque[Prompt] = deque()
        self.queued_tokens, self.queued_pairs = 0, 0.0
        self.busy = False
        self.began = self.ends = 0.0
        self.finishing: list[Prompt] = []
        self.chunk_tokens = self.batch = self.kv_prompts = 0
        self.starts = self.tick = 0.0
        self.anchor = self.raw_prefill = self.raw_decode = self.slack_s = 0.0
        self.prefill_steps, self.prefill_s, self.decode_raw_s = 0, 0.0, 0.0
        self.decode_s = self.decode_raw_step_s = 0.0
        self.rate = self.rate_at = 0.0

    # Events

    def arrive(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """A prompt is on its way to the engine."""
        self.advance(load, now)
        self.queue.append(prompt)
        self.queued_tokens += prompt.left
        self.queued_pairs += prompt.left * (prompt.at + 0.5 * prompt.left)
        self.rate = self.rate * exp((self.rate_at - now) / RATE_S) + prompt.left / RATE_S
        self.rate_at = now
        self.refresh(load)

    def expect(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """A prompt is computed elsewhere and handed over: room for its KV is taken, nothing is queued."""
        self.advance(load, now)
        prompt.left, prompt.planned, prompt.locked = 0, True, True
        self.kv_prompts += prompt.prompt_tokens
        self.refresh(load)

    def answered(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """A prompt's first token came: the step that completed it ended now."""
        self.advance(load, now)
        if not prompt.planned:
            self._hurry(load, prompt, now)
        if prompt in self.finishing:
            self._learn(load, now)
            self._close(now)
            self._plan(load, now)
        prompt.decoding = True
        prompt.began, prompt.tick = now, self.tick
        prompt.prefill_steps, prompt.prefill_s = self.prefill_steps, self.prefill_s
        prompt.decode_raw_s = self.decode_raw_s
        self._unlock(prompt)
        self.batch += 1
        self.starts += prompt.prompt_tokens - self.tick
        self.refresh(load)

    def decoded(self, load: EndpointLoad, prompt: Prompt, output_tokens: int, now: float) -> None:
        """An answer of so many tokens is whole: what its decode steps took, the prefills in between apart."""
        self.advance(load, now)
        prefills = self.prefill_steps - prompt.prefill_steps
        steps = output_tokens - 1 - prefills
        raw_s = self.decode_raw_s - prompt.decode_raw_s
        believed = self.tick - prompt.tick - prefills
        spent_s = now - prompt.began - (self.prefill_s - prompt.prefill_s)
        if steps >= 8 and believed > 0 and raw_s > 0 and spent_s > 0:
            load.belief.step.observe(spent_s / steps / (raw_s / believed), (1.0 / steps) ** 2)

    def leave(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """A prompt is over, computed or not."""
        self.advance(load, now)
        if prompt.decoding:
            self.batch -= 1
            self.starts -= prompt.prompt_tokens - prompt.tick
            if not self.batch:
                self.starts = 0.0
            if not self.busy:
                self.began = now
        else:
            self._remove(prompt)
            if prompt in self.finishing:
                self.finishing.remove(prompt)
            self._unlock(prompt)
        self.refresh(load)

    # The engine on paper

    def advance(self, load: EndpointLoad, now: float) -> None:
        """Play the believed steps up to now. A step that completes a prompt lasts until its first token says so."""
        while True:
            if self.busy:
                if self.finishing or self.ends > now:
                    return
                ends = self.ends
                self._close(ends)
                self._plan(load, ends)
                continue
            if self.batch and self.decode_s > 0:
                self._decode(now if not self.queue else min(now, max(self.began, self.queue[0].enters)))
            if not self.queue or self.queue[0].enters > now:
                return
            start = self.queue[0].enters
            if self.batch:
                start = self.began if self.began >= start else self.began + self.decode_s
            if start > now:
                return
            if start > self.began:
                self._decode(start)
            self.anchor, self.slack_s = start, 0.15 * self.decode_s if self.batch else 0.0
            self.raw_prefill = self.raw_decode = 0.0
            if not self._plan(load, start):
                return

    def _decode(self, until: float) -> None:
        """Whole decode steps up to a moment."""
        if not self.batch:
            self.began = max(self.began, until)
            return
        steps = int((until - self.began) / self.decode_s + 1e-9)
        if steps > 0:
            self.tick += steps
            self.began += steps * self.decode_s
            self.decode_raw_s += steps * self.decode_raw_step_s

    def _plan(self, load: EndpointLoad, at: float) -> bool:
        """Begin a step with the prompts that have entered by then; False when there are none that fit."""
        shape, queue = load.belief.shape, self.queue
        room = shape.budget_tokens - self.batch
        context = self.starts + self.batch * self.tick
        tokens, pairs = 0, 0.0
        while queue and room > tokens:
            head = queue[0]
            if head.enters > at or not self._fits(load, head, context):
                break
            take = min(head.left, room - tokens)
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
        prefill = (
            max(shape.weights_s, shape.token_s * tokens) + shape.wire_s * tokens + shape.pair_s * pairs + shape.step_s
        )
        decode = shape.context_s * context + (shape.sequence_s + shape.token_s + shape.wire_s) * self.batch
        self.raw_prefill += prefill
        self.raw_decode += decode
        self.busy, self.began, self.chunk_tokens = True, at, tokens
        self.ends = at + load.belief.prefill.factor * prefill + load.belief.step.factor * decode
        return True

    def _fits(self, load: EndpointLoad, prompt: Prompt, context: float) -> bool:
        """Whether there is KV for all of the prompt, as engines ask before they begin one; then it is locked."""
        if prompt.locked:
            return True
        held = context + self.kv_prompts
        if load.kv_tokens is not None and held > 0 and held + prompt.prompt_tokens > load.kv_tokens:
            return False
        prompt.locked = True
        self.kv_prompts += prompt.prompt_tokens
        return True

    def _unlock(self, prompt: Prompt) -> None:
        if prompt.locked:
            prompt.locked = False
            self.kv_prompts -= prompt.prompt_tokens

    def _close(self, at: float) -> None:
        """The step under way is over."""
        self.prefill_steps += 1
        self.prefill_s += at - self.began
        self.tick += 1
        self.busy, self.began = False, at
        self.finishing = []

    def _hurry(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """The engine is faster than believed: plan on to the step that completes this prompt."""
        prompt.enters = min(prompt.enters, now)
        while not prompt.planned:
            if self.busy:
                self._close(min(self.ends, now))
            for each in self.queue:
                each.enters = min(each.enters, now)
                if each is prompt:
                    break
            if not self.queue or not self._plan(load, now):
                self._remove(prompt)
                prompt.planned = True

    def _remove(self, prompt: Prompt) -> None:
        if prompt.left and prompt in self.queue:
            self.queue.remove(prompt)
            self.queued_tokens -= prompt.left
            self.queued_pairs = max(0.0, self.queued_pairs - prompt.left * (prompt.at + 0.5 * prompt.left))

    def _learn(self, load: EndpointLoad, now: float) -> None:
        """How long the steps since the anchor really took."""
        belief = load.belief
        spent = now - self.anchor
        if spent > 0 and self.raw_prefill > 0:
            seen = max(0.01 * spent, spent - belief.step.factor * self.raw_decode) / self.raw_prefill
            belief.prefill.observe(seen, (self.slack_s / spent) ** 2)
        self.anchor, self.slack_s = now, 0.0
        self.raw_prefill = self.raw_decode = 0.0

    # The outlook

    def refresh(self, load: EndpointLoad) -> None:
        """Say in plain floats what a newcomer would meet (EndpointLoad's docstring)."""
        belief = load.belief
        shape, slow, slower = belief.shape, belief.prefill.factor, belief.step.factor
        batch = self.batch + load.strangers
        context = self.starts + self.batch * self.tick
        each = shape.sequence_s + shape.wire_s
        decode = shape.context_s * context + each * batch
        over = slower * (decode + shape.token_s * batch) + slow * shape.step_s
        self.decode_raw_step_s = max(shape.weights_s, shape.token_s * batch) + shape.step_s + decode
        self.decode_s = slower * self.decode_raw_step_s
        token_s = slow * (shape.token_s + shape.wire_s)
        load.token_s = token_s + over / max(1, shape.budget_tokens - batch)
        load.pair_s = slow * shape.pair_s
        load.fixed_s = shape.request_s + over
        if batch and not self.busy:
            load.fixed_s += 0.5 * self.decode_s
        load.ready_at = (self.ends if self.busy else self.began) + (
            self.queued_tokens * load.token_s + self.queued_pairs * load.pair_s
        )
        stretch = 1.0 / (1.0 - min(MOST_BUSY, self.rate * token_s))
        load.sequence_s = stretch * slower * each
        load.context_s = stretch * slower * shape.context_s
        load.step_s = self.decode_s * stretch
