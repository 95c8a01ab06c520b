"""Tests of the rules for parallel layouts: each refuses a layout and says what is valid."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sizing.gpu_memory import Demand, MemoryCheck, check_memory
from policies.sizing.gpus import gpu_named
from policies.sizing.layout_facts import ModelFacts, facts_of
from policies.sizing.model_shapes import model_named
from policies.sizing.parallel_layout import Layout
from policies.sizing.parallelism_rules import (
    RULES,
    PlannedGroup,
    layout_findings,
    valid_ep_sizes,
    valid_tp_sizes,
)

LLAMA_70B = facts_of(model_named("llama-3.1-70b"))
LLAMA_405B = facts_of(model_named("llama-3.1-405b"))
DEEPSEEK = facts_of(model_named("deepseek-v3"))
# The published hybrid of 60 layers and 64 experts, top 2, on groups of 4 GPUs.
HYBRID = ModelFacts(64, 8, 60, 64)


def memory(model: str, layout: Layout, context: int = 8192) -> MemoryCheck:
    return check_memory(model_named(model), gpu_named("h100"), layout, Demand(context))


CASES = [
    ("tp-heads", PlannedGroup(Layout(7), LLAMA_70B), "1, 2, 4, 8, 16, 32, 64"),
    ("tp-heads", PlannedGroup(Layout(11), LLAMA_405B, domain=16), "1, 2, 4, 8, 16, 32, 64, 128"),
    ("tp-unknown-heads", PlannedGroup(Layout(6)), ""),
    ("tp-kv-heads", PlannedGroup(Layout(16), LLAMA_405B, domain=72), "tp up to 8"),
    ("pp-layers", PlannedGroup(Layout(pp=90), LLAMA_70B), "1 to 80"),
    ("pp-uneven", PlannedGroup(Layout(8, 4), LLAMA_405B), "1, 2, 3, 6, 7, 9"),
    ("pp-uneven", PlannedGroup(Layout(2, 7), HYBRID), "1, 2, 3, 4, 5, 6, 10"),
    ("ep-dense", PlannedGroup(Layout(8, ep=8), LLAMA_70B), "1"),
    ("ep-ranks", PlannedGroup(Layout(4, ep=3), DEEPSEEK), "1, 2, 4"),
    ("ep-ranks", PlannedGroup(Layout(8, ep=4), DEEPSEEK, engine="vllm"), "1, 8"),
    ("ep-experts", PlannedGroup(Layout(5, ep=5), HYBRID, domain=8), "1"),
    (
        "ep-backend",
        PlannedGroup(Layout(8, ep=4), DEEPSEEK, engine="sglang", all_to_all="deepep"),
        "ep 8",
    ),
    (
        "moe-product",
        PlannedGroup(Layout(8, ep=2), DEEPSEEK, moe_tp=2, moe_ep=2),
        "8 x 1, 4 x 2, 2 x 4, 1 x 8",
    ),
    ("gpus", PlannedGroup(Layout(8, 2), LLAMA_70B, gpus=8), "tp * pp * dp up to 8"),
    ("tp-domain", PlannedGroup(Layout(8), LLAMA_70B, domain=4), "tp up to 4"),
    ("ep-domain", PlannedGroup(Layout(1, ep=16, dp=16), DEEPSEEK), "ep up to 8"),
    ("tp-slow-link", PlannedGroup(Layout(2), LLAMA_70B, has_fast_link=False), "pp, or replicas"),
    (
        "weights",
        PlannedGroup(Layout(1), LLAMA_70B, memory=memory("llama-3.1-70b", Layout(1))),
        "more tp or pp",
    ),
    (
        "context-kv",
        PlannedGroup(Layout(2), LLAMA_70B, memory=memory("llama-3.1-70b", Layout(2))),
        "max-model-len up to 0",
    ),
    (
        "cap-kv",
        PlannedGroup(
            Layout(4),
            LLAMA_70B,
            memory=memory("llama-3.1-70b", Layout(4)),
            max_concurrency=64,
        ),
        "up to 48",
    ),
    ("tp-too-large", PlannedGroup(Layout(8), LLAMA_70B, min_tp=1), "tp 1 and 8 replicas"),
    ("chunk", PlannedGroup(Layout(), step_tokens=128, max_seqs=256), "256 and more"),
    (
        "chunk",
        PlannedGroup(
            Layout(4),
            step_tokens=2048,
            is_chunked=False,
            memory=memory("llama-3.1-70b", Layout(4)),
        ),
        "8192 and more, or chunked prefill",
    ),
]


@pytest.mark.parametrize(
    ("code", "group", "valid"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_a_violated_rule_has_its_code_and_says_what_is_valid(
    code: str, group: PlannedGroup, valid: str
) -> None:
    findings = {finding.code: finding for finding in layout_findings(group)}
    assert valid in findings[code].valid
    assert f"[{code}, " in findings[code].text
    assert findings[code].member in ("tp", "pp", "ep", "dp")


def test_every_rule_is_violated_by_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.code for rule in RULES}
    assert len(RULES) == len({rule.code for rule in RULES}) >= 14


def test_the_hybrid_of_64_gpus_is_valid_and_its_broken_variants_are_not() -> None:
    def codes(layout: Layout, domain: int = 4) -> set[str]:
        group = PlannedGroup(layout, HYBRID, engine="vllm", domain=domain)
        return {finding.code for finding in layout_findings(group)}

    unit = Layout(tp=2, pp=4, ep=4, dp=2)
    assert codes(unit) == set()
    # 4 stages x (TP 2 x DP 2) are 16 GPUs; four such groups share the experts: 64, twice: 128.
    assert unit.gpus * 4 == 64
    assert codes(msgspec.structs.replace(unit, pp=7)) == {"pp-uneven"}
    assert codes(msgspec.structs.replace(unit, dp=5, ep=5)) >= {"ep-experts"}
    assert codes(msgspec.structs.replace(unit, tp=8, dp=1, ep=8)) == {"tp-domain"}


def test_nothing_is_found_where_nothing_is_known() -> None:
    assert list(layout_findings(PlannedGroup(Layout(8, 2)))) == []


@given(
    st.sampled_from([LLAMA_70B, LLAMA_405B, DEEPSEEK, HYBRID, ModelFacts(28, 4, 28)]),
    st.integers(1, 128),
)
def test_the_valid_tp_sizes_are_those_without_a_finding(facts: ModelFacts, tp: int) -> None:
    codes = {finding.code for finding in layout_findings(PlannedGroup(Layout(tp), facts))}
    assert (tp in valid_tp_sizes(facts, 128)) == ("tp-heads" not in codes)


def test_experts_are_spread_evenly_over_divisors_of_the_ranks() -> None:
    assert valid_ep_sizes(HYBRID, 12) == [1, 2, 4]
    assert valid_ep_sizes(LLAMA_70B, 8) == []


def test_a_product_of_moe_sizes_that_is_tp_breaks_no_rule() -> None:
    group = PlannedGroup(Layout(8, ep=2), DEEPSEEK, moe_tp=4, moe_ep=2)
    assert "moe-product" not in {finding.code for finding in layout_findings(group)}


def test_messages_count_replicated_heads_and_ranks_of_experts() -> None:
    wide = PlannedGroup(Layout(32), LLAMA_405B, domain=72)
    (replicated,) = (f for f in layout_findings(wide) if f.code == "tp-kv-heads")
    assert "each is kept 4 times" in replicated.message
    spread = PlannedGroup(Layout(4, ep=12, dp=3), HYBRID, domain=72)
    (uneven,) = (f for f in layout_findings(spread) if f.code == "ep-experts")
    assert uneven.valid == "1, 2, 4"


def test_tp_of_twice_the_least_is_not_too_large_and_of_four_times_is() -> None:
    def codes(tp: int) -> set[str]:
        group = PlannedGroup(Layout(tp), LLAMA_70B, min_tp=2)
        return {finding.code for finding in layout_findings(group)}

    assert "tp-too-large" not in codes(4)
    assert "tp-too-large" in codes(8)


def test_weights_that_do_not_load_are_given_in_gb() -> None:
    group = PlannedGroup(Layout(1), memory=memory("llama-3.1-70b", Layout(1)))
    (finding,) = layout_findings(group)
    assert finding.message == "141.2 GB of weights per GPU do not fit"
