"""A free port for a server that must know its port before it starts, or keep it over a restart.

The port is below the range from which the system assigns ports, because another socket could be
assigned a port of that range before the server binds it.
"""

from __future__ import annotations

import socket
from random import SystemRandom

LOWEST, HIGHEST = 15_000, 30_000


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    while True:
        port = SystemRandom().randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
