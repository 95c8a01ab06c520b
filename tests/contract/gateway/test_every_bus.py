"""What gateways may rely on from any bus. A new implementation is tested here by being in BUSES."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from gateway.peers.bus import BACKLOG_CAP_BYTES, FRAME_CAP_BYTES, Bus
from gateway.peers.local_bus import LocalBus, LocalHub
from gateway.peers.redis_bus import RedisAddress, RedisBus
from tests.fair_time import PATIENCE_S, at_most
from tests.redis_server import RedisServer, redis_server

ONE, TWO, THREE = (bytes([number]) * 8 for number in (1, 2, 3))


class Medium:
    """What buses meet at. `bus` is one gateway's line to it, `drops` what all of them gave up."""

    def __init__(self) -> None:
        self.drops: list[str] = []

    def bus(self) -> Bus:
        raise NotImplementedError

    async def go(self) -> None:
        raise NotImplementedError

    async def come(self) -> None:
        raise NotImplementedError


class AtRedis(Medium):
    def __init__(self, server: RedisServer, name: str) -> None:
        super().__init__()
        self._server, self._name = server, name

    def bus(self) -> Bus:
        return RedisBus(RedisAddress(self._server.url, self._name), Random(1), self.drops.append)

    async def go(self) -> None:
        self._server.stop()

    async def come(self) -> None:
        await asyncio.to_thread(self._server.start)


class AtHub(Medium):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._hub = LocalHub(path, self.drops.append)

    def bus(self) -> Bus:
        return LocalBus(self._path, self.drops.append)

    async def go(self) -> None:
        await self._hub.stop()

    async def come(self) -> None:
        self._path.unlink(missing_ok=True)
        self._hub = LocalHub(self._path, self.drops.append)
        await self._hub.start()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(params=["redis", "local"])
async def medium(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Medium]:
    if request.param == "redis":
        yield AtRedis(request.getfixturevalue("server"), request.node.name)
        return
    hub = AtHub(tmp_path / "hub")
    await hub.come()
    yield hub
    await hub.go()


class Ear:
    """One gateway's bus, and what it heard."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.heard: list[bytes] = []
        self.ages: list[float] = []

    def deliver(self, frame: bytes, age_s: float) -> None:
        self.heard.append(frame)
        self.ages.append(age_s)

    def from_others(self) -> list[bytes]:
        return [frame for frame in self.heard if not frame.startswith(b"own")]


@asynccontextmanager
async def ears(medium: Medium, *names: bytes) -> AsyncIterator[list[Ear]]:
    async with AsyncExitStack() as stack:
        found = []
        for name in names:
            ear = Ear(medium.bus())
            await ear.bus.start(name, ear.deliver)
            stack.push_async_callback(ear.bus.stop)
            found.append(ear)
        await until(lambda: all(ear.bus.state(monotonic()).connected for ear in found))
        yield found


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.005)  # other processes and sockets have nobody to wake us


async def test_what_one_says_all_others_hear_in_order_and_fresh(medium: Medium) -> None:
    async with ears(medium, ONE, TWO, THREE) as (one, two, three):
        said = [f"said {number}".encode() for number in range(300)]
        for frame in said:
            one.bus.publish(frame)
        await until(lambda: len(two.heard) >= 300 and len(three.heard) >= 300)
        assert two.heard == three.heard == said
        assert max(two.ages) < 2.0
        state = two.bus.state(monotonic())
        assert (state.connected, state.staleness_s, state.gaps, medium.drops) == (True, 0.0, 0, [])


async def test_what_is_for_one_nobody_else_hears(medium: Medium) -> None:
    async with ears(medium, ONE, TWO, THREE) as (one, two, three):
        one.bus.publish(b"for two", TWO)
        one.bus.publish(b"for all")
        await until(lambda: len(two.heard) >= 2 and len(three.heard) >= 1)
        assert sorted(two.heard) == [b"for all", b"for two"]
        assert three.heard == [b"for all"]


async def test_a_frame_of_any_bytes_and_of_the_greatest_length_comes_as_it_was_sent(medium: Medium) -> None:
    async with ears(medium, ONE, TWO) as (one, two):
        frames = [b"", bytes(range(256)), Random(3).randbytes(FRAME_CAP_BYTES)]
        for frame in frames:
            one.bus.publish(frame)
        await until(lambda: len(two.heard) >= 3)
        assert two.heard == frames


async def test_a_longer_frame_is_never_sent_and_is_counted(medium: Medium) -> None:
    async with ears(medium, ONE, TWO) as (one, two):
        one.bus.publish(bytes(FRAME_CAP_BYTES + 1))
        one.bus.publish(b"next")
        await until(lambda: bool(two.heard))
        assert (two.heard, medium.drops) == ([b"next"], ["too_long"])


async def test_without_a_medium_publishing_neither_blocks_nor_fails_and_memory_is_bounded(medium: Medium) -> None:
    async with ears(medium, ONE, TWO) as (one, two):
        await medium.go()
        await until(lambda: not one.bus.state(monotonic()).connected)
        for number in range(200):
            one.bus.publish(number.to_bytes(4, "little") + bytes(64 << 10))
            if number % 20 == 0:
                await asyncio.sleep(0)
        assert one.bus.state(monotonic()).backlog_bytes <= BACKLOG_CAP_BYTES
        assert set(medium.drops) == {"backlog"}
        await until(lambda: two.bus.state(monotonic()).staleness_s > 0)
        await medium.come()
        await until(lambda: bool(two.heard) and int.from_bytes(two.heard[-1][:4], "little") == 199)
        numbers = [int.from_bytes(frame[:4], "little") for frame in two.heard]
        assert numbers == sorted(numbers)
        await until(lambda: two.bus.state(monotonic()).staleness_s == 0.0)


async def test_a_medium_that_went_and_came_is_used_again_by_all(medium: Medium) -> None:
    async with ears(medium, ONE, TWO) as (one, two):
        one.bus.publish(b"before")
        await until(lambda: two.heard == [b"before"])
        await medium.go()
        await until(lambda: not (one.bus.state(monotonic()).connected or two.bus.state(monotonic()).connected))
        one.bus.publish(b"own meanwhile")
        await medium.come()
        async with at_most(5.0):
            await until(lambda: all(ear.bus.state(monotonic()).connected for ear in (one, two)))
            two.bus.publish(b"own after")
            await until(lambda: b"own after" in one.heard)


async def test_one_that_comes_later_and_one_that_goes_trouble_nobody(medium: Medium) -> None:
    async with ears(medium, ONE, TWO) as (one, two):
        async with ears(medium, THREE) as (three,):
            one.bus.publish(b"hello")
            await until(lambda: b"hello" in three.heard)
        two.bus.publish(b"own still here")
        await until(lambda: b"own still here" in one.heard)
