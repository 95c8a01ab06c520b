"""A message bus over Redis: one stream for frames to all gateways, and one for each gateway.

After a disconnect, reading continues after the last entry that was read. So frames sent meanwhile
are received later, if the stream still contains them. If Redis or its data is lost, the shared
state only gets older. Reconnects of several gateways are spread over time.
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

from gateway.http.outgoing_tls import redis_options
from gateway.peers.bus_interface import BROADCAST, Backlog, BusState, DropCounter, FrameHandler
from gateway.peers.redis_error import describe_redis_error
from gateway.util.tls_contexts import ClientSettings

log = logging.getLogger("penstock")

FIELD = b"f"
STREAM_FRAMES = 2048
"""Approximate number of frames in the broadcast stream, which a gateway can still read after a
disconnect."""

DIRECT_S = 60
BLOCK_MS = 400
SILENCE_S = 1.0  # a blocking read returns within BLOCK_MS, so a longer silence is a failure
ANSWER_S = 2.0
BATCH, BATCH_BYTES = 64, 1 << 20
FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 2.0

CONNECTION_ERRORS = (RedisError, OSError, TimeoutError)


class RedisAddress(msgspec.Struct, frozen=True):
    """The address of a Redis server, and the credentials for it.

    url       redis:// or rediss:// URL, without credentials
    stream    prefix of the streams' names, so that several groups of gateways can share a server
    username  user to log in as; None: the default user
    password  password of the user; None: no login
    tls       TLS settings for a rediss:// URL; None for redis://
    """

    url: str
    stream: str
    username: str | None = None
    password: str | None = None
    tls: ClientSettings | None = None

    def __repr__(self) -> str:
        return f"RedisAddress({self.url})"


class RedisBus:
    """A message bus with two connections to Redis, one for writing and one for blocking reads.

    If a connection fails, a task of its own reconnects it.
    """

    def __init__(self, address: RedisAddress, rng: Random, count_drop: DropCounter) -> None:
        self._address = address
        self._rng = rng
        self._all = f"{address.stream}:all".encode()
        self._backlog = Backlog(count_drop)
        self._sending: list[tuple[bytes, bytes]] = []
        self._gaps = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._read_at = monotonic()
        self._can_write = self._can_read = self._is_connected = False
        self._last = b"0-0"
        self._problem = ""
        self._logged: set[str] = set()  # problems already logged in this outage

    async def start(self, own_id: bytes, deliver: FrameHandler) -> None:
        own = self._direct_stream(own_id)

        async def read(redis: Any) -> None:
            await self._read(redis, own, deliver)

        self._tasks = [
            asyncio.create_task(self._run(self._write, "_can_write"), name="write to Redis"),
            asyncio.create_task(self._run(read, "_can_read"), name="read from Redis"),
        ]

    async def stop(self) -> None:
        with suppress(*CONNECTION_ERRORS):
            async with asyncio.timeout(0.2):
                while (len(self._backlog) or self._sending) and self._can_write:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        pending = set(self._tasks)
        # The Redis client may swallow a cancellation that arrives together with a reply.
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)

    def publish(self, frame: bytes, to: bytes = BROADCAST) -> None:
        self._backlog.add(to, frame)
        self._wake.set()

    def state(self, now: float) -> BusState:
        silence_s = now - self._read_at
        staleness_s = silence_s if silence_s > SILENCE_S else 0.0
        return BusState(
            self._is_connected, staleness_s, self._backlog.bytes, self._gaps, self._problem
        )

    # Connections

    async def _run(self, work: Callable[[Any], Awaitable[None]], flag: str) -> None:
        # Call `work` over a connection, and reconnect with random back-off when it breaks.
        #
        # The back-off grows until the work has succeeded once, because a Redis that accepts
        # connections may refuse every command (a full disk, a replica).
        wait_s = FIRST_RETRY_S
        while True:
            redis = self._connect()
            try:
                await work(redis)
            except CONNECTION_ERRORS as error:
                has_worked = self._on_break(flag, error)
            except Exception as error:
                log.exception(
                    "shared state: an unexpected error ended a connection to Redis; "
                    "it is opened again"
                )
                has_worked = self._on_break(flag, error)
            finally:
                with suppress(*CONNECTION_ERRORS):
                    await redis.aclose()
            wait_s = FIRST_RETRY_S if has_worked else min(LONGEST_RETRY_S, 2 * wait_s)
            await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.5))

    def _connect(self) -> Any:
        address = self._address
        return Redis.from_url(
            address.url,
            username=address.username,
            password=address.password,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # _run() reconnects
            max_connections=1,
            client_name="penstock",
            **redis_options(address.tls),
        )

    def _on_success(self, flag: str) -> None:
        # Record that one of the connections works; log it when both do.
        setattr(self, flag, True)
        was_connected = self._is_connected
        self._is_connected = self._can_write and self._can_read
        if self._is_connected and not was_connected:
            is_reconnect, self._problem = bool(self._problem), ""
            self._logged.clear()
            level = logging.WARNING if is_reconnect else logging.INFO
            again = "again " if is_reconnect else ""
            log.log(level, "shared state: connected %sto Redis at %s", again, self._address.url)

    def _on_break(self, flag: str, error: Exception) -> bool:
        # Record that a connection has broken; return whether it had worked.
        has_worked: bool = getattr(self, flag)
        setattr(self, flag, False)
        self._is_connected = False
        problem = describe_redis_error(error)
        # Both connections usually break at once, with different errors: log the first one only.
        if problem not in self._logged and not (self._problem and has_worked):
            self._logged.add(problem)
            log.warning(
                "shared state: the Redis server at %s cannot be reached: %s. This gateway "
                "continues with its own state",
                self._address.url,
                problem,
            )
        self._problem = problem
        return has_worked

    # Frames

    def _direct_stream(self, gateway: bytes) -> bytes:
        return f"{self._address.stream}:to:{gateway.hex()}".encode()

    async def _write(self, redis: Any) -> None:
        # Send the waiting frames, and after a reconnect also the unacknowledged ones.
        #
        # Receivers drop frames that they receive twice.
        await redis.ping()
        while True:
            while len(self._backlog) or self._sending:
                size = sum(len(frame) for _, frame in self._sending)
                while len(self._backlog) and len(self._sending) < BATCH and size < BATCH_BYTES:
                    self._sending.append(self._backlog.pop_oldest())
                    size += len(self._sending[-1][1])
                pipe = redis.pipeline(transaction=False)
                for to, frame in self._sending:
                    stream = self._all if to == BROADCAST else self._direct_stream(to)
                    pipe.xadd(stream, {FIELD: frame}, maxlen=STREAM_FRAMES, approximate=True)
                    if to != BROADCAST:
                        pipe.expire(stream, DIRECT_S)
                await pipe.execute()
                self._sending = []
            self._on_success("_can_write")
            await self._wake.wait()
            self._wake.clear()

    async def _read(self, redis: Any, own: bytes, deliver: FrameHandler) -> None:
        clock_offset_ms, last = await self._resume(redis)
        self._on_success("_can_read")
        direct = b"0-0"
        while True:
            reply = cast(
                "list[Any] | dict[Any, Any] | None",
                await redis.xread({self._all: last, own: direct}, count=BATCH, block=BLOCK_MS),
            )
            self._read_at = monotonic()
            now_ms = 1000 * self._read_at + clock_offset_ms
            for stream, entries in _streams(reply):
                for entry_id, fields in entries:
                    frame = fields.get(FIELD) if fields else None
                    if frame is not None:
                        sent_ms = int(entry_id.partition(b"-")[0])
                        deliver(frame, max(0.0, (now_ms - sent_ms) / 1000))
                if entries and stream == own:
                    direct = entries[-1][0]
                elif entries:
                    last = self._last = entries[-1][0]

    async def _resume(self, redis: Any) -> tuple[float, bytes]:
        # Return Redis's clock minus the monotonic clock in ms, and the id of the last entry read.
        #
        # Reading continues after that entry. The id is that of the stream's start if the stream was
        # emptied meanwhile.
        seconds, micros = await redis.time()
        clock_offset_ms = seconds * 1000 + micros / 1000 - 1000 * monotonic()
        newest = await redis.xrevrange(self._all, count=1)
        oldest = await redis.xrange(self._all, count=1)
        if not newest or _order(newest[0][0]) < _order(self._last):
            self._last = b"0-0"
        elif self._last != b"0-0" and _order(oldest[0][0]) > _order(self._last):
            self._gaps += 1
        return clock_offset_ms, self._last


def _streams(reply: Any) -> list[tuple[bytes, Any]]:
    if not reply:
        return []
    if isinstance(reply, dict):
        return [
            (stream, [entry for part in parts for entry in part]) for stream, parts in reply.items()
        ]
    return [(stream, entries) for stream, entries in reply]


def _order(entry: bytes) -> tuple[int, int]:
    first, _, second = entry.partition(b"-")
    return int(first), int(second or 0)
