"""What first tokens, whole answers and scrapes teach about an endpoint: its speed, its API's cost, its KV.

Lives here: which stretch of steps a first token judges (Span), and what of the belief it corrects. Not here: the steps
themselves (paper.py), how one observation moves a factor (latency.py).
"""

from __future__ import annotations

from math import inf
from operator import mul
from typing import TYPE_CHECKING

from policies.step_time import FILLS

if TYPE_CHECKING:
    from policies.engine_load import EngineLoad

SHORT_S = 0.1  # first tokens within so much of an idle queue tell of what every step, or the API, costs
LEARN_S = 1.0  # first tokens in a row are judged together until they span so much
LESSON_S = 0.1  # between two lessons of a kind: where requests come by the hundred, each tells next to nothing


class Span:
    """The steps in a row since somebody knew the clock, and how much work they were by the prior.

    anchor        when they began: at a first token; or, where `entered` is set, at the end of the decode step that a
                  prompt met when it entered then, `wait_s` later in the mean
    fills         seconds of the prompts in them by the prior, by how full the steps were (step_time.FILLS)
    pairs_s, decode_s, steps  of these, what attention takes (Belief.area_s); what was decoded in between, as believed;
                  and how many steps they were
    tight         a prompt had to wait for KV; foreign  the most prompt tokens that other gateways had waiting
    taught_at, decoded_at  when first tokens, and whole answers, last taught something
    """

    __slots__ = (
        *("anchor", "decode_s", "decoded_at", "entered", "fills", "foreign", "pairs_s", "steps", "taught_at", "tight"),
        "wait_s",
    )

    def __init__(self) -> None:
        self.taught_at = self.decoded_at = -inf
        self.begin(0.0)

    def begin(self, at: float, wait_s: float = 0.0, entered: float | None = None) -> None:
        """From here on it is measured."""
        self.anchor, self.wait_s, self.entered, self.tight = at, wait_s, entered, False
        self.fills = [0.0] * (FILLS + 1)
        self.pairs_s = self.decode_s = 0.0
        self.steps = self.foreign = 0

    def add(
        self, prefill_s: float, filling: tuple[int, float], pairs_s: float, decode_s: float, foreign_tokens: int
    ) -> None:
        """One more step; `filling` is how full its prompt tokens made it (Shape.filling)."""
        part, beyond = filling
        self.fills[part] += prefill_s * (1.0 - beyond)
        self.fills[part + 1] += prefill_s * beyond
        self.pairs_s += pairs_s
        self.decode_s += decode_s
        self.steps += 1
        if foreign_tokens > self.foreign:
            self.foreign = foreign_tokens


def learn(span: Span, load: EngineLoad, ends: float, now: float) -> None:
    """How long the steps of the span really took, if no wait for KV was among them.

    Which of two steps completed a prompt is known to a part of a step's length; what other gateways had waiting was
    computed in between, and may be all of it or none: the more, the less is learnt.
    """
    belief = load.belief
    spent = now - span.anchor
    if spent > 0 and span.steps and not span.tight and now - span.taught_at >= LESSON_S:
        span.taught_at = now
        if spent >= SHORT_S or span.entered is None:
            _steps(span, load, spent)
        # Where others decode, it decides which step a prompt is in. How long a short step took is known best.
        if span.entered is not None and span.steps == 1 and (spent < SHORT_S or span.wait_s > 0.0):
            seen_s = belief.request_s + span.anchor + now - ends - span.entered - span.wait_s
            belief.reached(seen_s, min(1.0, (SHORT_S / spent) ** 2))
    span.begin(now)


def _steps(span: Span, load: EngineLoad, spent: float) -> None:
    """The size of a short step tells of what every step costs, of a long one, of its tokens."""
    belief = load.belief
    foreign_s = span.foreign * belief.token_s
    rest = max(0.01 * spent, spent - span.decode_s - foreign_s)
    off = 0.6 * span.wait_s + 0.1 * spent / span.steps + foreign_s
    layers_s, prompts_s = span.steps * belief.layers_s, sum(map(mul, span.fills, belief.paces))
    if spent < SHORT_S:
        belief.layered(max(0.1 * layers_s, rest - prompts_s) / layers_s, (off / layers_s) ** 2)
    else:
        ratio = max(0.1 * prompts_s, rest - layers_s) / prompts_s
        belief.prompted(ratio, span.fills, span.pairs_s, (off / prompts_s) ** 2)
