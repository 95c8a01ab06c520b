"""Property tests of the Kalman filter that corrects the predicted speed of an engine."""

from __future__ import annotations

from math import exp

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.engine.kalman import MOST_CORRECTION, KalmanFilter

PRIORS = (0.25, 0.02, 0.1)
SEEN = st.tuples(
    st.floats(1e-6, 1e6), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 10.0)
)


@given(st.lists(SEEN, max_size=60))
def test_factors_stay_within_their_bounds_and_nothing_is_known_better_than_certain(
    seen: list[tuple[float, float, float, float]],
) -> None:
    learnt = KalmanFilter(*PRIORS)
    for ratio, second, third, noise in seen:
        learnt.observe(ratio, (1.0, second, third), noise)
        assert all(
            exp(-MOST_CORRECTION) * 0.999 <= factor <= exp(MOST_CORRECTION) * 1.001
            for factor in learnt.factors
        )
        covar = np.array(learnt.covar)
        assert np.allclose(covar, covar.T, atol=1e-12)
        assert np.linalg.eigvalsh(covar).min() > -1e-9
        assert 0.0 < learnt.covar[0][0] <= PRIORS[0] * 1.001
        assert 0.0 <= learnt.var <= 1.0


@given(st.floats(0.2, 5.0), st.floats(0.5, 2.0), st.integers(0, 1000))
def test_two_factors_observed_in_all_mixtures_are_both_learned(
    whole: float, part: float, seed: int
) -> None:
    learnt, rng = KalmanFilter(0.25, 0.1), np.random.default_rng(seed)
    for _ in range(300):
        raw, noise = rng.uniform(0.0, 1.0), exp(rng.normal(0.0, 0.01))
        truth = whole * (1.0 - raw + raw * part)
        first, second = learnt.factors
        believed = first * (1.0 - raw + raw * second)
        learnt.observe(
            noise * truth / believed, (1.0, raw * second / (1.0 - raw + raw * second)), 0.01**2
        )
    assert abs(learnt.factors[0] / whole - 1.0) < 0.05
    assert abs(learnt.factors[1] / part - 1.0) < 0.1


def test_a_part_that_changes_after_years_of_one_truth_is_followed_and_leaves_the_rest_alone() -> (
    None
):
    learnt, rng = KalmanFilter(0.25, 0.1), np.random.default_rng(7)
    for part, times in ((1.0, 5000), (0.5, 500)):
        for _ in range(times):
            raw = rng.uniform(0.1, 0.9)
            first, second = learnt.factors
            believed = first * (1.0 - raw + raw * second)
            learnt.observe(
                (1.0 - raw + raw * part) / believed, (1.0, raw * second * first / believed), 0.01**2
            )
        assert abs(learnt.factors[0] - 1.0) < 0.05
        assert abs(learnt.factors[1] / part - 1.0) < 0.1
