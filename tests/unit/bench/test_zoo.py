"""Tests of random workloads: their distribution, reproducibility, and the search for a capacity."""

from __future__ import annotations

from collections import Counter
from math import isclose
from pathlib import Path

import pytest

from bench.zoo.fleets import IDLE_TTFT, build_fleet, idle_ttft_s
from bench.zoo.measure import HIGHEST, LOWEST, STEP, Attainments, build_case, find_capacity
from bench.zoo.requests import LONGEST_ANSWER, LONGEST_PROMPT, SHORTEST_ANSWER
from bench.zoo.results import LEAST, Result
from bench.zoo.run import Comparison, ResultFile
from bench.zoo.space import MOST_REQUESTS, draw
from bench.zoo.summary import attainment_gap, best_rule_ratio, geometric_mean, page, ratio
from policies.routing_types import Role

WORKLOADS = [draw("test", number) for number in range(100)]


def test_the_shares_that_the_comparison_promises_hold_in_every_hundred_workloads() -> None:
    assert sum(workload.is_long for workload in WORKLOADS) >= 25
    assert sum(workload.sharing in ("tree", "documents") for workload in WORKLOADS) >= 25
    assert sum(workload.condition != "equal" for workload in WORKLOADS) >= 25
    assert sum(workload.split != "none" for workload in WORKLOADS) >= 15
    sizes = Counter(workload.groups for workload in WORKLOADS)
    assert min(sizes) == 2
    assert max(sizes) >= 32


def test_a_seed_and_a_number_determine_the_workload_and_its_requests() -> None:
    assert draw("test", 7) == WORKLOADS[7] != draw("other", 7)
    build_case.cache_clear()
    first = build_case("test", 7, 0)
    build_case.cache_clear()
    assert build_case("test", 7, 0).requests == first.requests
    assert build_case("test", 7, 1).requests != first.requests


@pytest.mark.parametrize("number", range(0, 40, 3))
def test_a_workload_keeps_to_its_bounds_and_an_idle_fleet_can_keep_its_budgets(number: int) -> None:
    case = build_case("test", number, 0)
    requests = case.requests.requests
    assert 1 <= case.workload.requests <= MOST_REQUESTS
    assert all(60 <= request.input_tokens <= LONGEST_PROMPT for request in requests)
    assert all(SHORTEST_ANSWER <= request.output_tokens <= LONGEST_ANSWER for request in requests)
    least = min(kind.capacity_tokens for kind in case.fleet.kinds)
    assert all(request.input_tokens <= least / 4 for request in requests)
    idle_s = idle_ttft_s(case.workload, case.fleet, requests[: case.workload.requests])
    assert case.slo.ttft_s >= IDLE_TTFT * idle_s
    assert 0.0 < case.requests.uncached <= 1.0


def test_a_block_id_means_one_prefix() -> None:
    for number in range(12):
        before: dict[int, tuple[int, ...]] = {}
        for request in build_case("test", number, 0).requests.requests[:300]:
            for index, block in enumerate(request.blocks):
                prefix = request.blocks[:index]
                assert before.setdefault(block, prefix) == prefix


def test_arrivals_have_a_mean_gap_of_one_whatever_their_pattern() -> None:
    for number in range(20):
        workload = WORKLOADS[number]
        if workload.sharing != "sessions":
            requests = build_case("test", number, 0).requests.requests
            assert isclose(requests[-1].arrival_s, len(requests), rel_tol=0.15)


def test_pools_have_groups_for_both_halves_and_the_others_have_none() -> None:
    for workload in WORKLOADS:
        roles = {kind.role for kind in build_fleet(workload).kinds}
        expected = {Role.PREFILL, Role.DECODE} if workload.split == "pools" else {Role.BOTH}
        assert roles == expected


def test_wrong_labels_change_what_the_gateway_believes_and_not_the_group() -> None:
    labelled = next(workload for workload in WORKLOADS if workload.condition == "labels")
    kinds = build_fleet(labelled).kinds
    assert any(kind.labelled_gpu or kind.labelled_batched_tokens for kind in kinds)
    assert len({(kind.gpu, kind.max_num_batched_tokens) for kind in kinds}) == 1


def test_the_search_finds_where_attainment_crosses_the_target_from_any_start() -> None:
    for start in (LOWEST, -10, 0, 25, HIGHEST):
        load = find_capacity(lambda step: 1.0 if step < 17 else 0.5, 0.9, start)
        assert STEP**16 <= load <= STEP**17
    assert find_capacity(lambda step: 0.0, 0.9, 0) == 0.0
    assert find_capacity(lambda step: 1.0, 0.9, 0) == STEP**HIGHEST


def test_attainment_falls_with_the_load_and_a_load_is_replayed_once() -> None:
    number = next(number for number, workload in enumerate(WORKLOADS) if workload.requests == 600)
    attainments = Attainments(build_case("test", number, 0), "least_loaded")
    calm, busy = attainments.at(-40), attainments.at(60)
    assert calm > busy
    assert attainments.at(60) == busy
    assert set(attainments.by_step) == {-40, 60}


def _result(policy: str, arrivals: int, capacity: float, attainment: float = 1.0) -> Result:
    steps = dict.fromkeys(range(LOWEST, HIGHEST), attainment)
    return Result("test", 0, arrivals, policy, steps, {"0.9": capacity, "0.95": capacity})


def test_the_best_rule_is_chosen_with_one_seed_of_arrivals_and_compared_with_the_other() -> None:
    by = {
        "ours": {0: _result("ours", 0, 1.0), 1: _result("ours", 1, 1.0)},
        "a": {0: _result("a", 0, 2.0), 1: _result("a", 1, 0.5)},
        "b": {0: _result("b", 0, 1.0), 1: _result("b", 1, 1.0)},
    }
    # Seed 0 chooses a, compared with seed 1: 1 / 0.5. Seed 1 chooses b, compared with seed 0: 1.
    assert isclose(best_rule_ratio(by, ["a", "b"], "ours"), 2.0**0.5)
    assert isclose(ratio(by, "a", "ours"), 1.0)


def test_a_capacity_below_the_grid_counts_as_its_lowest_load() -> None:
    by = {
        "ours": {0: _result("ours", 0, LEAST)},
        "a": {0: _result("a", 0, 0.0)},
    }
    assert ratio(by, "a", "ours") == 1.0


def test_the_gap_below_capacity_is_the_best_rules_attainment_less_ours() -> None:
    by = {
        "ours": {seed: _result("ours", seed, 1.0, 0.97) for seed in (0, 1)},
        "a": {seed: _result("a", seed, 1.0, 0.99) for seed in (0, 1)},
    }
    assert isclose(attainment_gap(by, ["a"], "ours", 0.5), 0.02)


def test_a_rule_far_behind_with_the_first_arrivals_is_not_measured_with_others(
    tmp_path: Path,
) -> None:
    file = ResultFile(tmp_path / "results.jsonl", "code", any_code=False)
    for arrivals, policy, capacity in (
        (0, "priced", 0.5),
        (0, "llumnix", 1.0),
        (0, "preble", 0.91),
        (0, "lmetric", 0.89),
        (1, "priced", 0.5),
        (1, "llumnix", 1.0),
        (1, "preble", 1.0),
    ):
        file.add(_result(policy, arrivals, capacity))
    for arrivals in (0, 1):
        comparison = Comparison("test", 0, arrivals, file, first=0)
        comparison.run(("llumnix", "preble", "lmetric", "priced"), quick=True)
    measured = {(policy, arrivals) for _, _, arrivals, policy in file.known}
    assert ("lmetric", 1) not in measured
    assert len(measured) == 7
    assert "1 workloads counted" in page(
        {0: draw("test", 0)}, [file.known[key] for key in file.known], "priced"
    )


def test_a_geometric_mean_lies_within_its_interval() -> None:
    low, mean, high = geometric_mean([0.5, 1.0, 2.0, float("nan")])
    assert isclose(mean, 1.0)
    assert low < mean < high


def test_the_page_lists_each_workload_and_each_reason_to_drop_one() -> None:
    results = [
        *(_result(policy, seed, 1.0) for policy in ("priced", "a") for seed in (0, 1)),
        Result("test", 1, 0, "a", {}, {"0.9": 0.0}),
        Result("test", 1, 0, "priced", {}, {"0.9": 0.0}),
    ]
    text = page({0: WORKLOADS[0], 1: WORKLOADS[1]}, results, "priced")
    assert "1 workloads counted, 1 dropped" in text
    assert f"dropped {WORKLOADS[1].name}: no rule reaches 90 %" in text
    assert f"| {WORKLOADS[0].name} |" in text
