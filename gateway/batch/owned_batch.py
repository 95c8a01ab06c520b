"""A batch that this process runs: its input file, its journal, and the order of its requests.

The methods load, check, flush and finish use the storage, in threads. All other methods do not
block.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from time import monotonic, time
from typing import Any

import msgspec

from gateway.batch.completion_window import Schedule
from gateway.batch.file_and_batch_objects import (
    BatchRecord,
    BatchState,
    FileRecord,
    RequestCounts,
    new_id,
)
from gateway.batch.input_lines import InputChecker, InputLine, InputLines, decode_line
from gateway.batch.remaining_work import RequestTimes
from gateway.batch.request_attempt import LineResult, RequestAttempt
from gateway.batch.result_journal import (
    JournalEntry,
    JournalReader,
    KeptAnswer,
    encode_entry,
)
from gateway.batch.result_lines import result_line
from gateway.batch.storage_interface import BatchJournal, BatchStorage, ClaimedBatch, LeaseLostError
from gateway.batch.storage_threads import StorageThreads
from gateway.batch.token_usage import UsageSum
from policies.admission.batch_reserve import WindowDemand

log = logging.getLogger("penstock")

MISSING_BYTES = 4096  # upper bound of the size of a result without an answer
REASONS = {
    BatchState.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchState.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request ended."),
}


class OwnedBatch:
    """An unfinished batch that this process runs, because it has the batch's lease.

    A lease is the exclusive right to run a batch until the lease expires or is released.

    running   attempts in progress, by the request's index
    tasks     the tasks of these attempts
    reserved  indexes of the requests that run although the pool has no free capacity, because the
              completion window ends soon
    schedule  whether the batch is expected to end within its completion window
    is_open   whether requests may be started
    is_lost   whether another process has taken over the batch
    """

    def __init__(
        self, storage: BatchStorage, claimed: ClaimedBatch, threads: StorageThreads
    ) -> None:
        """Prepare to run the claimed batch. Blocking calls of the storage run in `threads`."""
        self._storage, self._claimed, self._threads = storage, claimed, threads
        self.running: dict[int, RequestAttempt] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.reserved: set[int] = set()
        self.schedule = Schedule.ON_TIME
        self.progress = JournalReader(0)
        self.is_blocked = self.is_open = self.is_lost = False
        self._lines = InputLines()
        self._journal: BatchJournal | None = None
        self._unwritten: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None
        self._cursor = 0
        # Requests with a partial answer. They run before all others, in the order of the file.
        self._resumed: frozenset[int] = frozenset()
        self._ready: deque[int] = deque()
        self._retries: list[tuple[float, int]] = []
        self.failures: dict[int, int] = {}
        self._times = RequestTimes(claimed.record.request_times_s)

    @property
    def record(self) -> BatchRecord:
        """Return the batch's record as it was last stored."""
        return self._claimed.record

    # Input

    async def check(self, checker: InputChecker, max_line: int) -> None:
        """Check every line of the input file, and store the offset at which each line begins.

        checker   the check of a single line
        max_line  maximum bytes of a line
        """
        await self._scan(max_line, checker.check, lambda: checker.is_full)

    async def load(self, max_line: int) -> None:
        """Read the journal, and store the offset at which each line of the input file begins.

        The input file is known to be valid. `max_line` is the maximum length of a line in bytes.
        """
        if not self._lines.count:
            await self._scan(max_line, lambda _: None, lambda: False)
        self.progress = JournalReader(self._lines.count)
        self._journal = await self._threads.run(self._claimed.open_journal, self.progress)
        self._resumed = frozenset(self.progress.kept)
        self._ready.extend(self._resumed)

    async def _scan(
        self, max_line: int, see: Callable[[bytes], None], is_over: Callable[[], bool]
    ) -> None:
        lines = self._lines = InputLines()
        run = self._threads.run
        with await run(self._claimed.open_input) as file:
            while not is_over() and await run(lines.scan, file, max_line, see):
                pass

    async def read(self, number: int) -> InputLine:
        """Return the request with the index `number` (from 0), read from the input file."""
        span = self._lines.span(number)
        return decode_line(await self._threads.run(self._claimed.read_input, *span))

    # The requests that remain to be run

    @property
    def total(self) -> int:
        return self._lines.count

    @property
    def backlog(self) -> int:
        """Return the number of requests that have no result yet."""
        return self.total - self.progress.completed - self.progress.failed

    @property
    def has_ended(self) -> bool:
        return not self.tasks and not self._unwritten and not self.backlog

    def demand(self, now: float, usual_s: float | None) -> WindowDemand:
        """Return how much work the batch still needs, and when its completion window ends.

        now      monotonic time in seconds
        usual_s  expected seconds per request, used until the first request of the batch has ended;
                 None if unknown
        """
        running = {number: now - run.started_at for number, run in self.running.items()}
        work_s, longest_s = self._times.estimate(self.backlog, running, usual_s)
        left_s = self.record.expires_at - time()
        is_known = self._times.measured is not None
        return WindowDemand(self.record.id, left_s, work_s, longest_s, is_known)

    def take_next(self, now: float) -> int | None:
        """Return the index of the request to run next at monotonic time `now`; None if none is due.

        Interrupted requests come first, then those whose next attempt is due.
        """
        if self.is_blocked:
            return None
        if self._ready:
            return self._ready.popleft()
        if self._retries and self._retries[0][0] <= now:
            return heappop(self._retries)[1]
        number = self.progress.has_result.find(0, self._cursor)
        while number in self._resumed:
            number = self.progress.has_result.find(0, number + 1)
        if number < 0:
            return None
        self._cursor = number + 1
        return number

    def retry_at(self, number: int, due: float) -> None:
        """Schedule another attempt at a request, not before the monotonic time `due`."""
        heappush(self._retries, (due, number))

    def put_back(self, run: RequestAttempt, kept: KeptAnswer | None) -> None:
        """Schedule an interrupted request to run next, before requests that have not begun.

        `kept` is the received part of its answer, which the next attempt continues; None if there
        is none.
        """
        self._ready.append(run.number)
        self.end_attempt(run, kept)

    def end_attempt(self, run: RequestAttempt, kept: KeptAnswer | None) -> None:
        """Record an attempt that gave no result.

        `kept` is the received part of the answer, which the next attempt continues. With None, the
        next attempt generates the answer from the beginning.
        """
        number = run.number
        seconds = monotonic() - run.started_at
        self._times.add_attempt(number, seconds, is_kept=kept is not None)
        if kept is not None:
            self.progress.kept[number] = kept
            self._write(JournalEntry(number, kept=kept))
        elif self.progress.kept.pop(number, None) is not None:
            self._write(JournalEntry(number))

    # Results

    def add_result(self, run: RequestAttempt, result: LineResult) -> None:
        """Append the result of one request of the batch to the batch's journal."""
        response = (result.status, result.request_id, result.body)
        line = result_line(run.number, self.record.id, run.line.custom_id, response)
        self._write(JournalEntry(run.number, result.status == 200, line[:-1].decode()))
        self._times.add_result(run.number, monotonic() - run.started_at)
        self.failures.pop(run.number, None)

    def _write(self, entry: JournalEntry) -> None:
        self._unwritten.append(encode_entry(entry))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush(), name="batch journal")

    async def _flush(self) -> None:
        while self._unwritten and not self.is_lost:
            count = len(self._unwritten)
            data = b"".join(self._unwritten)
            journal = self._journal
            assert journal is not None
            try:
                await self._threads.run(journal.append, data)
                self.is_blocked = False
            except LeaseLostError:
                self.is_lost = self.is_blocked = True
                return
            except OSError as error:
                self.is_blocked = True
                log.error("the journal of batch %s cannot be written: %s", self.record.id, error)
                await asyncio.sleep(1.0)
                continue
            for line in self._unwritten[:count]:
                self.progress.feed(line)
            del self._unwritten[:count]
            await self._collect(journal.pause_s)

    async def _collect(self, pause_s: float) -> None:
        # Collect entries for one write, up to `pause_s` seconds or until no request runs any more.
        ends = monotonic() + pause_s
        while self.tasks and self.is_open and monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def flush(self) -> None:
        """Wait until all entries are in the journal, or until the journal cannot be written to."""
        while self._unwritten and not self.is_blocked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.flush()
        if self._flushing is not None:
            self._flushing.cancel()
        journal, self._journal = self._journal, None
        if journal is not None:
            await self._threads.run(journal.close)

    # Records

    async def save(self, record: BatchRecord) -> None:
        """Store a changed record of the batch.

        Raises LeaseLostError if another process has taken the lease.
        """
        await self._threads.run(self._claimed.save, record)

    async def save_progress(self) -> None:
        """Store the counts and the schedule of the batch, if they have changed.

        Raises LeaseLostError if another process has taken the lease.
        """
        record, schedule = self.record, self.schedule.value
        if (self.counts, schedule) != (record.counts, record.schedule):
            changes = {"counts": self.counts, "schedule": schedule}
            times_s = self._times.measured  # stored for the next owner of the batch
            await self.save(msgspec.structs.replace(record, **changes, request_times_s=times_s))

    async def fail(self, record: BatchRecord) -> None:
        """Store the record of a refused batch, and delete the batch's copy of the input file."""
        await self._threads.run(self._claimed.finish, record)

    def renew(self) -> None:
        """Renew the lease on the batch. The call blocks; use it in a thread.

        Raises LeaseLostError if another process has taken the lease.
        """
        self._claimed.renew()

    def release(self) -> None:
        """Release the lease on the batch, so that another process may take it.

        The call blocks; use it in a thread.
        """
        self._claimed.release()

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self.total, self.progress.completed, self.progress.failed)

    async def finish(self, state: BatchState, now: float, expiry_s: float) -> None:
        """Write the output and error files of the batch, and put it into its final state.

        Requests without a result get an error that names `state`. The ids of both files are stored
        before the files are written. If this process stops before the end, the next owner deletes
        these files and writes others, because this process may only be slow and still write.

        now       Unix time in seconds
        expiry_s  seconds after which both files expire, if the client has set no shorter time
        """
        record, run = self.record, self._threads.run
        expires_at = int(now + min(record.output_expiry_s or expiry_s, expiry_s))
        for name in record.result_file_ids:
            await run(self._storage.delete_file, record.tenant, name)
        ids = new_id("file-"), new_id("file-")
        is_cancelled = state is BatchState.CANCELLED
        interim = BatchState.CANCELLING if is_cancelled else BatchState.FINALIZING
        await self.save(record.enter(interim, now, counts=self.counts, result_file_ids=ids))
        written, usage = [], UsageSum()
        for kind, name in zip(("output", "error"), ids, strict=True):
            title = f"{record.id}_{kind}.jsonl"
            file = FileRecord(name, title, "batch_output", 0, int(now), expires_at)
            size = await run(self._write_results, file, state, usage, kind == "output")
            written.append(name if size else None)
        failed = self.total - self.progress.completed
        counts = RequestCounts(self.total, self.progress.completed, failed)
        unanswered = failed - self.progress.failed
        changes: dict[str, Any] = {"counts": counts, "usage": usage.total}
        changes["unanswered"] = unanswered
        changes |= {"output_file_id": written[0], "error_file_id": written[1]}
        await run(self._claimed.finish, self.record.enter(state, now, **changes))

    def _write_results(
        self, file: FileRecord, state: BatchState, usage: UsageSum, is_good: bool
    ) -> int:
        reason = REASONS.get(state, REASONS[BatchState.EXPIRED])
        lines = self._result_lines(reason, usage, is_good=is_good)
        most = self.progress.size + 2 * self.total * MISSING_BYTES
        return self._storage.write_result_file(self.record.tenant, file, lines, most)

    def _result_lines(
        self, reason: tuple[str, str], usage: UsageSum, *, is_good: bool
    ) -> Iterator[bytes]:
        # Yield the lines of the output file, or of the errors file if not `is_good`.
        #
        # The usage of the output file's lines is added to `usage`.
        reader = JournalReader(self.total)
        for line in self._claimed.journal_lines():
            entry = reader.feed(line)
            if entry is not None and entry.is_good is is_good:
                if is_good:
                    usage.add(entry.result)
                yield entry.result.encode() + b"\n"
        if is_good:
            return
        with self._claimed.open_input() as file:
            for number in reader.missing():
                custom_id = self._lines.read(file, number).custom_id
                yield result_line(number, self.record.id, custom_id, None, reason)
