"""One process of a contestant: python bench/kv/worker.py CONTESTANT ROLE, with JSON lines in and out.

Does what it is told and says what that cost. It leaves by os._exit: some peers crash in their libraries' destructors.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, Protocol, TextIO

import numpy as np
from pool import Bytes, Draw, draw, wipe, wrong_blocks


class Side(Protocol):
    """One end of a contestant. The initiator's `run` and `post` return when the bytes are known to be in place."""

    pool: Bytes

    def address(self) -> dict[str, Any]: ...
    def connect(self, peer: dict[str, Any]) -> None: ...
    def prepare(self, what: Draw, each: bool) -> None: ...
    def begin(self) -> None: ...
    def finish(self) -> None: ...
    def run(self) -> None: ...
    def post(self, index: int) -> None: ...


class Worker:
    """Carries out commands on its side; keeps the processor time between `begin` and `finish`."""

    def __init__(self, side: Side, role: str, expected: Bytes) -> None:
        self.side, self.role, self.expected = side, role, expected
        self.what: Draw | None = None
        self.since = 0.0
        if role == "source":
            side.pool[:] = expected

    def address(self) -> dict[str, Any]:
        return self.side.address()

    def connect(self, peer: dict[str, Any]) -> None:
        self.side.connect(peer)

    def prepare(self, block_bytes: int, count: int, seed: int, each: bool) -> None:
        """Draws the blocks and lets the side build its descriptors: its input, and no part of the time."""
        self.what = draw(len(self.side.pool), block_bytes, count, seed)
        if self.role == "sink":
            wipe(self.side.pool, self.what)
        self.side.prepare(self.what, each)

    def begin(self) -> None:
        self.since = time.process_time()
        self.side.begin()

    def finish(self) -> float:
        """Processor seconds of all threads since `begin`."""
        self.side.finish()
        return time.process_time() - self.since

    def run(self) -> float:
        """Seconds to move all blocks that were drawn."""
        started = time.perf_counter()
        self.side.run()
        return time.perf_counter() - started

    def posts(self) -> list[float]:
        """Microseconds of every block, moved one after another."""
        assert self.what is not None
        times = []
        for index in range(len(self.what.src)):
            started = time.perf_counter_ns()
            self.side.post(index)
            times.append((time.perf_counter_ns() - started) / 1e3)
        return times

    def verify(self) -> int:
        """Blocks that are not what and where they should be."""
        assert self.what is not None
        return wrong_blocks(self.side.pool, self.expected, self.what)

    def custom(self, **arguments: Any) -> Any:
        """A measurement that only this side knows (layer-wise)."""
        return self.side.custom(**arguments)  # type: ignore[attr-defined]


def serve(worker: Worker, answers: TextIO) -> None:
    """One command a line, one answer a line, until there are no more."""
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"ok": getattr(worker, command.pop("do"))(**command)}
        except (
            Exception
        ) as error:  # the coordinator says which contestant failed, and goes on without it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


def main() -> None:
    """Contestants' libraries print what they like: their stdout becomes stderr."""
    module, role, settings, expected_path = (
        sys.argv[1],
        sys.argv[2],
        json.loads(sys.argv[3]),
        sys.argv[4],
    )
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    expected = np.memmap(expected_path, dtype=np.uint8, mode="r")
    side = importlib.import_module(module).open_side(role, len(expected), settings)
    serve(Worker(side, role, expected), answers)
    os._exit(0)


if __name__ == "__main__":
    main()
