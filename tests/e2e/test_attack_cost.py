"""What attacks may cost: the wait of everyone else, and memory. None of the figures depends on how busy the machine is.

Waits are CPU time of the gateway's event loop (timed_gateway.py). tests/load/attack_cost.py measures the same attacks
on the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

import pytest

from tests.e2e.attacked import MOST_GROWTH, Attacked, attacked_gateway, canned_engine, wait_s
from tests.e2e.attackers import CORPUS, attacking
from tests.e2e.wire import Wire, post
from tests.fair_time import TRIES
from tests.load.agent_links import agent, idle_sockets, link_times

MIB = 2**20
REQUEST = post(
    {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions",
    "Authorization: Bearer sk-bench",
)
CALM_S, BEGUN_S, ATTACK_S, REQUESTS = 0.05, 0.05, 0.25, 10
MOST_WAIT_S, MOST_AGENT_S = 0.005, 5.0
REQUEST_S = 0.00025  # CPU time of a request on a free core of the machine that the bounds were written on


class Seen(NamedTuple):
    """What was measured beside an attack: a wait that one moment in a hundred exceeds, and memory."""

    wait_s: float
    resident_bytes: int
    socket_bytes: int


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[int, int]]:
    with canned_engine() as calm, canned_engine() as hostile:
        yield calm, hostile


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, engines: tuple[int, int]) -> Iterator[Attacked]:
    calm, hostile = engines
    folder = tmp_path_factory.mktemp("attacked")
    with attacked_gateway(folder, [f"http://127.0.0.1:{calm}"], hostile) as started:
        served(started, CALM_S)
        yield started
        assert started.gateway.alive
        assert "Traceback" not in started.gateway.said, started.gateway.said[-2000:]


class Served(NamedTuple):
    """How many requests were answered, and the most memory of sockets meanwhile."""

    number: int
    socket_bytes: int


def served(home: Attacked, seconds: float) -> Served:
    """Send requests for this time, and so many at least: each is answered."""
    most, number, until = 0, 0, monotonic() + seconds
    with Wire(home.gateway.port) as wire:
        while number < REQUESTS or monotonic() < until:
            wire.send(REQUEST)
            assert wire.answer().status == 200
            number += 1
            if number % 8 == 1:
                most = max(most, home.cost.socket_bytes())
    return Served(number, most)


def calm(home: Attacked) -> tuple[float, float]:
    """Without an attack: the wait that one moment in a hundred exceeds, and how slow the core is, 1 at least."""
    home.gaps()
    before = home.cost.cpu_s
    number = served(home, CALM_S).number
    slowness = max(1.0, (home.cost.cpu_s - before) / number / REQUEST_S)
    return wait_s(home.gaps(), 0.99), slowness


def attacked(home: Attacked, name: str) -> Seen:
    """Make the attack while a client sends requests."""
    resident = home.cost.resident_bytes
    home.cost.restart_peak()
    sockets = home.cost.socket_bytes()
    with attacking(name, *home.ports) as done:
        served(home, BEGUN_S)
        home.gaps()
        most = served(home, ATTACK_S).socket_bytes
        waited = wait_s(home.gaps(), 0.99)
    assert done["connections"]
    return Seen(waited, home.cost.peak_resident_bytes - resident, most - sockets)


@pytest.mark.parametrize("name", CORPUS)
def test_an_attack_costs_little_time_and_memory_and_no_request(home: Attacked, name: str) -> None:
    """The wait has a few tries, since caches and hyperthreads are shared with others; memory has none."""
    waits: list[float] = []
    bound_s = 0.0
    while not waits or waits[-1] > bound_s:
        assert len(waits) < TRIES, f"others wait too long: {waits}, {bound_s} at most"
        calm_s, slowness = calm(home)
        bound_s = max(2 * calm_s, calm_s + MOST_WAIT_S * slowness)
        seen = attacked(home, name)
        waits.append(seen.wait_s)
        assert seen.resident_bytes + seen.socket_bytes <= MOST_GROWTH + CORPUS[name].budget


async def test_members_link_with_an_agent_while_strangers_hold_its_port_open() -> None:
    async with agent() as source:
        resident, cpu_s = source.cost.resident_bytes, source.cost.cpu_s
        with idle_sockets(source.port, 64):
            assert len(await link_times(source, 20)) == 20
        assert source.cost.resident_bytes - resident < MOST_GROWTH
        assert source.cost.cpu_s - cpu_s < MOST_AGENT_S
