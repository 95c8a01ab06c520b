"""Tests of TCP connections whose clients do not have the fleet's secret key.

They may use only limited memory, and must not keep real agents out.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress

import pytest

from kvtransfer.agent import Agent
from kvtransfer.protocol.agent_messages import VERSION, AgentCard, LinkHello, encode
from kvtransfer.protocol.frame import FrameKind, encode_frame
from kvtransfer.protocol.session_authentication import greeting_nonce
from kvtransfer.transport_interface import MAX_UNPROVEN_BYTES
from kvtransfer.util.agent_options import AgentOptions
from tests.contract.kvtransfer.groups import KEY, PATIENT, SMALL, Group, groups, until
from tests.contract.kvtransfer.links import PATIENCE_S

# The proof may take long on a busy machine, and a test must not pass because idle connections timed
# out.
DEFAULTS = AgentOptions(max_missed_beats=60, handshake_s=120.0)
HOSTS = {
    "one address": ["127.0.0.1"],
    "several addresses": [f"127.0.0.{index}" for index in range(2, 7)],
}


def connect(agent: Agent, from_host: str) -> socket.socket:
    host, _, port = agent.address.rpartition(":")
    return socket.create_connection(
        (host, int(port)), timeout=PATIENCE_S, source_address=(from_host, 0)
    )


def unproven(agent: Agent) -> int:
    return len(agent._link_manager._unproven)


def count_dials(monkeypatch: pytest.MonkeyPatch, agent: Agent) -> list[object]:
    dials: list[object] = []
    dial = agent._link_manager._dial
    monkeypatch.setattr(
        agent._link_manager, "_dial", lambda dialling: (dials.append(dialling), dial(dialling))
    )
    return dials


async def fetch(source: Group, sink: Group, name: str) -> None:
    offer = source.agent.offer(name, [0], 16)
    landing = sink.agent.fetch(source.agent.address, name, [3], 16, ticket=offer.ticket)
    end = await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)
    assert end.has_landed, end


@asynccontextmanager
async def besieged(
    count: int, hosts: list[str], said: bytes = b""
) -> AsyncIterator[tuple[Group, Group]]:
    # Yield a source and a sink that are not linked yet.
    #
    # `count` connections to the source have already sent the bytes `said`.
    async with groups("tcp", SMALL, SMALL, options=[DEFAULTS, PATIENT]) as (source, sink):
        with ExitStack() as stack:
            for index in range(count):
                sock = stack.enter_context(
                    closing(connect(source.agent, hosts[index % len(hosts)]))
                )
                sock.sendall(said)
            await until(
                lambda: taken_in(source.agent) == count, "not all connections were taken in"
            )
            yield source, sink


def taken_in(agent: Agent) -> int:
    return len(agent._link_manager._peer_links) + agent.stats()["faults"].get("strangers", 0)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
async def test_a_member_links_at_its_first_try_beside_100_idle_connections(
    hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with besieged(100, hosts) as (source, sink):
        limit = (
            DEFAULTS.max_unproven_per_address if len(hosts) == 1 else DEFAULTS.max_unproven_links
        )
        assert unproven(source.agent) == limit
        dials = count_dials(monkeypatch, sink.agent)
        await fetch(source, sink, "r")
        assert len(dials) == 1
        assert unproven(source.agent) >= limit - 1  # the member replaced at most one


async def test_the_oldest_connection_is_dropped_and_the_others_stay() -> None:
    async with groups("tcp", SMALL, options=[DEFAULTS]) as (source,):
        with ExitStack() as stack:
            socks = []
            for count in range(1, 41):
                socks.append(stack.enter_context(closing(connect(source.agent, "127.0.0.1"))))
                await until(lambda count=count: taken_in(source.agent) == count)
            for sock in socks[:8]:
                assert await asyncio.to_thread(sock.recv, 1) == b""
            for sock in socks[8:]:
                sock.setblocking(False)
                with pytest.raises(BlockingIOError):
                    sock.recv(1)


async def test_memory_for_connections_without_the_key_is_bounded() -> None:
    unfinished = encode_frame(FrameKind.MESSAGE, bytes(MAX_UNPROVEN_BYTES))[:-1]
    async with besieged(100, HOSTS["several addresses"], unfinished) as (source, sink):
        links = list(source.agent._link_manager._peer_links)
        await until(lambda: min(link.received_bytes for link in links) == len(unfinished))
        received_bytes = sum(link.received_bytes for link in links)
        assert received_bytes <= DEFAULTS.max_unproven_links * (MAX_UNPROVEN_BYTES + 64)
        await fetch(source, sink, "r")
        with closing(connect(source.agent, "127.0.0.1")) as sock:
            with suppress(OSError):
                sock.sendall(encode_frame(FrameKind.MESSAGE, bytes(MAX_UNPROVEN_BYTES + 1)))
            assert await asyncio.to_thread(ended, sock)


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_links_that_showed_the_key_are_not_dropped_for_others() -> None:
    # Links wait for their proof, as on a slow network.
    #
    # Meanwhile connections without the key arrive.
    async with groups("tcp", SMALL, options=[DEFAULTS]) as (source,):
        with ExitStack() as stack:
            members = []
            for index in range(40):
                members.append(stack.enter_context(closing(connect(source.agent, "127.0.0.1"))))
                nonce = greeting_nonce(KEY, index.to_bytes(8, "big"))
                hello = encode(
                    LinkHello(VERSION, nonce, AgentCard(f"m{index}", bytes(16), SMALL), 1)
                )
                members[-1].sendall(encode_frame(FrameKind.MESSAGE, hello))
                assert await asyncio.to_thread(members[-1].recv, 1), "no Welcome"
                await until(lambda: not unproven(source.agent))
            for _ in range(100):
                stack.enter_context(closing(connect(source.agent, "127.0.0.1")))
            await until(lambda: taken_in(source.agent) == 140)
            assert (
                len(source.agent._link_manager._peer_links)
                == 40 + DEFAULTS.max_unproven_per_address
            )


async def test_a_greeting_that_is_replayed_keeps_one_connection_and_not_many() -> None:
    hello = encode_frame(
        FrameKind.MESSAGE,
        encode(
            LinkHello(VERSION, greeting_nonce(KEY, bytes(8)), AgentCard("x", bytes(16), SMALL), 1)
        ),
    )
    async with besieged(100, ["127.0.0.1"], hello) as (source, sink):
        await until(
            lambda: (
                len(source.agent._link_manager._peer_links) == DEFAULTS.max_unproven_per_address + 1
            )
        )
        await fetch(source, sink, "r")


@pytest.fixture
def flood() -> Iterator[list[int]]:
    # `ports`: the port, and the number of connections opened
    stop, ports = threading.Event(), [0, 0]

    def run() -> None:
        socks: list[socket.socket] = []
        for _ in range(3000):
            if stop.wait(0.001):
                break
            if ports[0]:
                with suppress(OSError):
                    socks.append(
                        socket.create_connection(("127.0.0.1", ports[0]), timeout=PATIENCE_S)
                    )
                    ports[1] += 1
            if len(socks) > 200:
                socks.pop(0).close()
        for sock in socks:
            sock.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield ports
    stop.set()
    thread.join()


async def test_a_flood_of_connections_without_the_key_starves_no_member(flood: list[int]) -> None:
    async with groups("tcp", *[SMALL] * 6, options=[DEFAULTS]) as (source, *sinks):
        flood[0] = int(source.agent.address.rpartition(":")[2])
        await until(lambda: flood[1] > 100, "there is no flood")
        for index, sink in enumerate(sinks):
            await fetch(source, sink, f"r{index}")
        flood[0] = 0
