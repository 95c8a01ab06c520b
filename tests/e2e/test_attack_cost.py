"""Tests that attacks cost other clients little: waiting time, memory, and failed requests.

Waiting times are CPU time of the gateway's event loop (timed_gateway.py), so they do not depend on
how busy the machine is. bench/load/attack_cost.py measures the same attacks in wall time.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

import pytest

from bench.load.agent_links import Source, agent, link_times
from tests.duration_limits import TRIES, Stopwatch
from tests.e2e.attackers import AGENT_CORPUS, CORPUS, attacking
from tests.e2e.gateway_under_attack import (
    MOST_GROWTH,
    Attacked,
    attacked_gateway,
    canned_engine,
    wait_s,
)
from tests.e2e.raw_connection import RawConnection, post

MIB = 2**20
REQUEST = post(
    {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions",
    "Authorization: Bearer sk-bench",
)
CALM_S, SETTLE_S, ATTACK_S = 0.05, 0.05, 0.25
MIN_REQUESTS = 10
MAX_WAIT_S, MAX_LINK_S, LINKS, MAX_AGENT_S = 0.005, 1.0, 10, 5.0
MAX_AGENT_GROWTH = 16 * 2**20  # bytes; closed links wait for the garbage collector without buffers

# CPU time of a request on an idle core of the machine for which the bounds were set.
REQUEST_S = 0.00025


class Measurement(NamedTuple):
    wait_s: float
    resident_bytes: int
    socket_bytes: int


class Load(NamedTuple):
    requests: int
    socket_bytes: int


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[int, int]]:
    with canned_engine() as calm, canned_engine() as hostile:
        yield calm, hostile


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[int, int]
) -> Iterator[Attacked]:
    calm, hostile = engines
    folder = tmp_path_factory.mktemp("attacked")
    with attacked_gateway(folder, [f"http://127.0.0.1:{calm}"], hostile) as attacked:
        send_requests(attacked, CALM_S)
        yield attacked
        assert attacked.gateway.is_alive
        assert "Traceback" not in attacked.gateway.stderr_text, attacked.gateway.stderr_text[-2000:]


def send_requests(target: Attacked, seconds: float) -> Load:
    # Send requests for `seconds`, at least MIN_REQUESTS. Asserts that each is answered.
    socket_bytes, requests, end = 0, 0, monotonic() + seconds
    with RawConnection(target.gateway.port) as wire:
        while requests < MIN_REQUESTS or monotonic() < end:
            wire.send(REQUEST)
            assert wire.answer().status == 200
            requests += 1
            if requests % 8 == 1:
                socket_bytes = max(socket_bytes, target.cost.socket_bytes())
    return Load(requests, socket_bytes)


def measure_calm(target: Attacked) -> tuple[float, float]:
    # Measure without an attack: the 99th percentile of the wait, and how slow the core is.
    #
    # Slowness is a factor of at least 1.
    target.gaps()
    before = target.cost.cpu_s
    requests = send_requests(target, CALM_S).requests
    slowness = max(1.0, (target.cost.cpu_s - before) / requests / REQUEST_S)
    return wait_s(target.gaps(), 0.99), slowness


def measure_attack(target: Attacked, name: str, resident: int) -> Measurement:
    # Measure beside an attack. Memory counts from `resident` bytes, those before the first try.
    target.cost.reset_peak()
    sockets = target.cost.socket_bytes()
    with attacking(name, *target.ports) as counters:
        send_requests(target, SETTLE_S)
        target.gaps()
        load = send_requests(target, ATTACK_S)
        wait = wait_s(target.gaps(), 0.99)
    assert counters["connections"]
    growth = target.cost.peak_resident_bytes - resident
    return Measurement(wait, growth, load.socket_bytes - sockets)


@pytest.mark.parametrize("name", CORPUS)
def test_an_attack_costs_little_time_and_memory_and_no_request(target: Attacked, name: str) -> None:
    # Several tries are permitted, because other processes share caches and hyperthreads, and a
    # garbage collection may come late. Memory is compared with that before the first try, so that
    # memory left over from one try counts in the next.
    resident = target.cost.resident_bytes
    for _ in range(TRIES):
        calm_s, slowness = measure_calm(target)
        bound_s = max(2 * calm_s, calm_s + MAX_WAIT_S * slowness)
        measured = measure_attack(target, name, resident)
        growth = measured.resident_bytes + measured.socket_bytes
        if measured.wait_s <= bound_s and growth <= MOST_GROWTH + CORPUS[name].budget:
            return
    pytest.fail(f"{measured}, more than {bound_s} s or {MOST_GROWTH + CORPUS[name].budget} bytes")


@pytest.mark.parametrize("name", AGENT_CORPUS)
async def test_members_link_with_an_agent_while_others_attack_its_port(name: str) -> None:
    async with agent() as source:
        resident, cpu_s = source.cost.resident_bytes, source.cost.cpu_s
        with attacking(name, source.port, source.port) as counters:
            await link_times(source, 1)  # the attacker has its connections by then
            took_s = [await fair_link_s(source) for _ in range(LINKS)]
        assert counters["connections"]
        assert max(took_s) < MAX_LINK_S, took_s
        assert source.cost.resident_bytes - resident < MAX_AGENT_GROWTH
        assert source.cost.cpu_s - cpu_s < MAX_AGENT_S


async def fair_link_s(source: Source) -> float:
    # Return how many seconds one link takes, without time in which a process waited for a CPU.
    took = Stopwatch(source.cost.pid)
    await link_times(source, 1)
    return took.fair_s
