"""Threads for the blocking calls of the storage of files and batches.

They are separate from the event loop's default threads. Therefore a storage that hangs does not
delay DNS lookups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StorageThreads:
    """A fixed number of threads for blocking calls; further calls wait until a thread is free."""

    def __init__(self, count: int) -> None:
        """Prepare at most `count` threads, which start when they are needed."""
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="batch storage")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a blocking call in one of the threads, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(call, *args, **kwargs))

    def close(self) -> None:
        """Accept no more calls. The threads end after their current calls; this does not wait."""
        self._executor.shutdown(wait=False, cancel_futures=True)
