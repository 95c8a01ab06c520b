"""sd_notify(3): reports this process's state to systemd, over the socket in NOTIFY_SOCKET."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from time import CLOCK_MONOTONIC, clock_gettime_ns

log = logging.getLogger("penstock")


def notify(env: Mapping[str, str], *assignments: str) -> bool:
    """Send assignments such as READY=1 to systemd; return False if no service manager listens.

    A failure is logged and not raised.
    """
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # a socket in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(assignments).encode(), address)
    except OSError as error:
        log.warning("cannot notify systemd: %s", error)
        return False
    return True


def report_reloading(env: Mapping[str, str]) -> bool:
    """Report to systemd that a reload begins; report_ready() reports its end."""
    return notify(env, "RELOADING=1", f"MONOTONIC_USEC={clock_gettime_ns(CLOCK_MONOTONIC) // 1000}")


def report_ready(env: Mapping[str, str]) -> bool:
    return notify(env, "READY=1", f"STATUS=serving, pid {os.getpid()}")


def report_stopping(env: Mapping[str, str]) -> bool:
    """Report to systemd that this process drains and will exit."""
    return notify(env, "STOPPING=1", "STATUS=draining")
