"""A bus through Redis: one stream that all gateways append to and read, and one for each gateway alone.

Reads resume where they ended, so what was said while a connection was away is heard afterwards, as far as the stream
reaches back. A Redis that is gone, hung or emptied costs freshness only; gateways come back spread over time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from time import monotonic
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.shared.bus import EVERYBODY, Backlog, BusState, Deliver, Drop
from gateway.shared.redis_error import describe_redis_error
from gateway.tls import ClientSettings
from gateway.tls_clients import redis_options

log = logging.getLogger("penstock")

FIELD = b"f"
KEPT_FRAMES = 2048
"""About so many frames stay in the stream: what a gateway may have missed and still hear."""

DIRECT_S = 60
BLOCK_MS = 400
SILENCE_S = 1.0  # a reading that waits is answered within BLOCK_MS; longer than this, and something is wrong
ANSWER_S = 2.0
BATCH, BATCH_BYTES = 64, 1 << 20
FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 2.0

LOST = (RedisError, OSError, TimeoutError)


class Place(msgspec.Struct, frozen=True):
    """Where the Redis is. `stream` names the fleet: gateways of several fleets may use one Redis."""

    url: str
    stream: str
    username: str | None = None
    password: str | None = None
    tls: ClientSettings | None = None

    def __repr__(self) -> str:
        return f"Place({self.url})"


class RedisBus:
    """Two connections, one to write and one to wait for news, each with a task that comes back by itself."""

    def __init__(self, place: Place, rng: Random, drop: Drop) -> None:
        self._place = place
        self._rng = rng
        self._all = f"{place.stream}:all".encode()
        self._backlog = Backlog(drop)
        self._sending: list[tuple[bytes, bytes]] = []
        self._gaps = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = monotonic()
        self._writes = self._reads = self._here = False
        self._seen = b"0-0"
        self._problem = ""
        self._logged: set[str] = set()  # problems of this outage: each is logged once

    async def start(self, me: bytes, deliver: Deliver) -> None:
        own = self._to(me)

        async def read(redis: Any) -> None:
            await self._read(redis, own, deliver)

        self._tasks = [
            asyncio.create_task(self._keep(self._write, "_writes"), name="tell the fleet"),
            asyncio.create_task(self._keep(read, "_reads"), name="hear the fleet"),
        ]

    async def stop(self) -> None:
        with suppress(*LOST):
            async with asyncio.timeout(0.2):
                while (len(self._backlog) or self._sending) and self._writes:  # noqa: ASYNC110 - briefly
                    await asyncio.sleep(0.005)
        pending = set(self._tasks)
        while pending:  # the client may swallow a cancellation that comes together with an answer
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)

    def publish(self, frame: bytes, to: bytes = EVERYBODY) -> None:
        self._backlog.add(to, frame)
        self._wake.set()

    def state(self, now: float) -> BusState:
        silent_s = now - self._heard_at
        stale_s = silent_s if silent_s > SILENCE_S else 0.0
        return BusState(self._here, stale_s, self._backlog.bytes, self._gaps, self._problem)

    # Connections

    async def _keep(self, work: Callable[[Any], Awaitable[None]], flag: str) -> None:
        """Do the work over a connection, and over a new one whenever it broke, after a time that differs by chance and
        grows until one has stood: a Redis that lets us in may refuse to do anything (a full disk, a replica)."""
        wait_s = FIRST_RETRY_S
        while True:
            redis = self._connection()
            try:
                await work(redis)
            except LOST as error:
                stood = self._breaks(flag, error)
            except Exception as error:
                log.exception("shared view: a line to Redis failed")
                stood = self._breaks(flag, error)
            finally:
                with suppress(*LOST):
                    await redis.aclose()
            wait_s = FIRST_RETRY_S if stood else min(LONGEST_RETRY_S, 2 * wait_s)
            await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.5))

    def _connection(self) -> Any:
        place = self._place
        return Redis.from_url(
            place.url,
            username=place.username,
            password=place.password,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # we are the retry
            max_connections=1,
            client_name="penstock",
            **redis_options(place.tls),
        )

    def _stands(self, flag: str) -> None:
        """A line has done its work once."""
        setattr(self, flag, True)
        here, self._here = self._here, self._writes and self._reads
        if self._here and not here:
            again, self._problem = bool(self._problem), ""
            self._logged.clear()
            level = logging.WARNING if again else logging.INFO
            log.log(level, "shared view: connected %sto Redis at %s", "again " if again else "", self._place.url)

    def _breaks(self, flag: str, why: Exception) -> bool:
        """A line is gone; whether it had stood."""
        stood: bool = getattr(self, flag)
        setattr(self, flag, False)
        self._here = False
        problem = describe_redis_error(why)
        if problem not in self._logged and not (self._problem and stood):  # both connections break at once
            self._logged.add(problem)
            log.warning("shared view: no Redis at %s: %s. This gateway goes on alone", self._place.url, problem)
        self._problem = problem
        return stood

    # Words

    def _to(self, gateway: bytes) -> bytes:
        return f"{self._place.stream}:to:{gateway.hex()}".encode()

    async def _write(self, redis: Any) -> None:
        """What was not acknowledged is sent once more over the next connection: whoever hears it twice knows."""
        await redis.ping()
        while True:
            while len(self._backlog) or self._sending:
                size = sum(len(frame) for _, frame in self._sending)
                while len(self._backlog) and len(self._sending) < BATCH and size < BATCH_BYTES:
                    self._sending.append(self._backlog.take())
                    size += len(self._sending[-1][1])
                pipe = redis.pipeline(transaction=False)
                for to, frame in self._sending:
                    stream = self._all if to == EVERYBODY else self._to(to)
                    pipe.xadd(stream, {FIELD: frame}, maxlen=KEPT_FRAMES, approximate=True)
                    if to != EVERYBODY:
                        pipe.expire(stream, DIRECT_S)
                await pipe.execute()
                self._sending = []
            self._stands("_writes")
            await self._wake.wait()
            self._wake.clear()

    async def _read(self, redis: Any, own: bytes, deliver: Deliver) -> None:
        ahead_ms, seen = await self._resume(redis)
        self._stands("_reads")
        direct = b"0-0"
        while True:
            found = cast(
                "list[Any] | dict[Any, Any] | None",
                await redis.xread({self._all: seen, own: direct}, count=BATCH, block=BLOCK_MS),
            )
            self._heard_at = monotonic()
            now_ms = 1000 * self._heard_at + ahead_ms
            for stream, entries in _streams(found):
                for name, fields in entries:
                    frame = fields.get(FIELD) if fields else None
                    if frame is not None:
                        deliver(frame, max(0.0, (now_ms - int(name.partition(b"-")[0])) / 1000))
                if entries and stream == own:
                    direct = entries[-1][0]
                elif entries:
                    seen = self._seen = entries[-1][0]

    async def _resume(self, redis: Any) -> tuple[float, bytes]:
        """How far Redis' clock is ahead of ours in ms, and after which entry to go on: the last we saw, if this is
        still the stream that it was in."""
        seconds, micros = await redis.time()
        ahead_ms = seconds * 1000 + micros / 1000 - 1000 * monotonic()
        newest, oldest = await redis.xrevrange(self._all, count=1), await redis.xrange(self._all, count=1)
        if not newest or _order(newest[0][0]) < _order(self._seen):
            self._seen = b"0-0"
        elif self._seen != b"0-0" and _order(oldest[0][0]) > _order(self._seen):
            self._gaps += 1
        return ahead_ms, self._seen


def _streams(found: Any) -> list[tuple[bytes, Any]]:
    """(stream, entries) as either version of Redis' protocol tells them."""
    if not found:
        return []
    if isinstance(found, dict):
        return [(stream, [each for part in parts for each in part]) for stream, parts in found.items()]
    return [(stream, entries) for stream, entries in found]


def _order(entry: bytes) -> tuple[int, int]:
    first, _, second = entry.partition(b"-")
    return int(first), int(second or 0)
