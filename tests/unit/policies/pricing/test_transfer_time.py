"""Tests of predicted KV transfer times: measured rates per pair of engines, and queues."""

from __future__ import annotations

from math import inf

import pytest

from policies.pricing.transfer_time import (
    LEAST_TOKENS,
    MEMORY_S,
    MEMORY_TOKENS,
    PendingTransfer,
    TransferTimes,
)

PAIR, OTHER, EXPECTED_S = ("p0", "d0"), ("p0", "d1"), 1e-5


def measured(token_s: float, handoffs: int = 40, tokens: int = 8_000) -> TransferTimes:
    times = TransferTimes()
    for number in range(handoffs):
        times.record(PAIR, tokens, tokens * token_s, float(number))
    return times


def test_a_fleet_without_handoffs_is_expected_to_be_as_configured() -> None:
    assert TransferTimes().speed(PAIR, EXPECTED_S, 0.0).token_s == pytest.approx(EXPECTED_S)


def test_a_slow_link_is_learnt_for_its_pair_and_expected_of_the_others() -> None:
    times = measured(1e-3)
    assert times.speed(PAIR, EXPECTED_S, 40.0).token_s == pytest.approx(1e-3, rel=0.1)
    assert 1e-4 < times.speed(OTHER, EXPECTED_S, 40.0).token_s < 1e-3


def test_a_handoff_counts_at_once_also_in_the_moment_of_an_earlier_forecast() -> None:
    times, twin = measured(1e-3), measured(1e-3)
    before = times.speed(PAIR, EXPECTED_S, 40.0).token_s
    for each in (times, twin):
        each.record(PAIR, 8_000, 8.0 * EXPECTED_S, 40.0)
    after = times.speed(PAIR, EXPECTED_S, 40.0)
    assert after.token_s < before
    assert after == twin.speed(PAIR, EXPECTED_S, 40.0)


def test_pairs_with_handoffs_of_their_own_differ() -> None:
    times = measured(1e-3)
    for number in range(40):
        times.record(OTHER, 8_000, 8_000 * EXPECTED_S, float(number))
    assert (
        times.speed(OTHER, EXPECTED_S, 40.0).token_s
        < 0.1 * times.speed(PAIR, EXPECTED_S, 40.0).token_s
    )


def test_a_new_pair_is_expected_to_be_like_those_with_the_same_prefill_or_decode_engine() -> None:
    # A slow link connects two racks: one has p0 and d0, the other p1 and d1. p2 and d2 are new.
    times = TransferTimes()
    for number in range(40):
        for names, token_s in (
            (("p0", "d0"), 1e-6),
            (("p1", "d1"), 1e-6),
            (("p0", "d1"), 1e-3),
            (("p1", "d0"), 1e-3),
            (("p2", "d0"), 1e-6),
            (("p1", "d2"), 1e-3),
        ):
            times.record(names, 8_000, 8_000 * token_s, float(number))
    usual_s = times.speed(("p9", "d9"), EXPECTED_S, 40.0).token_s
    near_s, far_s = (times.speed(("p2", name), EXPECTED_S, 40.0).token_s for name in ("d9", "d2"))
    assert near_s < 0.2 * usual_s
    assert near_s < far_s
    assert times.speed(("p9", "d2"), EXPECTED_S, 40.0).token_s > 1.5 * usual_s
    # The same holds for a pair whose own handoffs were long ago.
    times.record(("p9", "d2"), 8_000, 0.0, 40.0)
    later_s = 40.0 + 3.0 * MEMORY_S
    for number in range(20):
        times.record(("p1", "d2"), 8_000, 8.0, later_s + number)
    assert times.speed(("p9", "d2"), EXPECTED_S, later_s + 20.0).token_s == pytest.approx(
        1e-3, rel=0.2
    )


def test_a_link_that_has_become_quick_is_believed_after_some_handoffs() -> None:
    times = measured(1e-3)
    for number in range(40):
        times.record(PAIR, 8_000, 0.0, 40.0 + number)
    assert times.speed(PAIR, EXPECTED_S, 80.0).token_s < 1e-4
    assert MEMORY_TOKENS < 40 * 8_000


def test_a_pair_without_handoffs_for_long_is_tried_again() -> None:
    times = measured(1e-3)
    assert times.speed(PAIR, EXPECTED_S, 20.0 * MEMORY_S).token_s == pytest.approx(
        EXPECTED_S, rel=0.01
    )


def test_small_handoffs_teach_the_fixed_time_and_not_the_rate() -> None:
    times = TransferTimes()
    for number in range(20):
        times.record(PAIR, LEAST_TOKENS - 1, 0.5, float(number))
    speed = times.speed(PAIR, EXPECTED_S, 20.0)
    assert speed.token_s == pytest.approx(EXPECTED_S)
    assert speed.fixed_s == pytest.approx(0.5, rel=0.1)
    assert speed.service_s(100) == pytest.approx(100 * EXPECTED_S + speed.fixed_s)
    assert 0.0 < times.speed(("p9", "d9"), EXPECTED_S, 20.0).fixed_s <= speed.fixed_s


def test_the_fixed_time_is_not_learnt_a_second_time_as_the_rate() -> None:
    times = TransferTimes()
    for number in range(40):
        times.record(PAIR, 100, 0.5, float(number))
        times.record(PAIR, 1_000, 0.6, float(number))
    assert times.speed(PAIR, EXPECTED_S, 40.0).service_s(1_000) == pytest.approx(0.6, rel=0.1)


def test_a_burst_of_short_prompts_over_a_slow_link_is_seen_in_its_queue() -> None:
    times = TransferTimes()
    for number in range(20):
        times.record(PAIR, 80, 0.04, float(number))
    for _ in range(25):
        times.begin(PAIR, 80, EXPECTED_S, 20.0)
    assert times.backlog_s(PAIR, 20.0) == pytest.approx(25 * 0.04, rel=0.15)


def test_a_negative_time_counts_as_none() -> None:
    times = TransferTimes()
    times.record(PAIR, 8_000, -3.0, 0.0)
    assert 0.0 < times.speed(PAIR, EXPECTED_S, 0.0).token_s < EXPECTED_S


def test_the_first_transfer_over_each_link_of_an_unmeasured_fleet_is_a_test() -> None:
    times = TransferTimes()
    first = times.begin(PAIR, 1_000, EXPECTED_S, 0.0)
    assert not times.is_measured(0.0)
    assert times.backlog_s(PAIR, 0.0) == times.backlog_s(OTHER, 0.0) == inf
    assert times.backlog_s(("p1", "d1"), 0.0) == 0.0
    second = times.begin(("p1", "d1"), 1_000, EXPECTED_S, 0.0)
    first.on_ready(1.0)
    assert times.backlog_s(PAIR, 2.9) == inf  # also when it is overdue
    first.end(3.0)
    times.learn(first, 1.0, 3.0)
    assert times.is_measured(3.0)
    assert times.backlog_s(PAIR, 3.0) == 0.0
    assert 0.0 < times.backlog_s(("p1", "d1"), 3.0) < 1.0
    second.cancel()


def test_a_test_whose_time_is_unknown_ends_and_teaches_no_speed() -> None:
    times = TransferTimes()
    cancelled, first, second = (times.begin(PAIR, 1_000, EXPECTED_S, 0.0) for _ in range(3))
    cancelled.cancel()
    times.learn(cancelled, None, 5.0)
    assert not times.is_measured(5.0)
    first.end(5.0)
    times.learn(first, None, 5.0)
    assert times.speed(PAIR, EXPECTED_S, 5.0).service_s(1_000) == pytest.approx(1_000 * EXPECTED_S)
    assert times.backlog_s(PAIR, 5.0) == pytest.approx(1_000 * EXPECTED_S)
    second.cancel()


def test_a_fleet_of_which_nothing_was_learnt_for_long_is_tested_again() -> None:
    times = measured(1e-3)
    ended_s = 39.0
    times.begin(PAIR, 1_000, EXPECTED_S, 50.0)
    assert times.backlog_s(PAIR, ended_s + MEMORY_S) < inf
    assert times.backlog_s(PAIR, ended_s + MEMORY_S + 1.0) == inf


def test_a_transfer_that_is_given_up_teaches_an_unmeasured_fleet_that_links_are_slow() -> None:
    times = TransferTimes()
    transfer = times.begin(PAIR, 8_000, EXPECTED_S, 0.0)
    transfer.on_ready(1.0)
    times.give_up(transfer, 1.0, 61.0)
    assert times.is_measured(61.0)
    assert times.backlog_s(PAIR, 61.0) == 0.0
    assert times.speed(("p9", "d9"), EXPECTED_S, 61.0).service_s(8_000) > 20.0


@pytest.mark.parametrize("tokens", [100, 8_000])
def test_a_transfer_that_is_given_up_in_a_measured_fleet_teaches_its_pair_alone(
    tokens: int,
) -> None:
    times = measured(EXPECTED_S)
    before = times.speed(PAIR, EXPECTED_S, 61.0)
    hanging = times.begin(("p1", "d1"), tokens, EXPECTED_S, 0.0)
    times.give_up(hanging, 1.0, 61.0)
    assert times.speed(("p1", "d1"), EXPECTED_S, 61.0).service_s(tokens) > 20.0
    assert times.speed(PAIR, EXPECTED_S, 61.0) == before


@pytest.mark.parametrize("tokens", [100, 8_000])
def test_a_transfer_that_is_given_up_after_a_pause_teaches_its_pair_alone(tokens: int) -> None:
    times, pair = measured(EXPECTED_S, tokens=tokens), ("p1", "d1")
    now = 40.0 + 1.5 * MEMORY_S
    before = times.speed(PAIR, EXPECTED_S, now)
    times.give_up(times.begin(pair, tokens, EXPECTED_S, now - 60.0), now - 60.0, now)
    assert times.speed(pair, EXPECTED_S, now).service_s(tokens) > 20.0
    assert times.speed(PAIR, EXPECTED_S, now) == before


def test_a_transfer_that_has_ended_or_was_cancelled_is_not_given_up() -> None:
    times = TransferTimes()
    ended, cancelled = (times.begin(PAIR, 8_000, EXPECTED_S, 0.0) for _ in range(2))
    ended.end(1.0)
    cancelled.cancel()
    for transfer in (ended, cancelled):
        times.give_up(transfer, 1.0, 61.0)
    assert not times.is_measured(61.0)


def test_the_measurements_of_a_removed_endpoint_are_dropped() -> None:
    times = measured(1e-3)
    before = times.speed(OTHER, EXPECTED_S, 40.0).token_s
    times.forget_endpoint("d0")
    assert times.speed(PAIR, EXPECTED_S, 40.0).token_s == before


# The queues of the links

TOKENS, TOKEN_S = 1_000, 1e-3


def new_times() -> TransferTimes:
    """Return transfer times learned from a single KV transfer, which took as long as expected."""
    times = TransferTimes()
    times.record(("p8", "d8"), TOKENS, TOKENS * TOKEN_S, 0.0)
    return times


def begin(times: TransferTimes, names: tuple[str, str] = PAIR) -> PendingTransfer:
    return times.begin(names, TOKENS, TOKEN_S, 0.0)


def begin_ready(times: TransferTimes, now: float) -> PendingTransfer:
    transfer = begin(times)
    transfer.on_ready(now)
    return transfer


def test_transfers_over_a_link_follow_one_another() -> None:
    times = new_times()
    assert times.backlog_s(PAIR, 5.0) == 0.0
    first, *_ = [begin_ready(times, 5.0) for _ in range(3)]
    assert times.backlog_s(PAIR, 5.0) == pytest.approx(3.0)
    assert times.backlog_s(PAIR, 5.75) == pytest.approx(2.25)
    first.end(6.0)
    assert times.backlog_s(PAIR, 6.5) == pytest.approx(1.5)


def test_a_transfer_uses_the_outgoing_and_the_incoming_link_of_its_pair() -> None:
    times = new_times()
    begin(times, ("p0", "d0"))
    assert times.backlog_s(("p0", "d1"), 0.0) == pytest.approx(1.0)
    assert times.backlog_s(("p1", "d0"), 0.0) == pytest.approx(1.0)
    assert times.backlog_s(("p1", "d1"), 0.0) == 0.0
    assert times.backlog_s(("d0", "p0"), 0.0) == 0.0  # the other directions


def test_kv_that_is_not_computed_is_not_moved_and_an_overdue_transfer_has_ended_none_else() -> None:
    times = new_times()
    first, second = begin(times), begin(times)
    assert times.backlog_s(PAIR, 9.0) == pytest.approx(2.0)
    second.on_ready(9.0)
    assert times.backlog_s(PAIR, 9.5) == pytest.approx(1.5)
    assert times.backlog_s(PAIR, 99.0) == pytest.approx(1.0)
    second.end(99.0)
    first.on_ready(100.0)
    assert times.backlog_s(PAIR, 100.5) == pytest.approx(0.5)


def test_transfers_that_wait_take_as_long_as_their_link_is_known_to_need_now() -> None:
    # All transfers of the burst begin before the first handoff shows that the link is ten times
    # slower than forecast.
    times = new_times()
    burst = [times.begin(PAIR, 100_000, TOKEN_S, 0.0) for _ in range(4)]
    other = times.begin(("p9", "d9"), 100_000, TOKEN_S, 0.0)
    for transfer in (*burst, other):
        transfer.on_ready(0.0)
    assert times.backlog_s(PAIR, 0.0) == pytest.approx(400.0)
    burst[0].end(1000.0)
    times.learn(burst[0], 0.0, 1000.0)
    known_s = times.speed(PAIR, TOKEN_S, 1000.0).token_s
    assert known_s > 8.0 * TOKEN_S
    assert times.backlog_s(PAIR, 1000.0) == pytest.approx(3.0 * 100_000 * known_s)
    assert times.backlog_s(PAIR, 1500.0) == pytest.approx(3.0 * 100_000 * known_s - 500.0)
    # A link without a completed handoff keeps its forecast until its next transfer begins.
    assert times.backlog_s(("p9", "d9"), 0.0) == pytest.approx(100.0)
    for transfer in burst[1:]:
        transfer.cancel()
    assert times.backlog_s(PAIR, 1500.0) == 0.0


def test_a_transfer_of_another_pair_over_the_same_link_is_expected_at_the_known_rate() -> None:
    times = new_times()
    slow, same_link = (times.begin(names, 100_000, TOKEN_S, 0.0) for names in (PAIR, OTHER))
    slow.on_ready(0.0)
    slow.end(1000.0)
    times.learn(slow, 0.0, 1000.0)
    assert times.backlog_s(("p0", "d9"), 1000.0) > 5.0 * 100_000 * TOKEN_S
    same_link.cancel()
    assert times.backlog_s(("p0", "d9"), 1000.0) == 0.0


def test_the_wait_for_a_link_is_not_learnt_as_its_rate() -> None:
    times, now = new_times(), 0.0
    for _ in range(40):
        burst = [begin_ready(times, now) for _ in range(8)]
        for place, transfer in enumerate(burst, start=1):
            transfer.end(now + place)
            times.learn(transfer, now, now + place)
        now += 20.0
    assert times.speed(PAIR, 1e-3, now).token_s == pytest.approx(1e-3, rel=0.01)


def test_transfers_that_share_a_link_at_a_time_teach_its_rate_in_the_mean() -> None:
    # Eight transfers share the link, each at an eighth of its rate, and end together.
    times, now = new_times(), 0.0
    for _ in range(40):
        for transfer in [begin_ready(times, now) for _ in range(8)]:
            transfer.end(now + 8.0)
            times.learn(transfer, now, now + 8.0)
        now += 20.0
    assert times.speed(PAIR, 1e-3, now).token_s == pytest.approx(1e-3, rel=0.01)


def test_a_cancelled_transfer_leaves_its_links_and_teaches_nothing() -> None:
    times = new_times()
    first, second = begin_ready(times, 0.0), begin(times)
    first.cancel()
    assert times.backlog_s(PAIR, 0.5) == pytest.approx(1.0)
    for transfer in (first, second):
        transfer.cancel()
        transfer.on_ready(49.0)
        transfer.end(50.0)
        times.learn(transfer, 0.0, 50.0)
    assert times.backlog_s(PAIR, 50.0) == 0.0
    assert times.speed(PAIR, TOKEN_S, 50.0).token_s == pytest.approx(TOKEN_S)


def test_the_links_of_a_removed_endpoint_are_dropped_also_during_a_transfer() -> None:
    times = new_times()
    transfer = begin(times)
    times.forget_endpoint("d0")
    assert times.backlog_s(("p9", "d0"), 0.0) == 0.0
    transfer.end(1.0)
    assert times.backlog_s(PAIR, 1.0) == 0.0


def test_a_forecast_counts_the_transfers_of_each_link_until_they_end() -> None:
    times = measured(1e-4)
    first, _ = (times.begin(names, 8_000, EXPECTED_S, 40.0) for names in (PAIR, OTHER))
    forecast = times.forecast(EXPECTED_S, 40.0)
    assert [forecast.waits(end)[0] for end in ((0, "p0"), (1, "d0"), (1, "d1"))] == [2, 1, 1]
    assert forecast.waits((0, "p0"))[1] == pytest.approx(times.backlog_s(PAIR, 40.0))
    assert forecast.waits((1, "p0")) == (0, 0.0)
    first.on_ready(40.0)
    first.end(40.8)
    later = times.forecast(EXPECTED_S, 40.8)
    assert [later.waits(end)[0] for end in ((0, "p0"), (1, "d0"), (1, "d1"))] == [1, 0, 1]
