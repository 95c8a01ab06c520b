"""Choice of a transport for two agents that have just met over another one.

Shared memory on one host, then RDMA if both have it. Not here: dialling, and falling back if the
better transport does not come up (kvtransfer/links/link_manager.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from kvtransfer.protocol.messages import AgentCard


def host_id() -> str:
    """Return 16 hex digits, equal for processes that can share memory.

    That is one boot of one kernel, one network namespace (which holds the names of shm's sockets)
    and one user. "", which matches nothing, if /proc is not readable.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {network} {os.getuid()}".encode(), digest_size=8).hexdigest()


def better_transport(
    mine: AgentCard, theirs: AgentCard, names: Iterable[str], than: str
) -> str | None:
    """Return a transport that both agents have and that is better than `than`, if any."""
    both = set(names) & theirs.addresses.keys()
    for name in ("shm", "rdma"):
        if name == than:
            return None
        if name in both and (name != "shm" or (mine.host and mine.host == theirs.host)):
            return name
    return None
