"""Tests of how `make clocks` computes errors of latency predictions from an access log."""

from __future__ import annotations

import pytest

from bench.load.replay_accuracy import prediction_errors

LOG = """
{"id":"a","picked_us":1000,"first_token_us":101000,"predicted_ttft_us":90000}
{"id":"b","picked_us":1000,"first_token_us":201000,"predicted_ttft_us":300000}
{"id":"c","picked_us":0,"first_token_us":100000,"predicted_ttft_us":104000}
{"id":"whole answers have no first token","picked_us":1000,"predicted_ttft_us":300000}
{"id":"refused"}
"""


def test_prediction_errors_count_from_the_pick_and_for_streams_only() -> None:
    errors = prediction_errors(LOG.strip())
    assert errors is not None
    assert (errors.mape, errors.median) == (
        pytest.approx((0.1 + 0.5 + 0.04) / 3),
        pytest.approx(0.1),
    )


def test_a_policy_without_predictions_has_no_prediction_errors() -> None:
    assert prediction_errors('{"id":"a","picked_us":1000,"first_token_us":101000}') is None
