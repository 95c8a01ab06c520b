"""What first tokens, whole answers and scrapes teach about an endpoint: its speed, its API's cost, its KV.

Lives here: which stretch of steps a first token judges (Span), and what of the belief it corrects. Not here: the steps
themselves (paper.py), how one observation moves a factor (latency.py).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.latency import Belief
    from policies.model import EndpointLoad
    from policies.paper import Paper, Prompt

SHORT_S = 0.1  # first tokens within so much of an idle queue tell of what every step, or the API, costs
LEARN_S = 1.0  # first tokens in a row are judged together until they span so much
LESSON_S = 0.1  # between two lessons of a kind: where requests come by the hundred, each tells next to nothing
LEAST_PART = 0.1  # share of the prompts' time in steps that were not full, for these to learn anything
KV_GAIN, LEAST_KV = 0.1, 0.05  # weight of one scrape, and the share of KV that must be held for it to tell anything


class Span:
    """The steps in a row since somebody knew the clock, and how much work they were by the prior.

    anchor        when they began: at a first token; or, where `entered` is set, at the end of the decode step that a
                  prompt met when it entered then, `wait_s` later in the mean
    raw_*, steps  seconds by the prior of prompts, of these as far as steps were full (Shape.full), of their attention
                  (Belief.area_s), and of decoding within those steps, and how many they were
    tight         a prompt had to wait for KV; foreign  the most prompt tokens that other gateways had waiting
    taught_at, decoded_at  when first tokens, and whole answers, last taught something
    """

    __slots__ = (
        *("anchor", "decoded_at", "entered", "foreign", "raw_decode", "raw_full", "raw_pairs", "raw_prefill", "steps"),
        *("taught_at", "tight", "wait_s"),
    )

    def __init__(self) -> None:
        self.taught_at = self.decoded_at = -inf
        self.begin(0.0)

    def begin(self, at: float, wait_s: float = 0.0, entered: float | None = None) -> None:
        """From here on it is measured."""
        self.anchor, self.wait_s, self.entered, self.tight = at, wait_s, entered, False
        self.raw_prefill = self.raw_full = self.raw_pairs = self.raw_decode = 0.0
        self.steps = self.foreign = 0

    def add(self, prefill_s: float, full_s: float, pairs_s: float, decode_s: float, foreign_tokens: int) -> None:
        """One more step."""
        self.raw_prefill += prefill_s
        self.raw_full += full_s
        self.raw_pairs += pairs_s
        self.raw_decode += decode_s
        self.steps += 1
        if foreign_tokens > self.foreign:
            self.foreign = foreign_tokens


def learn(paper: Paper, load: EndpointLoad, now: float) -> None:
    """How long the steps of the span really took, if no wait for KV was among them.

    Which of two steps completed a prompt is known to a part of a step's length; what other gateways had waiting was
    computed in between, and may be all of it or none: the more, the less is learnt.
    """
    span, belief = paper.span, load.belief
    spent = now - span.anchor
    if spent > 0 and span.steps and not span.tight and now - span.taught_at >= LESSON_S:
        span.taught_at = now
        if spent >= SHORT_S or span.entered is None:
            _steps(span, load, spent)
        # Where others decode, it decides which step a prompt is in. How long a short step took is known best.
        if span.entered is not None and span.steps == 1 and (spent < SHORT_S or span.wait_s > 0.0):
            seen_s = belief.request_s + span.anchor + now - paper.ends - span.entered - span.wait_s
            belief.reached(seen_s, min(1.0, (SHORT_S / spent) ** 2))
    span.begin(now)


def _steps(span: Span, load: EndpointLoad, spent: float) -> None:
    """The size of a short step tells of what every step costs, of a long one, of its tokens."""
    belief = load.belief
    foreign_s = span.foreign * belief.token_s
    rest = max(0.01 * spent, spent - belief.step.factor * span.raw_decode - foreign_s)
    off = 0.6 * span.wait_s + 0.1 * spent / span.steps + foreign_s
    layers_s, prompts_s = span.steps * belief.layers_s, belief.prefill.factor * span.raw_prefill
    if spent < SHORT_S:
        seen = max(0.1 * layers_s, rest - prompts_s) / (span.steps * belief.shape.step_s)
        belief.layers.observe(seen, (off / layers_s) ** 2)
    else:
        seen, noise_var = max(0.1 * prompts_s, rest - layers_s) / span.raw_prefill, (off / prompts_s) ** 2
        _fullness(belief, seen, span.raw_full / span.raw_prefill, noise_var)
        _attention(belief, seen, span.raw_pairs / span.raw_prefill, noise_var)
    belief.settle()


def _attention(belief: Belief, seen: float, share: float, noise_var: float) -> None:
    """Prompts took `seen` times as long as by the prior, `share` of it for attention: the factors on all of it and on
    attention besides learn, each as far as the other is known. Long prompts are mostly attention, short ones hardly.

    An engine that has become slower is so in all it does: the first to open up to that is the factor on all.
    """
    prefill, pairs = belief.prefill, belief.pairs
    ratio, prefill_var = seen / prefill.factor, prefill.opened(seen)
    prefill.observe(seen, noise_var + share * share * pairs.var)
    if share > LEAST_PART:
        pairs.observe(ratio ** (1.0 / share) * pairs.factor, (noise_var + prefill_var) / (share * share))


def _fullness(belief: Belief, seen: float, full: float, noise_var: float) -> None:
    """Prompts took `seen` times as long as by the prior, where `full` of them was in full steps: the factors of full
    steps and of others learn, each as far as the other is known."""
    whole, partly = belief.whole, belief.part
    ratio, whole_var = seen / belief.filled(full), whole.var
    part = partly.factor * (1.0 - full) / (full + partly.factor * (1.0 - full))
    whole.observe(ratio * whole.factor, noise_var + part * part * partly.var)
    if part > LEAST_PART:
        partly.observe(ratio ** (1.0 / part) * partly.factor, (noise_var + whole_var) / (part * part))


def decoded(paper: Paper, load: EndpointLoad, prompt: Prompt, output_tokens: int, now: float) -> None:
    """What the decode steps of a whole answer took, the prefills in between apart."""
    span = paper.span
    if now - span.decoded_at < LESSON_S:
        return
    prefills = paper.prefill_steps - prompt.prefill_steps
    steps = output_tokens / prompt.sequences - 1 - prefills
    raw_s = paper.decode_raw_s - prompt.decode_raw_s
    believed = paper.tick - prompt.tick - prefills
    spent_s = now - prompt.began - (paper.prefill_s - prompt.prefill_s)
    if steps >= 8 and believed > 0 and raw_s > 0 and spent_s > 0:
        span.decoded_at = now
        load.belief.step.observe(spent_s * believed / (steps * raw_s), 1.0 / (steps * steps))
        load.belief.settle()


def scraped(paper: Paper, load: EndpointLoad, kv_usage: float) -> None:
    """How much KV the engine holds of what is held on paper, where every sequence has a copy of its prompt.

    A scrape some seconds old tells nearly the same: prefixes are shared as much before and after. Where nothing is
    scraped no engine's size is known either, and no wait for KV is expected. KV that another endpoint still computes is
    not there yet, neither here nor there.
    """
    if load.kv_tokens is None:
        return
    held = paper.starts + paper.batch * paper.tick + sum(prompt.prompt_tokens for prompt in paper.finishing)
    if paper.queue and paper.queue[0].locked:
        held += paper.queue[0].at  # blocks are taken chunk by chunk
    prefixes = paper.prefixes
    prefixes.distinct = max(0.0, kv_usage * load.kv_tokens - (held - prefixes.tokens))
    if held > LEAST_KV * load.kv_tokens:
        paper.kv_ratio += KV_GAIN * (max(LEAST_KV, min(1.0, kv_usage * load.kv_tokens / held)) - paper.kv_ratio)
