"""Detects late requests: they wait longer for a first token than they would at the peers.

A review (speed_outlier.py) compares completed work once a second. A stalled prefill step is visible
earlier, by its age. It is weak evidence: requests that wait there are hedged, and an endpoint in
doubt gets no new ones until the next review. endpoint_speed.py measures the age of a step;
speed_outlier.py and endpoint_health.py eject endpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.endpoint_load import NO_SOFT_CAP, EndpointLoad
from policies.health import speed_outlier
from policies.health.endpoint_speed import LEAST_PACED, SpeedRecord, SpeedVerdict
from policies.health.speed_outlier import PeerTimes, PeerTimesByKind, Reviewed
from policies.health.speed_samples import Measure, SpeedSamples

LEAST_LATE_S = 0.1
"""Minimum duration, in seconds, of a step or request that counts as late.

A request is sent away from an endpoint that has been as fast as its peers only if that also saves
at least this much time.
"""

UNPROVEN_RATIO, PROVEN_RATIO = 2.0, 2.5
"""How many times as long as at its peers a running step must take to count as a stall.

UNPROVEN_RATIO  for an endpoint that has not been as fast as its peers yet
PROVEN_RATIO    for an endpoint that has
"""

LATE_FACTOR, DOUBTED_FACTOR = 2.0, 1.2
"""How many times its expected time a request must take to count as late.

LATE_FACTOR     usually
DOUBTED_FACTOR  at an endpoint in doubt, one that was late before or seems slow
"""

DOUBT_RATIO, DOUBT_S = 3.0, 2.0
"""When an endpoint is in doubt because of a step that takes far too long.

An endpoint in doubt gets few requests.

DOUBT_RATIO  how many times as long as at its peers the step must take
DOUBT_S      seconds that the doubt lasts; they cover two reviews of speeds
"""

SUSPECT_CEILING = 1
"""Maximum number of concurrent requests at an endpoint that seems slow, while others have
capacity.
"""

RAMP_S, RAMP_END = 0.5, 64
"""How an endpoint's limit of concurrent requests grows again after a doubt.

It grows step by step, because policies that equalize what each endpoint was given in the past would
otherwise send it a burst.

RAMP_S    seconds in which the limit doubles
RAMP_END  limit at which the growth ends: from then on there is no limit
"""

LEAST_PEERS = 2
"""Least number of endpoints for which expected times are computed once per review, not on demand.

The endpoints are those of one kind that have completed prompts. While there are fewer, the next
prompt changes the expected times considerably, so they are computed whenever they are needed.
"""


class Expectations:
    """How long work is expected to take at each endpoint of a pool, to recognise late requests.

    peer_times_by_kind  the usual times of each kind of endpoint; each review replaces them
    """

    # _usual_s: by peer times, samples of an endpoint, and work, what _usual_time_s has returned.
    # Samples change only in reviews and in compute_peer_times
    __slots__ = ("_peer_times_by_kind", "_usual_s")

    def __init__(self) -> None:
        self._peer_times_by_kind: PeerTimesByKind = {}
        self._usual_s: dict[tuple[PeerTimes, SpeedSamples, int], float] = {}

    @property
    def peer_times_by_kind(self) -> PeerTimesByKind:
        return self._peer_times_by_kind

    @peer_times_by_kind.setter
    def peer_times_by_kind(self, times: PeerTimesByKind) -> None:
        self._peer_times_by_kind, self._usual_s = times, {}

    def stalled(self, members: Sequence[Reviewed], now: float) -> list[tuple[float, int]]:
        """Find endpoints whose running prefill step takes much longer than at other endpoints.

        Returns (ratio of the times, index of the endpoint), the highest ratio first. While little
        is known, the others' times are computed from what has been completed since the last review.
        """
        if not _are_enough(members):
            self.peer_times_by_kind = speed_outlier.compute_peer_times(members, now)
        stalls = [
            (ratio, index)
            for index, member in enumerate(members)
            if (ratio := self._stall_ratio(member, now)) > 0.0
        ]
        return sorted(stalls, reverse=True)

    def predict_remaining_s(
        self,
        member: Reviewed,
        measure: Measure,
        work: int,
        waited_s: float,
        now: float,
        *,
        is_doubted: bool = False,
        is_behind: bool = False,
    ) -> float | None:
        """Predict how many more seconds a late request will wait for its first byte.

        Returns None while the request is not late. The gateway compares the result with other
        endpoints.

        member      the request's endpoint
        measure     the measure by which it is judged, such as TTFT
        work        size of its work in that measure's unit, such as prompt tokens
        waited_s    seconds that it has waited
        is_doubted  whether its endpoint was late before or is suspect
        is_behind   whether other prompts are computed before its own
        """
        peer_times = self.peer_times_by_kind.get((member.kind, measure))
        if peer_times is None:
            return None
        expected_s = self._usual_time_s(member, peer_times, measure, work)
        ratio = self._stall_ratio(member, now) if measure is Measure.TTFT else 0.0
        is_suspect = member.record.verdict is SpeedVerdict.SUSPECT
        if is_doubted and measure is Measure.TTFT and (is_behind or not is_suspect):
            return doubted_wait_s(member.record, expected_s, waited_s, is_behind=is_behind)
        return remaining_wait_s(member.record, expected_s, waited_s, ratio)

    def first_byte_s(self, member: Reviewed, measure: Measure, work: int) -> float | None:
        """Return the expected seconds to the first byte of an answer; None if unknown.

        member   the endpoint
        measure  the measure of its usual times, such as TTFT
        work     size of the work that must be done before, in that measure's unit, such as prompt
                 tokens
        """
        peer_times, record = self.peer_times_by_kind.get((member.kind, measure)), member.record
        if peer_times is None:
            return None
        own_s = record.tracks[_PLACES[measure]].reference.mean_s(work)
        usual_s = own_s or peer_times.usual_s(work)
        return (
            usual_s * (1.0 if own_s or record.slowness is None else record.slowness.ratio) or None
        )

    def step_ratio(self, member: Reviewed, now: float) -> float:
        """Compare the age of a running prefill step with the time that other endpoints take.

        Returns the age divided by their time for the same work, or 0 if no step runs or the time is
        unknown.
        """
        record = member.record
        age_s, peer_times = (
            now - record.since,
            self.peer_times_by_kind.get((member.kind, Measure.TTFT)),
        )
        if not record.waiting or peer_times is None:
            return 0.0
        usual_s = self._usual_time_s(
            member, peer_times, Measure.TTFT, record.current_step_tokens(member.step_tokens)
        )
        return age_s / usual_s if usual_s else 0.0

    def late_step_s(self, member: Reviewed, now: float) -> float:
        """Return how many seconds a late prefill step will take at least; 0 if it is not late.

        A step is late after LATE_FACTOR times the time that it would take at the endpoint's peers.
        A late step is expected to last as long again as it has lasted, unless the endpoint's own
        steps usually take less. At an endpoint whose steps usually take longer than its peers', a
        step is late after DOUBTED_FACTOR times the peers' time.
        """
        record = member.record
        age_s, ratio = now - record.since, self.step_ratio(member, now)
        if ratio < DOUBTED_FACTOR or age_s < LEAST_LATE_S:
            return 0.0
        if record.tracks[0].reference.total < LEAST_PACED:
            return LATE_FACTOR * age_s if ratio >= LATE_FACTOR else 0.0
        own = PeerTimes(Measure.TTFT, [record.tracks[0].reference], member.shape)
        own_s = own.usual_s(record.current_step_tokens(member.step_tokens))
        if age_s >= LATE_FACTOR * own_s:
            return LATE_FACTOR * age_s
        if ratio < LATE_FACTOR and own_s < LATE_FACTOR * age_s / ratio:
            return 0.0
        return max(age_s, min(own_s, LATE_FACTOR * age_s))

    def running_step_s(self, member: Reviewed) -> float:
        """Estimate how many seconds the running prefill step takes from its beginning to its end.

        Returns 0 if that is unknown. The endpoint's own earlier times count more than its peers'.
        An engine ends the step of a prompt that is given up, but computes no further part of it.
        """
        track, budget = member.record.tracks[0], member.shape.budget_tokens
        work = min(budget, member.record.current_step_tokens(member.step_tokens))
        own = PeerTimes(Measure.TTFT, [track.reference], member.shape)
        peer_times = self.peer_times_by_kind.get((member.kind, Measure.TTFT))
        return own.usual_s(work) or (0.0 if peer_times is None else peer_times.usual_s(work))

    def _usual_time_s(
        self, member: Reviewed, peer_times: PeerTimes, measure: Measure, work: int
    ) -> float:
        # Return the seconds the endpoint usually needs for the work.
        #
        # The result is derived from the times of the endpoint's peers; without peers, from its own.
        track = member.record.tracks[_PLACES[measure]]
        key = peer_times, track.reference, work
        usual_s = self._usual_s.get(key)
        if usual_s is None:
            peers_s = peer_times.other_s(work, track.reference)
            usual_s = peers_s * max(1.0, track.usual_ratio) if peers_s else peer_times.usual_s(work)
            self._usual_s[key] = usual_s
        return usual_s

    def _stall_ratio(self, member: Reviewed, now: float) -> float:
        # Return the same if the step is late enough to be a stall, otherwise 0.
        record = member.record
        if not record.waiting or now - record.since < LEAST_LATE_S:
            return 0.0
        ratio = self.step_ratio(member, now)
        return ratio if ratio >= (PROVEN_RATIO if is_proven(record) else UNPROVEN_RATIO) else 0.0


def choose_doubted(stalled: Sequence[tuple[float, int]], doubted: Sequence[bool]) -> list[int]:
    """Choose the stalled endpoints that get few requests until the next review (they are in doubt).

    At least half of all endpoints are never in doubt.

    stalled  (ratio, index) of endpoints whose prefill step takes too long, the highest ratio first
    doubted  for every endpoint, whether it is in doubt already

    Returns their indices.
    """
    free, result = len(doubted) - sum(doubted), list[int]()
    for ratio, index in stalled:
        if ratio < DOUBT_RATIO:
            break
        if not doubted[index]:
            if 2 * (free - 1) < len(doubted):
                continue
            free -= 1
        result.append(index)
    return result


def is_doubted(load: EndpointLoad) -> bool:
    """Return whether the endpoint may get only one request at a time.

    This is so while it is suspected to have failed or to be slow.
    """
    return load.soft_cap <= SUSPECT_CEILING


def raised_ceiling(ceiling: int) -> int:
    """Return the next higher limit of requests for an endpoint that was suspected to be slow.

    Its limit doubles step by step. The result is NO_SOFT_CAP (no limit) at the end.
    """
    return max(1, 2 * ceiling) if ceiling < RAMP_END else NO_SOFT_CAP


def is_proven(record: SpeedRecord) -> bool:
    """Return whether an endpoint has been as fast as its peers, and no review suspects it now."""
    return record.has_kept_pace and record.verdict is SpeedVerdict.NORMAL


def remaining_wait_s(
    record: SpeedRecord, expected_s: float, waited_s: float, step_ratio: float
) -> float | None:
    """Return the seconds that a request will probably still wait for its first byte.

    Returns None while the request is not late. A delay is estimated to last as long again as it has
    lasted. An endpoint that has not been as fast as its peers yet may be broken: there the whole
    time counts as delay, and any gain justifies a hedge.

    expected_s  seconds that its endpoint would usually need for this request and for the prompts
                before it
    waited_s    seconds that the request has waited
    step_ratio  age of the running step divided by its peers' time; 0 if it is not a stall
    """
    is_late = waited_s >= LATE_FACTOR * expected_s or step_ratio > 0.0
    if expected_s <= 0.0 or waited_s < LEAST_LATE_S or not is_late:
        return None
    ratio = 0.0 if record.slowness is None else record.slowness.ratio
    if not is_proven(record):
        return max(waited_s, max(ratio, 2.0 * step_ratio) * expected_s - waited_s)
    ratio = max(ratio, 2.0 * step_ratio - 1.0)
    return max(waited_s - expected_s, ratio * expected_s - waited_s) - LEAST_LATE_S


def doubted_wait_s(
    record: SpeedRecord, expected_s: float, waited_s: float, *, is_behind: bool
) -> float | None:
    """Predict the further wait of a late request at an endpoint that was found to be slow.

    Like `remaining_wait_s`, but the endpoint is expected to take at least DOUBT_RATIO times as
    long. Returns seconds until the first byte, or None while the request is not late.

    expected_s  seconds that the endpoint would usually need
    waited_s    seconds that the request has waited
    is_behind   whether other prompts are computed before its own; it is then late immediately
    """
    is_late = is_behind or waited_s >= DOUBTED_FACTOR * expected_s
    if expected_s <= 0.0 or waited_s < LEAST_LATE_S or not is_late:
        return None
    ratio = DOUBT_RATIO if record.slowness is None else record.slowness.ratio
    return max(waited_s, max(DOUBT_RATIO, ratio) * expected_s - waited_s)


def _are_enough(members: Sequence[Reviewed]) -> bool:
    # Return whether LEAST_PEERS endpoints, or all of fewer, have completed prompts.
    missing = min(LEAST_PEERS, len(members))
    for member in members:
        if not missing:
            break
        missing -= member.record.tracks[0].reference.total > 0.0
    return not missing


_PLACES = {measure: index for index, measure in enumerate(Measure)}
