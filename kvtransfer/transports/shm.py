"""Shm: the way between processes of one host and user. The source shares its regions read-only; the sink copies.

A window is one small frame over a unix socket. Only the sink's own thread writes the sink's memory, and it sees by
itself when the source's blocks have changed hands: their generations lie behind the blocks in the same memory file.
Not here: the thread (stream.py), what a memory file is (regions.py).
"""

from __future__ import annotations

import array
import contextlib
import os
import platform
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.frame import WINDOW_HEADER_BYTES, FrameError, Kind, frame, pack_head, unpack_head
from kvtransfer.lattice import Runs
from kvtransfer.memory_files import MemoryFileRegion
from kvtransfer.regions import Region, RegionError
from kvtransfer.transports.base import Link, LinkOwner, Slice, TransportError, Verdict, WindowHead
from kvtransfer.transports.listening import Listening
from kvtransfer.transports.outbound import Outbound
from kvtransfer.transports.runs import copy_runs, in_steps, within
from kvtransfer.transports.stream import Manner, StreamLink

_MARK = struct.Struct("<?Q")
_SIZES = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")
_MOST_REGIONS = 253  # the kernel's limit of descriptors in one message
_BUFFER_BYTES = 256 << 10
_STEP_BYTES = 8 << 20  # copied between two looks at what other threads want, a fence above all
_DIAL_S = 3.0


class SharedOutbound(Outbound):
    """Windows are announced, not sent: whose generations they had is all that goes along."""

    def __init__(self, sock: socket.socket, sent: Callable[[WindowHead], None]) -> None:
        super().__init__(sock.fileno(), sent, checked=False)
        self._sock = sock
        self._fds: list[int] = []

    def hand_over(self, fds: list[int], header: bytes) -> None:
        """Descriptors for the peer, and the frame that says what they are. From any thread."""
        self._fds = fds
        self.queue(frame(Kind.REGIONS, header))

    def _begin_window(self, head: WindowHead, window: Slice) -> None:
        # The mark first: if the blocks are still the promised ones after it was taken, it is the promised mark.
        mark = generation_mark(window.region, window.runs)
        current = window.current is None or window.current()
        self._lay(frame(Kind.SHARED, pack_head(head) + _MARK.pack(current, mark)))

    def _write(self) -> bool:
        return self._write_small() if self._fds and self._begin < self._end else super()._write()

    def _send(self, data: memoryview) -> int:
        """The descriptors go along with the first bytes that leave, so they are there before their frame is."""
        if not self._fds:
            return super()._send(data)
        count = self._sock.sendmsg(
            [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._fds))]
        )
        self._fds = []
        return count


class ShmLink(StreamLink):
    transport = "shm"

    def __init__(
        self,
        sock: socket.socket,
        owner: LinkOwner,
        peer: str,
        manner: Manner,
        ended: Callable[[Any], None],
        regions: Sequence[Region],
    ) -> None:
        super().__init__(sock, owner, peer, manner, ended)
        self._shared_out = SharedOutbound(sock, self._sent)
        self._out = self._shared_out
        self._regions = regions
        self._shared = self._proven = False
        self._fds: list[int] = []
        self._theirs: list[Region] = []
        self._copying: int | None = None
        self._void = False

    def accept(self, transfer: int, grant: bytes) -> None:
        """With the first invitation that was accepted the peer gets to read us."""
        if self._shared:
            return
        self._shared = True
        fds = [region.fd for region in self._regions if region.fd is not None]
        sizes = b"".join(_SIZES.pack(region.blocks, region.block_bytes) for region in self._regions)
        if len(fds) != len(self._regions):
            raise TransportError("memory that belongs to the engine cannot be mapped by others")
        self._shared_out.hand_over(fds, sizes)
        self._wake()

    def secure(self, window_key: bytes) -> None:
        super().secure(window_key)
        self._proven = True

    def framed(self, kind: Kind, header: bytes) -> None:
        if kind is not Kind.MESSAGE and not self._proven:
            raise FrameError("the peer has proven nothing, and wants more than to be known")
        if kind is Kind.SHARED:
            self._take_in(header)
        elif kind is Kind.TAKEN:
            self._owner.sent(self, unpack_head(header))
        elif kind is Kind.REGIONS:
            self._attach(header)
        else:
            super().framed(kind, header)

    def _receive(self, buffer: memoryview) -> int:
        space = 0 if self._theirs else socket.CMSG_SPACE(_MOST_REGIONS * 4)
        count, others, flags, _ = self._sock.recvmsg_into([buffer], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in others:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += array.array("i", data[: len(data) // 4 * 4])
        # Asked after the read: the proof may be complete since it began.
        unwanted = self._fds and not self._proven
        if flags & socket.MSG_CTRUNC or len(self._fds) > _MOST_REGIONS or unwanted:
            _close(self._fds)
            self._fds = []
            raise FrameError("the peer hands over more than it may")
        return count

    def _attach(self, header: bytes) -> None:
        """The source's regions. Their size and seals are looked at before anything is read there."""
        fds, self._fds = self._fds, []
        sizes = list(_SIZES.iter_unpack(header)) if len(header) % _SIZES.size == 0 else []
        try:
            if self._theirs or not sizes or len(fds) != len(sizes):
                raise FrameError(f"{len(fds)} descriptors for {len(sizes)} regions")
            for rank, (blocks, block_bytes) in enumerate(sizes):
                self._theirs.append(
                    MemoryFileRegion.attach(
                        fds.pop(0), blocks, block_bytes, name=f"{self.peer}-{rank}"
                    )
                )
        except (RegionError, OSError, ValueError, OverflowError) as wrong:
            raise FrameError(f"the peer's regions cannot be mapped: {wrong}") from wrong
        finally:
            _close(fds)

    def _take_in(self, header: bytes) -> None:
        """A window was announced: fetch it."""
        if len(header) != WINDOW_HEADER_BYTES + _MARK.size:
            raise FrameError(f"{len(header)} bytes announce no window")
        head = unpack_head(header)
        current, mark = _MARK.unpack_from(header, WINDOW_HEADER_BYTES)
        window = self._owner.incoming(self, head)
        if window is not None:
            self._copying, self._void = head.transfer, False
            arrived = current and self._copy(head, window)
            self._copying = None
            if not self._void:
                whole = (
                    arrived and generation_mark(self._theirs[window.src_rank], window.runs) == mark
                )
                self._owner.landed(self, head, Verdict.OK if whole else Verdict.STALE)
        self._out.queue(frame(Kind.TAKEN, pack_head(head)))

    def _copy(self, head: WindowHead, window: Slice) -> bool:
        """All runs, a step at a time. False when a fence came between."""
        if window.src_rank >= len(self._theirs):
            raise FrameError(f"a window of rank {window.src_rank}, of which nothing was shared")
        runs, theirs = window.runs, self._theirs[window.src_rank]
        n_bytes = int(np.add.reduce(runs.length))
        if n_bytes != head.n_bytes:
            raise FrameError(f"a window of {head.n_bytes} bytes where the plan has {n_bytes}")
        if not (
            within(theirs, runs.src, runs.length) and within(window.region, runs.dst, runs.length)
        ):
            raise FrameError("a window reaches beyond its region")
        for step in in_steps(runs, _STEP_BYTES) if n_bytes > _STEP_BYTES else (runs,):
            copy_runs(theirs.bytes, window.region.bytes, step)
            if self._orders:
                self._obey()
            if self._void:
                return False
        return True

    def _fence(self, transfer: int) -> None:
        if transfer == self._copying:
            self._void = True
        super()._fence(transfer)

    def _release(self) -> None:
        for region in self._theirs:
            region.close()
        _close(self._fds)


class Shm:
    """Listens on a socket without a file, of a name nobody can guess; talks to processes of the same user alone."""

    name = "shm"
    sealed: bool | None = None

    def __init__(self, manner: Manner | None = None) -> None:
        self._manner = manner or Manner()
        self._regions: Sequence[Region] = ()
        self._listening: Listening[ShmLink] = Listening(self._link)

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Raises TransportError for regions over the engine's own memory (it has no descriptor to hand over), and on
        processors whose loads overtake each other: a block that changed hands could be taken for one that did not."""
        if platform.machine() not in ("x86_64", "AMD64"):
            raise TransportError(f"shm is for x86-64 alone, not for {platform.machine()}")
        if any(region.fd is None for region in regions) or len(regions) > _MOST_REGIONS:
            raise TransportError("shm needs regions that are memory files, and at most 253")
        self._regions = regions
        listener = _socket()
        name = f"penstock-kv-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            listener.bind(f"\0{name}")
            listener.listen(128)
        except OSError as wrong:  # a policy that denies such sockets
            listener.close()
            raise TransportError(f"shm cannot listen: {wrong}") from wrong
        self._listening.start(owner, listener, "kv-shm-listen")
        return f"@{name}"

    def dial(self, address: str) -> Link:
        sock = _socket()
        sock.settimeout(_DIAL_S)
        try:
            sock.connect("\0" + address.removeprefix("@"))
        except (OSError, ValueError) as wrong:
            sock.close()
            raise TransportError(f"{address} cannot be reached: {wrong}") from wrong
        return self._listening.add(sock, address, dialled=True)

    def close(self) -> None:
        self._listening.close()

    def _link(self, sock: socket.socket, owner: LinkOwner, peer: str) -> ShmLink:
        """Raises TransportError for another user's process: whatever it knows, it is none of us."""
        *_, uid, _ = (
            0,
            *_CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            ),
        )
        if uid != os.getuid():
            raise TransportError(f"the process at the other end belongs to user {uid}")
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        return ShmLink(
            sock,
            owner,
            peer or "a process of this host",
            self._manner,
            self._listening.forget,
            self._regions,
        )


def generation_mark(region: Region, runs: Runs) -> int:
    """The sum of the generations of all blocks that these runs read. Generations only grow: an equal sum is equal
    generations. On x86-64 no load overtakes another, so this is taken before or after a copy as it is written; on other
    processors nothing here sees to that, so Shm does not start there."""
    size = region.block_bytes
    if runs.count == 1:
        src, length = runs.src.item(), runs.length.item()
        if src % size + length <= size:
            return int(region.generations[src // size])
    blocks = runs.src // size
    if int(np.maximum.reduce(runs.src + runs.length - blocks * size)) > size:
        blocks = _all_blocks(runs, size)
    return int(np.add.reduce(region.generations[blocks], dtype=np.uint64))


def _all_blocks(runs: Runs, size: int) -> NDArray[np.int64]:
    """Every block of every run, where runs reach over several."""
    first, last = runs.src // size, (runs.src + runs.length - 1) // size
    counts = last - first + 1
    begins = np.cumsum(counts) - counts
    return np.repeat(first - begins, counts) + np.arange(int(counts.sum()))


def _socket() -> socket.socket:
    """TransportError where there is none to be had: whoever waits for a link is told, and takes the next best."""
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as wrong:
        raise TransportError(f"no socket: {wrong}") from wrong


def _close(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
