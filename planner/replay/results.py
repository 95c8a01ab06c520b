"""The results of a replay: one record per request, and figures (goodput, latencies, fairness).

Attainment is the share of requests served within their latency budgets; goodput is the number of
such requests per second. Simulations fill in the records. All functions are pure functions of a
ReplayRun.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from statistics import fmean, median

import msgspec

from planner.bench.percentiles import Summary, summarise
from policies.routing_types import Slo


class RequestEnd(StrEnum):
    """The ways in which a request of a replay can end.

    Every request ends in exactly one of them.
    """

    # Enum's own __hash__ is a Python call.
    __hash__ = str.__hash__

    SERVED = "served"
    SHED = "shed"  # the request was refused, and the client did not retry
    LOST = "lost"  # the group died during the answer, or no group could serve the request
    LEFT = "left"  # the client gave up
    CUT = "cut"  # the replay ended first


@dataclass(slots=True)
class ReplayRecord:
    """One request of a replay, as its client saw it.

    Times are on the replay's clock; None: the event did not occur.

    number            number of the request, in order of arrival
    arrived_s         time at which the client first sent the request
    prompt_tokens     tokens of its prompt
    output_tokens     tokens of its answer
    slo               its service class
    tenant            its tenant
    session           key of its session; "": none
    entered_s         time at which the request was admitted and a group was picked
    group             name of the group that served the request
    prefilled_by      name of the prefill group of a split request
    pulled_from       name of the group from which it pulled the beginning of its prompt
    cached_tokens     prompt tokens that the engine had cached
    believed_tokens   prompt tokens that the gateway expected to be cached
    ideal_tokens      prompt tokens that would be cached if all groups shared one cache without
                      evictions
    predicted_ttft_s  seconds to the first token that were predicted at the pick
    predicted_tpot_s  seconds per further token that were predicted at the pick
    first_s           time of the first token
    done_s            time of the last token
    longest_gap_s     longest time between two tokens in seconds
    wasted_tokens     prompt tokens that were computed in vain
    preemptions       how often an engine interrupted the request because KV memory was full
    refusals          how often the request was refused
    refused_s         time of the first refusal
    promised_s        time at which the client may retry, by the first Retry-After
    retries           number of further attempts after a group had failed
    end               how the request ended
    reason            reason of a refusal or failure
    """

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    tenant: str = ""
    session: str = ""
    entered_s: float | None = None
    group: str = ""
    prefilled_by: str = ""
    pulled_from: str = ""
    believed_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    first_s: float | None = None
    done_s: float | None = None
    longest_gap_s: float = 0.0
    wasted_tokens: int = 0
    preemptions: int = 0
    refusals: int = 0
    refused_s: float | None = None
    promised_s: float | None = None
    retries: int = 0
    end: RequestEnd = RequestEnd.CUT
    reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Return the seconds from the first attempt to the first token; None: no token came."""
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean seconds per token after the first one.

        Returns None for an incomplete answer, or one of a single token.
        """
        if self.first_s is None or self.done_s is None or self.output_tokens < 2:
            return None
        return (self.done_s - self.first_s) / (self.output_tokens - 1)

    @property
    def is_good(self) -> bool:
        """Return whether the request was served within the latency budgets of its service class."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        if self.end is not RequestEnd.SERVED or ttft_s is None:
            return False
        return ttft_s <= self.slo.ttft_s and (tpot_s is None or tpot_s <= self.slo.tpot_s)


@dataclass(slots=True)
class GroupTotals:
    """The totals of one simulated group.

    name           name of the group
    prompt_tokens  prompt tokens of its requests
    cached_tokens  number of these tokens that were cached
    output_tokens  generated tokens
    requests       number of requests
    steps          number of engine steps
    busy_s         seconds spent in steps
    """

    name: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class ReplayRun:
    """The outcome of one replay.

    policy   name of the routing policy
    fleet    name of the fleet
    records  the requests in order of arrival
    groups   the totals of each group
    ended_s  clock at the last event
    picks    number of decisions of the policy
    pick_s   wall time of these decisions in seconds
    wall_s   wall time of the whole replay in seconds
    """

    policy: str
    fleet: str
    records: list[ReplayRecord]
    groups: list[GroupTotals] = field(default_factory=list)
    ended_s: float = 0.0
    picks: int = 0
    pick_s: float = 0.0
    wall_s: float = 0.0


LONG_PROMPT = 32 * 1024


class ShareFigures(msgspec.Struct, frozen=True):
    """The results of one service class or tenant.

    offered     number of its requests
    good        number of requests served within both latency budgets
    ttft_p50_s  median time to the first token in seconds; None: no request was served
    ttft_p99_s  99th percentile of the time to the first token in seconds
    """

    offered: int
    good: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None

    @property
    def attainment(self) -> float:
        """Return the share of requests served within their latency budgets; 1 without requests."""
        return self.good / self.offered if self.offered else 1.0


class ReplayFigures(msgspec.Struct, frozen=True):
    """The results of one replay. Rates are per second of the time in which requests arrived.

    A request is good if it was served within both of its latency budgets (TTFT and TPOT).

    policy          name of the routing policy
    fleet           name of the fleet
    offered         number of requests
    ends            number of requests by the way in which they ended (RequestEnd)
    reasons         number of refused and failed requests by reason
    span_s          seconds in which the requests arrived
    attainment      share of all offered requests that were good; 0: none were offered
    goodput         good requests per second
    token_goodput   prompt and output tokens of good requests per second
    good_input      prompt tokens of good requests per second
    throughput      served requests per second
    ttft            seconds to the first token
    tpot            seconds per further token
    longest_gap     longest seconds between two tokens of an answer
    hit_ratio       share of prompt tokens that were cached
    of_ideal        cached tokens divided by those that one shared cache without evictions would
                    have
    believed_ratio  share of prompt tokens that the gateway expected to be cached
    imbalance       computed and generated tokens of the busiest group divided by the mean of all
                    groups
    wasted          share of computed prompt tokens whose requests were not served
    long_kept       share of requests with prompts above 32k tokens that were good
    jain            Jain's index over tenants' attainment: 1 if all are equal
    worst_tenant    the lowest attainment of a tenant
    classes         results by service class
    tenants         results by tenant
    ttft_error      mean relative error (MAPE) of the TTFT that was predicted at the pick, counted
                    from the pick; None: no predictions
    ttft_error_p50  median of these errors; None: no predictions
    tpot_error      mean relative error of the TPOT; None: no predictions
    at_first_retry  of the requests refused once and retried, the share admitted then; None: there
                    were none
    preemptions     how often engines interrupted a request because KV memory was full
    pick_us         microseconds per decision
    wall_s          wall time of the replay in seconds
    """

    policy: str
    fleet: str
    offered: int
    ends: Mapping[str, int]
    reasons: Mapping[str, int]
    span_s: float
    attainment: float
    goodput: float
    token_goodput: float
    good_input: float
    throughput: float
    ttft: Summary | None
    tpot: Summary | None
    longest_gap: Summary | None
    hit_ratio: float
    of_ideal: float | None
    believed_ratio: float
    imbalance: float
    wasted: float
    long_kept: float | None
    jain: float
    worst_tenant: float
    classes: Mapping[str, ShareFigures]
    tenants: Mapping[str, ShareFigures]
    ttft_error: float | None
    ttft_error_p50: float | None
    tpot_error: float | None
    at_first_retry: float | None
    preemptions: int
    pick_us: float
    wall_s: float


def figures(run: ReplayRun, from_s: float = 0.0, to_s: float | None = None) -> ReplayFigures:
    """Return the results of a replay for requests that arrived in [from_s, to_s), in seconds.

    Requests that were unfinished at the end of the replay are left out, because they might have
    been good. But if the first token was already too late, the request counts as a miss.
    """
    counted = list(_counted(run, from_s, inf if to_s is None else to_s))
    return _evaluate(run, counted, _span_s(counted, from_s))


def _evaluate(run: ReplayRun, counted: Sequence[ReplayRecord], span_s: float) -> ReplayFigures:
    # Return the results of those requests that count, which arrived within `span_s` seconds.
    served = [record for record in counted if record.end is RequestEnd.SERVED]
    good = [record for record in counted if record.is_good]
    per_s = 1 / span_s if span_s > 0 else 0.0
    hit_ratio, of_ideal, believed_ratio, wasted = _cache_ratios(counted, served)
    ttft_errors, tpot_errors = _prediction_errors(served)
    tenants = _shares(counted, lambda record: record.tenant)
    return ReplayFigures(
        policy=run.policy,
        fleet=run.fleet,
        offered=len(counted),
        ends=dict(Counter(str(record.end) for record in counted)),
        reasons=dict(Counter(record.reason for record in counted if record.reason)),
        span_s=span_s,
        attainment=len(good) / len(counted) if counted else 0.0,
        goodput=len(good) * per_s,
        token_goodput=sum(record.prompt_tokens + record.output_tokens for record in good) * per_s,
        good_input=sum(record.prompt_tokens for record in good) * per_s,
        throughput=len(served) * per_s,
        ttft=summarise([record.ttft_s for record in counted if record.ttft_s is not None]),
        tpot=summarise([record.tpot_s for record in served if record.tpot_s is not None]),
        longest_gap=summarise(_gaps(served)),
        hit_ratio=hit_ratio,
        of_ideal=of_ideal,
        believed_ratio=believed_ratio,
        imbalance=_imbalance(run),
        wasted=wasted,
        long_kept=_good_share([record for record in counted if record.prompt_tokens > LONG_PROMPT]),
        jain=jain([share.attainment for share in tenants.values()]),
        worst_tenant=min((share.attainment for share in tenants.values()), default=1.0),
        classes=_shares(counted, lambda record: record.slo.name),
        tenants=tenants,
        ttft_error=fmean(ttft_errors) if ttft_errors else None,
        ttft_error_p50=median(ttft_errors) if ttft_errors else None,
        tpot_error=fmean(tpot_errors) if tpot_errors else None,
        at_first_retry=_at_first_retry(counted),
        preemptions=sum(record.preemptions for record in counted),
        pick_us=run.pick_s / run.picks * 1e6 if run.picks else 0.0,
        wall_s=run.wall_s,
    )


def _counted(run: ReplayRun, from_s: float, to_s: float) -> Iterator[ReplayRecord]:
    for record in run.records:
        if not from_s <= record.arrived_s < to_s:
            continue
        if record.end is not RequestEnd.CUT or _is_late(record, run.ended_s):
            yield record


def _span_s(records: Sequence[ReplayRecord], from_s: float) -> float:
    arrivals = [record.arrived_s for record in records]
    return max(arrivals, default=from_s) - max(from_s, min(arrivals, default=from_s))


def _cache_ratios(
    counted: Sequence[ReplayRecord], served: Sequence[ReplayRecord]
) -> tuple[float, float | None, float, float]:
    # Return shares of prompt tokens: cached ones, those of the possible ones (None: none possible),
    # ones that were believed to be cached, and of the computed tokens those in vain.
    prompt = sum(record.prompt_tokens for record in served)
    ideal = sum(record.ideal_tokens for record in served)
    cached = sum(record.cached_tokens for record in served)
    believed = sum(record.believed_tokens for record in served)
    return (
        cached / prompt if prompt else 0.0,
        cached / ideal if ideal else None,
        believed / prompt if prompt else 0.0,
        _wasted_share(counted, prompt - cached),
    )


def _prediction_errors(served: Sequence[ReplayRecord]) -> tuple[list[float], list[float]]:
    # Return the relative errors of the predicted TTFT and TPOT. A prediction is for one endpoint,
    # so retried requests do not count.
    stayed = [record for record in served if not record.retries]
    return (
        _errors((record.predicted_ttft_s, _ttft_from_pick(record)) for record in stayed),
        _errors((record.predicted_tpot_s, record.tpot_s) for record in stayed),
    )


def _wasted_share(records: Sequence[ReplayRecord], useful_tokens: int) -> float:
    wasted = sum(record.wasted_tokens for record in records)
    return wasted / (wasted + useful_tokens) if wasted else 0.0


def _gaps(records: Sequence[ReplayRecord]) -> list[float]:
    return [record.longest_gap_s for record in records if record.output_tokens > 1]


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index of the values: (sum x)^2 / (n sum x^2).

    It is 1 if all values are equal, and 1/n if only one of n values is not zero.
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def regret(own: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> float:
    """Return how a routing policy compares with the best other one, on its worst workload.

    own     the policy's figure by workload; more is better
    others  the same for each other policy

    For each workload, the policy's figure is divided by that of the best other policy. The result
    is the smallest quotient: 0.9 means that the policy is never more than 10 % worse than the best.
    Workloads where all other figures are 0 do not count.
    """
    rivals = list(others)
    best = {
        name: max((other[name] for other in rivals if name in other), default=0.0) for name in own
    }
    return min((value / best[name] for name, value in own.items() if best[name] > 0), default=1.0)


def _is_late(record: ReplayRecord, now: float) -> bool:
    # Return whether a request was cut off after its TTFT budget was over, so that it was a miss.
    return record.first_s is None and now - record.arrived_s > record.slo.ttft_s


def _ttft_from_pick(record: ReplayRecord) -> float | None:
    # Return the seconds from the pick to the first token, to which a prediction refers.
    #
    # Return None if the request was not admitted or got no token.
    return (
        None
        if record.first_s is None or record.entered_s is None
        else record.first_s - record.entered_s
    )


def _shares(
    records: Sequence[ReplayRecord], key: Callable[[ReplayRecord], str]
) -> dict[str, ShareFigures]:
    members: dict[str, list[ReplayRecord]] = defaultdict(list)
    for record in records:
        members[key(record)].append(record)
    return {name: _share(records_of_name) for name, records_of_name in sorted(members.items())}


def _share(records: Sequence[ReplayRecord]) -> ShareFigures:
    ttft = summarise([record.ttft_s for record in records if record.ttft_s is not None])
    good = sum(record.is_good for record in records)
    return ShareFigures(
        len(records), good, None if ttft is None else ttft.p50, None if ttft is None else ttft.p99
    )


def _good_share(records: Sequence[ReplayRecord]) -> float | None:
    return sum(record.is_good for record in records) / len(records) if records else None


def _errors(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    return [
        abs(predicted - actual) / actual
        for predicted, actual in pairs
        if predicted is not None and actual
    ]


def _at_first_retry(records: Sequence[ReplayRecord]) -> float | None:
    admitted = sum(record.refusals == 1 and record.entered_s is not None for record in records)
    retried = admitted + sum(record.refusals > 1 for record in records)
    return admitted / retried if retried else None


def _imbalance(run: ReplayRun) -> float:
    work = [group.prompt_tokens - group.cached_tokens + group.output_tokens for group in run.groups]
    return max(work) * len(work) / sum(work) if any(work) else 1.0
