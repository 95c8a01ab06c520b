"""Tests of connections to an engine: reuse, replacement, deadlines, cancellation, backpressure."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import pytest
import uvloop

from gateway.http.ack_delay import QUICKACK
from gateway.http.engine_connections import (
    DEFER_LIMIT,
    MAX_IDLE_S,
    ConnectionPool,
    UpstreamConnection,
)
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.write_queue import WriteQueue
from gateway.protocol.response.http_response_parser import encode_chunk
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.protocol.response.relay_state import RelayState
from gateway.protocol.response.usage_and_error_search import MAX_FIRST_EVENT
from gateway.util.work_in_turns import run_at_once
from tests.duration_limits import PATIENCE_S

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
PATIENCE = UpstreamTimeouts(connect_s=1.0, first_byte_s=5.0, stall_s=1.0)


class FakeClient:
    def __init__(self) -> None:
        self.is_writing_paused = False
        self.text = bytearray()
        self.source: UpstreamConnection | None = None

    def write(self, data: bytes) -> None:
        self.text += data

    def set_source(self, source: UpstreamConnection | None) -> None:
        self.source = source
        if source is not None and self.is_writing_paused:
            source.pause()

    def slow(self) -> None:
        self.is_writing_paused = True
        if self.source is not None:
            self.source.pause()

    def ready(self) -> None:
        self.is_writing_paused = False
        if self.source is not None:
            self.source.resume()


class FakePayload:
    body = b"{}"


class FakeEngine(asyncio.Protocol):
    def __init__(
        self, accepted: asyncio.Queue[FakeEngine], react: Callable[[FakeEngine], None]
    ) -> None:
        self._accepted = accepted
        self._react = react
        self.heard = b""
        self.requests = 0
        self.gone = asyncio.Event()
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._accepted.put_nowait(self)

    def data_received(self, data: bytes) -> None:
        self.heard += data
        if self.heard.endswith(b"\r\n\r\n{}"):
            self.heard = b""
            self.requests += 1
            self._react(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()

    def pause_writing(self) -> None:
        self.paused = True


def answer(engine: FakeEngine) -> None:
    engine.transport.write(ANSWER)


def silence(engine: FakeEngine) -> None:
    pass


class FakeServer:
    def __init__(self, upstream: ConnectionPool, accepted: asyncio.Queue[FakeEngine]) -> None:
        self.upstream = upstream
        self.accepted = accepted
        self.react: Callable[[FakeEngine], None] = answer

    async def asked(self) -> FakeEngine:
        async with asyncio.timeout(PATIENCE_S):
            engine = await self.accepted.get()
            while not engine.requests:
                await asyncio.sleep(0)
        return engine

    async def ask(self, client: FakeClient | None = None) -> Relay:
        relay = Relay(b"")
        head = self.upstream.request_head("/v1/completions") + b"content-length: 2\r\n\r\n"
        await self.upstream.send(head, FakePayload(), relay, client or FakeClient())
        return relay


@asynccontextmanager
async def engines(patience: UpstreamTimeouts = PATIENCE) -> AsyncIterator[FakeServer]:
    loop = asyncio.get_running_loop()
    accepted: asyncio.Queue[FakeEngine] = asyncio.Queue()
    created: list[FakeServer] = []
    server = await loop.create_server(
        lambda: FakeEngine(accepted, lambda e: created[0].react(e)), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    upstream = ConnectionPool(
        f"http://127.0.0.1:{port}", "the-engines-key", patience, WriteQueue(loop)
    )
    created.append(FakeServer(upstream, accepted))
    try:
        yield created[0]
    finally:
        upstream.close()
        server.close()
        while not accepted.empty():
            accepted.get_nowait().transport.abort()


async def test_a_connection_is_reused_after_a_complete_response() -> None:
    async with engines() as fake:
        for _ in range(3):
            client = FakeClient()
            assert (await fake.ask(client)).state is RelayState.DONE
            assert client.text.endswith(b"\r\n\r\n{}")
            assert client.source is None
        assert fake.accepted.qsize() == 1
        assert (await fake.accepted.get()).requests == 3


async def test_concurrent_requests_use_separate_connections() -> None:
    async with engines() as fake:
        await asyncio.gather(*(fake.ask() for _ in range(5)))
        assert fake.accepted.qsize() == 5
        await asyncio.gather(*(fake.ask() for _ in range(5)))
        assert fake.accepted.qsize() == 5


async def test_a_connection_that_has_been_idle_too_long_is_not_reused() -> None:
    async with engines() as fake:
        await fake.ask()
        (connection,) = fake.upstream.connections
        connection.idle_since -= MAX_IDLE_S + 0.1
        await fake.ask()
        assert fake.accepted.qsize() == 2


async def test_sweeping_closes_idle_connections_before_the_engine_does() -> None:
    async with engines() as fake:
        await fake.ask()
        engine = await fake.accepted.get()
        run_at_once(fake.upstream.sweep(monotonic() + MAX_IDLE_S + 0.1))
        async with asyncio.timeout(PATIENCE_S):
            await engine.gone.wait()
        assert not fake.upstream.connections


@pytest.mark.parametrize("reset", [True, False])
async def test_a_dead_pooled_connection_is_replaced_once(reset: bool) -> None:
    async with engines() as fake:
        await fake.ask()
        first = await fake.accepted.get()

        def die(engine: FakeEngine) -> None:
            if engine is not first:
                answer(engine)
            elif reset:
                engine.transport.abort()
            else:
                engine.transport.close()

        fake.react = die
        assert (await fake.ask()).state is RelayState.DONE
        assert fake.accepted.qsize() == 1


async def test_a_new_connection_that_dies_is_not_replaced() -> None:
    async with engines() as fake:
        fake.react = lambda engine: engine.transport.abort()
        with pytest.raises(UpstreamError) as error_info:
            await fake.ask()
        assert error_info.value.kind in ("reset", "no_answer")
        assert fake.accepted.qsize() == 1


async def test_a_pooled_connection_that_dies_within_a_response_is_not_replaced() -> None:
    async with engines() as fake:
        await fake.ask()

        def half(engine: FakeEngine) -> None:
            engine.transport.write(ANSWER[:30])
            engine.transport.close()

        fake.react = half
        with pytest.raises(UpstreamError, match="before its response ended"):
            await fake.ask()
        assert fake.accepted.qsize() == 1


@pytest.mark.parametrize("second_try", [False, True])
async def test_cancelling_a_request_closes_its_connection(second_try: bool) -> None:
    async with engines() as fake:
        if second_try:
            await fake.ask()
            dead = await fake.accepted.get()
            fake.react = lambda engine: engine.transport.abort() if engine is dead else None
        else:
            fake.react = silence
        asking = asyncio.create_task(fake.ask())
        async with asyncio.timeout(PATIENCE_S):
            engine = await fake.asked()
            asking.cancel()
            await engine.gone.wait()
        assert not fake.upstream.connections


class CancellingClient(FakeClient):
    """A client that cancels its request after the connection began it, before its bytes are sent."""

    def set_source(self, source: UpstreamConnection | None) -> None:
        if source is not None:
            asyncio.get_running_loop().call_soon(source.abort)


@pytest.mark.parametrize("client", [FakeClient(), CancellingClient()])
async def test_a_large_body_is_sent_in_a_callback_of_its_own_unless_its_request_is_cancelled(
    client: FakeClient,
) -> None:
    payload = FakePayload()
    payload.body = bytes(DEFER_LIMIT)
    async with engines() as fake:
        await fake.ask()
        engine = await fake.accepted.get()
        head = fake.upstream.request_head("/v1/completions") + b"content-length: 262144\r\n\r\n"
        sending = asyncio.ensure_future(fake.upstream.send(head, payload, Relay(b""), client))
        expected = b"" if isinstance(client, CancellingClient) else head + payload.body
        async with asyncio.timeout(PATIENCE_S):
            while len(engine.heard) < len(expected):
                await asyncio.sleep(0)
            if not expected:
                await engine.gone.wait()
        assert engine.heard == expected
        sending.cancel()


async def test_a_refused_connection_is_reported_as_such() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        upstream = ConnectionPool(url, None, PATIENCE, WriteQueue(asyncio.get_running_loop()))
        with pytest.raises(UpstreamError) as error_info:
            await upstream.send(b"", FakePayload(), Relay(b""), FakeClient())
    assert error_info.value.kind == "connect_failed"


async def test_a_half_closed_connection_does_not_return_to_the_pool() -> None:
    async with engines() as fake:
        fake.react = silence
        client = FakeClient()
        asking = asyncio.create_task(fake.ask(client))
        engine = await fake.asked()
        engine.eof_received = lambda: True  # type: ignore[attr-defined]  # ignore the half-close
        assert client.source is not None
        client.source.half_close()
        engine.transport.write(ANSWER)
        assert (await asking).state is RelayState.DONE
        assert fake.upstream.take_idle() is None


async def test_interim_responses_and_heads_do_not_extend_the_deadline() -> None:
    async with engines() as fake:
        fake.react = silence
        asking = asyncio.create_task(fake.ask())
        engine = await fake.asked()
        (connection,) = fake.upstream.connections
        asked_at = connection.last_activity_at
        relay = connection._relay
        assert relay is not None
        engine.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 3 + ANSWER[:-2])
        async with asyncio.timeout(PATIENCE_S):
            while relay.head is None:
                await asyncio.sleep(0)
        assert connection.last_activity_at == asked_at
        run_at_once(fake.upstream.sweep(asked_at + 4.9))
        await asyncio.sleep(0)
        assert not asking.done()
        run_at_once(fake.upstream.sweep(asked_at + 5.1))
        with pytest.raises(UpstreamError) as error_info:
            await asking
        assert error_info.value.kind == "timeout"


async def test_the_first_byte_and_later_chunks_have_separate_timeouts() -> None:
    async with engines() as fake:
        fake.react = silence
        asking = asyncio.create_task(fake.ask())
        engine = await fake.asked()
        now = monotonic()
        run_at_once(fake.upstream.sweep(now + 4.5))
        engine.transport.write(ANSWER[:-1])
        (connection,) = fake.upstream.connections
        async with asyncio.timeout(PATIENCE_S):
            while connection.last_activity_at < now:
                await asyncio.sleep(0)
        run_at_once(fake.upstream.sweep(monotonic() + 0.5))
        await asyncio.sleep(0)
        assert not asking.done()
        run_at_once(fake.upstream.sweep(monotonic() + 1.5))
        with pytest.raises(UpstreamError) as error_info:
            await asking
        assert error_info.value.kind == "timeout"


async def test_silence_is_measured_from_the_last_body_byte_of_any_response() -> None:
    async with engines() as fake:
        fake.react = lambda engine: engine.transport.write(ANSWER[:-2])
        asking = asyncio.create_task(fake.ask())
        engine = await fake.asked()
        (connection,) = fake.upstream.connections
        assert fake.upstream.last_body_at == 0.0
        assert fake.upstream.silence_duration_s(connection.last_activity_at + 3.0) == pytest.approx(
            3.0, abs=0.2
        )
        engine.transport.write(b"{}")
        await asking
        assert fake.upstream.last_body_at > 0
        assert fake.upstream.silence_duration_s(monotonic() + 60) == 0.0


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_stream_whose_engine_closes_the_connection_after_done_is_whole(
    is_reset: bool,
) -> None:
    async with engines() as fake:
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        events = encode_chunk(b'data: {"n": 1}\n\n') + encode_chunk(b"data: [DONE]\n\n")

        def close_early(engine: FakeEngine) -> None:
            engine.transport.write(head + events)
            sock = engine.transport.get_extra_info("socket")
            if is_reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            engine.transport.close()

        fake.react = close_early
        client = FakeClient()
        relay = await fake.ask(client)
        assert client.text.endswith(events + b"0\r\n\r\n")
        assert not relay.has_error_event


async def test_a_slow_client_pauses_the_engine_and_does_not_count_as_its_silence() -> None:
    block = bytes(256 * 1024)
    length = 64 * len(block)
    async with engines() as fake:

        def pour(engine: FakeEngine) -> None:
            engine.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
                % length
            )
            for _ in range(64):
                engine.transport.write(block)

        fake.react = pour
        client = FakeClient()
        client.slow()
        asking = asyncio.create_task(fake.ask(client))
        async with asyncio.timeout(PATIENCE_S):
            engine = await fake.accepted.get()
            while not engine.paused:
                await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(client.text) < length // 2
        run_at_once(fake.upstream.sweep(monotonic() + 100))
        assert fake.upstream.silence_duration_s(monotonic() + 100) == 0.0
        client.ready()
        async with asyncio.timeout(PATIENCE_S):
            await asking
        assert len(client.text.partition(b"\r\n\r\n")[2]) == length


async def test_a_client_that_is_slow_until_the_end_leaves_no_paused_connection() -> None:
    async with engines() as fake:

        class SlowAtLast(FakeClient):
            def write(self, data: bytes) -> None:
                super().write(data)
                self.slow()

        await fake.ask(SlowAtLast())
        async with asyncio.timeout(PATIENCE_S):
            assert (await fake.ask()).state is RelayState.DONE
        assert fake.accepted.qsize() == 1


async def test_unsolicited_bytes_close_the_connection() -> None:
    async with engines() as fake:
        await fake.ask()
        engine = await fake.accepted.get()
        engine.transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await engine.gone.wait()


async def test_sockets_disable_nagle_and_requests_carry_the_engines_own_key() -> None:
    async with engines() as fake:
        await fake.ask()
        (connection,) = fake.upstream.connections
        assert connection.transport is not None
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert b"authorization: Bearer the-engines-key\r\n" in fake.upstream.request_head(
            "/v1/completions"
        )


async def test_all_requests_to_a_dead_engine_can_be_failed() -> None:
    async with engines() as fake:
        asked: list[FakeEngine] = []
        fake.react = asked.append
        asking = [asyncio.create_task(fake.ask()) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 3:
                await asyncio.sleep(0)
        fake.upstream.fail_all("ejected", "gone")
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [error.kind for error in found if isinstance(error, UpstreamError)] == [
            "ejected"
        ] * 3


async def test_a_stream_in_the_middle_of_an_event_is_failed_after_that_event() -> None:
    async with engines() as fake:
        whole, (half, rest) = b'data: {"n": 1}\n\n', (b'data: {"n"', b": 2}\n\n")
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        asked: list[FakeEngine] = []
        fake.react = asked.append
        clients = [FakeClient(), FakeClient()]
        asking = [asyncio.create_task(fake.ask(client)) for client in clients]
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 2:
                await asyncio.sleep(0)
            for engine, event in zip(asked, (whole, half), strict=True):
                engine.transport.write(
                    head + encode_chunk(event + b" " * MAX_FIRST_EVENT if event is half else event)
                )
            while not all(client.text for client in clients):
                await asyncio.sleep(0)
            assert fake.upstream.fail_between_events("shutdown", "over") == 1
            asked[1].transport.write(encode_chunk(rest))
            while fake.upstream.fail_between_events("shutdown", "over"):
                await asyncio.sleep(0)
            found = await asyncio.gather(*asking, return_exceptions=True)
        assert [error.kind for error in found if isinstance(error, UpstreamError)] == [
            "shutdown"
        ] * 2
        assert sum(client.text.endswith(encode_chunk(rest)) for client in clients) == 1


def test_a_connection_is_closed_if_its_request_is_cancelled_while_connecting() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        upstream = ConnectionPool(url, None, PATIENCE, WriteQueue(loop))
        standing = loop.create_future()
        upstream.connections = NotifyingSet(standing)
        sending = asyncio.ensure_future(upstream.send(b"", FakePayload(), Relay(b""), FakeClient()))
        await standing
        sending.cancel()
        await asyncio.wait((sending,))
        assert sending.cancelled()
        assert not upstream.connections
        server.close()

    uvloop.run(run())


class NotifyingSet(set[UpstreamConnection]):
    def __init__(self, standing: asyncio.Future[None]) -> None:
        super().__init__()
        self._standing = standing

    def add(self, connection: UpstreamConnection) -> None:
        super().add(connection)
        if not self._standing.done():
            self._standing.set_result(None)


@pytest.mark.skipif(QUICKACK is None, reason="TCP_QUICKACK is Linux's")
async def test_a_running_stream_uses_delayed_acks_until_the_next_request() -> None:
    assert QUICKACK is not None
    event = encode_chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    quick: list[int] = []

    async with engines() as fake:

        def stream(engine: FakeEngine) -> None:
            asyncio.get_running_loop().create_task(flow(engine))

        async def flow(engine: FakeEngine) -> None:
            engine.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            engine.transport.write(b"transfer-encoding: chunked\r\n\r\n" + event)
            for number in range(4):
                await until_read(client, event)
                if not number:  # the kernel also does this after a silence
                    sock_of(client).setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
                quick.append(sock_of(client).getsockopt(socket.IPPROTO_TCP, QUICKACK))
                client.text.clear()
                engine.transport.write(event)
            engine.transport.write(encode_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        fake.react = stream
        for _ in range(2):
            client = FakeClient()
            assert (await fake.ask(client)).state is RelayState.DONE
            assert quick == [1, 0, 0, 0]
            quick.clear()


def sock_of(client: FakeClient) -> socket.socket:
    assert client.source is not None
    assert client.source.transport is not None
    found: socket.socket = client.source.transport.get_extra_info("socket")
    return found


async def until_read(client: FakeClient, event: bytes) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while event not in client.text:
            await asyncio.sleep(0)


async def test_a_kernel_without_quickack_does_not_break_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = encode_chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    whole = head + 3 * event + encode_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    monkeypatch.setattr("gateway.http.ack_delay.QUICKACK", 255)  # an option that no kernel has
    async with engines() as fake:
        fake.react = lambda engine: engine.transport.write(whole)
        assert (await fake.ask()).state is RelayState.DONE
