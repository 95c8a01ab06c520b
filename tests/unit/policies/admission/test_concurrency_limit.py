"""Tests of the limit on a tenant's requests in progress."""

from __future__ import annotations

import pytest

from policies.admission.concurrency_limit import FIRST_HELD_S, ConcurrencyLimit
from policies.admission.quota import Quota, QuotaLimits


def limit_with(most: int, own: int) -> ConcurrencyLimit:
    limit = ConcurrencyLimit(most)
    limit.take(own)
    return limit


def test_as_many_requests_as_the_limit_may_be_in_progress() -> None:
    limit = limit_with(3, 2)
    assert limit.has_place(1)
    limit.take(1)
    assert not limit.has_place(1)
    limit.release(1, 1.0)
    assert limit.has_place(1)


def test_a_request_with_more_prompts_than_the_limit_runs_alone() -> None:
    limit = ConcurrencyLimit(2)
    assert limit.has_place(5)
    limit.take(5)
    assert not limit.has_place(1)
    limit.release(5, 1.0)
    limit.take(1)
    assert not limit.has_place(5)


def test_requests_at_other_gateways_count_until_these_report_none() -> None:
    limit = limit_with(4, 1)
    limit.set_peer(b"a", 2)
    limit.set_peer(b"b", 1)
    assert limit.in_progress == 4
    assert not limit.has_place(1)
    limit.set_peer(b"a", 0)
    assert limit.in_progress == 2


def test_the_wait_is_the_mean_duration_shared_by_the_requests_in_progress() -> None:
    limit = limit_with(4, 4)
    assert limit.wait_s(1) == pytest.approx(FIRST_HELD_S / 4)
    for _ in range(200):
        limit.release(1, 20.0)
        limit.take(1)
    assert limit.wait_s(1) == pytest.approx(5.0, rel=0.01)
    assert limit.wait_s(2) == pytest.approx(10.0, rel=0.01)
    assert limit.wait_s(9) == pytest.approx(20.0, rel=0.01)
    limit.release(1, 20.0)
    assert limit.wait_s(1) == 0.0


def test_requests_that_were_refused_do_not_shorten_the_wait() -> None:
    limit = limit_with(4, 5)
    for _ in range(200):
        limit.release(1, None)
        limit.take(1)
    limit.release(1, None)
    assert limit.wait_s(1) == pytest.approx(FIRST_HELD_S / 4)


def test_new_limits_keep_the_requests_in_progress_and_the_levels_that_did_not_change() -> None:
    quota = Quota(QuotaLimits(10, 1000, 2))
    assert quota.concurrency is not None
    quota.concurrency.take(2)
    assert quota.take(400, 5.0) is None
    assert quota.with_limits(QuotaLimits(10, 1000, 2)) is quota
    changed = quota.with_limits(QuotaLimits(20, 1000, 3))
    assert changed.levels(5.0) == (20.0, 600.0)
    assert changed.concurrency is not None
    assert changed.concurrency.has_place(1)
    changed.concurrency.take(1)
    assert not changed.concurrency.has_place(1)
    assert changed.with_limits(QuotaLimits(20, 1000)).concurrency is None
