"""When one prompt's first token will come: the engine on paper played on from now, step by step, up to that step.

Lives here: the play, on copies of a few numbers, and what is expected to arrive meanwhile. Not here: the engine on
paper (paper.py), what every newcomer is told in plain floats (outlook.py).
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING

from policies import latency

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policies.engine_load import EngineLoad
    from policies.queued_prompt import Prompt
    from policies.timeline import Timeline

MOST_STEPS = 64  # of an engine that are played: behind a longer queue the outlook tells enough, at no cost
UNSURE = 0.012  # of an engine's KV: a prompt that lacks less than is known of it is taken to have room
GOLDEN = 0.618034  # its multiples, less whole ones, are spread evenly between 0 and 1


class Piece:
    """What is left of one prompt, to be computed in the play. `needs`: KV that must be free before it begins."""

    __slots__ = ("at", "enters", "left", "needs", "prompt")

    def __init__(self, prompt: Prompt, enters: float, needs: float) -> None:
        self.prompt, self.enters, self.needs = prompt, enters, needs
        self.at, self.left = prompt.at, prompt.left


class Play:
    """One engine played on.

    clock, steps    when its next step begins, on the policy clock, and how many there were
    batch, context  sequences that decode, and their context; kv_free  KV tokens that nobody holds
    waited          prompts that had entered waited for KV
    ends            answers under way, the next to end last: step, KV and context it gives back, sequences; None until
                    somebody has to wait for KV, and all are taken to go on
    """

    __slots__ = ("batch", "clock", "context", "ends", "kv_free", "load", "queue", "steps", "timeline", "waited")

    def __init__(self, timeline: Timeline, load: EngineLoad, now: float) -> None:
        others = load.others
        self.timeline, self.load, self.queue = timeline, load, deque[Piece]()
        self.batch = timeline.batch + load.strangers + others.decoding
        self.context = timeline.starts + timeline.batch * timeline.tick + others.decode_tokens
        self.kv_free = timeline.kv_free(load) + UNSURE * (load.kv_tokens or 0)
        self.ends: list[tuple[float, float, float, int]] | None = None
        self.steps, self.waited = 0, False
        self.clock = timeline.began
        if timeline.busy:
            # What is late already was misjudged: expect it to take as long again.
            self.clock = timeline.ends if timeline.ends >= now else now + now - timeline.ends
            self._decode(timeline.finishing)

    def first_token(self) -> tuple[float, float]:
        """When the last prompt of the queue begins the step that completes it, and how long that takes: prompts that
        arrive meanwhile are computed with it."""
        now = self.queue[-1].enters - self.load.belief.request_s
        while True:
            tokens, pairs, done = self._plan()
            if not tokens:
                self._rest()
            elif self.queue:
                self.clock += self._step_s(tokens, pairs)
                self._pass(1)
                self._decode(done)
            else:
                room = self._room() - tokens
                if room > 0 and not self.waited:
                    more = min(room, self.timeline.arrivals.behind(self.clock - now))
                    tokens, pairs = tokens + more, pairs + 0.5 * more * more
                return self.clock, self._step_s(tokens, pairs)

    def _room(self) -> int:
        """Prompt tokens that one step takes."""
        return max(1, self.load.belief.room - self.batch)

    def _plan(self) -> tuple[float, float, list[Prompt]]:
        """The next step as the engine plans it: prompt tokens, their query-key pairs, and prompts that it completes."""
        queue, room, clock = self.queue, self._room(), self.clock
        done: list[Prompt] = []
        tokens, pairs = 0, 0.0
        while queue and room > tokens:
            head = queue[0]
            if head.enters > clock or (head.needs > self.kv_free and (self.batch or tokens)):
                break
            self.kv_free, head.needs = self.kv_free - head.needs, 0.0
            take = min(head.left, room - tokens)
            pairs += take * (head.at + 0.5 * take)
            head.at, head.left, tokens = head.at + take, head.left - take, tokens + take
            if not head.left:
                done.append(queue.popleft().prompt)
        return tokens, pairs, done

    def _step_s(self, tokens: float, pairs: float) -> float:
        """Seconds that a step with prompts takes."""
        belief = self.load.belief
        prompts_s, beside_s = belief.prompts_s(tokens, pairs), belief.beside_s(self.batch, self.context)
        return prompts_s * belief.pace(tokens) + beside_s + belief.layers_s

    def _decode_s(self) -> float:
        """Seconds that a step without prompts takes."""
        belief = self.load.belief
        compute_s = max(belief.floor_s, belief.flop_s * self.batch)
        return compute_s + belief.base_s + belief.context_s * self.context + belief.sequence_s * self.batch

    def _rest(self) -> None:
        """No prompt can begin: on to when the next one enters, or has its KV."""
        head = self.queue[0]
        if head.enters <= self.clock:
            self._free(head.needs)
            head.needs = min(head.needs, self.kv_free)  # more than that will not be free before it
            self.waited = True
        elif self.batch:
            self._run(head.enters - self.clock)
        else:
            self.clock = head.enters

    def _run(self, seconds: float) -> None:
        """Whole decode steps for at least so long."""
        step_s = self._decode_s()
        steps = max(1, ceil(seconds / step_s - 1e-9))
        self.clock += steps * step_s
        self._pass(steps)

    def _free(self, needs: float) -> None:
        """Decode until answers that end have freed so much KV, or all have ended."""
        if self.ends is None:
            self.ends = self._ends()
        while self.kv_free < needs and self.ends:
            steps = max(1, ceil(self.ends[-1][0] - self.steps))
            self.clock += steps * self._decode_s()
            self._pass(steps)

    def _pass(self, steps: int) -> None:
        """So many steps are over: every sequence has grown, and some answers have ended."""
        self.steps += steps
        self.context += steps * self.batch
        self.kv_free -= steps * self.batch
        ends = self.ends
        while ends and ends[-1][0] <= self.steps:
            _, kv, context, sequences = ends.pop()
            self.kv_free += kv
            self.context -= context
            self.batch -= sequences

    def _decode(self, prompts: Iterable[Prompt]) -> None:
        """These are past their first tokens."""
        for prompt in prompts:
            self.batch += prompt.sequences
            self.context += prompt.sequences * prompt.prompt_tokens

    def _ends(self) -> list[tuple[float, float, float, int]]:
        """When the answers under way will have ended, were they as those before: each takes another place among these,
        so that as many end early and late as did then."""
        timeline, ends, place = self.timeline, [], 0.0
        alone = timeline.prefixes.alone()
        for each in self.load.entries:
            if each.decoding:
                place = (place + GOLDEN) % 1.0
                made = timeline.tick - each.tick
                left = timeline.lengths.left(made, each.output_tokens, place)
                context = each.sequences * (each.prompt_tokens + made + left)
                kv = context - (1.0 - alone) * each.had
                ends.append((self.steps + left, kv, context, each.sequences))
        ends.sort(reverse=True)
        return ends


def ttft_s(timeline: Timeline, load: EngineLoad, prompt: Prompt, now: float) -> float:
    """Expected seconds until the first token of a prompt that is sent now and not in the queue yet."""
    timeline.advance(load, now)
    if max(len(timeline.queue), timeline.queued_tokens / max(1, load.belief.room - timeline.batch)) > MOST_STEPS:
        return latency.ttft_s(load, prompt.left, prompt.at, now)
    play = Play(timeline, load, now)
    for each in timeline.queue:
        play.queue.append(Piece(each, each.enters, 0.0 if each.locked else timeline.needs(each)))
    play.queue.append(Piece(prompt, now + load.belief.request_s, timeline.needs(prompt)))
    begins, spent_s = play.first_token()
    return begins + spent_s - now
