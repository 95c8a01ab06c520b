"""Tests of data-parallel ranks in a simulation, visible to the gateway or hidden."""

from __future__ import annotations

import msgspec
import pytest

from planner.replay import (
    FleetError,
    FleetSpec,
    GroupFault,
    GroupFaultKind,
    GroupKind,
    ReplayOptions,
    ReplayRun,
    RequestEnd,
    replay,
    traffic,
)
from planner.replay.fleet_spec import validate
from planner.replay.rank_choice import RankChoice
from planner.traces import TraceRequest
from policies import policy_registry
from policies.routing_types import Role

KIND = GroupKind("deepseek-v3", "h200", 1, kv_tokens=100_000, ep=8, ranks=8)


def some(count: int, every_s: float, prompt: int = 3000, output: int = 60) -> list[TraceRequest]:
    # Return the requests of eight conversations. In each, every second request repeats one prompt.
    return [
        TraceRequest(
            number * every_s,
            prompt + number,
            output + number % 7,
            tuple(range(number % 8 * 10, number % 8 * 10 + prompt // 512)),
        )
        for number in range(count)
    ]


def ran(
    requests: list[TraceRequest],
    kind: GroupKind = KIND,
    count: int = 1,
    policy: str = "prefix_aware",
    **options: object,
) -> ReplayRun:
    fleet = validate(FleetSpec("ranks", (msgspec.structs.replace(kind, count=count),)))
    built = policy_registry.build(policy, {})
    return replay(fleet, traffic(requests), built, None, ReplayOptions(**options))  # type: ignore[arg-type]


def test_each_rank_is_an_endpoint_with_a_part_of_the_memory() -> None:
    run = ran(some(80, 0.02), count=2)
    assert [group.name for group in run.groups][:9] == [
        *(f"tp0/dp{rank}" for rank in range(8)),
        "tp1/dp0",
    ]
    assert len({record.group for record in run.records}) > 6
    assert all(record.end is RequestEnd.SERVED for record in run.records)
    own = msgspec.structs.replace(KIND, kv_tokens=None)
    whole = GroupKind("deepseek-v3", "h200", 1, ep=8, dp=8)
    assert own.capacity_tokens == whole.capacity_tokens // 8


@pytest.mark.parametrize("choice", [RankChoice.LEAST, RankChoice.TURNS])
def test_hidden_ranks_are_one_endpoint_and_lose_repeated_prompts(choice: RankChoice) -> None:
    hidden = msgspec.structs.replace(KIND, rank_choice=choice)
    # With seven requests between two of one conversation, taking turns does not always lead to the
    # same rank.
    requests = [each for place, each in enumerate(some(200, 0.3)) if place % 8 < 7]
    seen, unseen = ran(requests), ran(requests, hidden)
    assert [group.name for group in unseen.groups] == ["tp0"]
    assert all(record.end is RequestEnd.SERVED for record in unseen.records)
    hits, lost = (sum(record.cached_tokens > 0 for record in run.records) for run in (seen, unseen))
    assert hits > len(requests) * 0.9
    assert lost < hits - 20


@pytest.mark.parametrize("choice", list(RankChoice))
def test_leaping_and_stepping_give_the_same_run_within_three_thousandths(
    choice: RankChoice,
) -> None:
    kind = msgspec.structs.replace(KIND, rank_choice=choice)
    requests = some(120, 0.15)
    leapt, stepped = ran(requests, kind), ran(requests, kind, merges_steps=False)
    for one, other in zip(leapt.records, stepped.records, strict=True):
        assert (one.group, one.cached_tokens) == (other.group, other.cached_tokens)
        assert one.first_s == pytest.approx(other.first_s, rel=3e-3)
        assert one.done_s == pytest.approx(other.done_s, rel=3e-3)
    assert leapt.groups[0].steps == stepped.groups[0].steps
    assert leapt.groups[0].busy_s == pytest.approx(stepped.groups[0].busy_s, rel=3e-3)


def test_a_prompt_on_one_rank_delays_answers_on_the_others_only_in_lockstep() -> None:
    requests = [TraceRequest(0.0, 100, 400, ()), TraceRequest(1.0, 30_000, 1, ())]
    free = msgspec.structs.replace(KIND, lockstep=False)
    joint, apart = ran(requests), ran(requests, free)
    assert joint.records[0].group != joint.records[1].group
    assert joint.records[0].longest_gap_s > 0.2
    assert apart.records[0].longest_gap_s < 0.05


def test_a_failed_rank_ends_the_whole_engine_which_returns_empty() -> None:
    fault = GroupFault(3.0, 0, GroupFaultKind.LOSE, duration_s=2.0)
    requests = some(120, 0.06, prompt=6000, output=20)
    run = ran(requests, count=2, policy="least_loaded", faults=(fault,))
    ends = {record.end for record in run.records}
    assert RequestEnd.SERVED in ends
    for record in run.records:
        if 3.0 < record.arrived_s < 5.0:
            assert record.group.startswith("tp1/")
        if record.end is RequestEnd.LOST:
            assert record.arrived_s < 3.0
    assert any(record.retries for record in run.records)
    back = [record for record in run.records if record.arrived_s > 5.0]
    assert any(record.group.startswith("tp0/") for record in back)
    assert all(record.end is RequestEnd.SERVED for record in back)


@pytest.mark.parametrize("choice", list(RankChoice))
def test_a_slow_engine_slows_all_of_its_ranks(choice: RankChoice) -> None:
    kind = msgspec.structs.replace(KIND, rank_choice=choice)
    slow = GroupFault(0.0, 0, GroupFaultKind.SLOW, None, 3.0)
    usual, slowed = ran(some(8, 20.0), kind), ran(some(8, 20.0), kind, faults=(slow,))
    for one, other in zip(usual.records, slowed.records, strict=True):
        assert other.tpot_s == pytest.approx(3 * (one.tpot_s or 0.0), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 1, "dp": 8}, "both set the number of data-parallel ranks"),
        ({"role": Role.PREFILL}, "role both"),
        ({"pp": 2}, "cannot be combined with pp or cp"),
        ({"ranks": 0}, "ranks must be positive"),
    ],
)
def test_ranks_that_no_engine_has_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        validate(FleetSpec("f", (msgspec.structs.replace(KIND, **changes),)))
