"""Tests of small overloads in simulated time: shares of requests that meet their latency budgets,
over several seeds of arrivals.
"""

from __future__ import annotations

from functools import cache
from itertools import count

from msgspec.structs import replace

from bench.load.overload_plan import (
    GROUP,
    OPENED_S,
    POLICY,
    SLO,
    STREAM_OUTPUT,
    STREAM_PROMPT,
    Phase,
    arrivals,
    trace_request,
)
from planner.replay import ClientBehaviour, FleetSpec, ReplayOptions, ReplayRun, replay, traffic
from planner.replay.results import ReplayRecord
from planner.traces.recorded_request import PRIVATE
from policies import policy_registry
from policies.admission_registry import build_admission

STREAMS, CAPACITY_PER_S = 150, 7.6  # a quarter of the live run's numbers, like the number of groups
PHASES = (Phase("before", 50.0, 0.5), Phase("spike", 30.0, 2.0), Phase("after", 45.0, 0.5))
SPIKE = 50.0, 80.0


@cache
def spikes() -> list[ReplayRecord]:
    # Return requests in spikes. A spike has about 450 requests, of which 28 to 48 % are admitted at
    # once.
    return [record for seed in range(1, 5) for record in replay_spike(seed).records]


def replay_spike(seed: int) -> ReplayRun:
    names = count(PRIVATE)
    streams = [
        trace_request(STREAM_PROMPT, STREAM_OUTPUT, OPENED_S + index * 0.08, names)
        for index in range(STREAMS)
    ]
    requests = [
        trace_request(arrival.prompt_tokens, arrival.output_tokens, arrival.due_s, names)
        for arrival in arrivals(PHASES, CAPACITY_PER_S, seed)
    ]
    spec = FleetSpec("a quarter", (replace(GROUP, count=2),), block_tokens=16)
    options = ReplayOptions(
        expected_output=None, standard=SLO, horizon_s=200.0, clients=ClientBehaviour(retries=1)
    )
    policy, admission = policy_registry.build(POLICY, {}), build_admission("priced", {})
    return replay(spec, traffic([*streams, *requests]), policy, admission, options)


def test_requests_admitted_during_a_spike_are_served_in_time() -> None:
    came = [record for record in spikes() if SPIKE[0] <= record.arrived_s < SPIKE[1]]
    let_in = [record for record in came if record.entered_s is not None and not record.refusals]
    assert 0.35 < len(let_in) / len(came) < 0.8
    assert sum(record.is_good for record in let_in) / len(let_in) >= 0.95


def test_clients_that_return_on_time_are_admitted() -> None:
    refused = [
        record for record in spikes() if SPIKE[0] <= record.arrived_s < SPIKE[1] and record.refusals
    ]
    assert len(refused) > 200
    assert (
        sum(record.refusals == 1 and record.entered_s is not None for record in refused)
        / len(refused)
        >= 0.9
    )


def test_ten_seconds_after_the_spike_new_requests_are_served_in_time_again() -> None:
    new = [record for record in spikes() if SPIKE[1] + 10.0 <= record.arrived_s < SPIKE[1] + 20.0]
    assert sum(record.is_good for record in new) / len(new) >= 0.8
