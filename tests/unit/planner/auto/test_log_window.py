"""Tests of which requests of an access log count when routing policies are compared by it."""

from __future__ import annotations

import msgspec

from planner.auto.log_window import BEGUN_TOKENS, carry_over, choose_window, complete_until
from planner.auto.policy_estimation import evaluate
from planner.plan.config_to_replay import cases
from planner.plan.recent_traffic import RecentTraffic
from planner.traces.access_log import LoggedRequest, arrived_s
from policies.auto.replay_messages import PolicyMember
from tests import auto_log


def line(at_s: float, duration_s: float, tokens: int = 100) -> LoggedRequest:
    return LoggedRequest(
        time=at_s,
        status=200,
        received_us=0,
        prompt_tokens=1000,
        completion_tokens=tokens,
        events=tokens + 2,
        first_token_us=round(0.5e6),
        last_us=round(duration_s * 1e6),
    )


def logged_by(now_s: float, lines: list[LoggedRequest]) -> list[LoggedRequest]:
    return [one for one in lines if one.time + (one.last_us or 0) / 1e6 <= now_s]


def test_requests_that_arrived_within_the_usual_duration_of_an_answer_do_not_count() -> None:
    lines = [line(at, 20.0 if at % 10 else 1.0) for at in range(100)]
    assert complete_until(logged_by(100.0, lines), 100.0) == 80.0


def test_requests_after_the_complete_part_of_a_log_are_replayed_but_not_counted() -> None:
    case = cases(auto_log.config("prefix_aware"))["main"]
    served = [
        msgspec.convert(one, LoggedRequest) for one in auto_log.serve("prefix_aware", 400, 20.0)
    ]
    now_s = 8.0
    lines = sorted(logged_by(now_s, served), key=arrived_s)
    chosen = choose_window(RecentTraffic(lines, arrived_s(lines[0]), 1.0), 1.0, now_s)
    arrived = [arrived_s(one) for one in served]
    counted = sum(1.0 <= at < chosen.until_s for at in arrived)
    assert counted * 0.03 > counted - sum(map(chosen.counts, map(arrived_s, lines)))
    assert sum(chosen.until_s <= at < now_s for at in arrived) > len(lines) - counted
    estimate = evaluate(case, [PolicyMember("prefix_aware")], auto_log.ENDPOINTS, chosen)
    assert estimate.requests == sum(map(chosen.counts, map(arrived_s, lines)))
    assert estimate.until_s == chosen.until_s


def test_the_newest_requests_are_replayed_and_a_third_of_them_warms_the_caches() -> None:
    lines = [line(float(at), 1.0) for at in range(1000)]
    lately = RecentTraffic(lines, 0.0, 0.0)
    chosen = choose_window(lately, 0.0, 1000.0, 300)
    assert chosen.until_s == 999.0
    assert sum(one.time < 999.0 for one in chosen.lines) == 300
    assert chosen.from_s == 799.0
    assert choose_window(lately, 0.0, 1000.0, 10_000).from_s == 0.0
    assert choose_window(lately, 900.0, 1000.0, 300).from_s == 900.0


def test_more_requests_are_replayed_if_many_are_in_progress_at_a_time() -> None:
    lines = logged_by(1000.0, [line(float(at), 200.0) for at in range(1000)])
    chosen = choose_window(RecentTraffic(lines, 0.0, 0.0), 0.0, 1000.0, 300)
    after = sum(one.time >= chosen.until_s for one in chosen.lines)
    assert sum(chosen.begins_s < one.time for one in chosen.lines) == 299 + after
    long = [line(float(at), 1.0 if at % 4 else 200.0) for at in range(1000)]
    many = choose_window(RecentTraffic(logged_by(1000.0, long), 0.0, 0.0), 0.0, 1000.0, 300)
    after = sum(one.time >= many.until_s for one in many.lines)
    assert sum(many.begins_s < one.time < many.until_s for one in many.lines) > 2 * after > 290


def test_requests_in_progress_at_the_beginning_are_replayed_with_the_rest_of_their_answers() -> (
    None
):
    ended, waiting, begun = line(0.0, 5.0), line(9.8, 20.0), line(9.5 - 0.5 - 9.0, 19.5 - 0.0)
    carried = carry_over([ended, waiting, begun], 10.0)
    assert [one.time for one in carried] == [10.0, 10.0]
    assert (carried[0].prompt_tokens, carried[0].completion_tokens) == (1000, 100)
    assert carried[1].prompt_tokens == BEGUN_TOKENS
    assert carried[1].completion_tokens == 50
