"""Which transport two agents use once they know each other: shared memory on one host, RDMA where both have it,
else the one by which they met. Not here: dialling, and falling back when the better way does
not open (switchboard.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from kvtransfer.messages import Card


def this_host() -> str:
    """16 hex digits, equal for processes that could share memory: one boot of one kernel, one network namespace (the
    names of shm's sockets live there), one user. "", which never shares, where /proc does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {network} {os.getuid()}".encode(), digest_size=8).hexdigest()


def better(mine: Card, theirs: Card, names: Iterable[str], than: str) -> str | None:
    """A transport that both have and that beats `than`; None if there is none."""
    both = set(names) & theirs.addresses.keys()
    for name in ("shm", "rdma"):
        if name == than:
            return None
        if name in both and (name != "shm" or (mine.host and mine.host == theirs.host)):
            return name
    return None
