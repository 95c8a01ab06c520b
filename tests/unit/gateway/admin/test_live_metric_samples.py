"""Tests of differences between consecutive metric samples, and their history of one minute."""

from __future__ import annotations

import itertools
import tracemalloc
from random import Random

from gateway.admin.live_metric_samples import (
    HISTORY_S,
    MetricSample,
    SampleHistory,
    SketchGrowth,
    counter_growth,
    sketch_growth,
)
from tests.unit.gateway.admin.empty import mark

MIB = 2**20


def test_growth_contains_only_counters_that_have_grown() -> None:
    assert counter_growth({"a": 3.0, "b": 1.0, "c": 2.0}, {"a": 1.0, "b": 1.0}) == {
        "a": 2.0,
        "c": 2.0,
    }


def test_history_keeps_one_minute_and_drops_samples_that_are_too_close() -> None:
    marks = SampleHistory()
    for step in range(400):
        marks.append(mark(at=step * 0.5))
    times = [sample.at for sample in marks]
    assert times[-1] - times[0] <= HISTORY_S
    assert all(later - earlier >= 0.95 for earlier, later in itertools.pairwise(times))
    assert len(times) == 62


def test_find_before_returns_the_newest_sample_that_is_old_enough() -> None:
    marks = SampleHistory()
    assert marks.find_before(5.0, 10.0) is None
    for at in (0.0, 5.0, 10.0, 15.0):
        marks.append(mark(at=at))
    old, oldest = marks.find_before(21.0, 10.0), marks.find_before(21.0, 60.0)
    assert (old and old.at, oldest and oldest.at) == (10.0, 0.0)


def sketches(rng: Random, requests: int, before: MetricSample) -> MetricSample:
    # Return the sample one second after `before`, in which `requests` further requests went to
    # randomly chosen ones of three endpoints.
    ttft = {name: dict(counts) for name, counts in before.ttft.items()}
    for _ in range(requests):
        counts = ttft.setdefault(rng.choice("abc"), {})
        bucket = int(rng.gauss(0.0, 4.0))
        counts[bucket] = counts.get(bucket, 0) + 1
    return mark(at=before.at + 1.0, ttft=ttft, tpot={"a": ttft.get("b", {})})


def test_growth_since_a_sample_is_the_difference_of_the_sketches() -> None:
    rng, history, samples = Random(1), SampleHistory(), [mark()]
    for _ in range(150):
        history.append(samples[-1])
        samples.append(sketches(rng, rng.choice((0, 1, 30)), samples[-1]))
        now = samples[-1]
        for thin in history:
            before = next(sample for sample in samples if sample.at == thin.at)
            assert not thin.ttft
            assert history.growth_since(thin, now) == sketch_growth(before, now)
            assert history.copy().growth_since(thin, now) == sketch_growth(before, now)


def test_growth_of_an_endpoint_that_was_added_again_counts_all_of_its_requests() -> None:
    history = SampleHistory()
    for at, count in enumerate((5, 7, 2, 3)):
        history.append(mark(at=float(at), ttft={"a": {1: count}}))
    oldest = next(iter(history))
    assert history.growth_since(oldest, mark(at=5.0, ttft={"a": {1: 4}})).ttft == {"a": {1: 6}}


def test_growth_since_a_sample_of_another_history_is_empty() -> None:
    history, now = SampleHistory(), mark(at=3.0, ttft={"a": {1: 4}})
    assert history.growth_since(now, now) == SketchGrowth({}, {})


def test_a_minute_of_full_sketches_takes_little_more_memory_than_the_newest() -> None:
    # In these sketches every bucket has counts. With real traffic, that takes weeks.
    names, history = [str(number) for number in range(8)], SampleHistory()
    whole = {name: dict.fromkeys(range(1268), 1000) for name in names}
    tracemalloc.start()
    try:
        for at in range(200):
            ttft = {name: {**counts, 5: 1000 + at} for name, counts in whole.items()}
            history.append(mark(at=float(at), ttft=ttft, tpot=ttft))
        del ttft
        assert len(list(history)) == 62
        assert tracemalloc.get_traced_memory()[0] < 1.5 * MIB
    finally:
        tracemalloc.stop()
