"""The part `stalls` of `make bench-scale`: how long pages and changes block the event loop.

The gateway runs in this process. The modules come from the folder at the head of `sys.path`.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from compared_systems import ADMIN, backend_urls, penstock_command
from scale_systems import verdict

from gateway.app import App
from gateway.config import load_config

PAGES = ("/metrics", "/live", "/endpoints", "/config")
REPLACED = 256
"""Number of endpoints that are replaced."""

MAX_STALL_MS = 5.0


class LoopTurns:
    """Measures for how long a turn of the event loop blocks all others: its longest turn.

    The time is processor time in seconds, so that other load on the machine does not count. It is
    measured by a callback in every turn, so the loop never waits.

    is_profiled  whether each turn is profiled too, which makes it longer
    profile      the profile of the longest turn
    """

    def __init__(self, is_profiled: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._profiler = cProfile.Profile() if is_profiled else None
        self.profile = self._profiler
        self.longest_s = 0.0
        self._last = time.thread_time()
        self._turn()

    def _turn(self) -> None:
        took_s = time.thread_time() - self._last
        if self._profiler is not None:
            self._profiler.disable()
        if took_s > self.longest_s:
            self.longest_s, self.profile = took_s, self._profiler
        if self._profiler is not None:
            self._profiler = cProfile.Profile()
            self._profiler.enable()
        self._last = time.thread_time()
        self._loop.call_soon(self._turn)

    async def during(self, action: Callable[[], Awaitable[None]]) -> float:
        """Await an action; return for how many milliseconds it blocked the event loop at most."""
        await asyncio.sleep(0.05)
        self.longest_s = 0.0
        await action()
        await asyncio.sleep(0.05)
        return self.longest_s * 1e3

    def print_profile(self) -> None:
        """Print the functions that took most of the longest turn."""
        if self.profile is not None:
            pstats.Stats(self.profile).sort_stats("cumulative").print_stats(25)


async def _get(port: int, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
    head = await reader.readline()
    assert b" 200 " in head, head
    while await reader.read(1 << 16):
        pass
    writer.close()


async def measure_turns(size: int, base: int, work: Path, is_profiled: bool) -> None:
    """Print how long a gateway's event loop is blocked by pages and changes, in milliseconds.

    The test engine must listen on more ports than `size`, for the endpoints that are added.
    """
    port, urls = base + size + REPLACED, backend_urls(base, size + REPLACED)
    text = Path(penstock_command("prefix_aware", urls[:size])(work, port)[-1])
    app = App(load_config(text, {}))
    began = time.monotonic()
    await app.start()
    print(f"start         {size:5} endpoints  {time.monotonic() - began:.1f} s", flush=True)
    turns = LoopTurns(is_profiled)
    actions = {"no request": lambda: asyncio.sleep(5.0)}
    actions |= {page: partial(_get, port + ADMIN, page) for page in PAGES}
    actions["discovery"] = app.swap.rebuild
    for name, policy, used in (
        ("reload, priced", "priced", urls[:size]),
        ("reload, prefix_aware", "prefix_aware", urls[:size]),
        (f"{REPLACED} new endpoints", "prefix_aware", urls[REPLACED:]),
    ):
        changed = Path(penstock_command(policy, used)(work, port)[-1]).read_bytes()
        actions[name] = partial(_reload, app, changed)
    try:
        for name, action in actions.items():
            longest_ms = await turns.during(action)
            print(
                f"stall         {size:5} endpoints  {name:20} {longest_ms:6.1f} ms; "
                f"{verdict(longest_ms, MAX_STALL_MS)}",
                flush=True,
            )
            turns.print_profile()
    finally:
        await app.stop()


async def _reload(app: App, text: bytes) -> None:
    # Apply a configuration, and wait until all of its endpoints are in rotation.
    outcome = await app.reloader.put(text, "bench")
    assert outcome.result == "applied", outcome
    table = app.gateway.endpoints
    while app.swap.retiring or not all(live.load.is_available for live in table.all()):
        await asyncio.sleep(0.01)
