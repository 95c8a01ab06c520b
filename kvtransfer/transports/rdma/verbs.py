"""Calls the RDMA library by the Python package pyverbs: memory, queue pairs and writes.

pyverbs is imported when a device is opened, so that hosts without it can use other transports. Its
errors become TransportError. link.py decides what is written where.
"""

from __future__ import annotations

import errno
import importlib
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import TransportError

PORT = 1
RECEIVED = 1 << 62  # marks the completions of receives; their numbers count from here
_ACTIVE = 4
_ETHERNET = 2
_MOST_GATHER = 16
_EVENTS = "anon_inode:[infinibandevent]"
_ATTEMPTS = 16

# A thread holds this lock while it creates a descriptor, so that `_channel` can identify its own.
_DESCRIPTORS = threading.Lock()


class QueuePairAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The address of a queue pair, one end of an RDMA connection.

    qpn  number of the queue pair
    psn  number of the first packet
    gid  global identifier of the port
    lid  local identifier of the port
    mtu  maximum packet size of the path (MTU), as the library's enum
    """

    qpn: int
    psn: int
    gid: str
    lid: int
    mtu: int


class Completion(NamedTuple):
    """The result of an RDMA write or receive request.

    number     number of the request
    status     status as the library's enum
    immediate  number that came with a receive
    """

    number: int
    status: int
    immediate: int = 0


class LocalRange(NamedTuple):
    """A range of registered local memory from which the RDMA device reads."""

    address: int
    length: int
    key: int


def unavailable(device: str | None = None) -> str | None:
    """Return why the RDMA library or the device cannot be used on this host; None if they can."""
    try:
        Device(device).close()
    except TransportError as error:
        return str(error)
    return None


class Device:
    """An RDMA device with an active port. Raises TransportError if there is none."""

    def __init__(self, name: str | None = None, gid_index: int | None = None) -> None:
        self._enums = _module("enums")
        with _as_transport_error("no RDMA device can be opened"), _DESCRIPTORS:
            self.context = _first_active() if name is None else _module("device").Context(name=name)
        self.name = str(self.context.name)
        with _close_on_error(self.context), _as_transport_error(f"{self.name} has no usable port"):
            port = self.context.query_port(PORT)
            self.gather = min(int(self.context.query_device().max_sge), _MOST_GATHER)
            self.mtu = int(port.active_mtu)
            self.lid = int(port.lid)
            self.link_layer = int(port.link_layer)
            self.gid_index = (
                self._best_gid(int(port.gid_tbl_len)) if gid_index is None else gid_index
            )
            self.gid = str(self.context.query_gid(PORT, self.gid_index).gid)

    def _best_gid(self, size: int) -> int:
        # Return the index of the GID (network address) to use.
        #
        # On Ethernet it is the IPv4-routed address if there is one, else the first that is not
        # link-local.
        if self.link_layer != _ETHERNET:
            return 0
        entries = [
            entry
            for entry in self.context.query_gid_table(size)
            if entry.gid_type == self._enums.IBV_GID_TYPE_ROCE_V2
        ]
        gids = {
            int(entry.gid_index): str(self.context.query_gid(PORT, entry.gid_index).gid)
            for entry in entries
        }
        for wanted in ("0000:0000:0000:0000:0000:ffff:", ""):
            for index, gid in gids.items():
                if gid.startswith(wanted) and not gid.startswith("fe80:"):
                    return index
        if not gids:
            raise TransportError(f"the RDMA device {self.name} has no RoCE v2 address (GID)")
        return next(iter(gids))

    def close(self) -> None:
        with _as_transport_error(f"{self.name} cannot be closed"), _DESCRIPTORS:
            self.context.close()


class RegisteredMemory:
    """Memory registered with an RDMA device.

    After `close`, no device can access it with these keys.
    """

    def __init__(self, region: Any) -> None:
        self._region = region
        self.key: int = region.lkey
        self.remote_key: int = region.rkey

    def close(self) -> None:
        with _as_transport_error("memory cannot be deregistered from the RDMA device"):
            self._region.close()


class ProtectionDomain:
    """Memory registered with an RDMA device, and the connections that may access it.

    A queue pair (end of a connection) reaches only memory of its own protection domain.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._enums = _module("enums")
        self._regions: dict[int, RegisteredMemory] = {}
        self._lock = threading.Lock()
        with _as_transport_error("no RDMA protection domain can be created"):
            self.handle = _module("pd").PD(device.context)
        # Receives carry a number and no bytes, but pyverbs needs a buffer for them.
        self._scratch = np.zeros(64, np.uint8)
        address: int = self._scratch.__array_interface__["data"][0]
        with _close_on_error(self.handle):
            self._regions[address] = self.register(
                address, self._scratch.size, writable_by_peer=False
            )
        self.nowhere = LocalRange(address, 0, self._regions[address].key)

    def register(self, address: int, length: int, *, writable_by_peer: bool) -> RegisteredMemory:
        """Register memory for the device: to read it, or also for another agent's writes."""
        access = self._enums.IBV_ACCESS_LOCAL_WRITE
        if writable_by_peer:
            access |= self._enums.IBV_ACCESS_REMOTE_WRITE
        with _as_transport_error(f"the RDMA device cannot register {length} bytes"):
            return RegisteredMemory(_module("mr").MR(self.handle, length, access, address=address))

    def key_of(self, region: Region) -> int:
        """Return the key with which this host's RDMA device reads the memory of a region.

        The memory is registered at the first call.
        """
        with self._lock:
            if region.address not in self._regions:
                memory = self.register(region.address, region.bytes.size, writable_by_peer=False)
                self._regions[region.address] = memory
            return self._regions[region.address].key

    def close(self) -> None:
        with self._lock, _as_transport_error("the RDMA protection domain cannot be closed"):
            for memory in self._regions.values():
                memory.close()
            self._regions.clear()
            self.handle.close()


class CompletionQueue:
    """Where an RDMA device reports finished requests, with a file descriptor to wait on."""

    def __init__(self, device: Device, size: int) -> None:
        cq = _module("cq")
        self._channel, self.fd = _channel(cq, device.context)
        with (
            _close_on_error(self._channel),
            _as_transport_error("no RDMA completion queue can be created"),
        ):
            self._queue = cq.CQ(device.context, size, None, self._channel, 0)

    def poll(self, most: int = 64) -> list[Completion]:
        with _as_transport_error("completions of RDMA requests cannot be read"):
            _, entries = self._queue.poll(most)
        return [
            Completion(int(entry.wr_id), int(entry.status), int(entry.imm_data))
            for entry in entries
        ]

    def arm(self) -> None:
        """Make the descriptor `fd` readable when the next RDMA request completes.

        Requests that have already completed do not count, so the caller must poll once more.
        """
        with _as_transport_error("the RDMA device cannot report completions"):
            self._queue.req_notify(0)

    def clear_event(self) -> None:
        """Consume the device's event of a finished request, so that `fd` is no longer readable."""
        try:
            self._channel.get_cq_event(self._queue)
        except _errors() as error:
            if getattr(error, "error_code", None) != errno.EAGAIN:
                raise TransportError(f"waiting for RDMA completions failed: {error}") from error
        else:
            self._queue.ack_events(1)

    def close(self) -> None:
        with _as_transport_error("the RDMA completion queue cannot be closed"), _DESCRIPTORS:
            self._queue.close()
            self._channel.close()


class QueuePair:
    """One end of an RDMA connection, with its queues of write and receive requests.

    writes    maximum number of write requests in flight
    arrivals  maximum number of posted receive requests
    number    number of the queue pair; its receives complete as RECEIVED + number
    """

    def __init__(
        self,
        domain: ProtectionDomain,
        completions: CompletionQueue,
        number: int,
        writes: int,
        arrivals: int,
    ) -> None:
        self._domain, self._device = domain, domain.device
        self._enums, self._wr = _module("enums"), _module("wr")
        qp = _module("qp")
        room = qp.QPCap(writes, arrivals, self._device.gather, 1, 0)
        queue = completions._queue
        with _as_transport_error("no queue pair"):
            self._qp = qp.QP(
                domain.handle,
                qp.QPInitAttr(
                    qp_type=self._enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=0
                ),
            )
        with _close_on_error(self._qp), _as_transport_error("no queue pair"):
            self._attr = qp.QPAttr(port_num=PORT)
            self._attr.qp_access_flags = (
                self._enums.IBV_ACCESS_LOCAL_WRITE | self._enums.IBV_ACCESS_REMOTE_WRITE
            )
            self._qp.to_init(self._attr)
        nowhere = self._wr.SGE(domain.nowhere.address, 0, domain.nowhere.key)
        self._arrival = self._wr.RecvWR(wr_id=RECEIVED + number, num_sge=1, sg=[nowhere])
        self.card = QueuePairAddress(
            self._qp.qp_num,
            secrets.randbits(24),
            self._device.gid,
            self._device.lid,
            self._device.mtu,
        )

    def connect(self, peer: QueuePairAddress) -> None:
        """Connect to the other agent's queue pair.

        Raises TransportError for an unreachable address.
        """
        addr, attr = _module("addr"), self._attr
        with _as_transport_error("the peer's address is unreachable"):
            route = addr.GlobalRoute(
                dgid=addr.GID(peer.gid), sgid_index=self._device.gid_index, hop_limit=64
            )
            attr.ah_attr = addr.AHAttr(port_num=PORT, is_global=1, gr=route, dlid=peer.lid)
            attr.path_mtu, attr.dest_qp_num = min(peer.mtu, self.card.mtu), peer.qpn
            attr.rq_psn, attr.sq_psn = peer.psn, self.card.psn
            attr.max_dest_rd_atomic = attr.max_rd_atomic = 1
            # A lost packet is resent after 67 ms, seven times. A peer that is not ready is retried
            # without end, because the control connection shows whether it is alive.
            attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
            self._qp.to_rtr(attr)
            self._qp.to_rts(attr)

    def post_receive(self) -> None:
        """Post one more receive request, by which the device reports that KV was written."""
        with _as_transport_error("no receive request can be posted to the RDMA device"):
            self._qp.post_recv(self._arrival)

    def write(
        self,
        number: int,
        pieces: Sequence[LocalRange],
        target: tuple[int, int],
        *,
        signalled: bool,
        immediate: int | None = None,
    ) -> None:
        """Write pieces of local memory to consecutive addresses at (remote address, remote key).

        signalled  whether the completion of a successful write is reported
        """
        enums = self._enums
        gathered = [
            self._wr.SGE(piece.address, piece.length, piece.key)
            for piece in pieces or (self._domain.nowhere,)
        ]
        with _as_transport_error("no write request can be posted to the RDMA device"):
            request = self._wr.SendWR(
                wr_id=number,
                num_sge=len(gathered),
                sg=gathered,
                opcode=enums.IBV_WR_RDMA_WRITE
                if immediate is None
                else enums.IBV_WR_RDMA_WRITE_WITH_IMM,
                send_flags=enums.IBV_SEND_SIGNALED if signalled else 0,
                imm_data=immediate or 0,
            )
            request.set_wr_rdma(target[1], target[0])
            self._qp.post_send(request)

    def close(self) -> None:
        """Close this end of the RDMA connection immediately.

        Afterwards the device accesses no memory for it.
        """
        with _as_transport_error("the RDMA queue pair cannot be closed"):
            self._qp.close()


def is_refused(status: int) -> bool:
    """Return whether an RDMA write failed because the target memory is not registered there."""
    return status == int(_module("enums").IBV_WC_REM_ACCESS_ERR)


def ends_connection(status: int) -> bool:
    """Return whether an RDMA request failed in a way that a new connection may repair."""
    enums = _module("enums")
    return status in (
        enums.IBV_WC_WR_FLUSH_ERR,
        enums.IBV_WC_REM_ACCESS_ERR,
        enums.IBV_WC_LOC_ACCESS_ERR,
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise TransportError(
            f"the Python package pyverbs, which RDMA needs, cannot be imported: {error}"
        ) from error


def _errors() -> tuple[type[Exception], ...]:
    return (_module("pyverbs_error").PyverbsError,)


@contextmanager
def _as_transport_error(what: str) -> Iterator[None]:
    # Convert an error of pyverbs in the `with` block to a TransportError.
    #
    # The message of the TransportError begins with `what`.
    try:
        yield
    except _errors() as error:
        raise TransportError(f"{what}: {' '.join(str(error).split())}") from error


@contextmanager
def _close_on_error(thing: Any) -> Iterator[None]:
    # Close `thing` if the `with` block fails.
    #
    # Otherwise the garbage collector might close it after the device.
    try:
        yield
    except BaseException:
        thing.close()
        raise


def _first_active() -> Any:
    device = _module("device")
    names = sorted(entry.name.decode() for entry in device.get_device_list())
    for name in names:
        context = device.Context(name=name)
        with _close_on_error(context):
            if int(context.query_port(PORT).state) == _ACTIVE:
                return context
        context.close()
    raise TransportError(
        f"no RDMA device has an active port (devices: {', '.join(names) or 'none'})"
    )


def _channel(cq: Any, context: Any) -> tuple[Any, int]:
    # Open a completion channel, and return it with its file descriptor.
    #
    # pyverbs does not expose the descriptor. It is the lowest free number, which is found before.
    with _DESCRIPTORS, _as_transport_error("no RDMA completion channel can be created"):
        for _ in range(_ATTEMPTS):
            fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.close(fd)
            channel = cq.CompChannel(context)
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == _EVENTS:
                    os.set_blocking(fd, False)
                    return channel, fd
            channel.close()  # another thread has opened or closed a descriptor meanwhile
    raise TransportError("the descriptor of an RDMA completion channel cannot be identified")
