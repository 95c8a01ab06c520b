"""Tests of comparing the answers of two engines: an alarm needs more than differences by chance."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.golden.cli import report_of
from policies.golden.answers import (
    GoldenAnswer,
    GoldenError,
    TokenChoice,
    answer_of,
    read_prompts,
    request_of,
)
from policies.golden.compare import compare, is_valid, token_kl

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def tokens(*names: str, p: float = 0.9) -> GoldenAnswer:
    choices = tuple(TokenChoice(name, {name: p, "?": 1 - p}) for name in names)
    return GoldenAnswer("".join(names), tokens=choices)


def test_equal_answers_share_everything() -> None:
    pair = compare(CHAT, tokens("a", "b"), tokens("a", "b"))
    assert (pair.same, pair.shared, pair.diverged_at, pair.length) == (1.0, 1.0, None, 1.0)
    assert pair.kl == pytest.approx(0.0)


def test_the_first_difference_is_counted_in_tokens_and_ends_the_divergence() -> None:
    pair = compare(CHAT, tokens("a", "b", "c", "d"), tokens("a", "b", "x", "d"))
    assert (pair.same, pair.diverged_at, pair.shared) == (0.0, 2, 0.5)
    assert pair.kl is not None
    assert pair.kl > 0


def test_without_probabilities_characters_are_compared() -> None:
    pair = compare(CHAT, GoldenAnswer("hello world"), GoldenAnswer("hello there"))
    assert (pair.diverged_at, pair.kl) == (6, None)


def test_a_failed_answer_differs_and_is_not_valid() -> None:
    pair = compare(CHAT, GoldenAnswer("a"), GoldenAnswer(error="status 500"))
    assert (pair.same, pair.valid) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("prompt", "answer", "valid"),
    [
        (CHAT, GoldenAnswer("no json"), True),
        (CHAT | {"response_format": {"type": "json_object"}}, GoldenAnswer("no json"), False),
        (CHAT | {"response_format": {"type": "json_schema"}}, GoldenAnswer('{"a": 1}'), True),
        (CHAT, GoldenAnswer(calls=(("f", "{}"),)), False),
        (CHAT | {"tools": [{"function": {"name": "f"}}]}, GoldenAnswer(calls=(("f", "{}"),)), True),
        (CHAT | {"tools": [{"function": {"name": "f"}}]}, GoldenAnswer(calls=(("f", "{"),)), False),
    ],
)
def test_json_and_tool_calls_are_read(
    prompt: dict[str, Any], answer: GoldenAnswer, valid: bool
) -> None:
    assert is_valid(prompt, answer) is valid


def test_the_divergence_of_known_distributions_is_exact() -> None:
    one, other = {"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}
    assert token_kl(one, other) == pytest.approx(0.5 * log(2) + 0.5 * log(0.5 / 0.75))


DISTRIBUTIONS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1), min_size=1)


@given(DISTRIBUTIONS, DISTRIBUTIONS)
def test_a_divergence_is_never_negative_and_zero_for_itself(
    one: dict[str, float], other: dict[str, float]
) -> None:
    one, other = ({k: v / sum(d.values()) for k, v in d.items()} for d in (one, other))
    assert token_kl(one, other) >= 0
    assert token_kl(one, one) == pytest.approx(0.0, abs=1e-6)


class Engine:
    def __init__(self, seed: int, noise: float) -> None:
        self._rng, self._noise = Random(seed), noise

    def answers(self, prompts: int, length: int = 24) -> list[GoldenAnswer]:
        return [self._answer(prompt, length) for prompt in range(prompts)]

    def _answer(self, prompt: int, length: int) -> GoldenAnswer:
        margins, choices = Random(prompt), []
        for _ in range(length):
            margin = margins.expovariate(0.5) + self._rng.gauss(0, 0.02 + self._noise)
            p = 1 / (1 + exp(-margin))
            token = "a" if margin > 0 else "b"
            choices.append(TokenChoice(token, {"a": p, "b": 1 - p}))
        return GoldenAnswer("".join(each.token for each in choices), tokens=tuple(choices))


def worse(base: Engine, candidate: Engine, prompts: int = 200) -> bool:
    bodies: list[dict[str, Any]] = [CHAT] * prompts
    answers: Sequence[list[GoldenAnswer]] = (
        base.answers(prompts), candidate.answers(prompts), base.answers(prompts)
    )  # fmt: skip
    return report_of(bodies, *answers, 0.0).is_worse


def test_the_noise_of_quantised_weights_is_found_with_200_prompts() -> None:
    found = [worse(Engine(seed, 0.0), Engine(1000 + seed, 0.1)) for seed in range(20)]
    assert sum(found) >= 19


def test_an_identical_engine_raises_at_most_one_alarm_in_100_runs() -> None:
    alarms = [worse(Engine(seed, 0.0), Engine(1000 + seed, 0.0), 100) for seed in range(100)]
    assert sum(alarms) <= 1


def test_a_tolerance_accepts_a_small_loss() -> None:
    base, candidate = Engine(1, 0.0), Engine(2, 0.1)
    answers = base.answers(200), candidate.answers(200), base.answers(200)
    assert report_of([CHAT] * 200, *answers, 0.0).is_worse
    assert not report_of([CHAT] * 200, *answers, 0.9).is_worse


def test_requests_are_greedy_and_ask_for_probabilities_in_their_own_form() -> None:
    chat = request_of(CHAT, "m", 8, 5)
    assert (chat["temperature"], chat["top_logprobs"], chat["model"]) == (0, 5, "m")
    assert request_of({"prompt": "x"}, "m", 8, 5)["logprobs"] == 5
    assert "logprobs" not in request_of(CHAT, "m", 8, 0)


def test_both_forms_of_probabilities_are_read() -> None:
    chat = answer_of(
        {"choices": [{"message": {"content": "a"}, "logprobs": {"content": [
            {"token": "a", "logprob": 0.0, "top_logprobs": [{"token": "b", "logprob": -9.0}]}]}}]},
        0.1,
    )  # fmt: skip
    assert chat.tokens[0].probabilities["a"] == 1.0
    plain = answer_of(
        {"choices": [{"text": "a", "logprobs": {
            "tokens": ["a"], "token_logprobs": [0.0], "top_logprobs": [{"b": -9.0}]}}]},
        0.1,
    )  # fmt: skip
    assert plain.tokens == chat.tokens
    assert answer_of([], 0.1).error


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "m"}'])
def test_a_file_without_a_request_is_refused(text: str) -> None:
    with pytest.raises(GoldenError):
        read_prompts([text])
