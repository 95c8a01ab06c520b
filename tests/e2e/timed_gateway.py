"""Runs the gateway's command line, and measures how long its event loop is blocked.

    python -m tests.e2e.timed_gateway serve --config FILE

A task wakes up every millisecond. For each line on standard input, the process prints the CPU
seconds of the loop's thread between these wake-ups since the last line, as JSON. A large number
means that something blocked the loop. CPU time does not grow while other processes have the core.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from time import thread_time

from gateway.app import App
from gateway.cli.main import main

TICK_S = 0.001


class Ticks:
    def __init__(self) -> None:
        self._gaps: list[float] = []

    async def run(self) -> None:
        before = thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now = thread_time()
            self._gaps.append(now - before)
            before = now

    def report(self) -> None:
        for _ in sys.stdin:
            gaps, self._gaps = self._gaps, []
            print(json.dumps([round(gap, 6) for gap in gaps]), flush=True)


_start = App.start


async def _start_with_ticks(app: App) -> None:
    await _start(app)
    ticks = Ticks()
    app.__dict__["ticks"] = asyncio.create_task(ticks.run())
    threading.Thread(target=ticks.report, daemon=True).start()


if __name__ == "__main__":
    App.start = _start_with_ticks  # type: ignore[method-assign]
    sys.exit(main())
