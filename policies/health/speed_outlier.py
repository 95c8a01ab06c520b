"""Compares the speed samples of a pool's endpoints, and decides which endpoints count as slow.

Peers are the endpoints of a pool with the same role, engine, layout and GPU label. Three times are
compared:

    TTFT    seconds of one prefill step, by its prompt tokens. A step begins at the previous first
            token, so that time in a queue does not count.
    TPOT    seconds per token of streams, by the number of streams. Time with prefill is excluded.
    ANSWER  seconds of whole (not streamed) answers, by their length.

Work of similar size is compared: sizes are divided into bins. If no peer did work of that size, the
nearest bin is scaled by the roofline model (policies/engine/step_time.py). An endpoint without
peers is compared with the whole pool, and with its own usual ratio to the pool.

`review` compares the endpoints. speed_samples.py has the samples and the verdicts. The gateway acts
on verdicts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping, Sequence
from math import ceil
from typing import Protocol

import msgspec

from policies.engine.step_time import NEUTRAL, StepCosts
from policies.health.endpoint_speed import Slowness, SpeedRecord
from policies.health.speed_samples import BINS, RECENT, Measure, SampleTrack, SpeedSamples

CONTEXT_TOKENS = 1024  # assumed context of a stream, for scaling decode steps over the batch
BUSIER = 1.25
LEAST_ONGOING_S = 0.1
WEAK_REVIEW = 0.5  # weight of a slow review with too few samples, one second after other samples
LATEST_SHARE = 0.9  # share of SlowLimits.factor from which the latest samples count as slow
MOST_FIXED = 0.1  # largest part of the peers' time that counts as independent of an engine's speed


class SlowLimits(msgspec.Struct, frozen=True):
    """The limits from which an endpoint counts as slow, compared with its peers.

    factor        the endpoint counts as slow if its time divided by its peers' time exceeds this;
                  0: it never does
    clear         ratio below which a suspect endpoint counts as normal again
    reviews       number of consecutive reviews above `factor`, each with new samples, after which a
                  suspect endpoint counts as slow
    usual_margin  the ratio must also exceed the endpoint's own usual ratio times this factor
    least_s       minimum seconds by which the endpoint's time must exceed its peers', by measure
                  (TTFT, TPOT, ANSWER); clients do not notice smaller differences
    """

    factor: float = 2.5
    clear: float = 1.6
    reviews: int = 3
    usual_margin: float = 1.5
    least_s: tuple[float, float, float] = (0.025, 0.003, 0.1)


class ReviewedEndpoint(msgspec.Struct, frozen=True, eq=False):
    """One endpoint in a review, which compares the speeds of a pool's endpoints.

    record       the endpoint's speed samples and verdict
    kind         any value; endpoints with equal values are compared with each other (peers)
    shape        the endpoint's step costs, to compare times for work of different sizes
    step_tokens  maximum number of prompt tokens in its current prefill step
    """

    record: SpeedRecord
    kind: Hashable
    shape: StepCosts = NEUTRAL
    step_tokens: int = 0


class Reviewed(Protocol):
    """What a review of speeds reads of an endpoint, such as its samples of recent times.

    Any object with these properties can be reviewed. The gateway passes its own endpoint objects,
    which compute a value only when the review reads it.
    """

    @property
    def record(self) -> SpeedRecord: ...

    @property
    def kind(self) -> Hashable: ...

    @property
    def shape(self) -> StepCosts: ...

    @property
    def step_tokens(self) -> int: ...


def review(members: Sequence[Reviewed], now: float, limits: SlowLimits) -> PeerTimesByKind:
    """Decide which of a pool's endpoints are slow, set their verdicts, and return usual times."""
    for member in members:
        member.record.prepare(now)
    findings = [_Finding() for _ in members]
    peer_times_by_kind: dict[tuple[Hashable, Measure], PeerTimes] = {}
    for measure in Measure:
        _compare(members, measure, now, findings, limits, peer_times_by_kind)
    for member, finding in zip(members, findings, strict=True):
        record = member.record
        if finding.worst is None and record.slow_measure in finding.cleared:
            finding.change = -1.0
        record.set_verdict(
            finding.worst,
            finding.change,
            finding.clear,
            limits.reviews,
            has_enough=finding.has_enough,
        )
        record.output *= RECENT
        for track in record.tracks:
            track.decay()
    return peer_times_by_kind


def compute_peer_times(members: Sequence[Reviewed], now: float) -> PeerTimesByKind:
    """Return the usual times that each kind of endpoint takes for its work, by measure.

    Measures are TTFT, TPOT and ANSWER. Unlike `review`, this function sets no verdicts.
    """
    for member in members:
        member.record.prepare(now)
    by_kind: dict[Hashable, list[Reviewed]] = {}
    for member in members:
        by_kind.setdefault(member.kind, []).append(member)
    return {
        (kind, measure): PeerTimes(
            measure, [member.record.tracks[index].reference for member in same], same[0].shape
        )
        for kind, same in by_kind.items()
        for index, measure in enumerate(Measure)
    }


class _Finding:
    __slots__ = ("change", "clear", "cleared", "has_enough", "worst")

    def __init__(self) -> None:
        self.worst: Slowness | None = None
        self.change, self.clear, self.has_enough = 0.0, True, False
        # Measures whose samples since the last review are not evidence.
        self.cleared: list[Measure] = []

    def add(self, slowness: Slowness, change: float, *, has_enough: bool) -> None:
        # Add a measure in which the endpoint is slow; the one whose latest samples are slow counts.
        #
        # A measure with enough samples for a verdict is preferred to one without.
        worst = self.worst
        if worst is None or (has_enough, change, slowness.ratio) > (
            *(self.has_enough, self.change, worst.ratio),
        ):
            self.worst, self.change, self.has_enough = slowness, change, has_enough


class PeerTimes:
    """How long several endpoints of one kind take for work, in one measure such as TTFT.

    An endpoint is judged by what the others would take for the same work. Times are sorted into
    bins by size of work. Within a bin, the roofline model `shape` scales them to the exact size.
    """

    # _means: by bin with samples, in ascending order, the endpoints' means, in ascending order
    # _middles_s: times of work in the middle of a bin by the roofline, as far as they were needed
    __slots__ = ("_means", "_measure", "_middles_s", "_shape", "count")

    def __init__(
        self, measure: Measure, references: Sequence[SpeedSamples], shape: StepCosts = NEUTRAL
    ) -> None:
        self._measure, self._shape = measure, shape
        self._middles_s: dict[int, float] = {}
        self.count = sum(samples.total > 0.0 for samples in references)
        means: dict[int, list[float]] = {}
        for samples in references:
            for bin_ in samples.bins:
                if samples.counts[bin_] > 1e-9:
                    insort(means.setdefault(bin_, []), self._mean_s(samples, bin_))
        self._means = {bin_: means[bin_] for bin_ in sorted(means)}

    def expected_s(self, recent: SpeedSamples, own: SpeedSamples) -> float:
        """Return the seconds that the other endpoints would take for one endpoint's work.

        recent  the recent samples of that endpoint, with the sizes of its work
        own     its part of these times, which is left out

        Returns 0 if that is unknown.
        """
        total = 0.0
        for bin_ in recent.bins:
            count = recent.counts[bin_]
            if count > 1e-9:
                each_s = self._without(bin_, own) or self._scaled(bin_, own)
                if not each_s:
                    return 0.0
                total += count * each_s * self._size(bin_, recent.work[bin_] / count)
        return total

    def usual_s(self, work: int) -> float:
        """Return the endpoints' median seconds for work of this size; 0 if unknown."""
        return self.other_s(work, None)

    def other_s(self, work: int, own: SpeedSamples | None) -> float:
        """Return the median time, in seconds, that the other endpoints take for work of this size.

        own  the samples of the endpoint to leave out; None: all endpoints count

        Returns 0 if unknown.
        """
        bin_ = min(BINS - 1, work.bit_length())
        middle_s = self._without(bin_, own) or self._scaled(bin_, own)
        return middle_s * self._size(bin_, work)

    def fixed_s(self, own: SpeedSamples | None) -> float:
        """Estimate the seconds of each sample that do not depend on the size of the work.

        This is the intercept of a line through the endpoints' times, over the times that the
        roofline model computes for the same work.

        own  the samples of the endpoint to leave out; None: all endpoints count

        Returns 0 if only work of one size was measured.
        """
        points = [
            (self._middle_s(bin_), seconds)
            for bin_ in self._means
            if (seconds := self._without(bin_, own))
        ]
        return _intercept(points)

    def _mean_s(self, samples: SpeedSamples, bin_: int) -> float:
        # Return the mean seconds of the samples in a bin, scaled to work in the bin's middle.
        count = samples.counts[bin_]
        return samples.seconds[bin_] / count / self._size(bin_, samples.work[bin_] / count)

    def _size(self, bin_: int, work: float) -> float:
        # Return the time of this work in a bin, as a multiple of the time in the bin's middle.
        return _work_s(self._measure, self._shape, work) / self._middle_s(bin_)

    def _middle_s(self, bin_: int) -> float:
        # Return the time of work in the middle of a bin by the roofline.
        middle_s = self._middles_s.get(bin_)
        if middle_s is None:
            middle_s = _work_s(self._measure, self._shape, _middle(bin_))
            self._middles_s[bin_] = middle_s
        return middle_s

    def _without(self, bin_: int, own: SpeedSamples | None) -> float:
        # Return the median of the endpoints other than `own` in a bin, in seconds.
        #
        # Return 0 if there is none.
        means = self._means.get(bin_)
        if means is None:
            return 0.0
        if own is None or own.counts[bin_] <= 1e-9:
            return median_without(means, -1)
        own_index = bisect_left(means, self._mean_s(own, bin_))
        return median_without(means, own_index) if len(means) > 1 else 0.0

    def _scaled(self, bin_: int, own: SpeedSamples | None) -> float:
        # Return the time in the nearest bin with other endpoints, scaled by the roofline.
        #
        # Return 0 if none.
        for near in sorted(self._means, key=lambda near: (abs(near - bin_), near)):
            if near != bin_ and (near_s := self._without(near, own)):
                return near_s * self._size(near, _middle(bin_))
        return 0.0


def _middle(bin_: int) -> float:
    return 0.75 * (1 << bin_)


def _intercept(points: Sequence[tuple[float, float]]) -> float:
    # Fit seconds = intercept + slope * work by least squares of relative errors.
    #
    # Return the intercept: at least 0, and 0 for fewer than two sizes of work.
    if len(points) < 2:
        return 0.0
    weights = [1.0 / (seconds * seconds) for _, seconds in points]
    total = sum(weights)
    x = sum(w * work for w, (work, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    xx = sum(w * (work - x) ** 2 for w, (work, _) in zip(weights, points, strict=True))
    xy = sum(w * (work - x) * (s - y) for w, (work, s) in zip(weights, points, strict=True))
    return max(0.0, y - x * xy / xx) if xx > 0.0 else 0.0


def median_without(ordered: Sequence[float], left_out: int) -> float:
    """Return the median of sorted values without the one at index `left_out`.

    Returns the median of all values if there is no such index.
    """
    others = len(ordered) - (0 <= left_out < len(ordered))
    skip = left_out if left_out >= 0 else len(ordered)
    low, high = (others - 1) // 2, others // 2
    return 0.5 * (ordered[low + (low >= skip)] + ordered[high + (high >= skip)])


PeerTimesByKind = Mapping[tuple[Hashable, Measure], PeerTimes]


def _compare(
    members: Sequence[Reviewed],
    measure: Measure,
    now: float,
    findings: Sequence[_Finding],
    limits: SlowLimits,
    peer_times_by_kind: dict[tuple[Hashable, Measure], PeerTimes],
) -> None:
    # Compare all endpoints by one measure; update `findings` and `peer_times_by_kind`.
    index_of_measure = _MEASURES.index(measure)
    tracks = [member.record.tracks[index_of_measure] for member in members]
    comparison = _Comparison(members, tracks, measure, now, limits)
    kinds: dict[Hashable, list[int]] = {}
    for index, member in enumerate(members):
        kinds.setdefault(member.kind, []).append(index)
    for kind, indices in kinds.items():
        shape = members[indices[0]].shape
        peers = PeerTimes(measure, [tracks[index].reference for index in indices], shape)
        peer_times_by_kind[kind, measure] = peers
        outputs = sorted(members[index].record.output for index in indices)
        for index in indices:
            comparison.assess(index, outputs, peers, findings[index])


class _Comparison:
    # One comparison of all endpoints of a pool by one measure.

    __slots__ = ("_pool", "limits", "measure", "members", "now", "tracks")

    def __init__(
        self,
        members: Sequence[Reviewed],
        tracks: Sequence[SampleTrack],
        measure: Measure,
        now: float,
        limits: SlowLimits,
    ) -> None:
        self.members, self.tracks = members, tracks
        self.measure, self.now, self.limits = measure, now, limits
        self._pool: PeerTimes | None = None

    @property
    def pool(self) -> PeerTimes:
        # The times of all endpoints. Only an endpoint without peers needs them.
        if self._pool is None:
            references = [track.reference for track in self.tracks]
            self._pool = PeerTimes(self.measure, references, self.members[0].shape)
        return self._pool

    def assess(
        self, index: int, outputs: Sequence[float], peers: PeerTimes, finding: _Finding
    ) -> None:
        # Compare the endpoint at `index` with its peers, and update its finding.
        #
        # `outputs` has the recent outputs of all endpoints of its kind, in ascending order. An
        # endpoint without peers is compared with the pool, by its usual ratio to it.
        track, limits = self.tracks[index], self.limits
        has_peers = peers.count - (track.reference.total > 0.0) > 0
        if not has_peers and self.pool.count <= 1:
            return
        peer_times = peers if has_peers else self.pool
        usual = track.usual_ratio
        scale = 1.0 if has_peers else usual
        samples = self._samples(index, peer_times, scale)
        if not samples.total:
            return
        each_s = 0.0
        if self.measure is Measure.TTFT and has_peers:
            each_s = peer_times.fixed_s(track.reference)
        expected_s = peer_times.expected_s(samples, track.reference)
        fixed_s = _fixed_s(each_s, samples, expected_s)
        slowness = _ratio(track, samples, expected_s, fixed_s, self.measure, limits, has_peers)
        if slowness is None or (
            self.measure is Measure.ANSWER and _is_busier(self.members[index].record, outputs)
        ):
            return
        if slowness.ratio >= limits.clear:
            finding.clear = False
        if track.fresh_count and slowness.ratio < limits.factor:
            finding.cleared.append(self.measure)
        least_s = limits.least_s[_MEASURES.index(self.measure)]
        limit = _limit(limits, usual if has_peers else 0.0)
        is_noticeable = slowness.seconds - slowness.peers_s >= least_s
        if limits.factor and slowness.ratio >= limit and is_noticeable:
            has_enough = _has_enough(samples, slowness, limit)
            change = _change(track, samples, peer_times, scale, limits, each_s)
            weight = 1.0 if has_enough or track.was_idle else WEAK_REVIEW
            finding.add(slowness, change * weight, has_enough=has_enough)

    def _samples(self, index: int, peer_times: PeerTimes, scale: float) -> SpeedSamples:
        # Return the recent samples, for TTFT with the prefill step that runs now.
        track = self.tracks[index]
        if self.measure is not Measure.TTFT:
            return track.recent
        factor = self.limits.factor * scale
        return _samples_with_running_step(self.members[index], track, peer_times, self.now, factor)


def _change(
    track: SampleTrack,
    samples: SpeedSamples,
    peer_times: PeerTimes,
    scale: float,
    limits: SlowLimits,
    each_s: float,
) -> int:
    # Return 1 if the samples since the last review are slow too, -1 if they are not, else 0.
    #
    # scale   the endpoint's usual ratio to the times of `peer_times`
    # each_s  the part of each of these times that does not depend on the size of the work
    if not track.fresh_count and samples is track.recent:
        return 0
    latest = track.since_last_review(samples)
    usual_s = scale * peer_times.expected_s(latest, track.reference)
    fixed_s = _fixed_s(each_s, latest, usual_s)
    usual_s, spent_s = usual_s - fixed_s, sum(latest.seconds) - fixed_s
    is_slow = spent_s >= LATEST_SHARE * limits.factor * usual_s
    return is_slow - (spent_s < limits.clear * usual_s)


def _fixed_s(each_s: float, samples: SpeedSamples, expected_s: float) -> float:
    # Return the part of the peers' time for these samples that a slow engine does not prolong.
    return min(each_s * samples.total, MOST_FIXED * expected_s)


def _samples_with_running_step(
    member: Reviewed, track: SampleTrack, peer_times: PeerTimes, now: float, factor: float
) -> SpeedSamples:
    # Return the recent samples, plus the running prefill step if peers would have finished it.
    record, tokens = member.record, member.step_tokens
    seconds = now - record.since
    if not (record.waiting and record.is_timed and tokens and factor) or seconds < LEAST_ONGOING_S:
        return track.recent
    peers_s = peer_times.other_s(tokens, track.reference)
    if not peers_s or seconds < factor * peers_s:
        return track.recent
    samples = track.recent.copy()
    samples.add(tokens, seconds)
    return samples


def _is_busier(record: SpeedRecord, outputs: Sequence[float]) -> bool:
    # Return whether an endpoint generates more than its peers, by the sorted outputs of all.
    own, middle = bisect_left(outputs, record.output), (len(outputs) - 1) // 2
    return len(outputs) > 1 and record.output > BUSIER * outputs[middle + (middle >= own)]


def _ratio(
    track: SampleTrack,
    samples: SpeedSamples,
    expected_s: float,
    fixed_s: float,
    measure: Measure,
    limits: SlowLimits,
    has_peers: bool,
) -> Slowness | None:
    # Return the ratio of its time to the peers' time, as Slowness; None if unknown.
    #
    # `fixed_s` is the part of both times that a slow engine does not prolong. Without peers, the
    # ratio is compared with its usual one.
    spent_s, total = sum(samples.seconds) - fixed_s, samples.total
    expected_s -= fixed_s
    if expected_s <= 0.0 or spent_s <= 0.0:
        return None
    ratio = spent_s / expected_s
    usual = track.usual_ratio
    limit = limits.factor if has_peers else limits.clear * usual if usual else ratio + 1.0
    if track.fresh_count and ratio < limit:
        track.update_usual_ratio(ratio)
    if has_peers:
        return Slowness(measure, ratio, spent_s / total, expected_s / total)
    if not usual:
        return None
    return Slowness(measure, ratio / usual, spent_s / total, expected_s * usual / total)


def _limit(limits: SlowLimits, usual: float) -> float:
    # Return the ratio from which an endpoint counts as slow whose usual ratio is `usual`.
    #
    # An endpoint that is usually nearly as slow needs a higher ratio.
    return max(limits.factor, limits.usual_margin * min(limits.factor, usual))


def _has_enough(samples: SpeedSamples, slowness: Slowness, limit: float) -> bool:
    # Return whether there are enough samples for a verdict.
    share = limit / slowness.ratio if slowness.ratio < 2.0 * limit else 1.0 / 3.0
    return samples.total >= share * samples.least - 1e-6


def _work_s(measure: Measure, shape: StepCosts, work: float) -> float:
    # Return the estimated seconds for work of this size.
    #
    # Only ratios of these are meaningful.
    if measure is Measure.ANSWER:
        return work
    if measure is Measure.TPOT:
        stream_s = shape.wire_s + shape.sequence_s + shape.context_s * CONTEXT_TOKENS
        return shape.step_s + max(shape.weights_s, shape.token_s * work) + stream_s * work
    steps = ceil(work / shape.budget_tokens)
    pairs_s = shape.pair_s * work * 0.5 * work
    compute_s = max(steps * shape.weights_s, shape.token_s * work)
    return shape.request_s + steps * shape.step_s + compute_s + shape.wire_s * work + pairs_s


_MEASURES = tuple(Measure)
