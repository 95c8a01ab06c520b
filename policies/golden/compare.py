"""Compares two engines' answers to the same prompts: do they differ more than by chance?

Greedy answers of one engine also differ between runs, because other batches round differently. So
the base engine answers twice, and its difference from itself is the noise floor. A candidate engine
is worse if its differences exceed the floor by more than chance explains. This module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import log, sqrt
from typing import Any

import msgspec

from policies.golden.answers import GoldenAnswer, TokenChoice

# One-sided standard score of each of the four measures: together at most 1 false alarm in 100.
ALARM_SCORE = 2.81
# Minimum standard deviation of a measure: identical pairs do not prove that it never varies.
LEAST_ERROR = 0.005
LEAST_PROBABILITY = 1e-6


class AnswerPair(msgspec.Struct, frozen=True):
    """How two answers to the same prompt differ.

    same         1.0 if they are equal, else 0.0
    shared       fraction (0 to 1) of the first answer before the first difference
    diverged_at  position of the first difference, in tokens if both have tokens, else in
                 characters; None: no difference
    kl           mean Kullback-Leibler divergence in nats, over the tokens up to the first
                 difference; None: no probabilities
    valid        0.0 if only the first answer is valid (is_valid()), else 1.0
    length       length of the second answer divided by that of the first; None: the first is empty
    """

    same: float
    shared: float
    diverged_at: int | None
    kl: float | None
    valid: float
    length: float | None


def compare(prompt: Mapping[str, Any], one: GoldenAnswer, other: GoldenAnswer) -> AnswerPair:
    units, others = _units(one, other)
    index = next(
        (n for n, (a, b) in enumerate(zip(units, others, strict=False)) if a != b),
        min(len(units), len(others)),
    )
    is_same = not one.error and not other.error and one.whole == other.whole
    shared = 1.0 if is_same else index / max(1, len(units), len(others))
    return AnswerPair(
        same=float(is_same),
        shared=min(1.0, shared),
        diverged_at=None if is_same else index,
        kl=_divergence(one.tokens, other.tokens),
        valid=float(not is_valid(prompt, one) or is_valid(prompt, other)),
        length=len(other.whole) / len(one.whole) if one.whole else None,
    )


def _units(one: GoldenAnswer, other: GoldenAnswer) -> tuple[Sequence[str], Sequence[str]]:
    # Return what is compared: tokens if both answers have them and no calls, else characters.
    if one.tokens and other.tokens and not one.calls and not other.calls:
        return [each.token for each in one.tokens], [each.token for each in other.tokens]
    return one.whole, other.whole


def is_valid(prompt: Mapping[str, Any], answer: GoldenAnswer) -> bool:
    """Return whether there is an answer, and its JSON and tool calls can be parsed."""
    if answer.error:
        return False
    form = prompt.get("response_format")
    wants_json = isinstance(form, Mapping) and str(form.get("type", "")).startswith("json")
    texts = [given for _, given in answer.calls] + ([answer.text] if wants_json else [])
    tools = prompt.get("tools") if isinstance(prompt.get("tools"), list) else []
    names = {tool["function"]["name"] for tool in tools or () if "function" in tool}
    if any(name not in names for name, _ in answer.calls):
        return False
    return all(_is_json(text) for text in texts)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _divergence(ones: Sequence[TokenChoice], others: Sequence[TokenChoice]) -> float | None:
    sums: list[float] = []
    for one, other in zip(ones, others, strict=False):
        if one.probabilities and other.probabilities:
            sums.append(token_kl(one.probabilities, other.probabilities))
        if one.token != other.token:
            break
    return sum(sums) / len(sums) if sums else None


def token_kl(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the Kullback-Leibler divergence, in nats, of two distributions of the next token.

    Only the probabilities of the most likely tokens are known, so all other tokens are treated as
    one. A token that is missing in `other` has at most the smallest probability there.
    """
    rest_one, rest = (max(0.0, 1 - sum(each.values())) for each in (one, other))
    unknown = min(*other.values(), max(rest, LEAST_PROBABILITY))
    total = 0.0
    for token, p in one.items():
        q = max(LEAST_PROBABILITY, other.get(token, unknown))
        if p > 0:
            total += p * log(p / q)
    if rest_one > LEAST_PROBABILITY:
        total += rest_one * log(rest_one / max(rest, LEAST_PROBABILITY))
    return max(0.0, total)


class MeasureResult(msgspec.Struct, frozen=True):
    """The result of one measure, such as the share of equal answers, over all prompts.

    name       the measure
    floor      its value for the base engine compared with itself
    candidate  its value for the candidate compared with the base engine
    worse_by   mean difference of the two, prompt by prompt; positive is worse
    error      standard error of that difference
    is_worse   whether the candidate is worse by more than chance and the tolerance
    """

    name: str
    floor: float
    candidate: float
    worse_by: float
    error: float
    is_worse: bool


class GoldenReport(msgspec.Struct, frozen=True):
    """The result of a golden comparison over all prompts.

    Shares are 0 to 1, divergences are in nats.

    prompts               number of prompts
    measures              the result of each measure
    length_ratio          length of the candidate's answers divided by that of the base engine's;
                          None: unknown
    median_divergence_at  median position of the first difference; None: no answers differ
    base_s                mean seconds of an answer of the base engine
    candidate_s           mean seconds of an answer of the candidate
    """

    prompts: int
    measures: tuple[MeasureResult, ...]
    length_ratio: float | None
    median_divergence_at: float | None
    base_s: float
    candidate_s: float

    @property
    def is_worse(self) -> bool:
        """Return whether any measure is worse by more than chance and the tolerance."""
        return any(measure.is_worse for measure in self.measures)


Measure = Callable[[AnswerPair], float | None]
# Name, value of a pair, and whether a lower value is worse.
_MEASURES: tuple[tuple[str, Measure, bool], ...] = (
    ("equal answers", lambda pair: pair.same, True),
    ("shared beginning", lambda pair: pair.shared, True),
    ("divergence (KL)", lambda pair: pair.kl, False),
    ("valid JSON and tool calls", lambda pair: pair.valid, True),
)


def judge(
    floors: Sequence[AnswerPair],
    pairs: Sequence[AnswerPair],
    tolerance: float,
    took_s: tuple[float, float],
) -> GoldenReport:
    """Decide from compared answers whether a candidate engine is worse than the base engine.

    floors     for each prompt, the base engine's answer compared with its own second answer. These
               differences are chance
    pairs      for each prompt, the base engine's answer compared with the candidate's
    tolerance  accepted difference beyond chance, as a share or in nats
    took_s     mean seconds of an answer of the base engine and of the candidate
    """
    measures = []
    for name, value, is_lower_worse in _MEASURES:
        found = [(value(floor), value(pair)) for floor, pair in zip(floors, pairs, strict=True)]
        known = [(a, b) for a, b in found if a is not None and b is not None]
        if known:
            measures.append(_measured(name, known, 1.0 if is_lower_worse else -1.0, tolerance))
    lengths = [pair.length for pair in pairs if pair.length is not None]
    places = sorted(pair.diverged_at for pair in pairs if pair.diverged_at is not None)
    return GoldenReport(
        *(len(pairs), tuple(measures)),
        sum(lengths) / len(lengths) if lengths else None,
        places[len(places) // 2] if places else None,
        *took_s,
    )


def _measured(
    name: str, known: Sequence[tuple[float, float]], sign: float, tolerance: float
) -> MeasureResult:
    losses = [sign * (floor - candidate) for floor, candidate in known]
    count = len(losses)
    mean = sum(losses) / count
    variance = sum((loss - mean) ** 2 for loss in losses) / max(1, count - 1)
    error = max(sqrt(variance / count), LEAST_ERROR / sqrt(count))
    return MeasureResult(
        name,
        sum(floor for floor, _ in known) / count,
        sum(candidate for _, candidate in known) / count,
        *(mean, error),
        mean - ALARM_SCORE * error > tolerance,
    )
