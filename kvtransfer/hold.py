"""Hold: the agent's lock, and work that comes up under it and is too long to be done there.

Not here: what the work is, or whose lock it is (agent.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Hold:
    """A lock that its holder may take again. Who lets go of it for the last time then does what was put `aside` under
    it, with nothing held: before anything else on that thread, so what a link brings next is looked at after it."""

    __slots__ = ("_aside", "_depth", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._aside: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *failed: object) -> None:
        self._depth -= 1
        works: deque[Callable[[], None]] | None = None
        if not self._depth and self._aside:
            works, self._aside = self._aside, deque()
        self._lock.release()
        while works:
            works.popleft()()

    def aside(self, work: Callable[[], None]) -> None:
        """Only while it is held."""
        self._aside.append(work)
