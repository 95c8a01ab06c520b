"""Tests of several simulated gateways: cache hits and goodput by the delay of messages between them.

bench/gateway_views.py has the simulation. There is no network and no process; `make gateways` tests
those.
"""

from __future__ import annotations

from functools import cache, partial
from random import Random

import msgspec
import pytest

from bench.gateway_views import SeveralGateways, ViewDelays
from bench.stale_views import PERFECT, Setting, requests, run
from planner.replay import FleetSpec, ReplayOptions, traffic
from planner.replay.results import figures
from policies import policy_registry
from tests.sim.conversation import conversation
from tests.sim.test_policies_on_a_virtual_clock import GROUP

REQUESTS = 500
SEEDS = range(2)
JITTER_S = 0.02
"""Random delay of each arrival in seconds, as in a network.

Routing amplifies the order of arrivals, so that results are means over several runs.
"""


@cache
def hit_ratio(count: int, late_s: float | None = None) -> float:
    return sum(_hit_ratio(count, late_s, seed) for seed in SEEDS) / len(SEEDS)


def _hit_ratio(count: int, late_s: float | None, seed: int) -> float:
    rng = Random(seed)
    arrivals = [
        msgspec.structs.replace(item, arrival_s=item.arrival_s + JITTER_S * rng.random())
        for item in conversation(REQUESTS)
    ]
    options = ReplayOptions(seed=seed, expected_output=None)
    create_policy = partial(policy_registry.build, "prefix_aware", {})
    spec, delays = FleetSpec("several", (GROUP,)), ViewDelays(late_s)
    fleet = SeveralGateways(spec, traffic(arrivals), create_policy, options, count, delays)
    return figures(fleet.run()).hit_ratio


@pytest.mark.parametrize("late_s", [0.1, 1.0])
def test_two_gateways_hit_like_one_despite_late_updates(late_s: float) -> None:
    assert hit_ratio(2, late_s) >= 0.97 * hit_ratio(1)


def test_two_unconnected_gateways_hit_much_less() -> None:
    assert hit_ratio(2) < 0.85 * hit_ratio(1)


SETTING = Setting(groups=32, rate=1.7, warm_s=20.0, span_s=20.0)
STALE = ViewDelays(0.075, 0.025, 3.0, 2.0)


@pytest.mark.parametrize("policy", ["prefix_aware", "priced"])
def test_three_gateways_with_stale_views_keep_the_goodput_of_one(policy: str) -> None:
    setting = msgspec.structs.replace(SETTING, policy=policy)
    arrivals = requests(setting, 900)
    one = run(setting, arrivals, 900, 1, PERFECT)
    three = run(setting, arrivals, 900, 3, STALE)
    assert three.offered == one.offered
    assert three.goodput >= 0.97 * one.goodput


def test_gateways_that_exchange_nothing_do_not() -> None:
    arrivals = requests(SETTING, 900)
    one = run(SETTING, arrivals, 900, 1, PERFECT)
    strangers = run(SETTING, arrivals, 900, 3, msgspec.structs.replace(STALE, flush_s=None))
    assert strangers.goodput < 0.97 * one.goodput
