"""Tests of connections to engines by host name: slow or failing lookups, and silent addresses."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop

from gateway.http import engine_lookup_and_connect
from gateway.http.connect_errors import NoFreePortError
from gateway.http.engine_connections import ConnectionPool
from gateway.http.engine_lookup_and_connect import (
    AVOID_S,
    OLD_PATIENCE_S,
    PATIENCE_S,
    RECENT_S,
    Address,
    EngineAddresses,
)
from gateway.http.engine_poll_client import ConnectError, PollClient
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.write_queue import WriteQueue
from gateway.protocol.upstream_error import UpstreamError
from tests import duration_limits
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

FIRST, SECOND = ("192.0.2.1", 8000), ("192.0.2.2", 8000)
AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class FakeNetwork:
    """A fake of the system's resolver, and of the hosts at the addresses that it returns.

    addresses  what the resolver answers, or the error that it raises
    lookup_s   seconds that a lookup takes
    accept_s   seconds that a server takes to accept a connection
    silent     addresses that do not answer
    refusals   errors that connections to addresses raise
    tried      addresses to which a connection was attempted, in order
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: Sequence[tuple[str, int]] | Exception = (FIRST, SECOND)
        self.lookup_s = self.accept_s = 0.0
        self.silent: set[tuple[str, int]] = set()
        self.refusals: dict[tuple[str, int], OSError] = {}
        self.tried: list[tuple[str, int]] = []
        monkeypatch.setattr(engine_lookup_and_connect, "_connected_socket", self._connected_socket)

    async def look_up(self, host: str, port: int) -> Sequence[Address]:
        await asyncio.sleep(self.lookup_s)
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return [(socket.AF_INET, address) for address in self.addresses]

    async def _connected_socket(
        self, family: socket.AddressFamily, address: tuple[str, int]
    ) -> socket.socket:
        self.tried.append(address)
        if address in self.silent:
            await asyncio.Event().wait()
        if address in self.refusals:
            refusal = self.refusals[address]
            raise type(refusal)(*refusal.args)
        await asyncio.sleep(self.accept_s)
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.setblocking(False)
        return ours


async def _connect(addresses: EngineAddresses, within_s: float = 1.0) -> None:
    transport, _ = await addresses.connect(asyncio.Protocol, within_s, within_s)
    transport.close()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    return FakeNetwork(monkeypatch)


@pytest.fixture
def addresses(network: FakeNetwork) -> EngineAddresses:
    return EngineAddresses("engine.test", 8000, network.look_up)


async def test_a_silent_address_does_not_use_up_the_time_of_the_next_one(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.silent = {FIRST}
    await _connect(addresses)
    assert network.tried == [FIRST, SECOND]
    await _connect(addresses)
    assert network.tried[2:] == [SECOND]
    await asyncio.sleep(AVOID_S + 1.0)
    network.silent = set()
    await _connect(addresses)
    assert network.tried[3:] == [FIRST]


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST)])
async def test_an_address_that_this_machine_cannot_use_hides_no_refusal(
    network: FakeNetwork, addresses: EngineAddresses, order: tuple[tuple[str, int], ...]
) -> None:
    network.addresses = order
    network.refusals = {
        FIRST: ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        SECOND: OSError(errno.EADDRNOTAVAIL, "no such address here"),
    }
    with pytest.raises(ConnectionRefusedError):
        await _connect(addresses)


@pytest.mark.parametrize("host", ["engine.test", "127.0.0.1"])
async def test_a_lack_of_free_ports_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    class Socket(socket.socket):
        def connect(self, address: object) -> None:
            if self.type & socket.SOCK_STREAM:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().connect(address)

    async def look_up(host: str, port: int) -> Sequence[Address]:
        return [(socket.AF_INET, ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(NoFreePortError):
        await _connect(EngineAddresses(host, 8000, look_up))


async def test_a_lack_of_descriptors_does_not_change_the_order_of_addresses(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.refusals = {FIRST: OSError(errno.EMFILE, "Too many open files")}
    await _connect(addresses)
    network.refusals = {}
    await _connect(addresses)
    assert network.tried == [FIRST, SECOND, FIRST]


async def test_failed_connections_leave_no_reference_cycles(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.refusals = {FIRST: ConnectionRefusedError(errno.ECONNREFUSED, "refused")}
    await _connect(addresses)
    await asyncio.sleep(AVOID_S + 1.0)
    gc.collect()
    gc.disable()
    try:
        await _connect(addresses)
        await asyncio.sleep(0.1)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [found for found in gc.garbage if isinstance(found, OSError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_each_waiting_connection_gets_an_error_of_its_own(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.addresses = NO_NAME
    waiting = [asyncio.ensure_future(_connect(addresses)) for _ in range(3)]
    await asyncio.wait(waiting)
    errors = [task.exception() for task in waiting]
    assert len({id(error) for error in errors}) == 3
    assert all(isinstance(error, socket.gaierror) for error in errors)


async def test_a_name_is_looked_up_for_each_connection(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.addresses = (FIRST,)
    await _connect(addresses)
    network.addresses = (SECOND,)
    await _connect(addresses)
    assert network.tried == [FIRST, SECOND]


@pytest.mark.parametrize("lookup_s", [0.0, 3.0])
async def test_while_the_resolver_fails_or_is_slow_the_last_addresses_are_used(
    network: FakeNetwork,
    addresses: EngineAddresses,
    lookup_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await _connect(addresses)
    network.addresses, network.lookup_s = AGAIN, lookup_s
    with caplog.at_level(logging.WARNING, "penstock"):
        for _ in range(5):
            await _connect(addresses)
        await asyncio.sleep(2 * lookup_s)
    assert network.tried == [FIRST] * 6
    assert [record.getMessage() for record in caplog.records] == [
        "the host name engine.test cannot be resolved, so its last known addresses are used: "
        f"{AGAIN}"
    ]


async def test_a_name_that_does_not_exist_any_more_has_no_address(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    await _connect(addresses)
    network.addresses = NO_NAME
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="not known"):
            await _connect(addresses)
    network.addresses = (SECOND,)
    await _connect(addresses)
    assert network.tried == [FIRST, SECOND]


async def test_an_invalid_name_does_not_exist(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.addresses = UnicodeError("label empty or too long")
    with pytest.raises(socket.gaierror, match="label empty"):
        await _connect(addresses)


async def test_a_slow_first_lookup_is_no_fault_of_the_engine(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.lookup_s = 3.0
    timeouts = UpstreamTimeouts(connect_s=1.0, first_byte_s=5.0, stall_s=1.0)
    outbox = WriteQueue(asyncio.get_running_loop())
    pool = ConnectionPool("http://engine.test:8000", None, timeouts, outbox)
    pool.addresses = addresses
    polls = PollClient("http://engine.test:8000", addresses)
    with pytest.raises(UpstreamError, match="the resolver did not answer") as raised:
        await pool.connect()
    assert raised.value.kind == "connect_error"
    with pytest.raises(ConnectError) as unresolved:
        await polls.get("/health", 1.0, 100)
    assert isinstance(unresolved.value.os_error, socket.gaierror)
    await asyncio.sleep(3.0)
    await pool.connect()
    assert network.tried == [FIRST]
    pool.close()


@pytest.mark.parametrize("accept_s", [0.9, 1.1])
async def test_a_slow_first_lookup_takes_no_time_from_the_connection(
    network: FakeNetwork, addresses: EngineAddresses, accept_s: float
) -> None:
    network.lookup_s, network.accept_s = 0.85, accept_s
    network.addresses = (FIRST,)
    if accept_s < 1.0:
        await _connect(addresses)
    else:
        with pytest.raises(TimeoutError):
            await _connect(addresses)
    assert network.tried == [FIRST]


async def test_a_first_lookup_leaves_a_health_check_half_of_its_time(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    network.lookup_s = 0.55
    polls = PollClient("http://engine.test:8000", addresses)
    with pytest.raises(ConnectError) as unresolved:
        await polls.get("/health", 1.0, 100)
    assert isinstance(unresolved.value.os_error, socket.gaierror)
    network.lookup_s = 0.45
    await asyncio.sleep(1.0)
    await _connect(addresses)
    assert network.tried == [FIRST]


@pytest.mark.parametrize("lookup_s", [0.4, 3.0])
async def test_old_addresses_are_used_only_if_the_resolver_takes_half_a_second(
    network: FakeNetwork, addresses: EngineAddresses, lookup_s: float
) -> None:
    network.addresses = (FIRST,)
    await _connect(addresses)
    await asyncio.sleep(RECENT_S + 1.0)
    network.addresses, network.lookup_s = (SECOND,), lookup_s
    started = asyncio.get_running_loop().time()
    await _connect(addresses)
    waited_s = asyncio.get_running_loop().time() - started
    assert waited_s == pytest.approx(min(lookup_s, OLD_PATIENCE_S))
    await _connect(addresses)
    expected = SECOND if lookup_s < OLD_PATIENCE_S else FIRST
    assert network.tried == [FIRST, expected, expected]


async def test_while_lookups_fail_old_addresses_wait_no_longer_than_others(
    network: FakeNetwork, addresses: EngineAddresses
) -> None:
    await _connect(addresses)
    network.addresses, network.lookup_s = AGAIN, 3.0
    await asyncio.sleep(RECENT_S + 1.0)
    await _connect(addresses)
    await asyncio.sleep(5.0)
    started = asyncio.get_running_loop().time()
    await _connect(addresses)
    assert asyncio.get_running_loop().time() - started == pytest.approx(PATIENCE_S)


@pytest.mark.parametrize("refuses", [True, False])
async def test_if_the_last_addresses_fail_those_of_a_slow_lookup_are_tried(
    network: FakeNetwork, addresses: EngineAddresses, refuses: bool
) -> None:
    network.addresses = (FIRST,)
    await _connect(addresses)
    network.addresses, network.lookup_s = (SECOND,), 0.4
    if refuses:
        network.refusals = {FIRST: ConnectionRefusedError(errno.ECONNREFUSED, "refused")}
    else:
        network.silent = {FIRST}
    await _connect(addresses)
    assert network.tried == [FIRST, FIRST, SECOND]


@pytest.mark.parametrize("lookup_s", [0.3, 3.0])
async def test_no_address_is_tried_twice_for_one_connection(
    network: FakeNetwork, addresses: EngineAddresses, lookup_s: float
) -> None:
    await _connect(addresses)
    network.lookup_s = lookup_s
    refusal = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    network.refusals = {FIRST: refusal, SECOND: refusal}
    with pytest.raises(ConnectionRefusedError):
        await _connect(addresses)
    assert network.tried == [FIRST, FIRST, SECOND]


async def test_an_address_needs_no_lookup() -> None:
    async def fail(host: str, port: int) -> Sequence[Address]:
        raise AssertionError

    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await _connect(EngineAddresses("127.0.0.1", port, fail))


class LoopWithoutResolver(uvloop.Loop):
    def getaddrinfo(self, *_: object, **__: object) -> Any:
        raise AssertionError(
            "the lookup of a known address needs a thread, and all threads of the resolver may "
            "be busy"
        )


@pytest.mark.parametrize("is_open", [True, False])
def test_a_known_address_needs_no_thread_of_the_resolver(is_open: bool) -> None:
    async def connect(port: int) -> None:
        async def look_up(host: str, port: int) -> Sequence[Address]:
            return [(socket.AF_INET, ("127.0.0.1", port))]

        await _connect(EngineAddresses("engine.test", port, look_up), duration_limits.PATIENCE_S)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_open:
            listener.listen()
        port = listener.getsockname()[1]
        loop = LoopWithoutResolver()
        try:
            if is_open:
                loop.run_until_complete(connect(port))
            else:
                with pytest.raises(ConnectionRefusedError):
                    loop.run_until_complete(connect(port))
        finally:
            loop.close()
