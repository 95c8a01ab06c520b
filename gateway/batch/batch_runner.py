"""Runs the requests of batches in capacity that live traffic leaves free, and stores the results.

There is one BatchRunner per gateway process. While it has batches, it reads the load of all pools
many times a second. concurrency_and_preemption.py decides how many batch requests a pool may run.
The runner starts requests up to this number, and interrupts those above it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from time import monotonic, time

from gateway.batch.completion_window import Schedule, ScheduleLog
from gateway.batch.concurrency_and_preemption import choose_preempted
from gateway.batch.file_and_batch_objects import BatchState
from gateway.batch.input_lines import LINE_OVERHEAD, InputChecker
from gateway.batch.owned_batch import OwnedBatch
from gateway.batch.pool_access import PoolAccess, find_pool, line_headers, refusal
from gateway.batch.remaining_work import TICK_S
from gateway.batch.request_attempt import RequestAttempt, ServeLine, retry_delay_s
from gateway.batch.storage_interface import (
    BatchStorage,
    ClaimedBatch,
    LeaseLostError,
    OpenBatch,
    StorageUnreachableError,
    tenant_digest,
)
from gateway.batch.storage_threads import StorageThreads
from gateway.config import BatchApi
from gateway.metrics.catalogue import Metrics
from gateway.routes_and_snapshot import Gateway
from policies.admission.batch_reserve import WindowPlan

log = logging.getLogger("penstock")

IDLE_S = 0.25  # seconds between two searches for a batch while none runs
RETRY_S = 1.0
REOPEN_S = 5.0  # seconds between two attempts to reach a storage that did not answer at the start
CALL_THREADS, LEASE_THREADS = 16, 4
MAX_FINISHING = 4  # maximum number of batches whose results are written at the same time
MAX_OWNED = 16  # maximum number of batches that one process runs at the same time


class BatchRunner:
    """Runs all batches whose lease this gateway process has taken.

    A lease is the exclusive right to run a batch for some time; its owner renews it.

    storage  the storage of files and batches
    is_open  whether the storage can be used
    """

    def __init__(
        self,
        section: BatchApi,
        storage: BatchStorage,
        gateway: Gateway,
        serve: ServeLine,
        metrics: Metrics,
    ) -> None:
        # Initialize; `serve` serves one request of a tenant like a live request.
        self.storage, self.is_open = storage, False
        self._first_section = section
        self._gateway, self._serve, self._metrics = gateway, serve, metrics
        self._threads = StorageThreads(CALL_THREADS)
        # Leases are renewed in threads of their own, so that long calls do not delay that.
        self._lease_threads = StorageThreads(LEASE_THREADS)
        self._finishing = asyncio.Semaphore(MAX_FINISHING)
        self._accesses: dict[str, PoolAccess] = {}
        self._owned: dict[str, OwnedBatch] = {}
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._is_due = asyncio.Event()
        self._turn = 0
        self._schedule_log = ScheduleLog()
        self._attach_gauges(metrics)

    def _attach_gauges(self, metrics: Metrics) -> None:
        metrics.batch_backlog.set_function(
            lambda: float(sum(batch.backlog for batch in self._owned.values()))
        )
        metrics.batch_running.set_function(lambda: float(self.running))
        for schedule in Schedule:
            gauge = metrics.batches.labels(schedule.value)
            gauge.set_function(partial(self._count_scheduled, schedule))
        metrics.batch_reserved_places.set_function(
            lambda: float(sum(access.schedule.plan.places for access in self._accesses.values()))
        )

    @property
    def running(self) -> int:
        return sum(len(batch.tasks) for batch in self._owned.values())

    @property
    def _section(self) -> BatchApi:
        return self._gateway.snapshot.config.batch or self._first_section

    def _count_scheduled(self, schedule: Schedule) -> float:
        return float(sum(b.is_open and b.schedule is schedule for b in self._owned.values()))

    async def start(self) -> None:
        """Prepare the storage of files and batches, and start to run batches.

        If the storage cannot be reached, connecting is repeated in the background until it
        succeeds. Raises OSError for any other failure.
        """
        try:
            await self._open()
        except StorageUnreachableError as error:
            log.error("batches cannot run until their storage can be reached: %s", error)
        except OSError as error:
            raise OSError(f"cannot open the storage of batches: {error}") from error
        loops = {"batches": self._pace_batches, "leases": self._keep_leases}
        loops |= {"claims": self._claim_batches, "janitor": self._delete_expired}
        self._loops = [
            asyncio.create_task(loop(), name=f"batch {name}") for name, loop in loops.items()
        ]

    async def _open(self) -> None:
        await self._threads.run(self.storage.open)
        self.is_open = True

    async def stop(self) -> None:
        """Interrupt all batch requests, store received parts of answers, release all batches."""
        if not self._loops:
            return
        # Leases are kept until the parts of answers are stored.
        loops = {task.get_name(): task for task in self._loops}
        keeping = loops.pop("batch leases")
        for task in loops.values():
            task.cancel()
        for batch in self._owned.values():
            for run in list(batch.running.values()):
                self._preempt(batch, run)
        supervisors = list(self._supervisors.values())
        for task in supervisors:
            task.cancel()
        await asyncio.gather(*loops.values(), *supervisors, return_exceptions=True)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        self._loops = []
        with suppress(OSError):
            await self._threads.run(self.storage.close)
        for threads in (self._threads, self._lease_threads):
            threads.close()

    def wake(self) -> None:
        """Look for new batches and cancellations now, before the next regular check."""
        self._is_due.set()

    async def _pace_batches(self) -> None:
        while True:
            try:
                self._pace_all()
            except Exception:  # an error in one round must not end all batches
                log.exception(
                    "starting or interrupting batch requests failed; the next round tries again"
                )
            await asyncio.sleep(TICK_S if self._owned else IDLE_S)

    # Taking over batches, and giving them up

    async def _claim_batches(self) -> None:
        while True:
            try:
                await self._claim_some()
            except StorageUnreachableError as error:
                log.error("the storage of batches cannot be reached: %s", error)
                await asyncio.sleep(REOPEN_S)
            except OSError as error:
                log.error("cannot look for batches: %s", error)
            except Exception:
                log.exception("looking for batches failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(self.storage.poll_s):
                    await self._is_due.wait()
            self._is_due.clear()

    async def _claim_some(self) -> None:
        if not self.is_open:
            await self._open()
            log.info("the storage of batches can be reached again")
        waiting = await self._threads.run(self.storage.open_batches)
        while len(self._owned) < MAX_OWNED and (batch := self._next_of(waiting)) is not None:
            waiting.remove(batch)
            claimed = await self._lease_threads.run(self.storage.claim, batch)
            if claimed is not None:
                self._adopt(claimed)

    def _next_of(self, waiting: list[OpenBatch]) -> OpenBatch | None:
        owned = Counter(tenant_digest(batch.record.tenant) for batch in self._owned.values())
        able = [batch for batch in waiting if batch.id not in self._owned]
        return min(able, key=lambda batch: owned[batch.tenant_digest], default=None)

    def _adopt(self, claimed: ClaimedBatch) -> None:
        # Start to run a batch whose lease this process has taken.
        name = claimed.record.id
        batch = self._owned[name] = OwnedBatch(self.storage, claimed, self._threads)
        task = asyncio.create_task(self._supervise(batch), name=f"batch {name}")
        self._supervisors[name] = task

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._first_section.lease / 3)
            await asyncio.gather(*(self._renew(batch) for batch in list(self._owned.values())))

    async def _renew(self, batch: OwnedBatch) -> None:
        name = batch.record.id
        try:
            await self._lease_threads.run(batch.renew)
        except LeaseLostError:
            if self._owned.get(name) is batch:
                batch.is_lost = True
        except OSError as error:
            log.error("the lease of batch %s cannot be renewed: %s", name, error)

    async def _delete_expired(self) -> None:
        while True:
            if self.is_open:
                try:
                    delete, expiry = self.storage.delete_expired, self._section.expiry
                    await self._threads.run(delete, time(), expiry)
                except OSError as error:
                    log.error("cannot delete expired files and batches: %s", error)
                except Exception:
                    log.exception("deleting expired files and batches failed")
            await asyncio.sleep(self.storage.janitor_s)

    # The life of one batch: validation, requests, output files

    async def _supervise(self, batch: OwnedBatch) -> None:
        name = batch.record.id
        try:
            await self._bring_to_end(batch)
        except LeaseLostError:
            log.error(
                "another process has taken over batch %s; this process stops running it", name
            )
        except OSError as error:
            log.error("running batch %s failed: %s; it will be tried again", name, error)
            await asyncio.sleep(RETRY_S)
        except Exception:
            log.exception("running batch %s failed; it will be tried again", name)
            await asyncio.sleep(RETRY_S)
        finally:
            await self._cancel_runs(batch)
            with suppress(OSError):
                await batch.close()
                await self._lease_threads.run(batch.release)
            self._owned.pop(name, None)
            self._supervisors.pop(name, None)

    async def _bring_to_end(self, batch: OwnedBatch) -> None:
        if batch.record.state is BatchState.VALIDATING and not await self._validate(batch):
            return
        await batch.load(self._max_line)
        final = await self._until_end(batch)
        await self._cancel_runs(batch)
        await batch.flush()
        if batch.is_lost:
            raise LeaseLostError
        now, missing = time(), batch.backlog
        async with self._finishing:
            await batch.finish(final, now, self._section.expiry)
        if missing:
            self._metrics.batch_requests_total.labels(final.value).inc(missing)
        log.info("batch %s has ended in state %s", batch.record.id, final.value)

    @property
    def _max_line(self) -> int:
        return self._gateway.snapshot.config.limits.body + LINE_OVERHEAD

    async def _validate(self, batch: OwnedBatch) -> bool:
        # Check the input file of a batch; return whether the batch may run.
        section, limits = self._section, self._gateway.snapshot.config.limits
        checker = InputChecker(batch.record.endpoint, section.lines, limits.body)
        await batch.check(checker, self._max_line)
        problems = checker.finish()
        now = time()
        if problems:
            await batch.fail(batch.record.enter(BatchState.FAILED, now, problems=problems))
            return False
        changes = {"model": checker.model, "counts": batch.counts}
        changes |= {"schedule": batch.schedule.value}
        await batch.save(batch.record.enter(BatchState.IN_PROGRESS, now, **changes))
        return True

    async def _until_end(self, batch: OwnedBatch) -> BatchState:
        # Wait until a batch is complete, cancelled or expired; return its final state.
        #
        # The paced requests run meanwhile. From time to time, cancellations are read and counts
        # stored. Raises LeaseLostError if another process has taken the batch over.
        poll_due = monotonic()
        while not batch.has_ended:
            if batch.is_lost:
                raise LeaseLostError
            if time() >= batch.record.expires_at:
                return BatchState.EXPIRED
            if monotonic() >= poll_due:
                poll_due = monotonic() + self.storage.poll_s
                cancelled_at = self.storage.cancelled_at
                if await self._threads.run(cancelled_at, batch.record) is not None:
                    return BatchState.CANCELLED
                await batch.save_progress()
                batch.is_open = True
            await asyncio.sleep(0.1)
        return BatchState.COMPLETED

    async def _cancel_runs(self, batch: OwnedBatch) -> None:
        batch.is_open = False
        tasks = list(batch.tasks.values())
        for run in batch.running.values():
            run.preempt()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Pacing

    def _pace_all(self) -> None:
        by_pool: dict[str, list[OwnedBatch]] = {}
        for batch in self._owned.values():
            if batch.is_open:
                pool = find_pool(self._gateway.snapshot, batch.record)
                by_pool.setdefault(pool, []).append(batch)
        self._schedule_log.keep(self._owned)
        for pool, batches in by_pool.items():
            self._pace(pool, batches)
        for pool, access in self._accesses.items():
            if pool not in by_pool:
                access.schedule.clear()

    def _pace(self, pool: str, batches: list[OwnedBatch]) -> None:
        now = monotonic()
        runs = [(batch, run) for batch in batches for run in batch.running.values()]
        starting = sum(len(batch.tasks) - len(batch.running) for batch in batches)
        running = len(runs) + starting
        access = self._accesses.get(pool)
        if access is None:
            access = self._accesses[pool] = PoolAccess(pool, self._gateway, self._metrics)
        self._schedule(access, batches, len(runs), now)
        allowed = access.allow(self._section, [run for _, run in runs], running, now)
        if allowed < running:
            able = [(batch, run) for batch, run in runs if not run.is_ending]
            hurried = access.schedule.plan.hurried
            costs = [(batch.record.id in hurried, run.lost_tokens) for batch, run in able]
            for index in choose_preempted(costs, running - allowed):
                self._preempt(*able[index])
            return
        self._start(batches, access.schedule.plan, allowed - running, now)

    def _schedule(
        self, access: PoolAccess, batches: list[OwnedBatch], running: int, now: float
    ) -> None:
        # Compare the batches of one pool with their completion windows.
        usual_s = access.usual_s(now)
        demands = [batch.demand(now, usual_s) for batch in batches]
        access.schedule.update(demands, access.reserve(self._section), running, now)
        for batch, demand in zip(batches, demands, strict=True):
            batch.schedule = access.schedule.schedule_of(demand.id)
            self._schedule_log.update(demand, batch.schedule, now)

    def _start(self, batches: list[OwnedBatch], plan: WindowPlan, count: int, now: float) -> None:
        # Start up to `count` requests: first requests of hurried batches, in the order of the plan,
        # then requests of all tenants in turn.
        reserved = plan.places - sum(len(batch.reserved) for batch in batches)
        by_id = {batch.record.id: batch for batch in batches}
        for batch in map(by_id.__getitem__, plan.hurried):
            while count > 0 and self._start_one([batch], now, is_reserved=reserved > 0):
                count, reserved = count - 1, reserved - 1
        queue = deque(group_by_tenant(batches))
        queue.rotate(-self._turn)
        self._turn += 1
        while count > 0 and queue:
            own = queue.popleft()
            if self._start_one(own, now, is_reserved=False):
                queue.append(own)
                count -= 1

    def _start_one(self, batches: list[OwnedBatch], now: float, *, is_reserved: bool) -> bool:
        # Start the next request of one tenant, perhaps on a reserved place; return whether there
        # was one.
        for batch in batches:
            number = batch.take_next(now)
            if number is not None:
                if is_reserved:
                    batch.reserved.add(number)
                task = batch.tasks[number] = asyncio.create_task(self._run_one(batch, number))
                task.add_done_callback(partial(_forget, batch, number))
                return True
        return False

    def _preempt(self, batch: OwnedBatch, run: RequestAttempt) -> None:
        number, lost = run.number, run.lost_tokens
        run.preempt()
        kept = run.keep()
        batch.put_back(run, kept)
        del batch.running[number]
        batch.tasks.pop(number).cancel()
        batch.reserved.discard(number)
        result = "restarted" if lost else "waiting" if kept is None else "kept"
        self._metrics.batch_preemptions_total.labels(result).inc()
        if kept is not None:
            self._metrics.batch_kept_tokens_total.inc(run.shown_tokens)

    # The attempts at one request

    async def _run_one(self, batch: OwnedBatch, number: int) -> None:
        try:
            await self._attempt(batch, number)
        except Exception:
            log.exception("batch %s: request %d failed inside the gateway", batch.record.id, number)
            batch.retry_at(number, monotonic() + RETRY_S)

    async def _attempt(self, batch: OwnedBatch, number: int) -> None:
        started_at = monotonic()
        line, record, gateway = await batch.read(number), batch.record, self._gateway
        is_reserved = number in batch.reserved
        headers = line_headers(self._section, gateway.snapshot, is_reserved=is_reserved)
        kept, failures = batch.progress.kept.get(number), batch.failures.get(number, 0)
        run = RequestAttempt(
            self._serve, record.tenant, number, line, headers, kept, failures, started_at
        )
        error = refusal(gateway.snapshot, record)
        if error is not None:
            batch.add_result(run, run.refused(error))
            self._metrics.batch_requests_total.labels("failed").inc()
            return
        if run.is_complete:  # the engine had sent the whole answer, but not its last events
            run.serving.close()
            self._settle(batch, run)
            return
        batch.running[number] = run
        await run.serving
        # The request's result counts from now on, before this task has ended: the request must not
        # be interrupted any more.
        batch.running.pop(number, None)
        if not run.is_preempted:
            self._settle(batch, run)

    def _settle(self, batch: OwnedBatch, run: RequestAttempt) -> None:
        result, number, count = run.result(), run.number, self._metrics.batch_requests_total.labels
        if result.is_retried:
            failures = run.failures + (not result.is_unlimited)
            batch.failures[number] = failures
            batch.end_attempt(run, run.keep())
            batch.retry_at(number, monotonic() + retry_delay_s(failures, result.retry_after_s))
            count("retried").inc()
        elif result.status != 200 and run.kept is not None:  # the engine refused the continuation
            batch.end_attempt(run, None)
            batch.retry_at(number, monotonic())
            count("retried").inc()
        else:
            batch.add_result(run, result)
            count("completed" if result.status == 200 else "failed").inc()


def group_by_tenant(batches: Iterable[OwnedBatch]) -> list[list[OwnedBatch]]:
    """Return the batches of each tenant as a list, in the order of the completion windows' ends.

    The tenants are in the order in which they first appear in `batches`.
    """
    by_tenant: dict[str, list[OwnedBatch]] = {}
    for batch in batches:
        by_tenant.setdefault(batch.record.tenant, []).append(batch)
    return [sorted(own, key=lambda batch: batch.record.expires_at) for own in by_tenant.values()]


def _forget(batch: OwnedBatch, number: int, task: asyncio.Task[None]) -> None:
    # Remove a request whose task has ended from the running ones, unless it runs again already.
    if batch.tasks.get(number) is task:
        del batch.tasks[number]
        batch.running.pop(number, None)
        batch.reserved.discard(number)
