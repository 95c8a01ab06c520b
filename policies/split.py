"""Split or not, and between whom: a pair of prefill and decode endpoint, or one endpoint for the whole request.

Lives here: what may not be split, the rule by uncached tokens, and the choice of a pair. Not here: how the two speak
(kvtransfer.dialects) or what becomes of a pair that fails (gateway/split/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from policies import pickers, run
from policies.contract import DECODE, Filter, Part, PartPrices, Policy, Weighted
from policies.filters import below_cap
from policies.latency import ttft_s
from policies.model import Ask, Candidate, Pick
from policies.presets import DecodeLoad


class Reason(StrEnum):
    """Why a request was split, or was not. The label in metrics and the word in the access log."""

    __hash__ = str.__hash__  # Enum's own is a call of Python, and every decision is counted by its reason

    LONG = "long"  # split: enough of the prompt is not cached where it would be decoded
    NOBODY_ALONE = "nobody_alone"  # split: nobody may serve it whole
    PAIR_CHEAPER = "pair_cheaper"  # split: the two halves cost less than the whole anywhere
    WHOLE_CHEAPER = "whole_cheaper"  # not split, by the same comparison
    SHORT = "short"
    CACHED = "cached"
    ONE_TOKEN = "one_token"  # noqa: S105  # a reason, no secret
    CHOICES = "choices"
    PROMPTS = "prompts"
    PROMPT_SCORES = "prompt_scores"
    NO_PAIR = "no_pair"
    RECOMPUTE = "recompute"  # a handoff failed, and what is left to try is computing it all in one place


_LONG = Reason.LONG  # before Python 3.12 an Enum finds its members slowly, and this is every split request's


class Shape(msgspec.Struct, frozen=True):
    """What decides whether a request can be split at all.

    choices        answers wanted of one prompt: the larger of n and best_of
    prompts        prompts in one request
    scores_prompt  log probabilities of the prompt, or its echo, are wanted: the decoder would compute it all again
    max_tokens     the client's bound on output tokens; None when it gave none
    """

    choices: int = 1
    prompts: int = 1
    scores_prompt: bool = False
    max_tokens: int | None = None


class SplitRule(msgspec.Struct, frozen=True):
    """Split from so many uncached prompt tokens on.

    hysteresis  half the width of a band around the threshold, as a share of it; inside, requests go the way the last
                request outside of it went, so that two modes do not alternate over a hair
    handoff_s, kv_token_s  what bringing the KV over takes, once and per token: for policies that price a split, which
                need no threshold (320 KiB per token at 50 GB/s)
    pair_gain   share of the whole's price that a pair must save: it holds the prompt's KV twice for a while
    """

    threshold_tokens: int = 2048
    hysteresis: float = 0.25
    handoff_s: float = 0.01
    kv_token_s: float = 6.5e-6
    pair_gain: float = 0.15

    def __post_init__(self) -> None:
        if self.threshold_tokens < 1 or not 0.0 <= self.hysteresis < 1.0:
            raise ValueError(f"a threshold of 1 or more and a hysteresis in [0, 1), not {self}")
        if self.handoff_s < 0.0 or self.kv_token_s < 0.0 or not 0.0 <= self.pair_gain < 1.0:
            raise ValueError(f"a handoff takes no negative time and a gain is in [0, 1), not {self}")


class Group(msgspec.Struct, frozen=True):
    """Endpoints whose KV caches fit each other. One that may do both stands in both rows."""

    compat: str
    prefills: tuple[Candidate, ...]
    decodes: tuple[Candidate, ...]


class Pools(msgspec.Struct, frozen=True):
    """Whom a splitting decision may choose from; `alone` are those that can serve a whole request."""

    groups: tuple[Group, ...]
    alone: tuple[Candidate, ...]


class Pair(msgspec.Struct, frozen=True):
    """Who computes the prompt and who decodes; never the same endpoint."""

    prefill: Pick
    decode: Pick


class Decision(msgspec.Struct, frozen=True):
    """A pair or None: one endpoint for all of it. `splitting` is the mode for requests inside the band from now on."""

    pair: Pair | None
    reason: Reason
    splitting: bool


def splitter(rule: SplitRule, policy: Policy) -> Splitter:
    """The pool's policy chooses who prefills; who decodes goes by load. A policy that prices halves decides it all."""
    crowded = msgspec.structs.replace(policy, filters=tuple(keep for keep in policy.filters if keep is not below_cap))
    if policy.parts is not None:
        return PricedSplitter(rule, policy, by_price("decode_price", DECODE, policy.filters, policy.parts), crowded)
    return Splitter(rule, policy, DecodeLoad().build(), crowded)


def by_price(name: str, part: Part, filters: tuple[Filter, ...], prices: PartPrices) -> Policy:
    """A policy that picks who does a part of a request for the least."""

    def score(ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        return [-price for price in prices(ask, candidates, part)]

    return Policy(name, filters, (Weighted(score),), pickers.best, reads_prefix=True)


def compat(engine: str, model: str, labels: Mapping[str, str]) -> str:
    """What must be equal for KV caches to fit: engine, model, and the labels `version` and `kv_dtype` where given.

    An engine refuses a peer of another version itself, in its handshake (engines.md B.1), but only after the prefill
    was computed in vain.
    """
    return "/".join((engine, model, labels.get("version", ""), labels.get("kv_dtype", "")))


def after_prefill_s(rule: SplitRule, ask: Ask, decode: Pick) -> float:
    """Expected seconds from the end of the prefill to the first token: the KV's way, and then it stands in line behind
    the prompts that the decoder computes itself, or until there is room for it."""
    prompt_tokens = ask.request.prompt_tokens
    moved_s = rule.handoff_s + (prompt_tokens - decode.cached_tokens) * rule.kv_token_s
    return moved_s + ttft_s(decode.candidate.load, 0, prompt_tokens, ask.now)


def unsplittable(shape: Shape) -> Reason | None:
    """Why a handoff would break this request, or None. Sources: engines.md B.1 (not splittable) and 0.9."""
    if shape.choices > 1:
        return Reason.CHOICES
    if shape.prompts > 1:
        return Reason.PROMPTS
    return Reason.PROMPT_SCORES if shape.scores_prompt else None


class Splitter(msgspec.Struct, frozen=True):
    """The rule and the policies that choose: `prefill` with prefixes in mind, `decode` by load.

    `crowded` is `prefill` for when everybody is at its cap and nobody may serve a request whole: then they queue there.
    """

    rule: SplitRule
    prefill: Policy
    decode: Policy
    crowded: Policy

    def decide(self, pools: Pools, ask: Ask, shape: Shape, splitting: bool) -> Decision:
        """Split this request or not. `splitting` is what the last decision said of the mode; False at first.

        A request that nobody may serve whole is split even when that does not pay: better slow than not at all.
        """
        why = unsplittable(shape)
        if why is not None:
            return Decision(None, why, splitting)
        pair = self.pair(pools, ask)
        if pair is None:
            return Decision(None, Reason.NO_PAIR, splitting)
        reason, splitting = self._worth(ask.request.prompt_tokens, pair.decode.cached_tokens, shape, splitting)
        if reason is not _LONG:
            if _anybody(pools.alone, ask):
                return Decision(None, reason, splitting)
            reason = Reason.NOBODY_ALONE
        return Decision(pair, reason, splitting)

    def pair(self, pools: Pools, ask: Ask) -> Pair | None:
        """The least loaded decode endpoint that has somebody to prefill for it, and the best of those."""
        groups = [group for group in pools.groups if _anybody(group.prefills, ask)]
        if not groups:
            return None
        group, several = groups[0], len(groups) > 1
        decode = run.pick(self.decode, ask, _together(groups) if several else group.decodes)
        if decode is None:
            return None
        chosen = decode.candidate
        if several:
            group = next(group for group in groups if chosen in group.decodes)
        others: Sequence[Candidate] = group.prefills
        if chosen in others:
            others = [each for each in others if each is not chosen]
        prefill = run.pick(self.prefill, ask, others)
        if prefill is None and not _anybody(pools.alone, ask):
            prefill = run.pick(self.crowded, ask, others)
        return None if prefill is None else Pair(prefill, decode)

    def _worth(self, prompt_tokens: int, cached_tokens: int, shape: Shape, splitting: bool) -> tuple[Reason, bool]:
        """Whether splitting pays: the reason, and the mode from now on."""
        if shape.max_tokens is not None and shape.max_tokens <= 1:
            return Reason.ONE_TOKEN, splitting
        width = self.rule.threshold_tokens * self.rule.hysteresis
        bound = self.rule.threshold_tokens + (-width if splitting else width)
        if prompt_tokens - cached_tokens >= bound:
            return _LONG, True
        return (Reason.CACHED if prompt_tokens >= bound else Reason.SHORT), False


class PricedSplitter(Splitter, frozen=True):
    """Prefill and decode apart or together, whichever is expected to cost everybody less.

    There is no threshold and no band. A long prompt among many answers is dear where these are generated, and a busy
    prefiller is dear to queue at, so splitting begins and ends with the load; endpoints that decode stay cheap to
    decode at and dear to prefill at, so roles form and dissolve by themselves.
    """

    def decide(self, pools: Pools, ask: Ask, shape: Shape, splitting: bool) -> Decision:
        """As Splitter's, by price. `splitting` is handed through: no mode is needed."""
        why = unsplittable(shape)
        if why is not None:
            return Decision(None, why, splitting)
        whole = run.pick(self.prefill, ask, pools.alone)
        if whole is not None and shape.max_tokens is not None and shape.max_tokens <= 1:
            return Decision(None, Reason.ONE_TOKEN, splitting)
        pair = self.pair(pools, ask)
        if pair is None:
            return Decision(None, Reason.NO_PAIR, splitting)
        if whole is None:
            if _anybody(pools.alone, ask):
                return Decision(None, Reason.WHOLE_CHEAPER, splitting)
            return Decision(pair, Reason.NOBODY_ALONE, splitting)
        if pair.prefill.score + pair.decode.score > (1.0 - self.rule.pair_gain) * whole.score:
            return Decision(pair, Reason.PAIR_CHEAPER, splitting)
        return Decision(None, Reason.WHOLE_CHEAPER, splitting)

    def pair(self, pools: Pools, ask: Ask) -> Pair | None:
        """The cheapest pair: in every group the cheapest decoder, then who prefills for it for the least."""
        pairs = [pair for group in pools.groups if (pair := self._pair_of(group, pools, ask)) is not None]
        return max(pairs, key=lambda pair: pair.prefill.score + pair.decode.score, default=None)

    def _pair_of(self, group: Group, pools: Pools, ask: Ask) -> Pair | None:
        decode = run.pick(self.decode, ask, group.decodes)
        if decode is None or self.prefill.parts is None:
            return None
        part = Part(decodes=0.0, transfer_s=after_prefill_s(self.rule, ask, decode))
        others = [each for each in group.prefills if each is not decode.candidate]
        prefill = run.pick(by_price("prefill_price", part, self.prefill.filters, self.prefill.parts), ask, others)
        if prefill is None and not _anybody(pools.alone, ask):
            prefill = run.pick(by_price("prefill_price", part, self.crowded.filters, self.prefill.parts), ask, others)
        return None if prefill is None else Pair(prefill, decode)


def _anybody(candidates: Sequence[Candidate], ask: Ask) -> bool:
    """Whether somebody is there who has not failed this request."""
    tried = ask.tried
    for each in candidates:  # noqa: SIM110  # on the way of every request; any() would cost twice as much
        if each.load.available and each.endpoint.name not in tried:
            return True
    return False


def _together(groups: Sequence[Group]) -> Sequence[Candidate]:
    return [each for group in groups for each in group.decodes]
