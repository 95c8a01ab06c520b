"""What is asked in an overload, and when: the phases, the lengths, and the load that is called capacity.

The same requests go over HTTP (bench/load/overload_load.py) and, to find the capacity, through a replay on the virtual clock. Not
here: processes, sockets, figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from planner.bench.workloads import lognormal, poisson
from planner.replay import FleetSpec, GroupKind, ReplayOptions, replay, traffic
from planner.replay.capacity import capacity
from planner.text_generator import BLOCK_TOKENS
from planner.traces.shape import PRIVATE, TraceRequest
from policies import registry
from policies.model import Slo

STREAMS = 600
STREAM_PROMPT, STREAM_OUTPUT = 200, 3000  # longer than the run
OPENED_S, OPENED_WITHIN_S = 20.0, 12.0  # by then the gateway has seen how fast the engines are

SPEED = 0.2
GROUP = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=8, slowness=1 / SPEED)
"""600 streams on these make some 8,000 tokens a second, which two cores of a test machine can send, relay and read."""

SLO = Slo("standard", ttft_s=5.0, tpot_s=0.25)
POLICY = "prefix_aware"  # the default of a pool
HELD = 0.9  # capacity is where so many keep both budgets, as in docs/goodput.md
SETTLED_S, JUDGED_S = 50.0, 50.0

BASE = 0.5
"""Before and after, in parts of capacity. Half of the capacity is promised to those who were refused and come back."""


class Phase(msgspec.Struct, frozen=True):
    """So many seconds at a load, in parts of capacity. `obey`: whether refused clients wait as they are told."""

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
    """One client's request, `due_s` after the first one could come. Equal seeds give equal requests everywhere."""

    number: int
    phase: int
    due_s: float
    prompt_tokens: int
    output_tokens: int


class Plan(msgspec.Struct, frozen=True):
    """What the load generator is told. All moments of a run count from `begin_s` of time.monotonic."""

    url: str
    still_url: str
    begin_s: float
    capacity_per_s: float
    seed: int
    phases: tuple[Phase, ...] = PHASES

    @property
    def ends_s(self) -> float:
        """Of time.monotonic."""
        return self.begin_s + sum(phase.seconds for phase in self.phases)

    def window(self, name: str) -> tuple[float, float]:
        """When the phase of that name begins and ends."""
        at_s = 0.0
        for phase in self.phases:
            if phase.name == name:
                return at_s, at_s + phase.seconds
            at_s += phase.seconds
        raise ValueError(f"no phase is called {name}")


def arrivals(phases: tuple[Phase, ...], capacity_per_s: float, seed: int) -> Iterator[Arrival]:
    """Independent clients, phase after phase."""
    rng, numbers, at_s = Random(f"overload {seed}"), count(), 0.0
    for place, phase in enumerate(phases):
        for due_s in poisson(phase.load * capacity_per_s, seed * 100 + place):
            if due_s >= phase.seconds:
                break
            lengths = lognormal(rng, 500, 640, 16, 8_000), lognormal(rng, 120, 160, 8, 600)
            yield Arrival(next(numbers), place, at_s + due_s, *lengths)
        at_s += phase.seconds


def capacity_per_s() -> float:
    """Requests a second, beside the open streams, of which 90 % keep both budgets when everybody is let in."""
    return capacity(_attainment, HELD, start=30.0, tolerance=0.05).load


def _attainment(rate: float) -> float:
    kept = [good for seed in (1, 2) for good in _replayed(rate, seed)]
    return sum(kept) / len(kept)


def _replayed(rate: float, seed: int) -> Iterator[bool]:
    """Whether requests kept their budgets, once the fleet has settled."""
    phases = (Phase("settling", SETTLED_S, 1.0), Phase("judged", JUDGED_S, 1.0), Phase("last words", 15.0, 1.0))
    names = count(PRIVATE)
    open_ = [
        trace_request(STREAM_PROMPT, STREAM_OUTPUT, OPENED_S + at * OPENED_WITHIN_S / STREAMS, names)
        for at in range(STREAMS)
    ]
    asked = [
        trace_request(one.prompt_tokens, one.output_tokens, one.due_s, names) for one in arrivals(phases, rate, seed)
    ]
    ends_s = SETTLED_S + JUDGED_S
    options = ReplayOptions(seed, expected_output=None, standard=SLO, horizon_s=ends_s + 40.0)
    spec = FleetSpec("overload", (GROUP,), block_tokens=16)
    run = replay(spec, traffic([*open_, *asked]), registry.build(POLICY, {}), options=options)
    for record in run.records:
        if record.output_tokens != STREAM_OUTPUT and SETTLED_S <= record.arrived_s < ends_s:
            yield record.is_good


def trace_request(prompt_tokens: int, output_tokens: int, arrival_s: float, names: Iterator[int]) -> TraceRequest:
    """One whose prompt is like no other."""
    blocks = tuple(next(names) for _ in range(-(-prompt_tokens // BLOCK_TOKENS)))
    return TraceRequest(arrival_s, prompt_tokens, output_tokens, blocks)
