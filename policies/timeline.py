"""What one endpoint's engine is believed to be doing: the events that the ledger tells of, and what each of them moves.

The engine on paper is paper.py's, what is learnt lessons.py's, what a newcomer would meet outlook.py's. Not here: step
times (latency.py), what is booked for whom (ledger.py).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from policies import lessons, outlook
from policies.foresight import Arrivals
from policies.lengths import Lately
from policies.paper import Paper, Prompt

if TYPE_CHECKING:
    from policies.model import EndpointLoad

STALE_S = 0.002
"""How old what a newcomer would meet may be while nothing is queued."""


class Timeline(Paper):
    """One engine on paper, kept up to date. One writer: the ledger, through the methods here.

    lately           what it has been doing lately, in averages
    arrivals, lengths  what prompts have been sent there lately, and how long answers turned out to be
    idle_s, over_s   seconds from a pick to the first step of an idle engine; what a step with prompts pays besides them
    fresh_at, stale  when the outlook was refreshed, and whether something was left out of it since
    """

    __slots__ = ("arrivals", "fresh_at", "idle_s", "lately", "lengths", "over_s", "stale")

    def __init__(self, now: float = 0.0) -> None:
        super().__init__(now)
        self.lately = outlook.Averages(now)
        self.arrivals, self.lengths = Arrivals(now), Lately()
        self.fresh_at, self.stale = -inf, False
        self.idle_s = self.over_s = 0.0

    def arrive(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
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

    def expect(self, load: EndpointLoad, prompt: Prompt) -> None:
        """A prompt is computed elsewhere and handed over: nothing is queued, and its KV needs room when it comes. Until
        then it keeps nobody from beginning; the outlook reckons with it at once."""
        prompt.left, prompt.planned, prompt.coming = 0, True, True
        self.kv_coming += prompt.prompt_tokens
        load.kv_free -= prompt.prompt_tokens

    def handed(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
        """One that was expected decodes from now on."""
        self.advance(load, now)
        self.start(prompt, now)
        self._touch(load, now)

    def answered(self, load: EndpointLoad, prompt: Prompt, now: float) -> None:
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

    def leave(self, load: EndpointLoad, prompt: Prompt, now: float, output_tokens: int | None) -> None:
        """A prompt is over, computed or not; `output_tokens` when the answer is whole and somebody told its length.

        The timeline was advanced to this moment before.
        """
        if output_tokens is not None:
            self.lengths.ended(output_tokens / prompt.sequences, prompt.output_tokens)
        if prompt.decoding or prompt.locked:
            self.prefixes.release(prompt.had)
        if prompt.decoding:
            if output_tokens is not None and prompt.told:
                lessons.decoded(self, load, prompt, output_tokens, now)
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

    def scraped(self, load: EndpointLoad, kv_usage: float | None, now: float) -> None:
        """The engine told of itself; `kv_usage` is the share of its KV that is held, None where it did not say."""
        self.advance(load, now)
        if kv_usage is not None:
            lessons.scraped(self, load, kv_usage)
        self.refresh(load, now)

    def refresh(self, load: EndpointLoad, now: float) -> None:
        """Say anew what a newcomer would meet."""
        outlook.refresh(self, load, now)

    def _touch(self, load: EndpointLoad, now: float) -> None:
        """Something changed. When prompts are computed is told at once; the rest of the outlook may be a little old."""
        if now - self.fresh_at >= STALE_S or self.queue or load.others.shares:
            self.refresh(load, now)
            return
        self.stale = True
        load.ready_at = self.ends if self.busy else self.began
        load.due_at = load.ready_at if self.finishing else inf
