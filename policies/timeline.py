"""What one engine is believed to be doing: its queue of prompts, the step under way, the batch that decodes.

Lives here: the chunked-prefill scheduler on paper, played forward with the believed step times and set right by every
first token that really comes. Not here: step times (latency.py), what is booked for whom (ledger.py).
"""

from __future__ import annotations

from collections import deque
from math import exp, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.model import EndpointLoad

RATE_S = 20.0  # over how long the prompt tokens computed are averaged
SHARE_S = 120.0  # over how long the share of the time that prompts take is averaged
BEHIND = 0.2  # of what usually arrives, what is sent behind a prompt that waits: routing sends the most elsewhere
FRESH_S = 0.5  # how old that average may be
SHORT_S = 0.1  # first tokens within so much of an idle queue tell of a step's overhead
LEARN_S = 1.0  # first tokens in a row are judged together until they span so much
LESSON_S = 0.1  # between two lessons of a kind: where requests come by the hundred, each tells next to nothing
STALE_S = 0.002  # how old what a newcomer would meet may be while nothing is queued
MOST_BUSY = 0.95  # no prediction lets prefill take more of the time than this


class Prompt:
    """One booked prompt on the timeline. What it knows of decoding is set at its first token.

    enters    policy clock when the engine's scheduler sees it
    left, at  tokens in no step yet, and tokens of the prompt before those
    planned   its last chunk is in a step; decoding  it is past its first token; locked  it has its KV
    sequences answers that grow from it
    told      somebody will tell of its first token; else it is believed to come when the step ends
    """

    __slots__ = (
        *("at", "began", "decode_raw_s", "decoding", "enters", "left", "locked", "planned", "prefill_s"),
        *("prefill_steps", "prompt_tokens", "sequences", "tick", "told"),
    )

    at: int
    began: float
    decode_raw_s: float
    decoding: bool
    enters: float
    left: int
    locked: bool
    planned: bool
    prefill_s: float
    prefill_steps: int
    prompt_tokens: int
    sequences: int
    tick: float
    told: bool

    def computed(self) -> None:
        """Its first token is made, or believed to be where nobody will tell: it decodes."""

    def join(self, now: float) -> None:
        """Its endpoint's timeline begins anew, with it."""


class Timeline:
    """The steps of one engine, believed. One writer: the ledger, through the methods here.

    queue                         prompts with tokens in no step yet, first come first served
    queued_tokens, queued_pairs   those tokens, and their query-key pairs
    busy, began, ends, finishing  whether a step with prompt chunks is under way, when it began and should end, and the
                                  prompts that it completes; when not busy, `began` is a boundary of decode steps
    batch, starts, tick           sequences that decode; `starts + batch * tick` is their context; steps so far
    anchor, raw_*                 since when, and with how much work by the prior, no first token has set the clock
    share, pace                   of the time, what steps with prompts take; how many of them there are per second
    foreign                       the most prompt tokens that other gateways had waiting since the anchor
    fresh_at, stale               when the outlook was refreshed, and whether something was left out of it since
    taught_at, decoded_at         when first tokens, and whole answers, last taught something
    """

    __slots__ = (
        *("anchor", "batch", "began", "born", "busy", "decode_raw_s", "decode_s", "decoded_at", "ends"),
        *("finishing", "foreign", "fresh_at", "idle_s", "kv_prompts", "over_s", "pace", "planned", "prefill_s"),
        *("prefill_steps", "queue", "queued_pairs", "queued_tokens", "rate", "rate_at", "raw_decode"),
        *("raw_prefill", "raw_step_s", "seen_s", "seen_steps", "share", "slack_s", "stale", "starts", "steps"),
        *("taught_at", "tick", "tight"),
    )

    def __init__(self, now: float = 0.0) -> None:
        self.queue: deque[Prompt] = deque()
        self.queued_tokens, self.queued_pairs = 0, 0.0
        self.busy = self.tight = self.stale = False
        self.fresh_at = self.taught_at = self.decoded_at = -inf
        self.began = self.ends = self.rate_at = now
        self.finishing: list[Prompt] = []
        self.batch = self.kv_prompts = self.planned = self.steps = 0
        self.starts = self.tick = 0.0
        self.anchor = self.raw_prefill = self.raw_decode = self.slack_s = 0.0
        self.prefill_steps, self.prefill_s, self.decode_raw_s = 0, 0.0, 0.0
        self.decode_s = self.raw_step_s = self.idle_s = self.over_s = 0.0
        self.rate = self.share = self.pace = self.seen_s = 0.0
        self.born, self.seen_steps, self.foreign = inf, 0, 0

    # Events

    def arrive(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """A prompt is on its way to the engine. What is ahead of the next one grows by its work."""
        left, at = prompt.left, prompt.at
        pairs = left * (at + 0.5 * left)
        self.queue.append(prompt)
        self.queued_tokens += left
        self.queued_pairs += pairs
        ready_at = load.ready_at
        if ready_at < now:
            ready_at = now + self.idle_s
        load.ready_at = ready_at + left * load.token_s + pairs * load.pair_s
        if load.due_at == inf:
            load.due_at = load.ready_at + self.over_s

    def expect(self, prompt: Prompt) -> None:
        """A prompt is computed elsewhere and handed over: room for its KV is taken, nothing is queued."""
        prompt.left, prompt.planned, prompt.locked = 0, True, True
        self.kv_prompts += prompt.prompt_tokens

    def handed(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """One that was expected decodes from now on."""
        self.advance(load, now)
        self.start(prompt, now)
        self._touch(load, now)

    def answered(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """A prompt's first token came: the step that completed it ended now."""
        if not self.busy and len(self.queue) == 1 and not prompt.planned and now - self.taught_at < LESSON_S:
            self._skip(prompt, now)
        else:
            self.advance(load, now)
            if not prompt.planned:
                self._hurry(load, prompt, now)
        if prompt in self.finishing:
            self._close(now)
            if now - self.anchor > LEARN_S:
                self._learn(load, now)
            if not (self.queue and self._plan(load, now)) and now > self.anchor:
                self._learn(load, now)
        self.start(prompt, now)
        self._touch(load, now)

    def leave(self, load: EndpointLoad, prompt: Prompt, now: float, output_tokens: int | None) -> None:
        """A prompt is over, computed or not; `output_tokens` when the answer is whole and somebody told its length.

        The timeline was advanced to this moment before.
        """
        if prompt.decoding:
            if output_tokens is not None and prompt.told:
                self._decoded(load, prompt, output_tokens, now)
            self.batch -= prompt.sequences
            self.starts -= prompt.sequences * (prompt.prompt_tokens - prompt.tick)
            if not self.batch:
                self.starts = 0.0
            if not self.busy:
                self.began = now
        else:
            self._remove(prompt)
            if prompt in self.finishing:
                self.finishing.remove(prompt)
            if prompt.locked:
                self.kv_prompts -= prompt.prompt_tokens
        self._touch(load, now)

    # The engine on paper

    def advance(self, load: EndpointLoad, now: float) -> None:
        """Play the believed steps up to now. A step that completes a prompt lasts until its first token says so."""
        while True:
            if self.busy:
                ends = self.ends
                if ends > now or (self.finishing and self._awaited()):
                    return
                self._close(ends)
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

    def _skip(self, prompt: Prompt, now: float) -> None:
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

    def _begin(self, load: EndpointLoad, start: float) -> bool:
        """Begin a step with prompts after steps without, from where the next first token is measured."""
        if self.batch:
            self._decode(start)
        self._anchor(start, 0.3 * self.decode_s if self.batch else 0.0)
        return self._plan(load, start)

    def _decode(self, until: float) -> None:
        """Whole decode steps up to a moment, while anybody decodes."""
        steps = int((until - self.began) / self.decode_s + 1e-9)
        if steps > 0:
            self.tick += steps
            self.began += steps * self.decode_s
            self.decode_raw_s += steps * self.raw_step_s

    def _plan(self, load: EndpointLoad, at: float) -> bool:
        """Begin a step with the prompts that have entered by then; False when there are none that fit."""
        shape, queue = load.belief.shape, self.queue
        room = shape.budget_tokens - self.batch
        context = self.starts + self.batch * self.tick
        tokens, pairs = 0, 0.0
        while queue and room > tokens:
            head = queue[0]
            if head.enters > at or not (head.locked or self._fits(load, head, context)):
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
        prefill, weights_s = shape.token_s * tokens, shape.weights_s
        prefill = (prefill if prefill > weights_s else weights_s) + shape.wire_s * tokens + shape.pair_s * pairs
        decode = shape.context_s * context + (shape.sequence_s + shape.token_s + shape.wire_s) * self.batch
        self.planned += tokens
        self.raw_prefill += prefill
        self.raw_decode += decode
        self.busy, self.began = True, at
        self.steps += 1
        if load.others.prefill_tokens > self.foreign:
            self.foreign = load.others.prefill_tokens
        belief = load.belief
        self.ends = at + belief.prefill.factor * prefill + belief.step.factor * decode + belief.layers_s
        return True

    def _fits(self, load: EndpointLoad, prompt: Prompt, context: float) -> bool:
        """Whether there is KV for all of the prompt, as engines ask before they begin one; then it is locked."""
        if load.kv_tokens is not None:
            held = context + self.kv_prompts
            if held + prompt.prompt_tokens > load.kv_tokens:
                self.tight = True
                if held > 0:
                    return False
        prompt.locked = True
        self.kv_prompts += prompt.prompt_tokens
        return True

    def _close(self, at: float) -> None:
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
        prompt.prefill_steps, prompt.prefill_s = self.prefill_steps, self.prefill_s
        prompt.decode_raw_s = self.decode_raw_s
        if prompt.locked:
            prompt.locked = False
            self.kv_prompts -= prompt.prompt_tokens
        self.batch += prompt.sequences
        self.starts += prompt.sequences * (prompt.prompt_tokens - self.tick)

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
        """How long the steps since the anchor really took, if no wait for KV was among them.

        Which of two steps completed a prompt is known to a part of a step's length; what other gateways had waiting was
        computed in between, and may be all of it or none: the more, the less is learnt.
        """
        belief = load.belief
        spent = now - self.anchor
        if spent > 0 and not self.tight and now - self.taught_at >= LESSON_S:
            self.taught_at = now
            foreign_s = self.foreign * belief.token_s
            rest = max(0.01 * spent, spent - belief.step.factor * self.raw_decode - foreign_s)
            off = self.slack_s + 0.1 * spent / self.steps + foreign_s
            layers_s, prompts_s = self.steps * belief.layers_s, belief.prefill.factor * self.raw_prefill
            if spent < SHORT_S:  # the size of a short step tells of what every step costs, of a long one, of its tokens
                seen = max(0.1 * layers_s, rest - prompts_s) / (self.steps * belief.shape.step_s)
                belief.layers.observe(seen, (off / layers_s) ** 2)
            else:
                seen = max(0.1 * prompts_s, rest - layers_s) / self.raw_prefill
                belief.prefill.observe(seen, (off / prompts_s) ** 2)
            belief.settle()
        self._anchor(now, 0.0)

    def _anchor(self, at: float, slack_s: float) -> None:
        self.anchor, self.slack_s, self.tight = at, slack_s, False
        self.foreign = 0
        self.raw_prefill = self.raw_decode = 0.0
        self.steps = 0

    def _decoded(self, load: EndpointLoad, prompt: Prompt, output_tokens: int, now: float) -> None:
        """What the decode steps of a whole answer took, the prefills in between apart."""
        if now - self.decoded_at < LESSON_S:
            return
        prefills = self.prefill_steps - prompt.prefill_steps
        steps = output_tokens / prompt.sequences - 1 - prefills
        raw_s = self.decode_raw_s - prompt.decode_raw_s
        believed = self.tick - prompt.tick - prefills
        spent_s = now - prompt.began - (self.prefill_s - prompt.prefill_s)
        if steps >= 8 and believed > 0 and raw_s > 0 and spent_s > 0:
            self.decoded_at = now
            load.belief.step.observe(spent_s * believed / (steps * raw_s), 1.0 / (steps * steps))
            load.belief.settle()

    # The outlook

    def tpot_s(self, load: EndpointLoad, prompt_tokens: int, output_tokens: int, first_s: float) -> float:
        """Expected seconds per output token of a newcomer whose first token comes after `first_s`, in the mean over all
        that may arrive meanwhile; most requests meet less, a few much more. It adds to the batch (step_s)."""
        belief, share = load.belief, self.share if self.share < MOST_BUSY else MOST_BUSY
        step_s = self.decode_s + belief.sequence_s + belief.context_s * prompt_tokens
        load.step_s += load.sequence_s + load.context_s * prompt_tokens
        expected = step_s / (1.0 - share + self.pace * step_s)  # steps with prompts make tokens too
        if output_tokens > 0:  # those who come while it waits are computed while it decodes
            expected += BEHIND * share * first_s / output_tokens
        return expected

    def _touch(self, load: EndpointLoad, now: float) -> None:
        """Something changed. When prompts are computed is told at once; the rest of the outlook may be a little old."""
        if now - self.fresh_at >= STALE_S or self.queue or load.others.shares:
            self.refresh(load, now)
            return
        self.stale = True
        load.ready_at = self.ends if self.busy else self.began
        load.due_at = load.ready_at if self.finishing else inf

    def refresh(self, load: EndpointLoad, now: float) -> None:
        """Say in plain floats what a newcomer would meet (EndpointLoad's docstring)."""
        self.fresh_at, self.stale = now, False
        belief = load.belief
        others = load.others
        batch = self.batch + load.strangers + others.decoding
        context = self.starts + self.batch * self.tick + others.decode_tokens
        decode = belief.context_s * context + belief.sequence_s * batch
        flops, floor = belief.flop_s * batch, belief.floor_s
        over = decode + flops + belief.layers_s
        self.decode_s = step_s = (floor if floor > flops else flops) + belief.base_s + decode
        self.raw_step_s = step_s / belief.step.factor
        room = belief.room - batch
        per_token_s = belief.token_s
        load.token_s = token_s = per_token_s + over / (room if room > 1 else 1)
        load.pair_s = pair_s = belief.pair_s
        self.idle_s = idle_s = belief.request_s + (0.5 * step_s if batch else 0.0)
        load.fixed_s = idle_s + over
        base = self.ends if self.busy else self.began
        if others.prefill_tokens:  # computed between ours
            base = max(base, now) + others.prefill_tokens * token_s
        load.ready_at = base + self.queued_tokens * token_s + self.queued_pairs * pair_s
        self.over_s = over
        if self.finishing:
            load.due_at = base
        elif self.queue:
            head = self.queue[0]
            head_s = head.left * (token_s + (head.at + 0.5 * head.left) * pair_s)
            load.due_at = (base if base > head.enters else head.enters) + head_s + over
        else:
            load.due_at = inf
        if now - self.rate_at > FRESH_S:
            self._average(now)
        busy = self.rate * per_token_s
        stretch = 1.0 / (1.0 - (busy if busy < MOST_BUSY else MOST_BUSY))
        load.sequence_s = stretch * belief.sequence_s
        load.context_s = stretch * belief.context_s
        load.step_s = step_s * stretch
        if load.kv_tokens is not None:
            self._room(load, load.kv_tokens)

    def _average(self, now: float) -> None:
        """Prompt tokens computed per second; which share of the time steps with prompts take, how many a second."""
        passed = now - self.rate_at
        kept = exp(-passed / RATE_S)
        self.rate = self.rate * kept + self.planned * (1.0 - kept) / passed
        self.rate_at, self.planned = now, 0
        if self.born < now:
            gain = min(1.0, passed / min(SHARE_S, now - self.born))
            self.share += gain * ((self.prefill_s - self.seen_s) / passed - self.share)
            self.pace += gain * ((self.prefill_steps - self.seen_steps) / passed - self.pace)
        else:
            self.born = now
        self.seen_s, self.seen_steps = self.prefill_s, self.prefill_steps

    def _room(self, load: EndpointLoad, kv_tokens: float) -> None:
        """KV that is free when all who are queued have theirs, and how fast it comes back: answers end one by one."""
        waiting = load.others.prefill_tokens
        for prompt in self.queue:
            if not prompt.locked:
                waiting += prompt.prompt_tokens
        context = self.starts + self.batch * self.tick + load.others.decode_tokens
        load.kv_free = kv_tokens - context - self.kv_prompts - waiting
        # While prompts wait for KV nothing comes between decode steps: these are not stretched.
        load.kv_s = load.expected_tokens * self.decode_s / (load.in_flight * context) if context > 0 else 0.0
