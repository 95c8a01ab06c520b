"""Measures the cost of a process: CPU time, memory, and kernel memory of its sockets. Linux only.

Unlike wall time, CPU time does not grow while other processes use the cores.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
_SOCK_DIAG_BY_FAMILY, _SKMEMINFO, _DONE, _ERROR = 20, 7, 3, 2
_REQUEST = struct.Struct("=IHHII BBBBI 48s")
_MEMORY = struct.Struct("=9I")
_ALL = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_MESSAGE = 72  # bytes of struct inet_diag_msg


class ProcessCost:
    def __init__(
        self, pid: int, listens: Collection[int] = (), dials: Collection[int] = ()
    ) -> None:
        """Prepare to measure the process `pid`, and the sockets that belong to it.

        A socket belongs to the process if it has one of these ports:

        listens  local ports of its listening sockets
        dials    remote ports of the connections that it opens
        """
        self.pid, self._listens, self._dials = pid, frozenset(listens), frozenset(dials)
        self._status = Path(f"/proc/{pid}/status")

    @property
    def cpu_s(self) -> float:
        return time.clock_gettime((~self.pid << 3) | 2)

    @property
    def resident_bytes(self) -> int:
        return self._size("VmRSS")

    @property
    def peak_resident_bytes(self) -> int:
        # Return the highest resident memory since reset_peak(), in bytes.
        return self._size("VmHWM")

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def socket_bytes(self) -> int:
        return sum(
            memory
            for local, remote, memory in _tcp_sockets()
            if local in self._listens or remote in self._dials
        )

    def _size(self, name: str) -> int:
        match = re.search(rf"{name}:\s+(\d+) kB", self._status.read_text())
        assert match is not None
        return int(match[1]) * 1024


def sockstat_bytes() -> int:
    # Return the kernel memory of all TCP sockets on the machine in bytes (/proc/net/sockstat).
    match = re.search(r"TCP:.* mem (\d+)", Path("/proc/net/sockstat").read_text())
    assert match is not None
    return int(match[1]) * PAGE


def _tcp_sockets() -> list[tuple[int, int, int]]:
    # Return local port, remote port and memory of every TCP socket, as sock_diag(7) reports.
    sockets = []
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as netlink:
            states = 0xFFFFFFFF & ~(1 << 10)  # bit mask of all TCP states except listening
            fields = (family, socket.IPPROTO_TCP, 1 << (_SKMEMINFO - 1), 0, states, b"")
            netlink.send(_REQUEST.pack(_REQUEST.size, _SOCK_DIAG_BY_FAMILY, _ALL, 1, 0, *fields))
            sockets += _read_dump(netlink)
    return sockets


def _read_dump(netlink: socket.socket) -> list[tuple[int, int, int]]:
    sockets = []
    while True:
        data = netlink.recv(1 << 20)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind in (_DONE, _ERROR):
                return sockets
            message, data = data[16:length], data[(length + 3) & ~3 :]
            local, remote = struct.unpack_from("!HH", message, 4)
            sockets.append((local, remote, _memory_in(message[_MESSAGE:])))


def _memory_in(attributes: bytes) -> int:
    # Return a socket's memory in bytes from its sock_diag attributes (INET_DIAG_SKMEMINFO).
    #
    # It is the sum of rmem_alloc, fwd_alloc, wmem_queued, optmem and backlog.
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _SKMEMINFO:
            received, _, _, _, reserved, queued, options, backlog, _ = _MEMORY.unpack_from(
                attributes, 4
            )
            return int(received + reserved + queued + options + backlog)
        attributes = attributes[(length + 3) & ~3 :]
    return 0
