"""A worker process of the KV benchmark: `python bench/kv/worker.py MODULE ROLE SETTINGS REFERENCE`

It reads commands from stdin and writes replies to stdout, both as lines of JSON. It ends with
os._exit, because some libraries crash in their destructors.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, Protocol, TextIO, runtime_checkable

import numpy as np
from block_memory import Bytes, Draw, draw, wipe, wrong_blocks


class Side(Protocol):
    """One end of a transfer (source or sink), which each compared transport implements.

    prepare  build descriptors of the chosen blocks: one for all, or one per block if `each` is true
    begin    called before the measured time
    run      transfer all blocks at once
    post     transfer the block with this index
    finish   called after the measured time

    On the side that starts transfers, `run` and `post` return when the bytes are known to have
    arrived.
    """

    pool: Bytes

    def address(self) -> dict[str, Any]: ...
    def connect(self, peer: dict[str, Any]) -> None: ...
    def prepare(self, drawn: Draw, each: bool) -> None: ...
    def begin(self) -> None: ...
    def finish(self) -> None: ...
    def run(self) -> None: ...
    def post(self, index: int) -> None: ...


@runtime_checkable
class TimedSide(Protocol):
    """One end of a transfer that times the blocks itself, because it sends them on another thread.

    It transfers all blocks one by one, and returns the microseconds of each.
    """

    def posts(self) -> list[float]: ...


class BusyLoop:
    """Computes in Python without pause during a transfer, to slow it as an engine's own code would.

    kind  "thread": in a thread of this process, where it competes for the interpreter lock;
          "process": in another process; "": it does not run
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_over = True
        self.thread: threading.Thread | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.kind == "thread":
            self.is_over = False
            self.thread = threading.Thread(target=self._count, daemon=True)
            self.thread.start()
        elif self.kind == "process":
            self.process = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def stop(self) -> None:
        self.is_over = True
        if self.thread is not None:
            self.thread.join()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.thread = self.process = None

    def _count(self) -> None:
        while not self.is_over:
            pass


class Worker:
    """Executes the benchmark's commands in a worker process; measures durations and CPU time."""

    def __init__(self, side: Side, role: str, expected: Bytes, busy: str) -> None:
        self.busy = BusyLoop(busy)
        self.side, self.role, self.expected = side, role, expected
        self.drawn: Draw | None = None
        self.since = 0.0
        if role == "source":
            side.pool[:] = expected

    def address(self) -> dict[str, Any]:
        return self.side.address()

    def connect(self, peer: dict[str, Any]) -> None:
        self.side.connect(peer)

    def prepare(self, block_bytes: int, count: int, seed: int, each: bool) -> None:
        self.drawn = draw(len(self.side.pool), block_bytes, count, seed)
        if self.role == "sink":
            wipe(self.side.pool, self.drawn)
        self.side.prepare(self.drawn, each)

    def begin(self) -> None:
        self.since = time.process_time()
        self.busy.start()
        self.side.begin()

    def finish(self) -> float:
        """Return the CPU seconds that this process has used since the last call of begin()."""
        self.side.finish()
        self.busy.stop()
        return time.process_time() - self.since

    def run(self) -> float:
        """Copy all chosen blocks in one transfer, and return the seconds that it took."""
        started = time.perf_counter()
        self.side.run()
        return time.perf_counter() - started

    def posts(self) -> list[float]:
        """Copy the chosen blocks one after another, and return the microseconds of each copy."""
        assert self.drawn is not None
        if isinstance(self.side, TimedSide):
            return self.side.posts()
        times = []
        for index in range(len(self.drawn.src)):
            started = time.perf_counter_ns()
            self.side.post(index)
            times.append((time.perf_counter_ns() - started) / 1e3)
        return times

    def verify(self) -> int:
        assert self.drawn is not None
        return wrong_blocks(self.side.pool, self.expected, self.drawn)

    def custom(self, **arguments: Any) -> Any:
        return self.side.custom(**arguments)  # type: ignore[attr-defined]


def serve(worker: Worker, replies: TextIO) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"ok": getattr(worker, command.pop("do"))(**command)}
        except Exception as error:  # the coordinator drops the contestant and continues
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    module, role, settings, expected_path = (
        sys.argv[1],
        sys.argv[2],
        json.loads(sys.argv[3]),
        sys.argv[4],
    )
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    expected = np.memmap(expected_path, dtype=np.uint8, mode="r")
    busy = settings.pop("busy", "")
    side = importlib.import_module(module).open_side(role, len(expected), settings)
    serve(Worker(side, role, expected, busy), replies)
    os._exit(0)


if __name__ == "__main__":
    main()
