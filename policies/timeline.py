"""What one endpoint's engine is believed to be doing: the events that the ledger tells of, and what each of them moves.

The engine on paper is paper.py's, what is learnt lessons.py's, what a newcomer would meet outlook.py's. Not here: step
times (latency.py), what is booked for whom (ledger.py).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from policies import lessons, outlook
from policies.averages import Arrivals
from policies.lengths import Lately
from policies.paper import Paper

if TYPE_CHECKING:
    from policies.engine_load import EngineLoad
    from policies.queued_prompt import Prompt

KV_GAIN, LEAST_KV = 0.1, 0.05  # weight of one scrape, and the share of KV that must be held for it to tell anything
STALE_S = 0.002
"""How old what a newcomer would meet may be while nothing is queued."""


class Timeline(Paper):
    """One engine on paper, kept up to date. One writer: the ledger, through the methods here.

    arrivals, lengths  what prompts have been sent there lately, and how long answers turned out to be
    """

    __slots__ = ("arrivals", "lengths")

    def __init__(self, now: float = 0.0) -> None:
        super().__init__(now)
        self.arrivals, self.lengths = Arrivals(now), Lately()

    def arrive(self, load: EngineLoad, prompt: Prompt, now: float) -> None:
        """A prompt is on its way to the engine. What is ahead of the next one grows by its work."""
        left, at = prompt.left, prompt.at
        pairs = left * (at + 0.5 * left)
        self.arrivals.came(left, now)
        self.queue.append(prompt)
        self.queued_tokens += left
        self.queued_pairs += pairs
        load.kv_free -= prompt.prompt_tokens
        ready_at = load.ready_at
        if ready_at < now:
            ready_at = now + self.idle_s
        load.ready_at = ready_at + left * load.token_s + pairs * load.pair_s
        if load.due_at == inf:
            load.due_at = load.ready_at + self.over_s

    def expect(self, load: EngineLoad, prompt: Prompt) -> None:
        """A prompt is computed elsewhere and handed over: nothing is queued, and its KV needs room when it comes. Until
        then it keeps nobody from beginning; the outlook reckons with it at once."""
        prompt.left, prompt.planned, prompt.coming = 0, True, True
        self.kv_coming += prompt.prompt_tokens
        load.kv_free -= prompt.prompt_tokens

    def handed(self, load: EngineLoad, prompt: Prompt, now: float) -> None:
        """One that was expected decodes from now on."""
        self.advance(load, now)
        self.start(prompt, now)
        self._touch(load, now)

    def answered(self, load: EngineLoad, prompt: Prompt, now: float) -> None:
        """A prompt's first token came: the step that completed it ended now."""
        if not prompt.planned and self.together(now):  # of the step that has ended: nothing was planned since
            self.remove(prompt)
            prompt.planned = True
        elif not self.busy and len(self.queue) == 1 and not prompt.planned and self._taught(now):
            self.skip(prompt, now)
        else:
            self.advance(load, now)
            if not prompt.planned:
                self.hurry(load, prompt, now)
        if prompt in self.finishing:
            self.close(now)
            self.told_at = now
        self.start(prompt, now)
        self._touch(load, now)

    def _taught(self, now: float) -> bool:
        return now - self.span.taught_at < lessons.LESSON_S

    def leave(self, load: EngineLoad, prompt: Prompt, now: float, output_tokens: int | None) -> None:
        """A prompt is over, computed or not; `output_tokens` when the answer is whole and somebody told its length.

        The timeline was advanced to this moment before.
        """
        if output_tokens is not None:
            self.lengths.ended(output_tokens / prompt.sequences, prompt.output_tokens)
        if prompt.decoding or prompt.locked:
            self.prefixes.release(prompt.had)
        if prompt.decoding:
            if output_tokens is not None and prompt.told:
                self._learn_decode_steps(load, prompt, output_tokens, now)
            self.batch -= prompt.sequences
            self.starts -= prompt.sequences * (prompt.prompt_tokens - prompt.tick)
            if not self.batch:
                self.starts = 0.0
            if not self.busy:
                self.began = now
        else:
            self.remove(prompt)
            if prompt in self.finishing:
                self.finishing.remove(prompt)
            if prompt.locked:
                self.kv_prompts -= prompt.prompt_tokens
            elif prompt.coming:
                self.kv_coming -= prompt.prompt_tokens
        self._touch(load, now)

    def scraped(self, load: EngineLoad, kv_usage: float | None, now: float) -> None:
        """The engine told of itself; `kv_usage` is the share of its KV that is held, None where it did not say."""
        self.advance(load, now)
        if kv_usage is not None:
            self._learn_kv_sharing(load, kv_usage)
        self.refresh(load, now)

    def _learn_decode_steps(self, load: EngineLoad, prompt: Prompt, output_tokens: int, now: float) -> None:
        """What the decode steps of a whole answer took, the prefills in between apart."""
        span = self.span
        if now - span.decoded_at < lessons.LESSON_S:
            return
        prefills = self.prefill_steps - prompt.prefill_steps
        steps = output_tokens / prompt.sequences - 1 - prefills
        base_s = self.decode_base_s - prompt.decode_base_s
        context_s = self.decode_context_s - prompt.decode_context_s
        believed = self.tick - prompt.tick - prefills
        spent_s = now - prompt.began - (self.prefill_s - prompt.prefill_s)
        # Steps that were none have been taken back, at what they would take by then.
        if steps >= 8 and believed > 0 and base_s > 0 and context_s >= 0 and spent_s > 0:
            span.decoded_at = now
            load.belief.decoded(spent_s * believed / steps, base_s, context_s, 1.0 / (steps * steps))

    def _learn_kv_sharing(self, load: EngineLoad, kv_usage: float) -> None:
        """How much KV the engine holds of what is held on paper, where every sequence has a copy of its prompt.

        A scrape some seconds old tells nearly the same: prefixes are shared as much before and after. Where nothing is
        scraped no engine's size is known either, and no wait for KV is expected. KV that another endpoint still computes is
        not there yet, neither here nor there.
        """
        if load.kv_tokens is None:
            return
        held = self.starts + self.batch * self.tick + sum(prompt.prompt_tokens for prompt in self.finishing)
        if self.queue and self.queue[0].locked:
            held += self.queue[0].at  # blocks are taken chunk by chunk
        prefixes = self.prefixes
        prefixes.distinct = max(0.0, kv_usage * load.kv_tokens - (held - prefixes.tokens))
        if held > LEAST_KV * load.kv_tokens:
            self.kv_ratio += KV_GAIN * (max(LEAST_KV, min(1.0, kv_usage * load.kv_tokens / held)) - self.kv_ratio)

    def refresh(self, load: EngineLoad, now: float) -> None:
        """Say anew what a newcomer would meet."""
        outlook.refresh(self, load, now)

    def _touch(self, load: EngineLoad, now: float) -> None:
        """Something changed. When prompts are computed is told at once; the rest of the outlook may be a little old."""
        if now - self.fresh_at >= STALE_S or self.queue or load.others.shares:
            self.refresh(load, now)
            return
        self.stale = True
        load.ready_at = self.ends if self.busy else self.began
        load.due_at = load.ready_at if self.finishing else inf
