"""Fixtures with two real engines for all tests, because engines take a minute to start.

A test that kills an engine restarts it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.real.engine_requests import introduce
from tests.real.engines import REAL, Engine, free_ports
from tests.real.holding_relay import Tap, tap


def pytest_configure() -> None:
    # On SIGTERM, raise an exception, so that the fixtures of all modules end their engines.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def engines() -> Iterator[tuple[Engine, Engine]]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    ports = free_ports(4)
    pair = Engine("P", ports[0], ports[1], 0), Engine("D", ports[2], ports[3], 1)
    try:
        for engine in pair:
            engine.start()
        asyncio.run(_all_ready(pair))
        yield pair
    finally:
        for engine in pair:
            engine.kill()


async def _all_ready(pair: tuple[Engine, Engine]) -> None:
    # Wait until both engines are ready and have made a first handoff.
    #
    # Their first handoff is slow if there are few cores.
    for engine in pair:
        await engine.ready()
    await introduce(*pair)


@pytest.fixture
async def taps(engines: tuple[Engine, Engine]) -> AsyncIterator[tuple[Tap, Tap]]:
    for engine in engines:
        await engine.idle_within(60.0)
    async with tap(engines[0].port) as before_p, tap(engines[1].port) as before_d:
        yield before_p, before_d


@pytest.fixture
async def again(engines: tuple[Engine, Engine]) -> AsyncIterator[None]:
    yield
    for engine in engines:
        if not engine.running:
            engine.start()
    await _all_ready(engines)
