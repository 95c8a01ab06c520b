"""What `make clocks` makes of an access log."""

from __future__ import annotations

import pytest

from bench.load.two_clocks import foreseen_by

LOG = """
{"id":"a","picked_us":1000,"first_token_us":101000,"predicted_ttft_us":90000}
{"id":"b","picked_us":1000,"first_token_us":201000,"predicted_ttft_us":300000}
{"id":"c","picked_us":0,"first_token_us":100000,"predicted_ttft_us":104000}
{"id":"whole answers have no first token","picked_us":1000,"predicted_ttft_us":300000}
{"id":"refused"}
"""


def test_how_well_first_tokens_were_foreseen_counts_from_the_pick_and_over_streams_alone() -> None:
    forecast = foreseen_by(LOG.strip())
    assert forecast is not None
    assert (forecast.mape, forecast.median) == (
        pytest.approx((0.1 + 0.5 + 0.04) / 3),
        pytest.approx(0.1),
    )


def test_a_policy_without_beliefs_foresees_nothing() -> None:
    assert foreseen_by('{"id":"a","picked_us":1000,"first_token_us":101000}') is None
