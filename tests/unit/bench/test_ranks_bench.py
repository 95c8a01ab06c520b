"""Tests of the benchmark of rules that choose an engine's data-parallel rank for each request."""

from __future__ import annotations

import msgspec
import pytest

import bench.ranks.run as ranks_run
from bench.ranks.measure import RANKS, Measurement, measure
from bench.ranks.run import find_users, page
from bench.ranks.sessions import MOST_TOKENS, draw, sessions
from planner.text_generator import BLOCK_TOKENS
from planner.traces.recorded_request import PRIVATE, TraceRequest


def by_session(seed: int, count: int = 40) -> dict[str, list[TraceRequest]]:
    found: dict[str, list[TraceRequest]] = {}
    for request in sessions(draw(seed), seed, count):
        found.setdefault(request.session, []).append(request)
    return found


@pytest.mark.parametrize("seed", range(1, 6))
def test_each_turn_of_a_session_continues_its_prompt_and_no_other_sessions(seed: int) -> None:
    owners: dict[int, str] = {}
    for name, turns in by_session(seed).items():
        for before, after in zip([None, *turns], turns, strict=False):
            assert len(after.blocks) == -(-after.input_tokens // BLOCK_TOKENS)
            assert after.input_tokens <= MOST_TOKENS
            for block in after.blocks:
                assert block < PRIVATE or owners.setdefault(block, name) == name
            if before is not None:
                whole = before.input_tokens // BLOCK_TOKENS
                assert after.blocks[:whole] == before.blocks[:whole]
                assert after.input_tokens > before.input_tokens + before.output_tokens
                assert after.think_s is not None


def test_seeds_are_different_workloads_and_equal_ones_are_equal() -> None:
    assert len({draw(seed) for seed in range(20)}) == 20
    assert by_session(7) == by_session(7)
    assert by_session(7) != by_session(8)


@pytest.mark.parametrize("arm", ["vllm", "prefix_aware", "oracle:0.1"])
def test_an_arm_is_measured_alike_twice(arm: str) -> None:
    first, again = (measure(arm, 3, 3) for _ in range(2))
    assert msgspec.structs.replace(first, cpu_s=0.0) == msgspec.structs.replace(again, cpu_s=0.0)
    assert first.offered > 10
    assert 0 < first.to_most_loaded < 1


def result(arm: str, seed: int, users: int, goodput: float, attainment: float = 1.0) -> Measurement:
    return Measurement(arm, seed, users, goodput, attainment, 0.5, 0.25, 1.0, 0.05, 100, 0.1)


@pytest.mark.parametrize("limit", [1, 3, 19, 20, 21, 100])
def test_the_load_is_the_largest_of_the_grid_that_the_oracle_serves(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fake(arm: str, seed: int, users: int) -> Measurement:
        tried.append(users)
        return result(arm, seed, users, 1.0, 1.0 if users <= limit else 0.5)

    monkeypatch.setattr(ranks_run, "measure", fake)
    found = find_users("oracle", 1, lambda line: None)
    assert found.users <= limit < max(tried)
    assert not any(found.users < users <= limit for users in tried)


def test_the_table_compares_arms_at_the_same_load_and_a_blind_one_at_its_best() -> None:
    results = [
        item
        for seed in (1, 2, 3)
        for item in (
            result("oracle", seed, 20, 4.0),
            result("aware", seed, 20, 3.8),
            result("vllm", seed, 20, 1.0),
            result("vllm", seed, 10, 1.9),
        )
    ]
    rows = {
        cells[0]: cells
        for line in page(results, ["vllm", "aware", "oracle"], "aware").splitlines()
        if line.startswith("| ")
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert rows["vllm"][1:4] == [
        "0.25 (0.25 to 0.25)",
        "3.80 (3.80 to 3.80)",
        "2.00 (2.00 to 2.00)",
    ]
    assert rows["aware"][1] == "0.95 (0.95 to 0.95)"
    assert rows["oracle"][2] == "0.95 (0.95 to 0.95)"
    assert f"{1 / RANKS:.3f}" in page(results, ["vllm", "aware", "oracle"], "aware")
