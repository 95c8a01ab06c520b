"""A batch that this process runs: its input file, its journal, and the order of its requests.

Calls named load, check, flush and finish use the disk, in threads; everything else does not block.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from typing import IO

from gateway.batch.input_lines import InputChecker, InputLine, decode_line, result_line
from gateway.batch.journal import (
    JournalEntry,
    JournalReader,
    KeptAnswer,
    encode_entry,
)
from gateway.batch.line_run import LineResult, LineRun
from gateway.batch.ownership import BatchOwner
from gateway.batch.records import BatchRecord, BatchState, FileRecord, RequestCounts
from gateway.batch.store import BatchStore, JournalFile, read_line

log = logging.getLogger("penstock")

SLICE_BYTES = 256 * 1024  # read per call in a thread, so that other threads run in between
REASONS = {
    BatchState.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchState.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request ended."),
}


class OwnedBatch:
    """A batch of requests that this process owns and that has not finished yet.

    record   the batch as stored
    folder   the batch's folder
    running  attempts in progress by the request's index
    tasks    the tasks of these attempts
    is_open  requests may be started
    """

    def __init__(self, store: BatchStore, owner: BatchOwner, record: BatchRecord) -> None:
        self._store, self._owner = store, owner
        self.record = record
        self.folder = store.batch_folder(record.tenant, record.id)
        self.running: dict[int, LineRun] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.progress = JournalReader(0)
        self.is_blocked = self.is_open = False
        self._spans = array("Q")  # offset and size of each line
        self._journal: JournalFile | None = None
        self._unwritten: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None
        self._cursor = 0
        self._resumed: frozenset[int] = frozenset()  # in the order of the file, these come first
        self._ready: deque[int] = deque()
        self._retries: list[tuple[float, int]] = []
        self.failures: dict[int, int] = {}

    # Input

    async def check(self, checker: InputChecker, max_line: int) -> None:
        """Check the whole input file of the batch with `checker`, and record the positions of its
        lines.
        """
        await self._scan(max_line, checker.check, lambda: checker.is_full)

    async def load(self, max_line: int) -> None:
        """Record the positions of the lines of a checked input file, and read the batch's
        journal.
        """
        if not self._spans:
            await self._scan(max_line, lambda _: None, lambda: False)
        self.progress = JournalReader(len(self._spans) // 2)
        await asyncio.to_thread(self._read_journal)
        self._resumed = frozenset(self.progress.kept)
        self._ready.extend(self._resumed)
        self.is_open = True

    async def _scan(
        self, max_line: int, see: Callable[[bytes], None], is_over: Callable[[], bool]
    ) -> None:
        self._spans = array("Q")
        with (self.folder / "input").open("rb") as file:
            while not is_over() and await asyncio.to_thread(self._scan_slice, file, max_line, see):
                pass

    def _scan_slice(self, file: IO[bytes], max_line: int, see: Callable[[bytes], None]) -> bool:
        # Read some lines of the file and pass them to `see`; return whether more may follow.
        #
        # A line longer than `max_line` bytes ends the file.
        offset = start = file.tell()
        while offset - start < SLICE_BYTES:
            line = file.readline(max_line + 1)
            if not line:
                return False
            if line.strip():
                self._spans.extend((offset, len(line)))
                see(line)
            if len(line) > max_line:
                return False
            offset += len(line)
        return True

    def _read_journal(self) -> None:
        path = self.folder / "journal"
        path.touch(mode=0o600)
        with path.open("rb") as file:
            for line in file:
                self.progress.feed(line)
        self._journal = JournalFile(path, self.progress.size)

    async def read(self, number: int) -> InputLine:
        """Read the request with this index from the batch's input file, and return it."""
        return await asyncio.to_thread(self._read_now, number)

    def _read_now(self, number: int) -> InputLine:
        offset, size = self._spans[2 * number : 2 * number + 2]
        return decode_line(read_line(self.folder / "input", offset, size))

    # What is to run

    @property
    def total(self) -> int:
        return len(self._spans) // 2

    @property
    def backlog(self) -> int:
        """Return the number of requests of the batch that have no result yet."""
        return self.total - self.progress.completed - self.progress.failed

    @property
    def has_ended(self) -> bool:
        return not self.tasks and not self._unwritten and not self.backlog

    def take_next(self, now: float) -> int | None:
        """Return the index of the batch's next request to run at `now` (monotonic seconds), or
        None.

        Pre-empted requests come first, then those whose next attempt is due.
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
        """Schedule another attempt at a request of the batch, not before `due` (monotonic
        seconds).
        """
        heappush(self._retries, (due, number))

    def put_back(self, number: int, kept: KeptAnswer | None) -> None:
        """Schedule an interrupted request of the batch to run next.

        It continues the kept part of its answer, if there is any.
        """
        self._ready.append(number)
        self.keep(number, kept)

    def keep(self, number: int, kept: KeptAnswer | None) -> None:
        """Record the received part of an answer to a batch request; the next attempt continues from
        it.

        With None, the next attempt generates the answer from the beginning.
        """
        if kept is not None:
            self.progress.kept[number] = kept
            self._write(JournalEntry(number, kept=kept))
        elif self.progress.kept.pop(number, None) is not None:
            self._write(JournalEntry(number))

    # Results

    def add_result(self, run: LineRun, result: LineResult) -> None:
        """Write the result of one request to the batch's journal."""
        response = (result.status, result.request_id, result.body)
        line = result_line(run.number, self.record.id, run.line.custom_id, response)
        self._write(JournalEntry(run.number, result.status == 200, line[:-1].decode()))
        self.failures.pop(run.number, None)

    def _write(self, entry: JournalEntry) -> None:
        self._unwritten.append(encode_entry(entry))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush(), name="batch journal")

    async def _flush(self) -> None:
        while self._unwritten:
            count = len(self._unwritten)
            data = b"".join(self._unwritten)
            journal = self._journal
            assert journal is not None
            try:
                await asyncio.to_thread(journal.append, data)
                self.is_blocked = False
            except OSError as error:
                self.is_blocked = True
                log.error(
                    "batch %s: cannot write its journal (check the disk of batch.folder): %s",
                    self.record.id,
                    error,
                )
                await asyncio.sleep(1.0)
                continue
            for line in self._unwritten[:count]:
                self.progress.feed(line)
            del self._unwritten[:count]

    async def flush(self) -> None:
        """Wait until all entries are in the batch's journal, or until it cannot be written any
        more.
        """
        while self._unwritten and not self.is_blocked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.flush()
        if self._flushing is not None:
            self._flushing.cancel()
        journal, self._journal = self._journal, None
        if journal is not None:
            await asyncio.to_thread(journal.close)

    # Records

    async def save(self, record: BatchRecord) -> None:
        """Store a changed record of the batch on disk.

        Raises LeaseLostError if another process now holds the batch's lease.
        """
        self.record = record
        store = partial(self._store.save_batch, record)
        await asyncio.to_thread(self._owner.change, self.folder, store)

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self.total, self.progress.completed, self.progress.failed)

    async def finish(self, state: BatchState, now: float, expires_at: int) -> None:
        """Write the output and error files of a batch, and put the batch into its final state.

        Requests without a result get an error that names `state`. The call may be repeated after a
        restart: the files keep their ids.
        """
        reason = REASONS.get(state, REASONS[BatchState.EXPIRED])
        record = self.record
        sizes = []
        for kind, is_good in (("output", True), ("error", False)):
            digest = hashlib.sha256(f"{record.id} {kind}".encode()).hexdigest()[:32]
            name = f"{record.id}_{kind}.jsonl"
            file = FileRecord(f"file-{digest}", name, "batch_output", 0, int(now), expires_at)
            lines = self._result_lines(reason, is_good=is_good)
            size = await asyncio.to_thread(
                self._store.write_result_file, record.tenant, file, lines
            )
            sizes.append(file.id if size else None)
        failed = self.total - self.progress.completed
        counts = RequestCounts(self.total, self.progress.completed, failed)
        await self.save(
            record.enter(state, now, counts=counts, output_file_id=sizes[0], error_file_id=sizes[1])
        )
        await asyncio.to_thread(self._store.close_batch, self.record)

    def _result_lines(self, reason: tuple[str, str], *, is_good: bool) -> Iterator[bytes]:
        # Yield the lines of the output file or, if not `is_good`, those of the errors file.
        reader = JournalReader(self.total)
        with (self.folder / "journal").open("rb") as file:
            for line in file:
                entry = reader.feed(line)
                if entry is not None and entry.is_good is is_good:
                    yield entry.result.encode() + b"\n"
        if is_good:
            return
        for number in reader.missing():
            custom_id = self._read_now(number).custom_id
            yield result_line(number, self.record.id, custom_id, None, reason)
