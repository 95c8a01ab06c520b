"""Tests of how much better other policies would be, estimated from an access log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.auto.calibrate import calibrate
from planner.auto.mean_error import BLOCKS, error_of_mean, in_blocks
from planner.auto.policy_estimation import evaluate
from planner.auto.run_job import run_job
from planner.plan.config_to_replay import PoolCase, cases
from planner.plan.recent_traffic import RecentTraffic
from planner.traces.access_log import LoggedRequest, arrived_s
from policies.auto.replay_messages import PolicyMember, PoolJob, ReplayAnswer, ReplayJob
from tests import auto_log

ROUND_ROBIN, PREFIX_AWARE = PolicyMember("round_robin"), PolicyMember("prefix_aware")


def recent(lines: list[dict[str, Any]]) -> RecentTraffic:
    rows = sorted((msgspec.convert(line, LoggedRequest) for line in lines), key=arrived_s)
    return RecentTraffic(rows, arrived_s(rows[0]), arrived_s(rows[0]))


def case_of(policy: str) -> PoolCase:
    return cases(auto_log.config(policy))["main"]


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return auto_log.serve("round_robin")


def test_the_better_policy_is_found_in_the_log_of_the_worse_one(
    lines: list[dict[str, Any]],
) -> None:
    members = (ROUND_ROBIN, PREFIX_AWARE)
    estimate = evaluate(case_of("round_robin"), members, auto_log.ENDPOINTS, recent(lines))
    incumbent, better = estimate.members
    assert (estimate.doubt, estimate.requests) == ("", len(lines))
    assert (incumbent.member, incumbent.gain) == ("round_robin", 0.0)
    assert better.gain > 0.3 > better.error > 0
    assert better.goodput > 0.9


def test_equal_policies_have_no_gain_and_no_error(lines: list[dict[str, Any]]) -> None:
    again = PolicyMember("round_robin", {})
    members = (ROUND_ROBIN, again)
    estimate = evaluate(case_of("round_robin"), members, auto_log.ENDPOINTS, recent(lines))
    assert (estimate.members[1].gain, estimate.members[1].error) == (0.0, 0.0)


def test_a_log_that_the_replay_does_not_reproduce_is_doubted_and_compares_nothing() -> None:
    lines = auto_log.serve("prefix_aware")
    wrong = [line | {"slo_outcome": "ttft_missed"} for line in lines]
    members = (PREFIX_AWARE, ROUND_ROBIN)
    estimate = evaluate(case_of("prefix_aware"), members, auto_log.ENDPOINTS, recent(wrong))
    assert "0% of requests were good, 100% in the replay" in estimate.doubt
    assert [member.member for member in estimate.members] == ["prefix_aware"]


def test_a_gain_is_over_the_goodput_in_the_log_if_the_replay_is_worse_than_the_log(
    lines: list[dict[str, Any]],
) -> None:
    members = (ROUND_ROBIN, PREFIX_AWARE)
    all_met = [line | {"slo_outcome": "met"} for line in lines]
    right = evaluate(case_of("round_robin"), members, auto_log.ENDPOINTS, recent(lines))
    wrong = evaluate(case_of("round_robin"), members, auto_log.ENDPOINTS, recent(all_met))
    served = sum(line["status"] == 200 for line in lines) / len(lines)
    assert wrong.doubt == ""
    assert wrong.members[1].gain == pytest.approx(wrong.members[1].goodput - served)
    assert sum(wrong.members[1].gains) / 8 == pytest.approx(wrong.members[1].gain, abs=0.005)
    assert right.members[1].gain > 0.3


def test_requests_of_an_earlier_policy_do_not_say_whether_the_replay_is_right(
    lines: list[dict[str, Any]],
) -> None:
    lately = recent(lines)
    members = (ROUND_ROBIN, PREFIX_AWARE)
    since_s = arrived_s(lately.lines[-10])
    estimate = evaluate(
        case_of("round_robin"), members, auto_log.ENDPOINTS, lately, in_force_since_s=since_s
    )
    assert estimate.doubt == "the log has only 10 comparable requests of the policy in force"


def test_the_speed_of_an_engine_that_is_slower_than_its_label_says_comes_from_the_log() -> None:
    slow = cases(auto_log.config("round_robin"))["main"]
    kinds = list(slow.fleet.groups)
    kinds[1] = msgspec.structs.replace(kinds[1], slowness=2.0)
    lines = auto_log.serve("prefix_aware", 400, 4.0, kinds=tuple(kinds))
    corrected = calibrate(case_of("prefix_aware"), auto_log.ENDPOINTS, recent(lines))
    fast, twice = (kind.slowness for kind in corrected.fleet.groups)
    assert fast == pytest.approx(1.0, rel=0.1)
    assert twice == pytest.approx(2.0, rel=0.15)


def test_a_job_answers_with_estimates_and_says_which_pools_failed(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    log = tmp_path / "access.jsonl"
    auto_log.write(log, lines, 1000.0)
    now_s = 1000.0 + max(line["time"] + (line["last_us"] or 0) / 1e6 for line in lines)
    config = auto_log.config("round_robin")
    config["pools"]["empty"] = auto_log.pool("round_robin")
    config["models"].append({"name": "other", "pool": "empty"})
    members = (ROUND_ROBIN, PREFIX_AWARE)
    pools = tuple(
        PoolJob(name, auto_log.ENDPOINTS, members, 600.0, 0.0, 0.0) for name in ("main", "empty")
    )
    answer = msgspec.json.decode(
        run_job(ReplayJob(config, str(log), now_s, 0.05, pools)), type=ReplayAnswer
    )
    (estimate,) = answer.estimates
    assert (estimate.pool, estimate.doubt) == ("main", "")
    assert 0.7 * len(lines) < estimate.requests < len(lines)
    assert now_s - 30 < estimate.until_s < now_s
    assert answer.failed == {"empty": f"the access log {log} contains no request for this pool"}
    assert answer.cpu_s > 0


def test_blocks_cover_all_requests_and_equal_blocks_have_no_error() -> None:
    parts = in_blocks(range(103))
    assert (len(parts), sum(map(len, parts))) == (BLOCKS, 103)
    assert error_of_mean([0.25] * BLOCKS) == 0.0
    assert error_of_mean([0.0, 1.0] * (BLOCKS // 2)) == pytest.approx(0.446, abs=0.001)
