"""Corrects the learned prefill speed of an engine by the time between two observed first tokens.

StepSpan sums up the engine steps in this time, as scheduler_model.py predicts them. `learn`
compares the prediction with the real time, and chooses the correction factor to update
(step_time.py).

If a prompt had to wait for KV memory during this time, the time is less informative, because the
length of the wait is not known exactly. A wait only makes the time longer. So of several spans with
a wait, a short one is used, with less weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from policies.engine.step_time import FILLS

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad
    from policies.engine.step_time import SpeedBelief

SHORT_S = 0.1  # spans below this measure the fixed cost of a step, or API latency
LEARN_S = 1.0  # maximum seconds of consecutive spans that are evaluated together
LESSON_S = 0.1  # minimum seconds between two updates of a kind; more would add little

# From this many spans with a wait for KV, one is used: the second shortest relative to its work,
# because the shortest may be an outlier. It still contains some waiting, which adds to the variance
# of its logarithm.
DELAYED_SPANS = 8
DELAYED_RANK = 1
DELAYED_VAR = 0.1


class PrefillLesson(NamedTuple):
    """What the time between observed first tokens has shown about an engine's prefill speed.

    ratio      real time of the prefill work divided by its predicted time
    fills      predicted seconds of that work, by how full the engine's steps were
    pairs_s    the part of these seconds that is attention
    noise_var  variance of the ratio's logarithm
    """

    ratio: float
    fills: Sequence[float]
    pairs_s: float
    noise_var: float


class StepSpan:
    """The predicted work of an engine's steps since its real state was last observed.

    A first token shows when the step that computed its prompt ended. The real time between two
    first tokens is compared with the work that was predicted for the steps of that time. This
    corrects the engine's learned speed.

    anchor           when the steps began: at a first token, or after a prompt entered an engine
                     that computed no other prompt
    wait_s           mean seconds that this prompt waits for the end of a decode step, or 0
    entered          when that prompt entered; None: unknown, or the steps began at a first token
    fills            predicted seconds of prefill, by how full the steps were (step_time.FILLS)
    pairs_s          the part of these seconds that is attention (SpeedBelief.area_s)
    decode_s         predicted seconds of decoding between the prefill steps
    last             the last step, as the first four arguments of `add`
    steps            number of steps
    waits_for_kv     whether a prompt had to wait for KV memory
    delayed_lessons  what earlier spans with such a wait have shown (PrefillLesson), since the last
                     correction from first tokens
    peer_tokens      the largest number of prompt tokens of other gateways that were queued
                     meanwhile
    corrected_at     time of the last correction from first tokens
    decoded_at       time of the last correction from whole answers
    """

    __slots__ = (
        *(
            "anchor",
            "decode_s",
            "decoded_at",
            "delayed_lessons",
            "entered",
            "fills",
            "last",
            "peer_tokens",
            "pairs_s",
            "steps",
            "corrected_at",
            "waits_for_kv",
        ),
        "wait_s",
    )

    def __init__(self) -> None:
        self.corrected_at = self.decoded_at = -inf
        self.delayed_lessons: list[PrefillLesson] = []
        self.begin(0.0)

    def begin(self, at: float, wait_s: float = 0.0, entered: float | None = None) -> None:
        """Begin a new, empty span: a period whose real and predicted time will be compared.

        at       when its first step begins
        wait_s   expected seconds that the first prompt waited for the end of a running decode step
        entered  when that prompt reached the engine; None: unknown, or the span begins at a first
                 token
        """
        self.anchor, self.wait_s, self.entered, self.waits_for_kv = at, wait_s, entered, False
        self.fills = [0.0] * (FILLS + 1)
        self.pairs_s = self.decode_s = 0.0
        self.steps = self.peer_tokens = 0
        self.last = 0.0, (0, 0.0), 0.0, 0.0

    def add(
        self,
        prefill_s: float,
        filling: tuple[int, float],
        pairs_s: float,
        decode_s: float,
        peer_tokens: int,
    ) -> None:
        """Add one predicted engine step to the span.

        prefill_s    seconds of prefill in the step
        filling      how full the step is with prompt tokens (StepCosts.filling)
        pairs_s      the part of prefill_s that is attention
        decode_s     seconds that decoding sequences add to the step
        peer_tokens  number of prompt tokens of other gateways that were queued during the step
        """
        self.last = prefill_s, filling, pairs_s, decode_s
        part, beyond = filling
        self.fills[part] += prefill_s * (1.0 - beyond)
        self.fills[part + 1] += prefill_s * beyond
        self.pairs_s += pairs_s
        self.decode_s += decode_s
        self.steps += 1
        if peer_tokens > self.peer_tokens:
            self.peer_tokens = peer_tokens

    def resize_last(self, prefill_s: float, filling: tuple[int, float], share: float) -> None:
        """Correct the last step: it computed `share` times as many prompt tokens as predicted.

        prefill_s  seconds of prefill that the step has then
        filling    how full it is then with prompt tokens (StepCosts.filling)
        """
        before_s, (part, beyond), pairs_s, decode_s = self.last
        self.fills[part] -= before_s * (1.0 - beyond)
        self.fills[part + 1] -= before_s * beyond
        self.pairs_s -= pairs_s
        self.decode_s -= decode_s
        self.steps -= 1
        self.add(prefill_s, filling, share * pairs_s, decode_s, 0)

    def prefill_s(self, belief: SpeedBelief) -> float:
        """Return the seconds of prefill that these steps should take at the learned speed."""
        return float(sum(map(mul, self.fills, belief.paces)))


def is_due(span: StepSpan, load: EngineLoad, now: float) -> bool:
    """Return whether the learned speed should be corrected now, by the duration of a span's steps.

    The duration must be more certain than the learned speed, or LEARN_S seconds must have passed. A
    short first step is used alone, because it shows the API latency best.

    span  the engine's steps since the last correction
    load  the engine's load, with its learned speed
    now   time of an observed first token
    """
    spent_s = now - span.anchor
    if spent_s > LEARN_S:
        return True
    if span.waits_for_kv or not span.steps:
        return False
    if spent_s < SHORT_S:
        return span.entered is not None
    error_s = _timing_error_s(span, load, spent_s)
    return error_s * error_s < load.belief.prompts.var * spent_s * spent_s


def learn(span: StepSpan, load: EngineLoad, ends: float, now: float) -> None:
    """Correct an engine's learned speed by the real duration of its steps, and begin the next span.

    span  the steps since the last observation, with their predicted work
    load  the engine's load, which contains the learned speed
    ends  predicted end of the last step. The first token came within that step, but it is not known
          exactly when
    now   time of the observed first token

    Several spans in which a prompt waited for KV memory give one correction, unless a span without
    a wait comes first. Prompts of other gateways may have been computed in the same time. The more
    there are, the smaller is the correction.
    """
    belief = load.belief
    spent_s = now - span.anchor
    if spent_s > 0 and span.steps and now - span.corrected_at >= LESSON_S:
        if span.waits_for_kv:
            _learn_delayed(span, load, spent_s)
            span.begin(now)
            return
        span.corrected_at = now
        span.delayed_lessons.clear()
        most_s = spent_s
        if span.entered is not None:  # the prompt cannot have entered before it was sent
            most_s = now - span.entered + belief.request_s
        is_faster = span.prefill_s(belief) > most_s
        if is_faster and spent_s < SHORT_S:
            belief.observe_prefill(*_prefill_lesson(span, load, most_s))
        elif spent_s >= SHORT_S or span.entered is None:
            _steps(span, load, spent_s)
        # If other sequences decode, the latency decides which step a prompt enters. It is measured
        # best by short steps.
        if (
            span.entered is not None
            and span.steps == 1
            and not is_faster
            and (spent_s < SHORT_S or span.wait_s > 0.0)
        ):
            seen_s = belief.request_s + span.anchor + now - ends - span.entered - span.wait_s
            belief.observe_api_latency(seen_s, min(1.0, (SHORT_S / spent_s) ** 2))
    span.begin(now)


def _learn_delayed(span: StepSpan, load: EngineLoad, spent_s: float) -> None:
    # Correct the speed of prefill by one of the last spans in which a prompt waited for KV.
    if spent_s < SHORT_S:
        return
    lessons = span.delayed_lessons
    lessons.append(_prefill_lesson(span, load, spent_s))
    if len(lessons) == DELAYED_SPANS:
        lessons.sort()
        ratio, fills, pairs_s, noise_var = lessons[DELAYED_RANK]
        load.belief.observe_prefill(ratio, fills, pairs_s, noise_var + DELAYED_VAR)
        lessons.clear()


def _steps(span: StepSpan, load: EngineLoad, spent_s: float) -> None:
    if spent_s >= SHORT_S:
        load.belief.observe_prefill(*_prefill_lesson(span, load, spent_s))
        return
    belief = load.belief
    prompt_s, error_s, prompts_s = _prompt_times(span, load, spent_s)
    layers_s = span.steps * belief.layers_s
    belief.observe_step_overhead(
        max(0.1 * layers_s, prompt_s - prompts_s) / layers_s, (error_s / layers_s) ** 2
    )


def _prefill_lesson(span: StepSpan, load: EngineLoad, spent_s: float) -> PrefillLesson:
    prompt_s, error_s, prompts_s = _prompt_times(span, load, spent_s)
    layers_s = span.steps * load.belief.layers_s
    ratio = max(0.1 * prompts_s, prompt_s - layers_s) / prompts_s
    return PrefillLesson(ratio, span.fills, span.pairs_s, (error_s / prompts_s) ** 2)


def _prompt_times(span: StepSpan, load: EngineLoad, spent_s: float) -> tuple[float, float, float]:
    # Return the seconds that prompts took, their error, and the seconds predicted for prefill.
    belief = load.belief
    peer_prefill_s = span.peer_tokens * belief.token_s
    prompt_s = max(0.01 * spent_s, spent_s - span.decode_s - peer_prefill_s)
    error_s = _timing_error_s(span, load, spent_s)
    return prompt_s, error_s, span.prefill_s(belief)


def _timing_error_s(span: StepSpan, load: EngineLoad, spent_s: float) -> float:
    peer_prefill_s = span.peer_tokens * load.belief.token_s
    return float(0.6 * span.wait_s + 0.1 * spent_s / span.steps + peer_prefill_s)
