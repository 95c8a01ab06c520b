"""A small version of `make overload` on the virtual clock: attainment during a spike and after it."""

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
from planner.traces.shape import PRIVATE
from policies import registry
from policies.admission_registry import build_admission

STREAMS, CAPACITY_PER_S = 150, 7.6  # a quarter of the live ones, as of the groups
PHASES = (Phase("before", 50.0, 0.5), Phase("spike", 30.0, 2.0), Phase("after", 45.0, 0.5))
SPIKE = 50.0, 80.0


@cache
def spike() -> ReplayRun:
    """Run a spike whose clients obey Retry-After once."""
    names = count(PRIVATE)
    streams = [
        trace_request(STREAM_PROMPT, STREAM_OUTPUT, OPENED_S + at * 0.08, names)
        for at in range(STREAMS)
    ]
    asked = [
        trace_request(one.prompt_tokens, one.output_tokens, one.due_s, names)
        for one in arrivals(PHASES, CAPACITY_PER_S, 1)
    ]
    spec = FleetSpec("a quarter", (replace(GROUP, count=2),), block_tokens=16)
    options = ReplayOptions(
        expected_output=None, standard=SLO, horizon_s=150.0, clients=ClientBehaviour(retries=1)
    )
    policy, admission = registry.build(POLICY, {}), build_admission("priced", {})
    return replay(spec, traffic([*streams, *asked]), policy, admission, options)


def test_requests_admitted_during_a_spike_are_served_in_time() -> None:
    came = [one for one in spike().records if SPIKE[0] <= one.arrived_s < SPIKE[1]]
    let_in = [one for one in came if one.entered_s is not None and not one.refusals]
    assert 0.4 < len(let_in) / len(came) < 0.8
    assert sum(one.is_good for one in let_in) / len(let_in) >= 0.95


def test_clients_that_return_on_time_are_admitted() -> None:
    refused = [
        one for one in spike().records if SPIKE[0] <= one.arrived_s < SPIKE[1] and one.refusals
    ]
    assert len(refused) > 50
    assert (
        sum(one.refusals == 1 and one.entered_s is not None for one in refused) / len(refused)
        >= 0.9
    )


def test_ten_seconds_after_the_spike_new_requests_are_served_in_time_again() -> None:
    new = [one for one in spike().records if SPIKE[1] + 10.0 <= one.arrived_s < SPIKE[1] + 20.0]
    assert sum(one.is_good for one in new) / len(new) >= 0.9
