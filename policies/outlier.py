"""Speed outliers: endpoints that take much longer than their peers for the same work.

Contains the comparison of an endpoint with the peers of its pool (review). Not here: the evidence and the verdict with
its hysteresis (speed_record.py), and what follows from a verdict (gateway/endpoints.py). What is compared:

    TTFT    seconds of one prefill step, binned by the prompt tokens in it. The wait behind other prompts is left out:
            a step begins where the first token before it came, so a long queue is no slowness.
    TPOT    seconds per token of streams, binned by the number of streams. Time in which a prompt was computed is left
            out.
    ANSWER  seconds of answers that come whole, binned by their length.

Peers are endpoints with the same declaration (role, engine, layout, label `gpu`). They are compared bin by bin. Where
no peer did work of that size, the nearest bin is scaled by the roofline of the kind (policies/latency.py). An endpoint
without such a peer is compared with the whole pool and judged by what its ratio to the pool usually is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from math import ceil

import msgspec

from policies.speed_record import BINS, RECENT, Measure, Samples, Slowness, SpeedRecord, Track
from policies.step_time import NEUTRAL, Shape

CONTEXT_TOKENS = 1024  # of one stream, for the shape of a decode step over its batch
BUSIER = 1.25
LEAST_ONGOING_S = 0.1


class SlowLimits(msgspec.Struct, frozen=True):
    """When an endpoint counts as slow.

    factor     ratio to the peers from which on it is slow; 0: never
    clear      ratio below which a suspect is normal again
    reviews    reviews in a row, with fresh evidence each, before a suspect is slow
    usual_margin  how far above its own usual ratio an endpoint must be as well
    least_s    seconds by which a sample must exceed the peers', by measure: below it nobody notices
    """

    factor: float = 2.5
    clear: float = 1.6
    reviews: int = 3
    usual_margin: float = 1.5
    least_s: tuple[float, float, float] = (0.025, 0.003, 0.1)


class Member(msgspec.Struct, frozen=True, eq=False):
    """One endpoint of a pool that is reviewed. `kind`: equal for peers. `step_tokens`: the most that the
    prefill step under way has to compute."""

    record: SpeedRecord
    kind: Hashable
    shape: Shape = NEUTRAL
    step_tokens: int = 0


def review(members: Sequence[Member], now: float, limits: SlowLimits) -> Yardsticks:
    """Judge the endpoints of a pool; due once a second. The verdicts are left in their records.

    Returns what each kind of endpoint takes for its work.
    """
    for member in members:
        member.record.prepare(now)
    findings = [_Finding() for _ in members]
    yardsticks: dict[tuple[Hashable, Measure], Peers] = {}
    for measure in Measure:
        _compare(members, measure, now, findings, limits, yardsticks)
    for member, finding in zip(members, findings, strict=True):
        record = member.record
        record.judge(finding.worst, finding.change, finding.clear, limits.reviews)
        record.output *= RECENT
        for track in record.tracks:
            track.age()
    return yardsticks


class _Finding:
    """What the measures say of one endpoint."""

    __slots__ = ("change", "clear", "worst")

    def __init__(self) -> None:
        self.worst: Slowness | None = None
        self.change, self.clear = 0, True


class Peers:
    """The means of one measure at some endpoints, by bin, in order."""

    __slots__ = ("_means", "_measure", "count")

    def __init__(self, measure: Measure, references: Sequence[Samples]) -> None:
        self._measure = measure
        self.count = sum(each.total > 0.0 for each in references)
        self._means = [
            sorted(each.seconds[place] / each.counts[place] for each in references if each.counts[place])
            for place in range(BINS)
        ]

    def expected_s(self, recent: Samples, own: Samples, shape: Shape) -> float:
        """What the others would have taken for the samples; `own` is among the references. 0: none is known."""
        total = 0.0
        for place, count in enumerate(recent.counts):
            if count > 1e-9:
                each_s = self._without(place, own) or self._scaled(place, own, shape)
                if not each_s:
                    return 0.0
                total += count * each_s
        return total

    def usual_s(self, work: int, shape: Shape) -> float:
        """What so much work takes; 0 while that is not known."""
        return self.other_s(work, None, shape)

    def other_s(self, work: int, own: Samples | None, shape: Shape) -> float:
        """What so much work takes at the others; 0 while that is not known."""
        place = min(BINS - 1, work.bit_length())
        return self._without(place, own) or self._scaled(place, own, shape)

    def _without(self, place: int, own: Samples | None) -> float:
        """The median of the others in a bin; 0 if there is none."""
        means = self._means[place]
        if own is None or not own.counts[place]:
            return median_without(means, -1) if means else 0.0
        mine = bisect_left(means, own.seconds[place] / own.counts[place])
        return median_without(means, mine) if len(means) > 1 else 0.0

    def _scaled(self, place: int, own: Samples | None, shape: Shape) -> float:
        """The nearest bin with others in it, scaled by what the work there takes on the roofline."""
        for distance in range(1, BINS):
            for near in (place - distance, place + distance):
                if 0 <= near < BINS and (near_s := self._without(near, own)):
                    return near_s * _work_s(self._measure, shape, place) / _work_s(self._measure, shape, near)
        return 0.0


def median_without(ordered: Sequence[float], left_out: int) -> float:
    """The median of ascending values but for the one at this place; of all of them where there is no such place."""
    others = len(ordered) - (0 <= left_out < len(ordered))
    skip = left_out if left_out >= 0 else len(ordered)
    low, high = (at if at < skip else at + 1 for at in ((others - 1) // 2, others // 2))
    return 0.5 * (ordered[low] + ordered[high])


Yardsticks = Mapping[tuple[Hashable, Measure], Peers]


def _compare(
    members: Sequence[Member],
    measure: Measure,
    now: float,
    findings: Sequence[_Finding],
    limits: SlowLimits,
    yardsticks: dict[tuple[Hashable, Measure], Peers],
) -> None:
    """Add what one measure says to the findings, and what its work takes to the yardsticks."""
    place = _PLACES.index(measure)
    tracks = [member.record.tracks[place] for member in members]
    pool = Peers(measure, [track.reference for track in tracks])
    kinds: dict[Hashable, list[int]] = {}
    for index, member in enumerate(members):
        kinds.setdefault(member.kind, []).append(index)
    for kind, indices in kinds.items():
        peers = Peers(measure, [tracks[index].reference for index in indices])
        yardsticks[kind, measure] = peers
        for index in indices:
            track, shape = tracks[index], members[index].shape
            alike = peers.count - (track.reference.total > 0.0) > 0
            yardstick = peers if alike else pool
            usual, judged = track.usual_ratio, track.recent
            if measure is Measure.TTFT:
                factor = limits.factor * (1.0 if alike else usual)
                judged = _judged(members[index], track, yardstick, now, factor)
            if not judged.total or not (alike or pool.count > 1):
                continue
            expected_s = yardstick.expected_s(judged, track.reference, shape)
            slowness = _ratio(track, judged, expected_s, measure, limits, alike)
            if slowness is None or (measure is Measure.ANSWER and _is_busier(members, index, indices)):
                continue
            finding = findings[index]
            if slowness.ratio >= limits.clear:
                finding.clear = False
            if _is_slow(judged, slowness, limits, limits.least_s[place], usual if alike else 0.0) and (
                finding.worst is None or slowness.ratio > finding.worst.ratio
            ):
                finding.worst, finding.change = slowness, 0
                if track.fresh or judged is not track.recent:
                    latest = track.latest(judged)
                    latest_s = yardstick.expected_s(latest, track.reference, shape) * (1.0 if alike else usual)
                    finding.change = 1 if sum(latest.seconds) >= limits.clear * latest_s else -1


def _judged(member: Member, track: Track, yardstick: Peers, now: float, factor: float) -> Samples:
    """The recent samples, and a prefill step under way as far as it has come if peers would long be through with it."""
    record, tokens = member.record, member.step_tokens
    seconds = now - record.since
    if not record.waiting or not tokens or not factor or seconds < LEAST_ONGOING_S:
        return track.recent
    peers_s = yardstick.other_s(tokens, track.reference, member.shape)
    if not peers_s or seconds < factor * peers_s:
        return track.recent
    judged = track.recent.copy()
    judged.add(min(BINS - 1, tokens.bit_length()), seconds)
    return judged


def _is_busier(members: Sequence[Member], index: int, peers: Sequence[int]) -> bool:
    """Whether it makes more tokens than its peers: its answers take long because it has more of them."""
    outputs = sorted(members[each].record.output for each in peers if each != index)
    return bool(outputs) and members[index].record.output > BUSIER * outputs[len(outputs) // 2]


def _ratio(
    track: Track, judged: Samples, expected_s: float, measure: Measure, limits: SlowLimits, alike: bool
) -> Slowness | None:
    """The ratio to the peers. Without peers of its kind it is the ratio to what is usual; None until that is known."""
    spent_s, total = sum(judged.seconds), judged.total
    if expected_s <= 0.0 or spent_s <= 0.0:
        return None
    ratio = spent_s / expected_s
    usual = track.usual_ratio
    most = limits.factor if alike else limits.clear * usual if usual else ratio + 1.0
    if track.fresh and ratio < most:
        track.learn(ratio)
    if alike:
        return Slowness(measure, ratio, spent_s / total, expected_s / total)
    if not usual:
        return None
    return Slowness(measure, ratio / usual, spent_s / total, expected_s * usual / total)


def _is_slow(judged: Samples, slowness: Slowness, limits: SlowLimits, least_s: float, usual: float) -> bool:
    bar = limits.factor
    if usual:  # one that is always nearly as slow needs more to be at fault
        bar = max(bar, limits.usual_margin * min(bar, usual))
    if not limits.factor or slowness.ratio < bar or slowness.seconds - slowness.peers_s < least_s:
        return False
    needed = judged.least if slowness.ratio < 2.0 * bar else judged.least / 3.0
    return judged.total >= needed - 1e-6


def _work_s(measure: Measure, shape: Shape, place: int) -> float:
    """Seconds by the prior of work in the middle of a bin. Only ratios of them are used."""
    work = 0.75 * (1 << place)
    if measure is Measure.ANSWER:
        return work
    if measure is Measure.TPOT:
        stream_s = shape.wire_s + shape.sequence_s + shape.context_s * CONTEXT_TOKENS
        return shape.step_s + max(shape.weights_s, shape.token_s * work) + stream_s * work
    steps = ceil(work / shape.budget_tokens)
    pairs_s = shape.pair_s * work * 0.5 * work
    compute_s = max(steps * shape.weights_s, shape.token_s * work)
    return shape.request_s + steps * shape.step_s + compute_s + shape.wire_s * work + pairs_s


_PLACES = tuple(Measure)
