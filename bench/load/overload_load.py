"""The load generator of an overload run: `python -m bench.load.overload_load streams|clients`

It reads a Plan from stdin and writes one JSON value to stdout. It runs as two processes:

streams   keeps hundreds of long streams open, and reports their progress
clients   sends the requests of independent clients, which retry after a refusal, and small requests
          to a server that refuses all, which show how busy the machine is

The schedule is in bench/load/overload_plan.py.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from bisect import bisect_left
from itertools import accumulate, pairwise
from random import Random
from time import monotonic

import msgspec

from bench.load.overload_client import ConnectionPool, TimedRequest, request
from bench.load.overload_plan import (
    OPENED_S,
    OPENED_WITHIN_S,
    STREAM_OUTPUT,
    STREAM_PROMPT,
    STREAMS,
    Arrival,
    Plan,
    arrivals,
)

OBEDIENT_RETRIES = 2  # the default of OpenAI's SDKs
DEAF_RETRIES = 5  # number of retries of clients that ignore Retry-After
SHORT_BACKOFF_S, LONG_BACKOFF_S = 0.5, 8.0  # the SDKs' back-off without Retry-After
LAST_RETRY_S = sum(
    min(LONG_BACKOFF_S, SHORT_BACKOFF_S * 2**number) for number in range(DEAF_RETRIES)
)
NULL_REQUESTS, NULL_EVERY_S = 400, 0.01
BUSY_NULL_EVERY_S = 0.1
GRACE_S = 10.0


class Try(msgspec.Struct):
    """One of a client's attempts to get its answer.

    Times are in seconds after the beginning of the plan, except unread_s, a duration.

    unread_s  seconds from the arrival of the response in the socket until the client read it
    """

    due_s: float
    sent_s: float
    answered_s: float | None
    status: int | None
    id: str
    retry_after_s: float | None
    unread_s: float = 0.0


class ClientRecord(msgspec.Struct):
    """One client's request with all of its attempts, and its answer.

    whole  whether the answer is complete
    cut    whether the end of the run interrupted the answer
    """

    number: int
    phase: int
    tries: list[Try]
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    whole: bool = False
    cut: bool = False


class Stream(msgspec.Struct):
    """How many tokens one long stream delivered in each phase of the run.

    tokens    number of tokens that arrived in each phase
    lasted_s  seconds between the first and the last token of each phase
    """

    status: int | None
    broken: bool
    tokens: list[int]
    lasted_s: list[float]


class ClientRecords(msgspec.Struct):
    """The output of the process `clients`. Durations are in seconds.

    idle_s  round-trip times to the null server, which refuses all requests, before the plan begins
    busy_s  (time, round-trip time) of the same requests during the plan
    """

    idle_s: list[float]
    busy_s: list[tuple[float, float]]
    clients: list[ClientRecord]


async def streams(plan: Plan) -> list[Stream]:
    """Open the plan's long streams one after another, and read them until the end of the plan.

    Returns the progress of each stream.
    """
    connections, loop = ConnectionPool(plan.url), asyncio.get_running_loop()
    tasks, requests = [], []
    for number in range(STREAMS):
        await _sleep_until(plan.begin_s + OPENED_S + OPENED_WITHIN_S * number / STREAMS)
        requests.append(TimedRequest(loop))
        body = request(STREAM_PROMPT, STREAM_OUTPUT, "stream", plan.seed, number)
        tasks.append(loop.create_task(connections.send(body, requests[-1])))
    await _sleep_until(plan.ends_s)
    for task in tasks:
        task.cancel()
    connections.close()
    return [_stream(plan, timed) for timed in requests]


def _stream(plan: Plan, timed: TimedRequest) -> Stream:
    timeline, bounds = (
        timed.timeline,
        list(accumulate((phase.seconds for phase in plan.phases), initial=0.0)),
    )
    first_s = plan.ends_s if timeline.first_s is None else timeline.first_s
    moments = list(accumulate(timeline.gaps_s, initial=first_s - plan.begin_s))
    cuts = [bisect_left(moments, bound) for bound in bounds]
    parts = [moments[low:high] for low, high in pairwise(cuts)]
    lasted = [part[-1] - part[0] if part else 0.0 for part in parts]
    return Stream(timed.status, timed.ended.done(), [len(part) for part in parts], lasted)


class ClientLoad:
    """The load of independent clients: sends the plan's requests, and records how each ended."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._connections, self._null = ConnectionPool(plan.url), ConnectionPool(plan.null_url)
        self._rng = Random(f"back-off {plan.seed}")
        self.clients: list[ClientRecord] = []

    async def measure_idle(self) -> list[float]:
        """Measure round trips to the null server, which refuses all requests, on the idle machine.

        Returns their durations in seconds.
        """
        for _ in range(20):  # warm up code and connections
            await self._round_trip()
        round_trips = []
        for _ in range(NULL_REQUESTS):
            await asyncio.sleep(NULL_EVERY_S)
            round_trips.append(await self._round_trip())
        return round_trips

    async def measure_busy(self) -> list[tuple[float, float]]:
        """Measure round trips to the null server during the plan; return (time, duration) pairs.

        The null server refuses all requests, so the durations show how busy the machine is. Both
        values are in seconds; the time counts from the beginning of the plan.
        """
        round_trips = []
        await _sleep_until(self._plan.begin_s)
        while (now := monotonic()) < self._plan.ends_s:
            round_trips.append((now - self._plan.begin_s, await self._round_trip()))
            await asyncio.sleep(BUSY_NULL_EVERY_S)
        return round_trips

    async def run_clients(self) -> None:
        """Start each client at the time that the plan states, and wait until all have ended."""
        plan, tasks = self._plan, []
        for arrival in arrivals(plan.phases, plan.capacity_per_s, plan.seed):
            await _sleep_until(plan.begin_s + arrival.due_s)
            tasks.append(asyncio.create_task(self._client(arrival)))
        _, late = await asyncio.wait(tasks, timeout=plan.ends_s + GRACE_S - monotonic())
        for task in late:
            task.cancel()

    def close(self) -> None:
        self._connections.close()
        self._null.close()

    async def _round_trip(self) -> float:
        timed = TimedRequest(asyncio.get_running_loop())
        await self._null.send(request(500, 100, "still"), timed)
        assert timed.answered_s is not None, "the null server closed the connection"
        return timed.answered_s - timed.sent_s

    async def _client(self, arrival: Arrival) -> None:
        plan = self._plan
        obeys = plan.phases[arrival.phase].obey
        client = ClientRecord(arrival.number, arrival.phase, [])
        self.clients.append(client)
        body = request(arrival.prompt_tokens, arrival.output_tokens, plan.seed, arrival.number)
        due_s = plan.begin_s + arrival.due_s
        for number in range(1 + (OBEDIENT_RETRIES if obeys else DEAF_RETRIES)):
            await _sleep_until(due_s)
            timed = TimedRequest(asyncio.get_running_loop())
            try:
                await self._connections.send(body, timed)
            finally:
                self._record(client, due_s, timed)
            if timed.status != 429:
                return
            wait_s = timed.retry_after_s if obeys else None
            if wait_s is None:
                wait_s = min(LONG_BACKOFF_S, SHORT_BACKOFF_S * 2**number) * (
                    1 - 0.25 * self._rng.random()
                )
            due_s = monotonic() + wait_s

    def _record(self, client: ClientRecord, due_s: float, timed: TimedRequest) -> None:
        zero_s, timeline = self._plan.begin_s, timed.timeline
        answered_s = None if timed.answered_s is None else timed.answered_s - zero_s
        due_s, sent_s = due_s - zero_s, timed.sent_s - zero_s
        record = Try(
            due_s, sent_s, answered_s, timed.status, timed.id, timed.retry_after_s, timed.unread_s
        )
        client.tries.append(record)
        if timed.status == 200 and timeline.first_s is not None and timeline.last_s is not None:
            client.first_s, client.last_s = timeline.first_s - zero_s, timeline.last_s - zero_s
            client.tokens, client.whole = timeline.tokens, timeline.done and timeline.error is None
            client.cut = not timed.ended.done() or timed.ended.cancelled()


async def clients(plan: Plan) -> ClientRecords:
    """Measure the idle machine, then run all clients of the plan, and return the records."""
    load = ClientLoad(plan)
    idle_s = await load.measure_idle()
    task = asyncio.create_task(load.measure_busy())
    await load.run_clients()
    records = ClientRecords(idle_s, await task, load.clients)
    load.close()
    return records


async def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - monotonic()
    if left_s > 0:
        await asyncio.sleep(left_s)


def main() -> int:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    gc.freeze()
    # A pause of this process would look like one of the gateway.
    gc.set_threshold(50_000, 50, 100)
    part = {"streams": streams, "clients": clients}[sys.argv[1]]
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(part(plan))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
