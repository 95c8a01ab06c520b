"""Chooses a better KV transport for two agents that are already connected over another one.

On one host, shared memory is better. Otherwise RDMA is, if both agents have it. link_manager.py
opens the new connection, and keeps the old one if the new one fails.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from kvtransfer.protocol.agent_messages import AgentCard


def host_id() -> str:
    """Return 16 hex digits that are equal for processes that can share memory.

    Such processes run on the same boot of the same kernel, as the same user, and in the same
    network namespace, which contains the names of shm's sockets. Returns "", which matches no host,
    if /proc cannot be read.
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
    """Return a transport that two connected agents should use instead of `than`; None to keep it.

    mine, theirs  identities of this and the other agent
    names         transports of this agent
    than          the transport in use
    """
    both = set(names) & theirs.addresses.keys()
    for name in ("shm", "rdma"):
        if name == than:
            return None
        if name in both and (name != "shm" or (mine.host and mine.host == theirs.host)):
            return name
    return None
