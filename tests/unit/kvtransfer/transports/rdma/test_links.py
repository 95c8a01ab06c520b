"""Tests of RDMA connections between KV agents with a fake device that fails, or untrusted peers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any
from unittest.mock import Mock

import pytest

from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import TransportError
from kvtransfer.transports.rdma import link as rdma_link
from kvtransfer.transports.rdma import transport
from kvtransfer.transports.rdma.control import (
    ControlMessage,
    OwnerMessage,
    QueuePairReady,
    QueuePairSetup,
    RdmaTrailer,
    encode,
)
from kvtransfer.transports.rdma.link import RdmaLink, RdmaOptions
from kvtransfer.transports.rdma.transport import Rdma
from kvtransfer.transports.rdma.verbs import QueuePairAddress
from tests.contract.kvtransfer.links import Owner, until
from tests.unit.kvtransfer.transports.rdma.test_sender_and_receiver import Key, Registry, trailer

CARD = QueuePairAddress(1, 2, "::1", 0, 5)


class Completions:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)

    def poll(self, most: int) -> list[Any]:
        return []

    def arm(self) -> None: ...


class Pairs:
    stuck = 0

    def __init__(self, domain: Domain) -> None:
        self.domain, self.completions, self.pair = domain, Completions(), None
        self.epoch, self.is_writable = -1, False

    def renew(self) -> QueuePairSetup:
        self.epoch += 1
        self.domain.pairs += 1
        return QueuePairSetup(self.epoch, CARD)

    def join(self, setup: QueuePairSetup) -> QueuePairReady | None:
        return QueuePairReady(self.epoch)

    def on_ready(self, message: QueuePairReady) -> None:
        self.is_writable = True

    def end(self) -> None:
        if self.stuck:
            self.stuck -= 1
            raise TransportError("the test's queue pair cannot be ended")

    def close(self) -> None:
        self.end()
        os.close(self.completions.fd)


class Domain(Registry):
    gather, pairs = 16, 0

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.device = self

    def key_of(self, region: Region) -> int:
        return 1

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_link, "QueuePairEpochs", Pairs)
    monkeypatch.setattr(transport, "Device", Domain)
    monkeypatch.setattr(transport, "ProtectionDomain", Domain)


class Door:
    def __init__(self, **options: Any) -> None:
        self.owner, self.end = Owner(), Rdma(options=RdmaOptions(**options))
        host, _, port = self.end.start(self.owner, []).rpartition(":")
        self.address = (host, int(port))
        self.callers: list[socket.socket] = []

    def knock(self) -> socket.socket:
        self.callers.append(socket.create_connection(self.address))
        self.callers[-1].settimeout(10)
        return self.callers[-1]

    @property
    def pairs(self) -> int:
        return self.end._domain.pairs  # type: ignore[union-attr]

    def close(self) -> None:
        self.end.close()
        for caller in self.callers:
            caller.close()


@pytest.fixture
def door() -> Iterator[Door]:
    fake_door = Door()
    yield fake_door
    fake_door.close()


def send_all(caller: socket.socket, sayings: Iterable[ControlMessage]) -> None:
    with suppress(OSError):
        for saying in sayings:
            caller.sendall(encode(saying))


def closes_connection(caller: socket.socket) -> bool:
    try:
        while caller.recv(1 << 16):
            continue
    except ConnectionResetError:
        pass
    return True


def test_a_dialling_peer_counts_as_unproven_from_the_start(door: Door) -> None:
    door.knock()
    door.owner.wait("linked")


def test_a_refused_unproven_peer_gets_no_queue_pair(door: Door) -> None:
    door.owner.on_linked = lambda link: link.close()  # type: ignore[method-assign]
    assert closes_connection(door.knock())
    assert door.pairs == 0


STRANGE: dict[str, ControlMessage | bytes] = {
    "more than 24 KiB at a time": encode(OwnerMessage(bytes(24 << 10))),
    "a length alone": (8 << 20).to_bytes(4, "little"),
    "another queue pair": QueuePairSetup(1, CARD),
    "a window": trailer(0),
}


@pytest.mark.parametrize("what", STRANGE)
def test_data_before_the_proof_ends_the_link(door: Door, what: str) -> None:
    caller, message = door.knock(), STRANGE[what]
    door.owner.wait("linked")
    caller.sendall(message if isinstance(message, bytes) else encode(message))
    door.owner.wait("lost")
    assert door.pairs == 1
    assert not door.owner.all("message")


def test_a_proven_peer_may_send_it(door: Door) -> None:
    caller = door.knock()
    door.owner.wait("linked")
    door.owner.heard[0].link.secure(bytes(32))
    for saying in (
        QueuePairSetup(0, CARD),
        QueuePairReady(0),
        OwnerMessage(bytes(1 << 20)),
        QueuePairSetup(1, CARD),
        RdmaTrailer(0, trailer(0).head, trailer(0).verdict),
    ):
        caller.sendall(encode(saying))
    assert door.owner.wait("message") == [bytes(1 << 20)]
    until(lambda: door.pairs == 2)


def test_slow_bytes_do_not_extend_the_time_for_a_queue_pair() -> None:
    door = Door(setup_s=0.2)
    caller = door.knock()
    door.owner.wait("linked")
    send_all(caller, repeat(OwnerMessage(b"still here"), 1 << 22))
    assert "was not established within" in str(door.owner.wait("lost")[0])
    door.close()


def test_new_queue_pairs_do_not_extend_the_time_either() -> None:
    door = Door(setup_s=0.2)
    caller = door.knock()
    door.owner.wait("linked")
    door.owner.heard[0].link.secure(bytes(32))
    send_all(caller, (QueuePairSetup(epoch, CARD) for epoch in range(1, 1 << 22)))
    assert "was not established within" in str(door.owner.wait("lost")[0])
    door.close()


def test_a_listener_survives_a_connection_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(24, "too many open files"), OSError(113, "no route to host")]
    accept = socket.socket.accept

    def failing(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    door = Door()
    door.knock()
    door.owner.wait("linked")
    door.close()


class Dialled:
    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        self.theirs, _ = listener.accept()
        listener.close()
        self.owner, self.domain, self.gone = Owner(), Domain(), threading.Event()
        self.link = RdmaLink(
            ours, self.domain, self.owner, RdmaOptions(), lambda link: self.gone.set()
        )  # type: ignore[arg-type]
        self.link.begin(threading.Event(), dialled=True)
        self.theirs.sendall(encode(QueuePairSetup(0, CARD)) + encode(QueuePairReady(0)))
        self.link.wait_connected()
        self.link.secure(bytes(32))
        self.memory = MemoryFileRegion.create(8, 4096, name="sink")
        assert self.link.grant(1, [self.memory], [1, 3])

    @property
    def keys(self) -> list[Key]:
        return self.domain.keys

    def close(self) -> None:
        self.link.close()
        self.link.join()
        self.theirs.close()
        self.memory.close()


@pytest.mark.parametrize("fails", ["eventfd", "pairs"])
def test_a_link_that_fails_to_open_leaves_neither_queue_nor_descriptor(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventfd, created, queues = os.eventfd, list[int](), list[Domain]()

    def wake(*args: int) -> int:
        if fails == "eventfd":
            raise OSError(24, "too many open files")
        created.append(eventfd(*args))
        return created[-1]

    def pairs(domain: Domain) -> Mock:
        if fails == "pairs":
            raise TransportError("the test's device has no more queue pairs")
        queues.append(domain)
        return Mock()

    monkeypatch.setattr(rdma_link, "QueuePairEpochs", pairs)
    monkeypatch.setattr(os, "eventfd", wake)
    ours, theirs = socket.socketpair()
    peered = type("Side", (), {"getpeername": lambda self: ("h", 1), "fileno": ours.fileno})()
    with (
        ours,
        theirs,
        pytest.raises((OSError, TransportError), match=r"too many open files|no more queue pairs"),
    ):
        RdmaLink(peered, Domain(), Owner(), RdmaOptions(), lambda link: None)  # type: ignore[arg-type]
    assert not queues
    for fd in created:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.fixture
def dialled() -> Iterator[Dialled]:
    dialling = Dialled()
    yield dialling
    dialling.close()


def test_a_fence_that_the_device_refuses_ends_the_link_and_completes_after_its_queue_pair(
    dialled: Dialled,
) -> None:
    dialled.keys[0].stuck = 9
    dialled.link.fence(1)
    assert "deregistered" in str(dialled.owner.wait("lost")[0])
    assert dialled.owner.wait("fenced") == [1]
    assert not dialled.keys[1].open


def test_no_fence_is_answered_while_a_peer_could_still_write(
    dialled: Dialled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requested, go = threading.Event(), threading.Event()

    def wait(seconds: float) -> bool:
        requested.set()
        return not go.wait(20)

    monkeypatch.setattr(dialled.link, "_ending", type("Ending", (), {"wait": staticmethod(wait)})())
    dialled.keys[0].stuck = 9
    dialled.link._pairs.stuck = 1  # type: ignore[attr-defined]
    dialled.link.fence(1)
    assert requested.wait(20)
    assert not dialled.owner.all("fenced")
    assert "stay reserved" in caplog.text
    go.set()
    assert dialled.owner.wait("fenced") == [1]


def test_a_fence_during_a_grant_is_answered_behind_it(
    dialled: Dialled, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    register = dialled.domain.register

    def slowly(address: int, length: int, *, writable_by_peer: bool) -> Key:
        begun.set()
        assert go.wait(20)
        return register(address, length, writable_by_peer=writable_by_peer)

    monkeypatch.setattr(dialled.domain, "register", slowly)
    granting = threading.Thread(target=dialled.link.grant, args=(2, [dialled.memory], [5]))
    granting.start()
    assert begun.wait(20)
    dialled.link.fence(2)
    dialled.link.fence(1)
    assert dialled.owner.wait("fenced") == [1]  # the link's thread is free meanwhile
    go.set()
    assert dialled.owner.wait("fenced", 2) == [1, 2]
    granting.join()
    assert not any(key.open for key in dialled.keys)
