"""Tests of which accepted sockets are served first as KV agents, and which are closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.frame import PREAMBLE_BYTES
from kvtransfer.transports import waiting_sockets
from kvtransfer.transports.tcp import Tcp
from kvtransfer.transports.waiting_sockets import SILENT_PERIOD_S, WaitingSockets
from tests.contract.kvtransfer.links import PATIENCE_S, Owner

LATER_S = 10.0
GREETING = bytes(PREAMBLE_BYTES)
NO_REGIONS: tuple[Region, ...] = ()


class Sockets:
    """Connected pairs of sockets for tests, whose accepted ends wait to become connections."""

    def __init__(self, stack: ExitStack) -> None:
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.waiting = WaitingSockets(self.listener)
        stack.callback(self.waiting.close)
        self._stack = stack

    def connect(self, peer: str = "192.0.2.1:1") -> socket.socket:
        client = self._stack.enter_context(socket.create_connection(self.listener.getsockname()))
        accepted, _ = self.listener.accept()
        self.waiting.add(accepted, peer)
        return client

    def peers(self, now: float) -> list[str]:
        taken = self.waiting.wait_ready(now)
        for sock, _ in taken:
            sock.close()
        return [peer for _, peer in taken]


@contextmanager
def new_sockets() -> Iterator[Sockets]:
    with ExitStack() as stack:
        yield Sockets(stack)


def is_dropped(client: socket.socket) -> bool:
    client.setblocking(False)
    with suppress(BlockingIOError):
        return client.recv(1) == b""
    return False


def test_a_socket_with_a_greeting_comes_before_all_silent_ones() -> None:
    with new_sockets() as sockets:
        for number in range(20):
            sockets.connect(f"192.0.2.1:{number}")
        sockets.connect("192.0.2.1:99").sendall(GREETING)
        assert sockets.peers(LATER_S) == ["192.0.2.1:99"]


def test_one_silent_socket_per_period_becomes_a_link_the_oldest_first() -> None:
    with new_sockets() as sockets:
        clients = [sockets.connect(f"192.0.2.1:{number}") for number in range(4)]
        assert sockets.peers(LATER_S) == ["192.0.2.1:0"]
        clients[2].sendall(GREETING)
        assert sockets.peers(LATER_S) == ["192.0.2.1:2"]
        sockets.waiting.wake()
        assert sockets.peers(LATER_S) == []
        # The bell stays readable here: it belongs to the end of the transport.
        assert sockets.peers(LATER_S + SILENT_PERIOD_S) == ["192.0.2.1:1"]


def test_a_client_that_sends_one_byte_at_a_time_stays_silent_until_a_preamble_is_whole() -> None:
    with new_sockets() as sockets:
        sockets.connect("192.0.2.1:1")
        assert sockets.peers(LATER_S) == ["192.0.2.1:1"]  # only the peer of the current period
        dripping = sockets.connect("192.0.2.1:2")
        for byte in GREETING[:-1]:
            dripping.sendall(bytes([byte]))
        sockets.waiting.wake()
        assert sockets.peers(LATER_S) == []
        dripping.sendall(GREETING[-1:])
        while not (ready := sockets.peers(LATER_S)):
            pass
        assert ready == ["192.0.2.1:2"]


def test_a_taken_socket_is_readable_from_its_first_byte_again() -> None:
    with new_sockets() as sockets:
        sockets.connect().sendall(GREETING)
        ((taken, _),) = sockets.waiting.wait_ready(LATER_S)
        assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        with taken:
            assert taken.recv(100) == GREETING


@pytest.mark.parametrize(("limit", "peers"), [("MOST_PER_ADDRESS", 1), ("MOST_WAITING", 3)])
def test_the_oldest_waiting_socket_is_dropped_over_a_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str, peers: int
) -> None:
    monkeypatch.setattr(waiting_sockets, limit, 4)
    with new_sockets() as sockets:
        clients = [sockets.connect(f"192.0.2.{number % peers}:1") for number in range(6)]
        assert [is_dropped(client) for client in clients] == [True, True, *[False] * 4]
        assert len(sockets.waiting) == 4


def test_one_address_cannot_drop_the_sockets_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_sockets, "MOST_WAITING", 8)
    with new_sockets() as sockets:
        member = sockets.connect("192.0.2.1:1")
        for number in range(40):
            sockets.connect(f"192.0.2.2:{number}")
        assert not is_dropped(member)


def test_addresses_take_turns_to_become_links() -> None:
    with new_sockets() as sockets:
        clients = [sockets.connect(f"192.0.2.2:{number}") for number in range(5)]
        clients.append(sockets.connect("192.0.2.1:1"))
        for client in clients:
            client.sendall(GREETING)
        assert sockets.peers(LATER_S)[:2] == ["192.0.2.2:0", "192.0.2.1:1"]


def test_many_silent_clients_cost_no_thread_each() -> None:
    transport, owner = Tcp(), Owner()
    address = transport.start(owner, NO_REGIONS)
    host, _, port = address.rpartition(":")
    dialler, dialling = Tcp(), Owner()
    dialler.start(dialling, NO_REGIONS)
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port))))
        stack.callback(transport.close)
        stack.callback(dialler.close)
        dialler.dial(address).send(GREETING)
        owner.wait("message")
        links = [event for event in owner.heard if event.kind == "linked"]
        # Each period of silence opens one link, so few are open before a patient member's greeting.
        assert len(links) < 100
        assert threading.active_count() < 100 + len(links)


def test_a_closed_transport_drops_the_sockets_that_wait() -> None:
    transport = Tcp()
    host, _, port = transport.start(Owner(), NO_REGIONS).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        transport.close()
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
