"""Tests of refusals: their reasons, their texts, and when the client should retry."""

from __future__ import annotations

from math import inf

import pytest

from policies.admission.refusals import shed_queue_full, shed_timed_out
from tests.unit.policies.builders import View, draining


def test_a_full_waiting_room_sheds_without_a_guess_before_anything_was_measured() -> None:
    verdict = shed_queue_full(View(24, 24, 3), None)
    assert (verdict.reason, verdict.retry_after_s) == ("waiting_room_full", None)
    assert (
        verdict.detail
        == "The wait queue is full. The pool has 24 of at most 24 requests running and 3 waiting."
    )


def test_a_full_wait_queue_returns_a_retry_after() -> None:
    verdict = shed_queue_full(View(24, 24, 3, draining(2.0)), 2.0)
    assert verdict.retry_after_s == pytest.approx(2.0, rel=0.1)
    assert verdict.detail.endswith("3 waiting; capacity is expected in 2.0 s.")


def test_a_refusal_without_any_time_tells_the_client_not_to_return() -> None:
    verdict = shed_queue_full(View(24, 24, 3, draining(2.0)), inf)
    assert (verdict.retry_after_s, verdict.may_return) == (None, False)
    assert verdict.detail.endswith("3 waiting; no capacity is expected in the next minutes.")


def test_a_timed_out_request_gets_the_time_of_its_return() -> None:
    verdict = shed_timed_out(View(24, 24, 4, draining(1.0)), 5.0)
    assert verdict.reason == "waited_too_long"
    assert verdict.retry_after_s == pytest.approx(5.0, rel=0.1)
