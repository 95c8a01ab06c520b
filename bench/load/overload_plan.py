"""The plan of an overload run: its phases, lengths and arrivals of requests, and the fleet's
capacity.

bench/load/overload_load.py sends the requests over HTTP. To find the capacity, the same requests
are replayed in simulated time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from planner.bench.workloads import lognormal, poisson
from planner.replay import FleetSpec, GroupKind, ReplayOptions, replay, traffic
from planner.replay.capacity_search import capacity
from planner.text_generator import BLOCK_TOKENS
from planner.traces.recorded_request import PRIVATE, TraceRequest
from policies import policy_registry
from policies.routing_types import Slo

STREAMS = 600
STREAM_PROMPT, STREAM_OUTPUT = 200, 3000  # tokens of streams that last longer than the run
OPENED_S, OPENED_WITHIN_S = 20.0, 12.0  # until 20 s, the gateway learns the engines' speed

SPEED = 0.2
GROUP = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=8, slowness=1 / SPEED)
"""The engines of the simulated fleet.

Their 600 streams make about 8,000 tokens/s, as many as two cores can send, relay and read.
"""

SLO = Slo("standard", ttft_s=5.0, tpot_s=0.25)
POLICY = "prefix_aware"  # the default of a pool
ATTAINMENT = 0.9  # share of requests within both budgets at capacity, as in docs/goodput.md
SETTLED_S, JUDGED_S = 50.0, 50.0

BASE = 0.5
"""Load before and after the overload, as a share (0 to 1) of the capacity.

The rest of the capacity is left for retries.
"""


class Phase(msgspec.Struct, frozen=True):
    """One phase of an overload run, during which the load is constant.

    seconds  its duration
    load     its load as a multiple of the fleet's capacity
    obey     whether refused clients obey Retry-After
    """

    name: str
    seconds: float
    load: float
    obey: bool = True


PHASES = (
    Phase("before", 55.0, BASE),
    Phase("spike", 30.0, 2.0),
    Phase("after", 60.0, BASE),
    Phase("storm", 20.0, 2.0, obey=False),
    Phase("calm", 40.0, BASE),
)


class Arrival(msgspec.Struct, frozen=True):
    """One client's request, sent `due_s` seconds after the plan begins.

    Plans with the same random seed have equal requests.
    """

    number: int
    phase: int
    due_s: float
    prompt_tokens: int
    output_tokens: int


class Plan(msgspec.Struct, frozen=True):
    """The requests that the load generator sends in an overload run, with their times.

    `begin_s` is in seconds of time.monotonic; other times are in seconds after it.
    """

    url: str
    null_url: str
    begin_s: float
    capacity_per_s: float
    seed: int
    phases: tuple[Phase, ...] = PHASES

    @property
    def ends_s(self) -> float:
        """Return the end of the plan's last phase, in seconds of time.monotonic()."""
        return self.begin_s + sum(phase.seconds for phase in self.phases)

    def window(self, name: str) -> tuple[float, float]:
        start_s = 0.0
        for phase in self.phases:
            if phase.name == name:
                return start_s, start_s + phase.seconds
            start_s += phase.seconds
        raise ValueError(
            f"the plan has no phase named {name}; its phases: "
            f"{', '.join(phase.name for phase in self.phases)}"
        )


def arrivals(phases: tuple[Phase, ...], capacity_per_s: float, seed: int) -> Iterator[Arrival]:
    rng, numbers, start_s = Random(f"overload {seed}"), count(), 0.0
    for index, phase in enumerate(phases):
        for due_s in poisson(phase.load * capacity_per_s, seed * 100 + index):
            if due_s >= phase.seconds:
                break
            lengths = lognormal(rng, 500, 640, 16, 8_000), lognormal(rng, 120, 160, 8, 600)
            yield Arrival(next(numbers), index, start_s + due_s, *lengths)
        start_s += phase.seconds


def find_capacity_per_s() -> float:
    """Return the requests per second that the engines serve well beside the open streams.

    At this rate, 90% of the requests meet both latency budgets without admission control. It is
    found by simulations.
    """
    return capacity(_attainment, ATTAINMENT, start=30.0, tolerance=0.05).load


def _attainment(rate: float) -> float:
    outcomes = [is_good for seed in (1, 2) for is_good in _replay(rate, seed)]
    return sum(outcomes) / len(outcomes)


def _replay(rate: float, seed: int) -> Iterator[bool]:
    # Yield for each request after the warm-up phase whether it kept its latency budgets.
    phases = (
        Phase("settling", SETTLED_S, 1.0),
        Phase("judged", JUDGED_S, 1.0),
        Phase("drain", 15.0, 1.0),
    )
    names = count(PRIVATE)
    streams = [
        trace_request(
            STREAM_PROMPT, STREAM_OUTPUT, OPENED_S + number * OPENED_WITHIN_S / STREAMS, names
        )
        for number in range(STREAMS)
    ]
    requests = [
        trace_request(arrival.prompt_tokens, arrival.output_tokens, arrival.due_s, names)
        for arrival in arrivals(phases, rate, seed)
    ]
    ends_s = SETTLED_S + JUDGED_S
    options = ReplayOptions(seed, expected_output=None, standard=SLO, horizon_s=ends_s + 40.0)
    spec = FleetSpec("overload", (GROUP,), block_tokens=16)
    run = replay(
        spec, traffic([*streams, *requests]), policy_registry.build(POLICY, {}), options=options
    )
    for record in run.records:
        if record.output_tokens != STREAM_OUTPUT and SETTLED_S <= record.arrived_s < ends_s:
            yield record.is_good


def trace_request(
    prompt_tokens: int, output_tokens: int, arrival_s: float, names: Iterator[int]
) -> TraceRequest:
    blocks = tuple(next(names) for _ in range(-(-prompt_tokens // BLOCK_TOKENS)))
    return TraceRequest(arrival_s, prompt_tokens, output_tokens, blocks)
