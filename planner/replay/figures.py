"""What a replay amounts to: goodput, attainment, latencies, hits, balance, waste, fairness. Pure; from a Run alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec

from planner.bench.stats import Summary, summarise
from planner.replay.record import End, Record, Run

LONG_PROMPT = 32 * 1024


class Share(msgspec.Struct, frozen=True):
    """How one class or tenant fared: requests offered and good, and its first tokens."""

    offered: int
    good: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None

    @property
    def attainment(self) -> float:
        """Share of the offered that were good."""
        return self.good / self.offered if self.offered else 1.0


class Figures(msgspec.Struct, frozen=True):
    """One replay in numbers. Rates are per second of the span in which requests arrived.

    attainment      share of all offered requests that were served within both budgets; 0 where none were offered
    goodput         good requests a second; `token_goodput`: prompt and output tokens of good requests a second
    good_input      prompt tokens of good requests a second
    hit_ratio       prompt tokens found cached; `of_ideal`: as a share of what an endless cache in common would have had
    imbalance       computed and made tokens of the busiest group over the mean
    wasted          prompt tokens computed for requests that were not served, as a share of all computed
    long_kept       share of prompts above 32k tokens that were served well
    jain            Jain's index over tenants' attainment: 1 when all fare alike; `worst_tenant`: the least attainment
    ttft_error, tpot_error  mean relative error of what was predicted at the pick, from there to the first token, over
                            what it turned out to be (MAPE); ttft_error_p50: the median; None if nothing was
    at_first_retry  of requests that were refused once and came again, the share let in then; None if there were none
    pick_us         microseconds per decision
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
    classes: Mapping[str, Share]
    tenants: Mapping[str, Share]
    ttft_error: float | None
    ttft_error_p50: float | None
    tpot_error: float | None
    at_first_retry: float | None
    preemptions: int
    pick_us: float
    wall_s: float


def figures(run: Run, from_s: float = 0.0, to_s: float | None = None) -> Figures:
    """Of the requests that arrived from `from_s` on (a cold fleet's first minutes aside) and before `to_s`.

    A request that the horizon cut short is left out, for it might have been good; unless its first token was overdue
    already: then it is a miss.
    """
    inside = [one for one in run.records if one.arrived_s >= from_s and (to_s is None or one.arrived_s < to_s)]
    counted = [one for one in inside if one.end is not End.CUT or _is_late(one, run.ended_s)]
    served = [one for one in counted if one.end is End.SERVED]
    good = [one for one in counted if one.good]
    ends = [one.arrived_s for one in counted]
    span_s = max(ends, default=from_s) - max(from_s, min(ends, default=from_s))
    per_s = 1 / span_s if span_s > 0 else 0.0
    prompt = sum(one.prompt_tokens for one in served)
    ideal = sum(one.ideal_tokens for one in served)
    cached = sum(one.cached_tokens for one in served)
    wasted = sum(one.wasted_tokens for one in counted)
    foreseen = _errors((one.predicted_ttft_s, _from_entry(one)) for one in served if not one.moved)
    paced = _errors((one.predicted_tpot_s, one.tpot_s) for one in served if not one.moved)
    tenants = _shares(counted, lambda one: one.tenant)
    attained = [share.attainment for share in tenants.values()]
    return Figures(
        policy=run.policy,
        fleet=run.fleet,
        offered=len(counted),
        ends=dict(Counter(str(one.end) for one in counted)),
        reasons=dict(Counter(one.reason for one in counted if one.reason)),
        span_s=span_s,
        attainment=len(good) / len(counted) if counted else 0.0,
        goodput=len(good) * per_s,
        token_goodput=sum(one.prompt_tokens + one.output_tokens for one in good) * per_s,
        good_input=sum(one.prompt_tokens for one in good) * per_s,
        throughput=len(served) * per_s,
        ttft=summarise([one.ttft_s for one in counted if one.ttft_s is not None]),
        tpot=summarise([one.tpot_s for one in served if one.tpot_s is not None]),
        longest_gap=summarise([one.longest_gap_s for one in served if one.output_tokens > 1]),
        hit_ratio=cached / prompt if prompt else 0.0,
        of_ideal=cached / ideal if ideal else None,
        believed_ratio=sum(one.believed_tokens for one in served) / prompt if prompt else 0.0,
        imbalance=_imbalance(run),
        wasted=wasted / (wasted + prompt - cached) if wasted else 0.0,
        long_kept=_kept([one for one in counted if one.prompt_tokens > LONG_PROMPT]),
        jain=jain(attained),
        worst_tenant=min(attained, default=1.0),
        classes=_shares(counted, lambda one: one.slo.name),
        tenants=tenants,
        ttft_error=fmean(foreseen) if foreseen else None,
        ttft_error_p50=median(foreseen) if foreseen else None,
        tpot_error=fmean(paced) if paced else None,
        at_first_retry=_at_first_retry(counted),
        preemptions=sum(one.preemptions for one in counted),
        pick_us=run.pick_s / run.picks * 1e6 if run.picks else 0.0,
        wall_s=run.wall_s,
    )


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: (sum x)^2 / (n sum x^2), from 1/n (one has all) to 1 (all have the same)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def regret(mine: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> float:
    """The worst ratio to the best over workloads: min over workloads of mine / best of the others. Higher is better.

    A figure per workload each, of which more is better; workloads where nobody has any do not count.
    """
    rivals = list(others)
    best = {name: max((other[name] for other in rivals if name in other), default=0.0) for name in mine}
    return min((value / best[name] for name, value in mine.items() if best[name] > 0), default=1.0)


def _is_late(one: Record, now: float) -> bool:
    """A request that was cut after its time for a first token was over: a miss, whatever would have become of it."""
    return one.first_s is None and now - one.arrived_s > one.slo.ttft_s


def _from_entry(one: Record) -> float | None:
    """From the pick to the first token: what a prediction is about."""
    return None if one.first_s is None or one.entered_s is None else one.first_s - one.entered_s


def _shares(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, Share]:
    members: dict[str, list[Record]] = defaultdict(list)
    for one in records:
        members[key(one)].append(one)
    return {name: _share(each) for name, each in sorted(members.items())}


def _share(records: Sequence[Record]) -> Share:
    ttft = summarise([one.ttft_s for one in records if one.ttft_s is not None])
    good = sum(one.good for one in records)
    return Share(len(records), good, None if ttft is None else ttft.p50, None if ttft is None else ttft.p99)


def _kept(records: Sequence[Record]) -> float | None:
    return sum(one.good for one in records) / len(records) if records else None


def _errors(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    """Relative errors of predictions: pairs of what was predicted and what came; those without either are left out."""
    return [abs(said - real) / real for said, real in pairs if said is not None and real]


def _at_first_retry(records: Sequence[Record]) -> float | None:
    let_in = sum(one.refusals == 1 and one.entered_s is not None for one in records)
    came = let_in + sum(one.refusals > 1 for one in records)
    return let_in / came if came else None


def _imbalance(run: Run) -> float:
    work = [group.prompt_tokens - group.cached_tokens + group.output_tokens for group in run.groups]
    return max(work) * len(work) / sum(work) if any(work) else 1.0
