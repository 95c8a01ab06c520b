"""Contract tests that every message bus between gateways must pass.

Add a new implementation to the `medium` fixture.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from gateway.peers.bus_interface import BACKLOG_CAP_BYTES, FRAME_CAP_BYTES, Bus
from gateway.peers.local_bus import LocalBus, LocalHub
from gateway.peers.redis_bus import RedisAddress, RedisBus
from tests.duration_limits import PATIENCE_S, Stopwatch, at_most
from tests.redis_server import RedisServer, redis_server

ONE, TWO, THREE = (bytes([number]) * 8 for number in (1, 2, 3))


class Medium:
    """The server that connects message buses: Redis, or the hub of a gateway's workers.

    drops  reasons why messages were dropped
    pids   its processes
    """

    def __init__(self) -> None:
        self.drops: list[str] = []
        self.pids: tuple[int, ...] = ()

    def bus(self) -> Bus:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError


class RedisMedium(Medium):
    def __init__(self, server: RedisServer, name: str) -> None:
        super().__init__()
        self._server, self._name = server, name
        self.pids = (server.pid,)

    def bus(self) -> Bus:
        return RedisBus(RedisAddress(self._server.url, self._name), Random(1), self.drops.append)

    async def stop(self) -> None:
        self._server.stop()

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)


class HubMedium(Medium):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._hub = LocalHub(path, self.drops.append)

    def bus(self) -> Bus:
        return LocalBus(self._path, self.drops.append)

    async def stop(self) -> None:
        await self._hub.stop()

    async def start(self) -> None:
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
        yield RedisMedium(request.getfixturevalue("server"), request.node.name)
        return
    hub = HubMedium(tmp_path / "hub")
    await hub.start()
    yield hub
    await hub.stop()


class Subscriber:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.received: list[bytes] = []
        self.ages: list[float] = []

    def deliver(self, frame: bytes, age_s: float) -> None:
        self.received.append(frame)
        self.ages.append(age_s)

    def from_others(self) -> list[bytes]:
        return [frame for frame in self.received if not frame.startswith(b"own")]


@asynccontextmanager
async def subscribers(medium: Medium, *names: bytes) -> AsyncIterator[list[Subscriber]]:
    async with AsyncExitStack() as stack:
        connected = []
        for name in names:
            subscriber = Subscriber(medium.bus())
            await subscriber.bus.start(name, subscriber.deliver)
            stack.push_async_callback(subscriber.bus.stop)
            connected.append(subscriber)
        await until(lambda: all(member.bus.state(monotonic()).connected for member in connected))
        yield connected


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_met():
            await asyncio.sleep(0.005)  # other processes cannot signal this one


async def test_all_others_receive_published_frames_in_order_and_without_delay(
    medium: Medium,
) -> None:
    async with subscribers(medium, ONE, TWO, THREE) as (one, two, three):
        frames = [f"said {number}".encode() for number in range(300)]
        took = Stopwatch(*medium.pids)
        for frame in frames:
            one.bus.publish(frame)
        await until(lambda: len(two.received) >= 300 and len(three.received) >= 300)
        without_cpu_s = took.wall_s - took.fair_s
        assert two.received == three.received == frames
        assert max(two.ages) - without_cpu_s < 2.0
        state = two.bus.state(monotonic())
        assert (state.connected, state.staleness_s, state.gaps, medium.drops) == (True, 0.0, 0, [])


async def test_a_frame_for_one_member_reaches_no_other(medium: Medium) -> None:
    async with subscribers(medium, ONE, TWO, THREE) as (one, two, three):
        one.bus.publish(b"for two", TWO)
        one.bus.publish(b"for all")
        await until(lambda: len(two.received) >= 2 and len(three.received) >= 1)
        assert sorted(two.received) == [b"for all", b"for two"]
        assert three.received == [b"for all"]


async def test_frames_of_any_bytes_and_of_the_greatest_length_arrive_unchanged(
    medium: Medium,
) -> None:
    async with subscribers(medium, ONE, TWO) as (one, two):
        frames = [b"", bytes(range(256)), Random(3).randbytes(FRAME_CAP_BYTES)]
        for frame in frames:
            one.bus.publish(frame)
        await until(lambda: len(two.received) >= 3)
        assert two.received == frames


async def test_a_longer_frame_is_never_sent_and_is_counted(medium: Medium) -> None:
    async with subscribers(medium, ONE, TWO) as (one, two):
        one.bus.publish(bytes(FRAME_CAP_BYTES + 1))
        one.bus.publish(b"next")
        await until(lambda: bool(two.received))
        assert (two.received, medium.drops) == ([b"next"], ["too_long"])


async def test_without_a_medium_publishing_neither_blocks_nor_fails_and_memory_is_bounded(
    medium: Medium,
) -> None:
    async with subscribers(medium, ONE, TWO) as (one, two):
        await medium.stop()
        await until(lambda: not one.bus.state(monotonic()).connected)
        for number in range(200):
            one.bus.publish(number.to_bytes(4, "little") + bytes(64 << 10))
            if number % 20 == 0:
                await asyncio.sleep(0)
        assert one.bus.state(monotonic()).backlog_bytes <= BACKLOG_CAP_BYTES
        assert set(medium.drops) == {"backlog"}
        await until(lambda: two.bus.state(monotonic()).staleness_s > 0)
        await medium.start()
        await until(
            lambda: bool(two.received) and int.from_bytes(two.received[-1][:4], "little") == 199
        )
        numbers = [int.from_bytes(frame[:4], "little") for frame in two.received]
        assert numbers == sorted(numbers)
        await until(lambda: two.bus.state(monotonic()).staleness_s == 0.0)


async def test_all_members_use_a_restarted_medium_again(medium: Medium) -> None:
    async with subscribers(medium, ONE, TWO) as (one, two):
        one.bus.publish(b"before")
        await until(lambda: two.received == [b"before"])
        await medium.stop()
        await until(
            lambda: (
                not (one.bus.state(monotonic()).connected or two.bus.state(monotonic()).connected)
            )
        )
        one.bus.publish(b"own meanwhile")
        await medium.start()
        async with at_most(5.0):
            await until(
                lambda: all(member.bus.state(monotonic()).connected for member in (one, two))
            )
            two.bus.publish(b"own after")
            await until(lambda: b"own after" in one.received)


async def test_members_that_join_and_leave_do_not_disturb_the_others(medium: Medium) -> None:
    async with subscribers(medium, ONE, TWO) as (one, two):
        async with subscribers(medium, THREE) as (three,):
            one.bus.publish(b"hello")
            await until(lambda: b"hello" in three.received)
        two.bus.publish(b"own still here")
        await until(lambda: b"own still here" in one.received)
