"""Moves KV through shared memory, between processes of one user on one host.

The source shares its memory read-only, and the sink's thread copies from it. A small frame on a
Unix socket announces each unit of KV (window). The memory file also has a counter per block, raised
when the block is released for reuse. So the sink itself detects blocks that changed meanwhile.

stream/link.py has the thread, layout/memory_files.py the memory files.
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

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region, RegionError
from kvtransfer.protocol.frame import (
    WINDOW_HEADER_BYTES,
    FrameError,
    FrameKind,
    encode_frame,
    pack_head,
    unpack_head,
)
from kvtransfer.transport_interface import (
    Link,
    LinkOwner,
    TransportError,
    WindowHead,
    WindowSlice,
    WindowVerdict,
)
from kvtransfer.transports.acceptor import LinkAcceptor
from kvtransfer.transports.copy_runs import are_within, copy_runs, split_by_bytes
from kvtransfer.transports.stream.link import StreamLink
from kvtransfer.transports.stream.link_options import LinkOptions
from kvtransfer.transports.stream.outbound import Outbound

_MARK = struct.Struct("<?Q")
_SIZES = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")
_MOST_REGIONS = 253  # the kernel's limit of descriptors in one message
_BUFFER_BYTES = 256 << 10
_STEP_BYTES = 8 << 20  # copied between two checks for fences and other orders
_DIAL_S = 3.0


class SharedOutbound(Outbound):
    """The sending side of a shared-memory connection: it announces KV that the receiver copies."""

    def __init__(self, sock: socket.socket, sent: Callable[[WindowHead], None]) -> None:
        super().__init__(sock.fileno(), sent, checked=False)
        self._sock = sock
        self._fds: list[int] = []

    def hand_over(self, fds: list[int], header: bytes) -> None:
        """Queue file descriptors for the other agent, with the frame that describes them.

        It may be called on any thread.
        """
        self._fds = fds
        self.enqueue(encode_frame(FrameKind.REGIONS, header))

    def _begin_window(self, head: WindowHead, window: WindowSlice) -> None:
        # Take the mark first: if the blocks are still current afterwards, it is the promised mark.
        mark = generation_mark(window.region, window.runs)
        current = window.is_current is None or window.is_current()
        self._append(encode_frame(FrameKind.SHARED, pack_head(head) + _MARK.pack(current, mark)))

    def _write(self) -> bool:
        return self._write_small() if self._fds and self._begin < self._end else super()._write()

    def _send(self, data: memoryview) -> int:
        # Send the file descriptors with the first bytes, so that they arrive before their frame.
        if not self._fds:
            return super()._send(data)
        count = self._sock.sendmsg(
            [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._fds))]
        )
        self._fds = []
        return count


class ShmLink(StreamLink):
    """One end of a connection between two processes that exchange KV through shared memory."""

    transport = "shm"

    def __init__(
        self,
        sock: socket.socket,
        owner: LinkOwner,
        peer: str,
        options: LinkOptions,
        ended: Callable[[Any], None],
        regions: Sequence[Region],
    ) -> None:
        super().__init__(sock, owner, peer, options, ended)
        self._shared_out = SharedOutbound(sock, self._sent)
        self._out = self._shared_out
        self._regions = regions
        self._shared = self._proven = False
        self._fds: list[int] = []
        self._peer_regions: list[Region] = []
        self._copying: int | None = None
        self._is_fenced = False

    def accept(self, transfer: int, grant: bytes) -> None:
        """Share this agent's KV memory read-only, when the first transfer is agreed on.

        The receiving agent copies KV from there.
        """
        if self._shared:
            return
        self._shared = True
        fds = [region.fd for region in self._regions if region.fd is not None]
        sizes = b"".join(_SIZES.pack(region.blocks, region.block_bytes) for region in self._regions)
        if len(fds) != len(self._regions):
            raise TransportError(
                "the KV memory cannot be shared, because it is not in a memory file; create "
                "it with MemoryFileRegion"
            )
        self._shared_out.hand_over(fds, sizes)
        self._wake()

    def secure(self, window_key: bytes) -> None:
        super().secure(window_key)
        self._proven = True

    def on_frame(self, kind: FrameKind, header: bytes) -> None:
        if kind is not FrameKind.MESSAGE and not self._proven:
            raise FrameError("the other agent sent data before its proof of identity")
        if kind is FrameKind.SHARED:
            self._copy_announced(header)
        elif kind is FrameKind.TAKEN:
            self._owner.on_sent(self, unpack_head(header))
        elif kind is FrameKind.REGIONS:
            self._attach(header)
        else:
            super().on_frame(kind, header)

    def _receive(self, buffer: memoryview) -> int:
        space = 0 if self._peer_regions else socket.CMSG_SPACE(_MOST_REGIONS * 4)
        count, others, flags, _ = self._sock.recvmsg_into([buffer], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in others:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += array.array("i", data[: len(data) // 4 * 4])
        # Check this after the read, because the peer's proof may have completed during the read.
        unwanted = self._fds and not self._proven
        if flags & socket.MSG_CTRUNC or len(self._fds) > _MOST_REGIONS or unwanted:
            _close(self._fds)
            self._fds = []
            raise FrameError("the other agent sent file descriptors that were not expected")
        return count

    def _attach(self, header: bytes) -> None:
        # Map the source's regions. Raises FrameError if their number, sizes or seals are wrong.
        fds, self._fds = self._fds, []
        sizes = list(_SIZES.iter_unpack(header)) if len(header) % _SIZES.size == 0 else []
        try:
            if self._peer_regions or not sizes or len(fds) != len(sizes):
                raise FrameError(
                    f"the other agent sent {len(fds)} file descriptors for {len(sizes)} regions"
                )
            for rank, (blocks, block_bytes) in enumerate(sizes):
                self._peer_regions.append(
                    MemoryFileRegion.attach(
                        fds.pop(0), blocks, block_bytes, name=f"{self.peer}-{rank}"
                    )
                )
        except (RegionError, OSError, ValueError, OverflowError) as error:
            raise FrameError(f"the other agent's KV memory cannot be mapped: {error}") from error
        finally:
            _close(fds)

    def _copy_announced(self, header: bytes) -> None:
        if len(header) != WINDOW_HEADER_BYTES + _MARK.size:
            raise FrameError(
                f"a received announcement of {len(header)} bytes does not describe a window of KV"
            )
        head = unpack_head(header)
        current, mark = _MARK.unpack_from(header, WINDOW_HEADER_BYTES)
        window = self.place_window(head)
        if window is not None:
            self._copying, self._is_fenced = head.transfer, False
            is_copied = current and self._copy(head, window)
            self._copying = None
            if not self._is_fenced:
                is_current = (
                    is_copied
                    and generation_mark(self._peer_regions[window.src_rank], window.runs) == mark
                )
                self._owner.on_landed(
                    self, head, WindowVerdict.OK if is_current else WindowVerdict.STALE
                )
        self._out.enqueue(encode_frame(FrameKind.TAKEN, pack_head(head)))

    def _copy(self, head: WindowHead, window: WindowSlice) -> bool:
        # Copy all byte ranges (runs) of a window of KV in steps.
        #
        # Return False if a fence stopped the copy.
        if window.src_rank >= len(self._peer_regions):
            raise FrameError(
                f"the other agent announced a window of rank {window.src_rank}, "
                "whose memory it does not share"
            )
        runs, peer_region = window.runs, self._peer_regions[window.src_rank]
        n_bytes = int(np.add.reduce(runs.length))
        if n_bytes != head.n_bytes:
            raise FrameError(
                f"the other agent announced a window of {head.n_bytes} bytes, but "
                f"{n_bytes} bytes are planned"
            )
        if not (
            are_within(peer_region, runs.src, runs.length)
            and are_within(window.region, runs.dst, runs.length)
        ):
            raise FrameError(
                "an announced window (piece of KV) does not lie within the memory region of "
                f"rank {window.src_rank}"
            )
        for step in split_by_bytes(runs, _STEP_BYTES) if n_bytes > _STEP_BYTES else (runs,):
            copy_runs(peer_region.bytes, window.region.bytes, step)
            if self._orders:
                self._run_orders()
            if self._is_fenced:
                return False
        return True

    def _fence(self, transfer: int) -> None:
        if transfer == self._copying:
            self._is_fenced = True
        super()._fence(transfer)

    def _release(self) -> None:
        for region in self._peer_regions:
            region.close()
        _close(self._fds)


class Shm:
    """The KV transport for processes of the same user. It listens on a random abstract Unix
    socket.
    """

    name = "shm"
    is_sealed: bool | None = None

    def __init__(self, options: LinkOptions | None = None) -> None:
        self._options = options or LinkOptions()
        self._regions: Sequence[Region] = ()
        self._listening: LinkAcceptor[ShmLink] = LinkAcceptor(self._link)

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Start to listen, and return the address for other agents.

        Raises TransportError for memory that is not in a file, and on processors other than x86-64.
        Those may reorder loads, so that a change of a block's owner could go unnoticed.
        """
        if platform.machine() not in ("x86_64", "AMD64"):
            raise TransportError(
                f"the transport shm requires a processor of type x86-64, not {platform.machine()}"
            )
        if any(region.fd is None for region in regions) or len(regions) > _MOST_REGIONS:
            raise TransportError(
                "the transport shm requires at most 253 regions, all in memory files"
            )
        self._regions = regions
        listener = _socket()
        name = f"penstock-kv-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            listener.bind(f"\0{name}")
            listener.listen(128)
        except OSError as error:  # a security policy may deny such sockets
            listener.close()
            raise TransportError(f"the transport shm cannot listen: {error}") from error
        self._listening.start(owner, listener, "kv-shm-listen")
        return f"@{name}"

    def dial(self, address: str) -> Link:
        sock = _socket()
        sock.settimeout(_DIAL_S)
        try:
            sock.connect("\0" + address.removeprefix("@"))
        except (OSError, ValueError) as error:
            sock.close()
            raise TransportError(
                f"the agent at {address} cannot be reached through shared memory: {error}"
            ) from error
        return self._listening.add(sock, address, dialled=True)

    def close(self) -> None:
        self._listening.close()

    def _link(self, sock: socket.socket, owner: LinkOwner, peer: str) -> ShmLink:
        # Return a link over a socket.
        #
        # Raises TransportError if the peer belongs to another user.
        *_, uid, _ = (
            0,
            *_CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            ),
        )
        if uid != os.getuid():
            raise TransportError(
                f"the process at the other end of a shm connection belongs to another user ({uid})"
            )
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        return ShmLink(
            sock,
            owner,
            peer or "a process of this host",
            self._options,
            self._listening.forget,
            self._regions,
        )


def generation_mark(region: Region, runs: ByteRuns) -> int:
    """Return a number by which a change of the blocks during a copy is detected.

    It is the sum of the generations (reuse counters) of the blocks that these byte ranges read.
    Generations only grow, so an equal sum means that no block was released. Compare it before and
    after a copy. x86-64 does not reorder these loads; elsewhere, this transport does not start.
    """
    size = region.block_bytes
    if runs.count == 1:
        src, length = runs.src.item(), runs.length.item()
        if src % size + length <= size:
            return int(region.generations[src // size])
    blocks = runs.src // size
    if int(np.maximum.reduce(runs.src + runs.length - blocks * size)) > size:
        blocks = _all_blocks(runs, size)
    return int(np.add.reduce(region.generations[blocks], dtype=np.uint64))


def _all_blocks(runs: ByteRuns, size: int) -> NDArray[np.int64]:
    first, last = runs.src // size, (runs.src + runs.length - 1) // size
    counts = last - first + 1
    begins = np.cumsum(counts) - counts
    return np.repeat(first - begins, counts) + np.arange(int(counts.sum()))


def _socket() -> socket.socket:
    # Return a new unix socket.
    #
    # Raises TransportError if there is none, so that a fallback is used.
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"cannot create a Unix socket for shared memory: {error}") from error


def _close(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
