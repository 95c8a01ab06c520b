"""Runs independent computations in several processes, and shows their progress.

    results = map_in_processes(measure, fleets, processes=2, on_progress=show)

Each computation has its own process, with a new interpreter (spawn), so that it inherits neither
threads nor locks. Results are in the order of the items, whatever the number of processes. With one
process, everything runs in the calling process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import format_exc
from typing import TypeVar

import msgspec

Item = TypeVar("Item")
Result = TypeVar("Result")
ReportShare = Callable[[float], None]
"""A callback of a computation, with the share of its work that is done, from 0 to 1."""
ItemProgress = Callable[[int, float], None]
"""A callback with the index of an item, and the share of its work that is done, from 0 to 1."""


class WorkerError(RuntimeError):
    """Raised if a process ended without a result.

    The message states how the process ended, or contains the traceback of its error. `index` is the
    index of its item.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class _Share(msgspec.Struct, frozen=True):
    done: float


class _Value(msgspec.Struct, frozen=True):
    value: object


class _Failure(msgspec.Struct, frozen=True):
    traceback: str


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(
    work: Callable[[Item, ReportShare], Result],
    items: Sequence[Item],
    processes: int,
    on_progress: ItemProgress,
) -> list[Result]:
    """Return work(item, report_share) for every item, in the order of the items.

    work         a function of a module, which a new process can import; items and results must be
                 picklable
    processes    maximum number of computations at a time; 1: one after another in this process
    on_progress  called in this process, at most a hundred times per item

    Raises WorkerError if a process ends without a result, and passes on exceptions of on_progress.
    In any case, also after Ctrl-C, all processes have ended when the function returns.
    """
    if min(processes, len(items)) <= 1:
        return [
            work(item, _whole_percents(partial(on_progress, index)))
            for index, item in enumerate(items)
        ]
    results: dict[int, Result] = {}
    with _Workers(work) as workers:
        for index in range(len(items)):
            if len(workers) == processes:
                workers.receive_until_one_ends(results, on_progress)
            workers.start(index, items[index])
        while workers:
            workers.receive_until_one_ends(results, on_progress)
    return [results[index] for index in range(len(items))]


class _Workers:
    """The child processes of one call of map_in_processes, one for each item in progress.

    All of them have ended when the `with` block ends.
    """

    def __init__(self, work: Callable[..., object]) -> None:
        self._work = work
        self._running: dict[Connection, tuple[int, BaseProcess]] = {}

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, (_, process) in self._running.items():
            process.terminate()
            process.join()
            pipe.close()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, index: int, item: object) -> None:
        """Start the child process that computes one item."""
        spawn = get_context("spawn")
        pipe, child_pipe = spawn.Pipe()
        process = spawn.Process(target=_compute, args=(child_pipe, self._work), daemon=True)
        with _interrupts_blocked():
            process.start()
        child_pipe.close()
        self._running[pipe] = index, process
        try:
            # The item does not go with the arguments of Process: if the process ended before it
            # had read them, start() would fail with an error that does not say so.
            pipe.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise _died(index, process) from None

    def receive_until_one_ends(self, results: dict[int, Result], on_progress: ItemProgress) -> None:
        """Report progress until a process has sent a result, and add the result to `results`.

        Raises WorkerError if a process ends without a result.
        """
        while True:
            for pipe in wait(list(self._running)):
                assert isinstance(pipe, Connection)
                index, process = self._running[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise _died(index, process) from None
                if isinstance(message, _Failure):
                    raise WorkerError(index, message.traceback)
                if isinstance(message, _Value):
                    results[index] = message.value  # type: ignore[assignment]
                    del self._running[pipe]
                    process.join()
                    pipe.close()
                    return
                on_progress(index, message.done)


def _died(index: int, process: BaseProcess) -> WorkerError:
    process.join()
    status = process.exitcode or 0
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return WorkerError(
        index,
        f"its process ended with {how} before it had a result; if memory is scarce, run it on one "
        "core: taskset -c 0 ...",
    )


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    # A process that is started in this block ignores Ctrl-C for good: the terminal sends it to all
    # processes, and this one ends the others.
    #
    # The first process to start also starts multiprocessing's resource tracker, which unblocks
    # SIGINT when it runs. So it is started before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _compute(pipe: Connection, work: Callable[[object, ReportShare], object]) -> None:
    # Run in the new process: compute one item and send messages about it.
    try:
        item = pipe.recv()
        message: _Value | _Failure
        try:
            message = _Value(work(item, _whole_percents(lambda done: pipe.send(_Share(done)))))
        except ConnectionError:
            raise
        except Exception:
            message = _Failure(format_exc())
        pipe.send(message)
    except (ConnectionError, EOFError):
        sys.exit(1)  # the calling process has ended


def _whole_percents(report: ReportShare) -> ReportShare:
    # Return a function that calls `report` only when another whole percent is done.
    last = -1

    def report_percent(share: float) -> None:
        nonlocal last
        if int(100 * share) > last:
            last = int(100 * share)
            report(share)

    return report_percent
