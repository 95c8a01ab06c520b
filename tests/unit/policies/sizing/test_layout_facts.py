"""Tests of which tensor-parallel sizes are possible for well-known models."""

from __future__ import annotations

import pytest

from policies.sizing.layout_facts import ModelFacts, facts_of_name
from policies.sizing.parallelism_rules import heads_problem


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32, 8),
        ("llama-3.1-70b", 64, 8),
        ("meta-llama/Meta-Llama-3-70B-Instruct", 64, 8),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", 64, 8),
        ("Qwen/Qwen2.5-7B-Instruct", 28, 4),
        ("openai/gpt-oss-120b", 64, 8),
        ("deepseek-ai/DeepSeek-V3", 128, None),
        ("deepseek-ai/DeepSeek-R1-0528", 128, None),
    ],
)
def test_a_model_is_known_by_its_served_name_and_by_its_repository(
    name: str, heads: int, kv_heads: int | None
) -> None:
    facts = facts_of_name(name)
    assert facts is not None
    assert (facts.heads, facts.kv_heads) == (heads, kv_heads)


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "my-llama",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
        "qwen3-8b2",
        "notqwen3-8b",
        "llama-3.1-700b",
    ],
)
def test_a_model_of_another_name_is_not_known(name: str) -> None:
    assert facts_of_name(name) is None


@pytest.mark.parametrize(
    ("shape", "tp", "starts"),
    [
        (ModelFacts(64, 8), 8, True),
        (ModelFacts(64, 8), 16, True),  # two ranks share each KV head
        (ModelFacts(64, 8), 7, False),
        (ModelFacts(28, 4), 4, True),
        (ModelFacts(28, 4), 8, False),
        (ModelFacts(40, 10), 4, False),  # 10 KV heads on 4 ranks
        (ModelFacts(128, None), 16, True),
    ],
)
def test_a_tp_size_must_divide_the_heads_and_divide_or_repeat_the_kv_heads(
    shape: ModelFacts, tp: int, starts: bool
) -> None:
    assert (heads_problem(shape, tp) is None) is starts
