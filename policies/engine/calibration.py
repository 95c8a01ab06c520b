"""Learns how fast an endpoint is from the time between two observed first tokens.

Contains StepSpan, the measured sequence of engine steps, and `learn`, which chooses the correction
factor to update. engine_model.py predicts the steps; step_time.py updates the factors.
"""

from __future__ import annotations

from math import inf
from operator import mul
from typing import TYPE_CHECKING

from policies.engine.step_time import FILLS

if TYPE_CHECKING:
    from policies.engine.engine_load import EngineLoad

SHORT_S = 0.1  # spans below this measure the fixed cost of a step, or API latency
LEARN_S = 1.0  # consecutive first tokens are evaluated together up to this length
LESSON_S = 0.1  # least time between two updates of a kind, because at high rates each adds little


class StepSpan:
    """The consecutive engine steps since the last observed moment, with their predicted work.

    anchor      when the steps began: at a first token or, if `entered` is set, at the end of the
                decode step during which a prompt entered. In the second case `wait_s` is the mean
                wait for that end
    fills       predicted seconds of prefill, by how full the steps were (step_time.FILLS)
    pairs_s     the part of these seconds that is attention (SpeedBelief.area_s)
    decode_s    predicted seconds of decoding between the prefill steps
    steps       number of steps
    tight       whether a prompt had to wait for KV memory
    foreign     the largest number of prompt tokens of other gateways that were queued in the
                meantime
    taught_at   time of the last correction from first tokens
    decoded_at  time of the last correction from whole answers
    """

    __slots__ = (
        *(
            "anchor",
            "decode_s",
            "decoded_at",
            "entered",
            "fills",
            "foreign",
            "pairs_s",
            "steps",
            "taught_at",
            "tight",
        ),
        "wait_s",
    )

    def __init__(self) -> None:
        self.taught_at = self.decoded_at = -inf
        self.begin(0.0)

    def begin(self, at: float, wait_s: float = 0.0, entered: float | None = None) -> None:
        """Begin to measure engine steps at the time `at`, with zero steps counted."""
        self.anchor, self.wait_s, self.entered, self.tight = at, wait_s, entered, False
        self.fills = [0.0] * (FILLS + 1)
        self.pairs_s = self.decode_s = 0.0
        self.steps = self.foreign = 0

    def add(
        self,
        prefill_s: float,
        filling: tuple[int, float],
        pairs_s: float,
        decode_s: float,
        foreign_tokens: int,
    ) -> None:
        """Add one predicted engine step to the span. All times are in seconds.

        `filling` says how full the step is with prompt tokens (StepCosts.filling). `foreign_tokens`
        is the number of prompt tokens of other gateways that were queued during the step.
        """
        part, beyond = filling
        self.fills[part] += prefill_s * (1.0 - beyond)
        self.fills[part + 1] += prefill_s * beyond
        self.pairs_s += pairs_s
        self.decode_s += decode_s
        self.steps += 1
        if foreign_tokens > self.foreign:
            self.foreign = foreign_tokens


def learn(span: StepSpan, load: EngineLoad, ends: float, now: float) -> None:
    """Correct an engine's learned speed by the real duration of its steps, unless a prompt waited
    for KV.

    `ends` is the predicted end of the last step. Within that step, the time of the first token is
    known only to a fraction of the step's length. Prompts of other gateways may have been computed
    in the same time, so the correction is smaller the more of them there are.
    """
    belief = load.belief
    spent_s = now - span.anchor
    if spent_s > 0 and span.steps and not span.tight and now - span.taught_at >= LESSON_S:
        span.taught_at = now
        if spent_s >= SHORT_S or span.entered is None:
            _steps(span, load, spent_s)
        # If other sequences decode, the latency decides which step a prompt enters. It is measured
        # best by short steps.
        if (
            span.entered is not None
            and span.steps == 1
            and (spent_s < SHORT_S or span.wait_s > 0.0)
        ):
            seen_s = belief.request_s + span.anchor + now - ends - span.entered - span.wait_s
            belief.observe_api_latency(seen_s, min(1.0, (SHORT_S / spent_s) ** 2))
    span.begin(now)


def _steps(span: StepSpan, load: EngineLoad, spent_s: float) -> None:
    belief = load.belief
    foreign_s = span.foreign * belief.token_s
    prompt_s = max(0.01 * spent_s, spent_s - span.decode_s - foreign_s)
    error_s = 0.6 * span.wait_s + 0.1 * spent_s / span.steps + foreign_s
    layers_s, prompts_s = span.steps * belief.layers_s, sum(map(mul, span.fills, belief.paces))
    if spent_s < SHORT_S:
        belief.observe_step_overhead(
            max(0.1 * layers_s, prompt_s - prompts_s) / layers_s, (error_s / layers_s) ** 2
        )
    else:
        ratio = max(0.1 * prompts_s, prompt_s - layers_s) / prompts_s
        belief.observe_prefill(ratio, span.fills, span.pairs_s, (error_s / prompts_s) ** 2)
