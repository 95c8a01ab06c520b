"""Property tests of the times by which slow endpoints are found, those of their peers.

Times are stored in bins by size of work. Only bins in use are read, which must give the same times
as all bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.engine.step_time import shape_for
from policies.health.endpoint_speed import SpeedRecord
from policies.health.late_request_detection import Expectations
from policies.health.speed_outlier import PeerTimes, ReviewedEndpoint, SlowLimits, review
from policies.health.speed_samples import BINS, Measure, SpeedSamples

SHAPE = shape_for("h200", 4)
work_sizes = st.sampled_from((1, 3, 40, 900, 1_500, 5_000, 200_000))
samples = st.lists(st.tuples(work_sizes, st.floats(0.01, 5.0)), max_size=8)
fleets = st.lists(samples, min_size=1, max_size=5)


def only(given: SpeedSamples, bin_: int) -> SpeedSamples:
    # Return the samples of one bin.
    part = SpeedSamples(given.least)
    if given.counts[bin_] > 1e-9:
        part.seconds[bin_], part.work[bin_] = given.seconds[bin_], given.work[bin_]
        part.counts[bin_] = part.total = given.counts[bin_]
        part.bins.append(bin_)
    return part


def time_of(
    measure: Measure, fleet: Sequence[SpeedSamples], work: int, own: SpeedSamples | None
) -> float:
    # Return the median of the other endpoints for this work, from the nearest bin that they have.
    wanted = min(BINS - 1, work.bit_length())
    for near in sorted(range(BINS), key=lambda bin_: (abs(bin_ - wanted), bin_)):
        parts = [only(each, near) for each in fleet if each is not own]
        times = [PeerTimes(measure, [part], SHAPE).usual_s(work) for part in parts if part.total]
        if times:
            return median(times)
    return 0.0


@given(fleets, work_sizes, st.sampled_from((Measure.TTFT, Measure.TPOT)), st.booleans())
def test_times_of_peers_are_those_of_all_bins(
    fleet: Sequence[Sequence[tuple[int, float]]], work: int, measure: Measure, leaves_out: bool
) -> None:
    references = [SpeedSamples(3.0) for _ in fleet]
    for reference, given_samples in zip(references, fleet, strict=True):
        for size, seconds in given_samples:
            reference.add(size, seconds)
            reference.decay(0.9)
    own = references[0] if leaves_out else None
    times = PeerTimes(measure, references, SHAPE)
    assert times.count == sum(map(bool, fleet))
    # An ambiguous median may leave out an equal mean of another endpoint instead.
    assert times.other_s(work, own) == pytest.approx(time_of(measure, references, work, own))


@given(samples, samples, st.floats(0.0, 1.0))
def test_bins_in_use_are_all_bins_with_samples(
    first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]], factor: float
) -> None:
    sums, before = SpeedSamples(0.0), SpeedSamples(0.0)
    for size, seconds in first:
        sums.add(size, seconds)
    before = sums.copy()
    for size, seconds in second:
        sums.add(size, seconds)
    sums.decay(factor)
    for each in (sums, before, sums.minus(before), sums.copy()):
        used = {bin_ for bin_ in range(BINS) if each.counts[bin_] or each.seconds[bin_]}
        assert used <= {*each.bins}
        assert each.bins == sorted({*each.bins})


@given(st.lists(st.tuples(work_sizes, st.floats(0.05, 3.0)), min_size=1, max_size=12))
def test_expectations_of_stalls_are_those_of_the_latest_review(
    prompts: Sequence[tuple[int, float]],
) -> None:
    kept = Expectations()
    records, now = [SpeedRecord() for _ in range(3)], 0.0
    for number, (tokens, seconds) in enumerate(prompts):
        record = records[number % len(records)]
        record.on_sent(tokens, now)
        members = [
            ReviewedEndpoint(each, "kind", SHAPE, tokens if each.waiting else 0) for each in records
        ]
        for share in (0.3, 0.6, 0.9):
            fresh = Expectations()
            fresh.peer_times_by_kind = kept.peer_times_by_kind
            at_s = now + share * seconds
            assert kept.stalled(members, at_s) == fresh.stalled(members, at_s)
            ratios = [kept.step_ratio(member, at_s) for member in members]
            assert ratios == [fresh.step_ratio(member, at_s) for member in members]
        now += seconds
        record.on_first_token(tokens, now)
        if number % 2:
            kept.peer_times_by_kind = review(members, now, SlowLimits())
