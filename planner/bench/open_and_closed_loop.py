"""Runs a benchmark, as an open loop or a closed loop. The main function is `run`.

- Open loop: requests are sent at given times.
- Closed loop: each user sends the next request after the answer to the last one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import msgspec

from planner.bench.bench_options import BenchPlan, with_defaults
from planner.bench.client import BenchClient, BenchRecord
from planner.bench.json_report import BenchReport
from planner.bench.workloads import Arrival, Turn, WorkloadSession, open_loop, replay, shapes

Watch = Callable[["RunProgress"], None]
_WATCH_EVERY_S = 0.25


class RunProgress(msgspec.Struct):
    """The progress of a benchmark run, which the run updates for an observer.

    started_s  time at which the run started
    elapsed_s  seconds since then
    sent       number of requests sent
    in_flight  number of requests without a complete answer
    peak       largest value of in_flight so far
    records    the measurements so far
    """

    plan: BenchPlan
    started_s: float = 0.0
    elapsed_s: float = 0.0
    sent: int = 0
    in_flight: int = 0
    peak: int = 0
    records: list[BenchRecord] = []


async def run(plan: BenchPlan, watch: Watch | None = None) -> BenchReport:
    """Run the benchmark that `plan` describes, and return its report.

    Raises PlanError if the plan is invalid, and BenchError if the server is unusable. If cancelled,
    the run ends early and returns a report that is marked as `interrupted`.
    """
    plan = with_defaults(plan)
    async with BenchClient(plan) as client:
        model = await client.model()
        for session in itertools.islice(shapes()[plan.shape].sessions(plan.seed - 1), plan.warmup):
            now = time.perf_counter()
            await client.send(
                BenchRecord(session.id, 0, now, now),
                _first_messages(session),
                session.turns[0].output_tokens,
            )
        bench = _Run(plan, client)
        interrupted = await bench.run_to_end(watch)
    return BenchReport(
        msgspec.structs.replace(plan, model=model),
        bench.progress.records,
        bench.progress.peak,
        interrupted,
    )


class _Run:
    def __init__(self, plan: BenchPlan, client: BenchClient) -> None:
        self._plan = plan
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        self.progress = RunProgress(plan)

    async def run_to_end(self, watch: Watch | None) -> bool:
        # Execute the run; return True if it was interrupted.
        self.progress.started_s = time.perf_counter()
        watching = asyncio.create_task(self._show(watch)) if watch else None
        try:
            await (self._open() if self._plan.is_open else self._closed())
        except asyncio.CancelledError:
            return True
        finally:
            await _cancel([*self._tasks, *([watching] if watching else [])])
            if watch:
                self._tick(watch)
        return False

    async def _open(self) -> None:
        for arrival in self._arrivals():
            due_s = self.progress.started_s + arrival.due_s
            if not self._may_start(due_s):
                break
            await _sleep_until(due_s)
            task = asyncio.create_task(self._converse(arrival.session, due_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _closed(self) -> None:
        sessions = shapes()[self._plan.shape].sessions(self._plan.seed)
        self._tasks = {
            asyncio.create_task(self._user(sessions)) for _ in range(self._plan.concurrency or 1)
        }
        await asyncio.gather(*self._tasks)

    async def _user(self, sessions: Iterator[WorkloadSession]) -> None:
        while self._may_start(now := time.perf_counter()):
            await self._converse(next(sessions), now)

    def _arrivals(self) -> Iterator[Arrival]:
        plan = self._plan
        if plan.trace is not None:
            return replay(plan.trace, plan.limit, plan.speed)
        assert plan.rate is not None, "an open loop has a rate or a trace"
        return open_loop(shapes()[plan.shape], plan.rate, plan.seed)

    def _may_start(self, due_s: float) -> bool:
        plan = self._plan
        if plan.requests is not None and self.progress.sent >= plan.requests:
            return False
        return plan.duration_s is None or due_s - self.progress.started_s < plan.duration_s

    async def _converse(self, session: WorkloadSession, due_s: float) -> None:
        # Send the turns of a session one after another.
        #
        # A failed turn ends the session, because the next turn would lack its answer.
        messages = _first_messages(session)[:-1]
        for number, turn in enumerate(session.turns):
            if not self._may_start(due_s):
                return
            record, answer = await self._send_request(session, number, turn, messages, due_s)
            if record.error is not None or number + 1 == len(session.turns):
                return
            messages.append({"role": "assistant", "content": answer})
            due_s = record.ended_s + turn.think_s * self._plan.think
            await _sleep_until(due_s)

    async def _send_request(
        self,
        session: WorkloadSession,
        number: int,
        turn: Turn,
        messages: list[dict[str, str]],
        due_s: float,
    ) -> tuple[BenchRecord, str]:
        progress = self.progress
        record = BenchRecord(session.id, number, due_s, due_s)
        progress.records.append(record)
        progress.sent += 1
        progress.in_flight += 1
        progress.peak = max(progress.peak, progress.in_flight)
        messages.append({"role": "user", "content": turn.content})
        try:
            return record, await self._client.send(record, messages, turn.output_tokens)
        finally:
            progress.in_flight -= 1

    async def _show(self, watch: Watch) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._tick(watch)

    def _tick(self, watch: Watch) -> None:
        self.progress.elapsed_s = time.perf_counter() - self.progress.started_s
        watch(self.progress)


def _first_messages(session: WorkloadSession) -> list[dict[str, str]]:
    system = [] if session.system is None else [{"role": "system", "content": session.system}]
    return [*system, {"role": "user", "content": session.turns[0].content}]


async def _sleep_until(wake_s: float) -> None:
    await asyncio.sleep(0)
    # A timer with a resolution of 1 ms may fire early.
    while (left_s := wake_s - time.perf_counter()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left_s)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
