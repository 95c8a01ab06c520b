"""Two engines for the whole session, since they take a minute to start; `again` restarts them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.real.asking import introduce
from tests.real.engines import REAL, Engine, free_ports
from tests.real.tap import Tap, tap


@pytest.fixture(scope="session")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """Yield the engines P and D, ready and idle."""
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; run `make real`")
    ports = free_ports(4)
    pair = Engine("P", ports[0], ports[1], 0), Engine("D", ports[2], ports[3], 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engines are ended
    try:
        for engine in pair:
            engine.start()
        asyncio.run(_all_ready(pair))
        yield pair
    finally:
        for engine in pair:
            engine.kill()


async def _all_ready(pair: tuple[Engine, Engine]) -> None:
    """Wait until the engines are ready and connected.

    With few cores the first handoff of two engines may take as long as a lease.
    """
    for engine in pair:
        await engine.ready()
    await introduce(*pair)


@pytest.fixture
async def taps(engines: tuple[Engine, Engine]) -> AsyncIterator[tuple[Tap, Tap]]:
    """Yield a tap in front of each engine; the engines are idle at the start of the test."""
    for engine in engines:
        await engine.await_idle(60.0)
    async with tap(engines[0].port) as before_p, tap(engines[1].port) as before_d:
        yield before_p, before_d


@pytest.fixture
async def again(engines: tuple[Engine, Engine]) -> AsyncIterator[None]:
    """Restart killed engines after the test."""
    yield
    for engine in engines:
        if not engine.is_running:
            engine.start()
    await _all_ready(engines)
