"""One of four groups is slow, under every policy, on the virtual clock: it is detected and gets
little work.

The load is half of what three healthy groups serve. A replay has no hedging.
"""

from __future__ import annotations

from random import Random
from statistics import quantiles

import msgspec
import pytest

from planner.replay import FleetSpec, Kind, Options, traffic
from planner.replay.fleet import Fleet
from planner.replay.options import Fault, Trouble
from planner.replay.record import Run
from planner.traces import TraceRequest
from policies import registry

GROUP = Kind("llama-3.1-70b-fp8", "h200", 4, kv_tokens=600_000)
KEPT_S = 10.0


def requests(seed: int, seconds: float, per_s: float = 8.8) -> list[TraceRequest]:
    """Return Poisson arrivals of chat prompts; three groups serve about 17.6 per second."""
    rng, now, made = Random(seed), 0.0, []
    while (now := now + rng.expovariate(per_s)) < seconds:
        prompt = round(rng.lognormvariate(7.6, 0.8))
        keys = tuple(rng.randrange(1 << 40) for _ in range(prompt // 512))
        made.append(
            TraceRequest(now, max(16, prompt), max(2, round(rng.lognormvariate(4.9, 0.6))), keys)
        )
    return made


def ran(
    policy: str, groups: int, seed: int, seconds: float, fault: Fault | None = None
) -> tuple[Run, Fleet]:
    spec = FleetSpec("four", (msgspec.structs.replace(GROUP, count=groups),))
    options = Options(slow_factor=2.5, faults=() if fault is None else (fault,))
    fleet = Fleet(spec, traffic(requests(seed, seconds)), registry.build(policy, {}), None, options)
    return fleet.run(), fleet


def share(run: Run, from_s: float) -> float:
    late = [one for one in run.records if one.arrived_s >= from_s]
    return sum(one.group == "tp0" for one in late) / len(late)


def p99_s(run: Run) -> float:
    return quantiles([one.ttft_s for one in run.records if one.ttft_s is not None], n=100)[98]


@pytest.mark.parametrize("policy", registry.names())
def test_a_group_ten_times_slower_gets_next_to_nothing_after_ten_seconds(policy: str) -> None:
    run, _ = ran(policy, 4, 1, 60.0, Fault(0.0, 0, Trouble.SLOW, factor=10.0))
    assert all(one.first_s is not None for one in run.records)
    assert share(run, KEPT_S) <= 0.01


@pytest.mark.parametrize("policy", ["round_robin", "llumnix", "prefix_aware", "priced"])
def test_first_tokens_come_as_with_the_other_three_alone(policy: str) -> None:
    """Over five minutes, including the seconds until the detection."""
    three, _ = ran(policy, 3, 11, 300.0)
    run, _ = ran(policy, 4, 11, 300.0, Fault(0.0, 0, Trouble.SLOW, factor=10.0))
    assert p99_s(run) <= 2.0 * p99_s(three)


@pytest.mark.parametrize("policy", ["round_robin", "sglang_cache_aware"])
def test_requests_that_are_late_at_a_suspect_group_do_not_wait_for_its_ejection(
    policy: str,
) -> None:
    run, fleet = ran(policy, 4, 11, 20.0, Fault(0.0, 0, Trouble.SLOW, factor=10.0))
    ejected_s, _ = fleet.speeds.ejected[0]
    assert any(
        one.moved and one.first_s is not None and one.first_s < ejected_s for one in run.records
    )


@pytest.mark.parametrize(
    ("factor", "only"), [(3.3, ""), (3.3, "prefill"), (3.3, "decode"), (10.0, "decode")]
)
@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_a_group_that_becomes_slow_at_one_thing_is_ejected(
    policy: str, factor: float, only: str
) -> None:
    _, fleet = ran(policy, 4, 1, 60.0, Fault(20.0, 0, Trouble.SLOW, factor=factor, only=only))
    assert [group for _, group in fleet.speeds.ejected] == [0]
    # Three times slower at prompts alone is near the limit: a policy that looks at load sends it few of them.
    assert fleet.speeds.ejected[0][0] <= 20.0 + (20.0 if only == "prefill" else 10.0)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware", "priced"])
def test_unequal_groups_are_not_ejected(policy: str) -> None:
    kinds = (
        Kind("llama-3.1-70b-fp8", "h200", 4, kv_tokens=600_000, count=2),
        Kind("llama-3.1-70b-fp8", "l40s", 4, kv_tokens=300_000, count=2),
    )
    made = traffic(requests(2, 60.0, 3.0))
    fleet = Fleet(
        FleetSpec("unequal", kinds),
        made,
        registry.build(policy, {}),
        None,
        Options(slow_factor=2.5),
    )
    fleet.run()
    assert fleet.speeds.ejected == []


@pytest.mark.parametrize("policy", ["round_robin", "prefix_aware", "priced"])
def test_a_group_that_is_fast_again_gets_requests_again(policy: str) -> None:
    run, fleet = ran(policy, 4, 3, 60.0, Fault(10.0, 0, Trouble.SLOW, for_s=20.0, factor=10.0))
    assert [group for _, group in fleet.speeds.ejected] == [0]
    assert share(run, 45.0) > 0.05
