"""Tests that a simulated fleet frees all KV memory after many requests and a fault."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.chaos.kv_trials import FAULTS, Trial

# Faults that end with their wave. A dead agent stays dead, and random faults last for a whole run.
PASSING = ["none", "freeze source", "freeze sink", "stall", "steal blocks", "hang up"]


def test_ten_minutes_of_waves_leave_nothing_behind() -> None:
    # The fault is the first thing that a seed draws.
    world = Trial(
        next(seed for seed in range(1000) if Random(seed).choice(FAULTS) == "none"), "inproc"
    )
    assert world.fault == "none"
    ends: Counter[str] = Counter()
    for wave in range(60):
        world.undisturbed.clear()
        world.fault = world.rng.choice(PASSING)
        for number in range(world.rng.randrange(2, 8)):
            world.request(f"{wave}/{number}")
        if world.fault == "hang up":
            victim = world.rng.choice(world.engines)
            world.at(world.moment(), lambda: world.hang_up(victim))  # noqa: B023  (it happens in this wave)
        else:
            world.breakage()
        world.settled(30, world.quiet)
        assert world.quiet(), wave
        world.rest(10)
        for engine in world.engines:
            engine.check()
            assert not engine.wrong, (wave, world.fault, engine.wrong)
            ends.update(
                str(handle.outcome.reason) for handle in engine.handles.values() if handle.outcome
            )
            engine.handles.clear()
    assert world.clock.now() > 600
    assert ends["landed"] > 100
    assert len(ends) > 10
    for engine in world.engines:
        assert engine.agent.stats()["links"] <= 4
        assert len(engine.agent._source._deadlines) < 50
        assert not engine.agent._sink._waiting
    world.leave()
