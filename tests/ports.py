"""Finds port numbers for servers that bind them later, or release and bind them again.

The ports are below the system's ephemeral range. Tests open hundreds of connections from ephemeral
ports, so another process could use one of those before it is bound.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from random import SystemRandom

LOWEST, HIGHEST = 15_000, 30_000

_returned: set[int] = set()


def free_port() -> int:
    """Return a free port that no call has returned before, in this or another running process."""
    return free_run(1)


def free_run(count: int) -> int:
    """Find `count` free ports with consecutive numbers, and return the first one.

    No call, in this or another running process, returns any of them again.
    """
    while True:
        first = SystemRandom().randrange(LOWEST, HIGHEST - count + 1)
        run = range(first, first + count)
        if _returned.isdisjoint(run) and all(_take(port) for port in run):
            _returned.update(run)
            return first


def _take(port: int) -> bool:
    # Parallel test processes share one file and lock one byte per port. The system releases the
    # locks when the process ends.
    locks = _lock_file()
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@cache
def _lock_file() -> int:
    # The file stays open, because closing it would release the locks.
    path = Path(tempfile.gettempdir()) / f"penstock-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
