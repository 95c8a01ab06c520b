"""The lock of a KV agent, whose holder can add work to run as soon as the lock is released.

Such work takes long, or wakes other threads that need the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class AgentLock:
    """A reentrant lock that runs deferred work when its holder releases it completely.

    The work runs on the releasing thread, without the lock, before that thread continues. So a
    connection handles its next event only after the work.
    """

    __slots__ = ("_deferred", "_depth", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *failed: object) -> None:
        self._depth -= 1
        deferred: deque[Callable[[], None]] | None = None
        if not self._depth and self._deferred:
            deferred, self._deferred = self._deferred, deque()
        self._lock.release()
        while deferred:
            deferred.popleft()()

    def defer(self, work: Callable[[], None]) -> None:
        """Run the function `work` as soon as this thread has released the lock completely.

        The caller must hold the lock.
        """
        self._deferred.append(work)
