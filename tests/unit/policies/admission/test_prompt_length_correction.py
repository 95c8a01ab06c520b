"""Tests that estimated prompt lengths are corrected by the lengths that engines report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.admission.prompt_length_correction import (
    HIGHEST,
    LEAST_ANSWERS,
    LOWEST,
    PromptLengths,
)


def test_an_estimate_stands_until_enough_answers_were_seen() -> None:
    prompts = PromptLengths()
    for _ in range(LEAST_ANSWERS - 1):
        prompts.record("m", False, 100, 50)
    assert prompts.correct("m", False, 100) == 100
    prompts.record("m", False, 100, 50)
    assert prompts.correct("m", False, 100) == 50
    assert prompts.correct("m", True, 100) == prompts.correct("n", False, 100) == 100


def test_a_model_that_counts_otherwise_from_now_on_is_believed_soon() -> None:
    prompts = PromptLengths()
    for counted in [1000] * 3000 + [250] * 8000:
        prompts.record("m", False, 1000, counted)
    assert 240 < prompts.correct("m", False, 1000) < 260


def test_an_estimate_that_is_close_stands_so_that_gateways_agree() -> None:
    prompts = PromptLengths()
    for _ in range(LEAST_ANSWERS):
        prompts.record("m", False, 1000, 1080)
    assert prompts.correct("m", False, 1000) == 1000


@given(
    st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**12)), max_size=40),
    st.integers(1, 10**7),
)
def test_a_correction_is_bounded_whatever_engines_report(
    seen: list[tuple[int, int]], estimated: int
) -> None:
    prompts = PromptLengths()
    for prompt, counted in seen:
        prompts.record("m", True, prompt, counted)
    assert (
        max(1, int(estimated * LOWEST))
        <= prompts.correct("m", True, estimated)
        <= estimated * HIGHEST + 1
    )


def test_adapters_that_come_and_go_for_weeks_take_bounded_memory() -> None:
    prompts = PromptLengths(most=8)
    for number in range(1000):
        for _ in range(LEAST_ANSWERS):
            prompts.record("base", False, 100, 50)
            prompts.record(f"adapter-{number}", False, 100, 50)
    assert len(prompts.ratios) == 8
    assert prompts.correct("base", False, 100) == prompts.correct("adapter-999", False, 100) == 50
    assert prompts.correct("adapter-1", False, 100) == 100
