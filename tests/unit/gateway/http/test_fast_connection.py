"""Tests that the gateway's HTTP parser reads any bytes, in any pieces, as aiohttp's parser does."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.aiohttp_connection import AiohttpConnection
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.disagg.scripted_engines import never_answers, prefills, split_gateway
from tests.unit.gateway.http.connection_harness import (
    LAST,
    ODD,
    ORDINARY,
    FakeTransport,
    Harness,
    Outcome,
    request,
    turns,
)

SEQUENCES = st.tuples(
    st.lists(st.sampled_from(ORDINARY), max_size=3),
    st.lists(st.sampled_from(ODD), max_size=1),
    st.lists(st.sampled_from(ORDINARY), max_size=2),
    st.lists(st.sampled_from(LAST), max_size=1),
)


def same(one: Outcome, other: Outcome) -> bool:
    return one[:3] == other[:3]


async def via_aiohttp(harness: Harness, requests: list[bytes]) -> Outcome:
    return await harness.deliver(harness.aiohttp_connection(), requests)


@pytest.mark.parametrize("number", range(len(ORDINARY)))
async def test_an_ordinary_request_is_served_on_the_fast_path_as_aiohttp_would_read_it(
    number: int,
) -> None:
    harness = Harness()
    outcome = await harness.deliver(harness.fast_connection(), [ORDINARY[number]])
    assert not outcome.has_switched
    assert outcome.responses[0][0] == 200
    assert same(outcome, await via_aiohttp(harness, [ORDINARY[number]]))


@pytest.mark.parametrize("odd", ODD + LAST)
async def test_any_other_request_switches_to_aiohttp_with_the_same_outcome(odd: bytes) -> None:
    harness = Harness()
    outcome = await harness.deliver(harness.fast_connection(), [ORDINARY[1], odd])
    assert outcome.has_switched
    assert same(outcome, await via_aiohttp(harness, [ORDINARY[1], odd]))


@pytest.mark.parametrize("slow", [False, True])
async def test_requests_cut_at_any_byte_are_read_the_same(slow: bool) -> None:
    harness = Harness(slow)
    requests = [ORDINARY[2], ORDINARY[4], ODD[1], ORDINARY[1]]
    expected = await via_aiohttp(harness, requests)
    sent = b"".join(requests)
    for cut in range(len(sent) + 1):
        outcome = await harness.deliver(harness.fast_connection(), [sent[:cut], sent[cut:]])
        assert same(outcome, expected), cut


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.booleans(), st.lists(st.integers(0, 2000), max_size=6))
def test_any_sequence_in_any_pieces_is_read_as_aiohttp_reads_it_one_by_one(
    sequence: tuple[list[bytes], ...], slow: bool, cuts: list[int]
) -> None:
    async def run() -> None:
        harness = Harness(slow)
        requests = list(itertools.chain(*sequence))
        expected = await via_aiohttp(harness, requests)
        last = requests.pop() if sequence[3] else b""
        sent = b"".join(requests)
        ends = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
        parts = [sent[start:end] for start, end in itertools.pairwise(ends)]
        outcome = await harness.deliver(harness.fast_connection(), [*parts, last])
        assert same(outcome, expected)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("field", "switches"), [("X-Mark: dripped", False), ("X_Mark: dripped", True)]
)
async def test_a_head_in_many_pieces_is_parsed_once_it_is_complete(
    field: str, switches: bool
) -> None:
    # Parsing it after each piece would take quadratic time.
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    sent = request(b"{}", field)
    for byte in sent[:-3]:
        connection.data_received(bytes([byte]))
        assert transport.protocol is connection
    await transport.deliver(sent[-3:])
    assert (transport.protocol is not connection) == switches
    assert [body for _, body, _ in harness.served] == [b"{}"]
    transport.close()
    await turns()


@pytest.mark.parametrize("invalid", [b"X: a\nY", b"X" * 70_000])
async def test_an_invalid_partial_head_is_refused_at_once(invalid: bytes) -> None:
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    await transport.deliver(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n")
    for start in range(0, len(invalid), 1000):
        await transport.deliver(invalid[start : start + 1000])
    assert transport.text.startswith(b"HTTP/1.1 4")
    transport.close()
    await turns()


async def test_pipelined_requests_are_served_in_order_while_reading_is_paused() -> None:
    harness = Harness(slow=True)
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    connection.data_received(request(b"first"))
    for _ in range(3):
        connection.data_received(request(b"x" * 30_000))
    assert transport.paused
    await turns()
    await turns()
    assert not transport.paused
    assert [len(body) for _, body, _ in harness.served] == [5, 30_000, 30_000, 30_000]
    transport.close()
    await turns()


async def test_an_unread_response_holds_back_the_next_request() -> None:
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    connection.pause_writing()
    connection.data_received(request(b"one"))
    connection.data_received(request(b"two"))
    assert [body for _, body, _ in harness.served] == [b"one"]
    connection.resume_writing()
    await turns()
    assert [body for _, body, _ in harness.served] == [b"one", b"two"]
    transport.close()
    await turns()


async def test_closing_when_idle_waits_for_the_current_response() -> None:
    harness = Harness(slow=True)
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    connection.data_received(request())
    closed = connection.close_when_idle()
    assert not transport.closed
    await turns()
    assert transport.closed
    assert closed.done()
    assert b"connection: close" in transport.text


async def test_a_client_that_does_not_read_stays_paused_after_the_switch() -> None:
    # The transport reports only changes, so the new protocol must inherit the paused state.
    #
    # Otherwise an engine could fill the memory with a response that is not read.
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    connection.pause_writing()
    connection.paused_at = since = 7.0
    connection.data_received(ODD[1])
    fallback = transport.protocol
    assert isinstance(fallback, AiohttpConnection)
    assert fallback.is_writing_paused
    assert fallback.paused_at == since
    transport.close()
    await turns()


class SlowTransport(FakeTransport):
    aborts = 0

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborts += 1
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


async def test_a_closing_connection_lets_a_slow_client_finish_reading() -> None:
    harness = Harness(slow=True)
    connection = harness.fast_connection()
    transport = SlowTransport(connection)
    connection.connection_made(transport)
    connection.phase_since = (
        monotonic() - 100
    )  # an old connection; only the time of closing matters
    connection.data_received(request())
    connection.close_when_idle()
    await turns()
    assert transport.closed
    patience_s = harness.limits.slow_reader
    connection.sweep(monotonic() + patience_s - 1)
    assert transport.aborts == 0
    connection.sweep(monotonic() + patience_s + 1)
    assert transport.aborts == 1
    await turns()


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
async def test_an_idle_connection_is_not_closed_while_it_has_an_unread_request(kind: str) -> None:
    harness = Harness()
    is_fast = kind == "fast"
    protocol = harness.fast_connection() if is_fast else harness.aiohttp_connection()
    server, client = socket.socketpair()
    with server, client:
        transport = SocketTransport(protocol, server)
        protocol.connection_made(transport)
        client.send(request())
        late = monotonic() + harness.limits.idle_timeout + 1
        protocol.sweep(late)
        await turns()
        assert not transport.closed
        server.recv(1000)
        protocol.sweep(late)
        await turns()
        assert transport.closed


@pytest.mark.parametrize("has_left", [False, True])
async def test_the_first_request_of_a_client_that_has_left_is_not_served(has_left: bool) -> None:
    harness = Harness()
    protocol = harness.fast_connection()
    server, client = socket.socketpair()
    with server, client:
        transport = SocketTransport(protocol, server)
        protocol.connection_made(transport)
        client.send(request())
        if has_left:
            client.close()
        protocol.data_received(server.recv(1000))
        await turns()
        assert len(harness.served) == (0 if has_left else 1)


class SocketTransport(FakeTransport):
    def __init__(self, protocol: asyncio.Protocol, sock: socket.socket) -> None:
        super().__init__(protocol)
        self._socket = sock

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else super().get_extra_info(name, default)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_with_bytes_unread_is_noticed(reset: bool) -> None:
    body = b'{"model":"demo","messages":[{"role":"user","content":"hi"}]}'
    async with split_gateway("vllm_nixl", [prefills()], [never_answers]) as running:
        url = urlsplit(running.app.url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(request(body))
        received = await running.decode[0].wait_for_request()
        writer.write(request(b"x" * 100_000))
        async with asyncio.timeout(PATIENCE_S):
            while not any(connection._reading_paused for connection in running.app.connections):
                await asyncio.sleep(0.001)
        if reset:
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        writer.close()
        async with asyncio.timeout(PATIENCE_S):
            await received.closed.wait()
        await running.at_rest()
        assert running.metric("penstock_client_disconnects_total") == 1
