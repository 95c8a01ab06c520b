"""Property tests of tenants' quotas: no more is admitted than a quota allows per minute.

A refused client gets a time for its retry, and is admitted then.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.admission.peer_quota_usage import apply_peer_usage, quota_usage
from policies.admission.quota import Quota, QuotaLimits

COMES = st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(1, 5000)), min_size=1, max_size=60)


@given(st.integers(1, 200), st.integers(1, 20_000), COMES)
def test_a_quota_admits_one_minutes_worth_and_then_the_refill(
    requests: int, tokens: int, comes: list[tuple[float, int]]
) -> None:
    quota, now, count, total, largest = Quota(QuotaLimits(requests, tokens)), 1000.0, 0, 0, 0
    for gap_s, amount in comes:
        now += gap_s
        if quota.take(amount, now) is None:
            count, total, largest = count + 1, total + amount, max(largest, amount)
        filled = 1.0 + (now - 1000.0) / 60.0
        assert count <= requests * filled + 1e-6
        assert total <= tokens * filled + max(0, largest - tokens) + 1e-3


@given(
    st.integers(1, 2**40),
    st.integers(1, 2**40),
    st.lists(st.integers(1, 2**24), min_size=1, max_size=30),
)
def test_a_client_that_returns_on_time_is_admitted(
    requests: int, tokens: int, amounts: list[int]
) -> None:
    quota, now = Quota(QuotaLimits(requests, tokens)), 5.0
    for amount in amounts:
        refused = quota.take(amount, now)
        if refused is not None:
            assert refused.retry_after_s > 0.0
            assert refused.remaining >= 0
            now += refused.retry_after_s
            assert quota.take(amount, now) is None


@given(COMES)
def test_what_was_refused_elsewhere_or_taken_too_much_comes_back(
    comes: list[tuple[float, int]],
) -> None:
    quota = Quota(QuotaLimits(10, 50_000))
    for _ in range(3):
        for _, amount in comes[:10]:
            assert quota.take(amount, 0.0) is None
            quota.correct(-amount // 2)
            quota.refund(amount - -(-amount // 2))
    assert quota.take(1, 0.0) is None


def test_a_clock_that_goes_back_refills_nothing() -> None:
    quota = Quota(QuotaLimits(1))
    assert quota.take(1, 100.0) is None
    refused = quota.take(1, 40.0)
    assert refused is not None
    assert (refused.what, refused.limit, refused.remaining, refused.retry_after_s) == (
        "requests",
        1,
        0,
        60.0,
    )


class Gateways:
    def __init__(self, size: int, limit: int) -> None:
        self.quotas = [Quota(QuotaLimits(None, limit)) for _ in range(size)]
        self.unreported = [0] * size
        self.admitted = [0] * size

    def take(self, at: int, tokens: int, now: float) -> None:
        if self.quotas[at].take(tokens, now) is None:
            self.unreported[at] += tokens
            self.admitted[at] += tokens

    def report(self, at: int, now: float) -> None:
        reported, self.unreported[at] = quota_usage(self.quotas[at], 0, self.unreported[at], now), 0
        for other, quota in enumerate(self.quotas):
            if other != at:
                apply_peer_usage(
                    quota, reported, quota_usage(quota, 0, self.unreported[other], now)
                )


@given(
    st.integers(2, 4),
    st.integers(1_000, 4_000),
    st.lists(
        st.tuples(st.floats(0.0, 0.5), st.integers(0, 3), st.integers(1, 1000)),
        min_size=20,
        max_size=80,
    ),
)
def test_connected_gateways_admit_as_much_as_one_plus_the_update_interval(
    size: int, limit: int, comes: list[tuple[float, int, int]]
) -> None:
    gateways, now, reported_at, before, most = Gateways(size, limit), 1000.0, 1000.0, 0, 0
    for gap_s, index, amount in comes:
        now += gap_s
        while reported_at + 0.1 <= now:
            reported_at += 0.1
            for index in range(size):
                gateways.report(index, reported_at)
            before = sum(gateways.admitted)
            if reported_at + 60.0 < now:
                reported_at = now
        gateways.take(index % size, amount, now)
        most = max(most, sum(gateways.admitted) - before)
        assert sum(gateways.admitted) <= limit * (1.0 + (now - 1000.0) / 60.0) + most + 1e-3


@given(st.integers(2, 4), st.integers(0, 3))
def test_a_gateway_that_comes_later_knows_soon_that_a_quota_is_used_up(
    size: int, late: int
) -> None:
    gateways, now = Gateways(size, 6000), 0.0

    def minute() -> list[int]:
        nonlocal now
        before = list(gateways.admitted)
        for _ in range(600):
            now += 0.1
            for index in range(size):
                gateways.take(index, 20, now)
                gateways.report(index, now)
        return [after - was for after, was in zip(gateways.admitted, before, strict=True)]

    minute()
    gateways.quotas[late % size] = Quota(QuotaLimits(None, 6000))
    assert sum(minute()) <= 12_200  # a minute's worth, and the new gateway's full bucket
    left = [quota.levels(now)[1] or 0.0 for quota in gateways.quotas]
    assert max(left) - min(left) < 1.0
    assert sum(minute()) == 6000
