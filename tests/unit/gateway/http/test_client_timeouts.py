"""Tests of the deadlines of client connections in each phase of a request."""

from __future__ import annotations

import pytest

from gateway.config import Limits
from gateway.http.client_timeouts import (
    BODY_GRACE_S,
    LINGER_S,
    Expiry,
    body_expiry,
    closing_expiry,
    head_expiry,
    idle_expiry,
    reader_expiry,
)

LIMITS = Limits()


def test_a_client_that_does_not_read_is_aborted() -> None:
    assert reader_expiry(LIMITS.slow_reader, LIMITS) is None
    assert reader_expiry(LIMITS.slow_reader + 0.1, LIMITS) is Expiry.ABORT


def test_the_first_request_must_begin_sooner_than_later_ones() -> None:
    age_s = LIMITS.headers_timeout + 0.1
    assert idle_expiry(age_s, LIMITS, has_sent_nothing=True) is Expiry.CLOSE
    assert idle_expiry(age_s, LIMITS, has_sent_nothing=False) is None
    age_s = LIMITS.idle_timeout + 0.1
    assert idle_expiry(age_s, LIMITS, has_sent_nothing=False) is Expiry.CLOSE


def test_a_head_must_be_complete_in_time() -> None:
    assert head_expiry(LIMITS.headers_timeout, LIMITS) is None
    assert head_expiry(LIMITS.headers_timeout + 0.1, LIMITS) is Expiry.HEAD_TIMEOUT


@pytest.mark.parametrize(
    ("age_s", "received", "expiry"),
    [
        (BODY_GRACE_S, 0, None),
        (BODY_GRACE_S + 2, 2 * LIMITS.body_min_rate, None),
        (BODY_GRACE_S + 2, 2 * LIMITS.body_min_rate - 1, Expiry.BODY_TIMEOUT),
        (LIMITS.body_timeout + 0.1, LIMITS.body, Expiry.BODY_TIMEOUT),
    ],
)
def test_a_body_has_a_minimum_rate_and_a_timeout(
    age_s: float, received: int, expiry: Expiry | None
) -> None:
    assert body_expiry(age_s, received, LIMITS) is expiry


def test_closing_takes_longer_only_while_a_response_is_sent() -> None:
    age_s = LINGER_S + 0.1
    assert closing_expiry(age_s, LIMITS, is_flushing=True) is None
    assert closing_expiry(age_s, LIMITS, is_flushing=False) is Expiry.ABORT
    assert closing_expiry(LIMITS.slow_reader + 0.1, LIMITS, is_flushing=True) is Expiry.ABORT
