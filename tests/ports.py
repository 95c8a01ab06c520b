"""A port for somebody who is told which one to take, and who takes it later or gives it up for a while.

Systems give out their free ports from a range of its own. One from there may be another's by the time it is needed:
tests start servers and clients by the hundred. Below that range nobody takes one without being told to.
"""

from __future__ import annotations

import socket
from random import SystemRandom

LOWEST, HIGHEST = 15_000, 30_000


def free_port() -> int:
    """One of 127.0.0.1 that nobody has now."""
    while True:
        port = SystemRandom().randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
