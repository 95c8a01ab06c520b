"""Finds port numbers for servers that bind them later, or that release them and bind them again.

The system's ephemeral ports are unsuitable: tests open hundreds of connections, so another process
may take one before it is bound. The ports here are below the ephemeral range.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from random import SystemRandom

LOWEST, HIGHEST = 15_000, 30_000


def free_port() -> int:
    while True:
        port = SystemRandom().randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_run(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        first = free_port()
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
