"""Tests that estimated quantiles are within 2% of the true ones, also if samples are merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics.quantile_sketch import (
    MAX_VALUE,
    MIN_VALUE,
    RELATIVE_ERROR,
    bucket_of,
    difference,
    merge_counts,
    quantile,
    value_of,
)

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
SAMPLES = 100_000
Draw = Callable[[Random], float]
DISTRIBUTIONS: dict[str, Draw] = {
    "log-normal": lambda rng: rng.lognormvariate(-2.0, 1.5),
    "exponential": lambda rng: rng.expovariate(20.0),
    "pareto": lambda rng: 0.01 * rng.paretovariate(1.1),
    "two modes": lambda rng: rng.gauss(0.03, 0.001) if rng.random() < 0.97 else rng.gauss(8.0, 0.5),
    "uniform": lambda rng: rng.uniform(0.001, 60.0),
}
seconds = st.floats(MIN_VALUE, MAX_VALUE)


def sketch(values: list[float]) -> dict[int, int]:
    return dict(Counter(map(bucket_of, values)))


def exact(values: list[float], share: float) -> float:
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_quantiles_of_100k_samples_are_within_2_percent(name: str) -> None:
    rng = Random(name)
    values = [max(MIN_VALUE, DISTRIBUTIONS[name](rng)) for _ in range(SAMPLES)]
    counts = sketch(values)
    for share in SHARES:
        assert quantile(counts, share) == pytest.approx(exact(values, share), rel=0.02)


@given(st.lists(seconds, min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_relative_error_of_an_observation(
    values: list[float], share: float
) -> None:
    assert quantile(sketch(values), share) == pytest.approx(
        exact(values, share), rel=RELATIVE_ERROR * 1.001
    )


@given(seconds)
def test_one_sample_is_every_quantile(value: float) -> None:
    estimates = {quantile(sketch([value]), share) for share in SHARES}
    assert estimates == {value_of(bucket_of(value))}
    assert value_of(bucket_of(value)) == pytest.approx(value, rel=RELATIVE_ERROR * 1.001)


@given(st.lists(st.lists(seconds, max_size=20), max_size=5))
def test_merged_sketches_are_the_sketch_of_all_observations(parts: list[list[float]]) -> None:
    assert merge_counts(map(sketch, parts)) == sketch([value for part in parts for value in part])


@given(st.lists(seconds, max_size=20), st.lists(seconds, max_size=20))
def test_the_difference_of_two_moments_is_the_sketch_of_the_observations_between(
    old: list[float], new: list[float]
) -> None:
    assert difference(sketch(old + new), sketch(old)) == sketch(new)


def test_a_reset_sketch_counts_from_zero() -> None:
    assert difference({5: 1}, {5: 4, 6: 1}) == {5: 1}


def test_values_out_of_range_are_counted_at_its_ends_and_memory_is_bounded() -> None:
    assert [bucket_of(value) for value in (-1.0, 0.0, 1e-9)] == [bucket_of(MIN_VALUE)] * 3
    assert bucket_of(1e9) == bucket_of(MAX_VALUE)
    assert bucket_of(MAX_VALUE) - bucket_of(MIN_VALUE) < 1_300


def test_without_observations_there_is_no_quantile() -> None:
    assert quantile({}, 0.5) is None
