"""Connections to an engine: reuse, the free second try, deadlines, cancelling, and backpressure both ways."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import pytest
import uvloop

from gateway.framing import chunk
from gateway.outbox import Outbox
from gateway.relay import Relay, State, UpstreamBroke
from gateway.told import FIRST_EVENT
from gateway.upstream import IDLE_S, QUICKACK, Connection, Patience, Upstream
from tests.fair_time import PATIENCE_S

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
PATIENCE = Patience(connect_s=1.0, first_byte_s=5.0, stall_s=1.0)


class Client:
    """A Downstream that keeps what it is given, and can be slow."""

    def __init__(self) -> None:
        self.writing_paused = False
        self.text = bytearray()
        self.source: Connection | None = None

    def write(self, data: bytes) -> None:
        self.text += data

    def set_source(self, source: Connection | None) -> None:
        self.source = source
        if source is not None and self.writing_paused:
            source.pause()

    def slow(self) -> None:
        self.writing_paused = True
        if self.source is not None:
            self.source.pause()

    def ready(self) -> None:
        self.writing_paused = False
        if self.source is not None:
            self.source.resume()


class Body:
    body = b"{}"


class Engine(asyncio.Protocol):
    """An engine's connection, steered by its test."""

    def __init__(self, accepted: asyncio.Queue[Engine], react: Callable[[Engine], None]) -> None:
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


def answer(engine: Engine) -> None:
    engine.transport.write(ANSWER)


def silence(engine: Engine) -> None:
    pass


class Engines:
    """A listening engine and the Upstream towards it."""

    def __init__(self, upstream: Upstream, accepted: asyncio.Queue[Engine]) -> None:
        self.upstream = upstream
        self.accepted = accepted
        self.react: Callable[[Engine], None] = answer

    async def asked(self) -> Engine:
        """An engine's connection on which a request has come."""
        async with asyncio.timeout(PATIENCE_S):
            engine = await self.accepted.get()
            while not engine.requests:
                await asyncio.sleep(0)
        return engine

    async def ask(self, client: Client | None = None) -> Relay:
        relay = Relay(b"")
        head = self.upstream.head("/v1/completions") + b"content-length: 2\r\n\r\n"
        await self.upstream.send(head, Body(), relay, client or Client())
        return relay


@asynccontextmanager
async def engines(patience: Patience = PATIENCE) -> AsyncIterator[Engines]:
    loop = asyncio.get_running_loop()
    accepted: asyncio.Queue[Engine] = asyncio.Queue()
    holder: list[Engines] = []
    server = await loop.create_server(lambda: Engine(accepted, lambda e: holder[0].react(e)), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://127.0.0.1:{port}", "the-engines-key", patience, Outbox(loop))
    holder.append(Engines(upstream, accepted))
    try:
        yield holder[0]
    finally:
        upstream.close()
        server.close()
        while not accepted.empty():
            accepted.get_nowait().transport.abort()


async def test_a_whole_answer_gives_its_connection_back_and_the_next_request_takes_it() -> None:
    async with engines() as made:
        for _ in range(3):
            client = Client()
            assert (await made.ask(client)).state is State.DONE
            assert client.text.endswith(b"\r\n\r\n{}")
            assert client.source is None
        assert made.accepted.qsize() == 1
        assert (await made.accepted.get()).requests == 3


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with engines() as made:
        await asyncio.gather(*(made.ask() for _ in range(5)))
        assert made.accepted.qsize() == 5
        await asyncio.gather(*(made.ask() for _ in range(5)))
        assert made.accepted.qsize() == 5


async def test_a_connection_older_than_the_engines_patience_is_not_reused() -> None:
    async with engines() as made:
        await made.ask()
        (connection,) = made.upstream.connections
        connection.idle_since -= IDLE_S + 0.1
        await made.ask()
        assert made.accepted.qsize() == 2


async def test_sweeping_closes_idle_connections_before_the_engine_does() -> None:
    async with engines() as made:
        await made.ask()
        engine = await made.accepted.get()
        made.upstream.sweep(monotonic() + IDLE_S + 0.1)
        async with asyncio.timeout(PATIENCE_S):
            await engine.gone.wait()
        assert not made.upstream.connections


@pytest.mark.parametrize("reset", [True, False])
async def test_a_pooled_connection_that_was_dead_costs_one_free_try(reset: bool) -> None:
    async with engines() as made:
        await made.ask()
        first = await made.accepted.get()

        def die(engine: Engine) -> None:
            if engine is not first:
                answer(engine)
            elif reset:
                engine.transport.abort()
            else:
                engine.transport.close()

        made.react = die
        assert (await made.ask()).state is State.DONE
        assert made.accepted.qsize() == 1


async def test_a_fresh_connection_that_dies_is_no_free_try() -> None:
    async with engines() as made:
        made.react = lambda engine: engine.transport.abort()
        with pytest.raises(UpstreamBroke) as broke:
            await made.ask()
        assert broke.value.kind in ("reset", "no_answer")
        assert made.accepted.qsize() == 1


async def test_a_pooled_connection_that_dies_within_an_answer_is_no_free_try() -> None:
    async with engines() as made:
        await made.ask()

        def half(engine: Engine) -> None:
            engine.transport.write(ANSWER[:30])
            engine.transport.close()

        made.react = half
        with pytest.raises(UpstreamBroke, match="before its answer ended"):
            await made.ask()
        assert made.accepted.qsize() == 1


@pytest.mark.parametrize("second_try", [False, True])
async def test_a_client_that_leaves_closes_the_engines_connection(second_try: bool) -> None:
    async with engines() as made:
        if second_try:
            await made.ask()
            dead = await made.accepted.get()
            made.react = lambda engine: engine.transport.abort() if engine is dead else None
        else:
            made.react = silence
        asking = asyncio.create_task(made.ask())
        async with asyncio.timeout(PATIENCE_S):
            engine = await made.asked()
            asking.cancel()
            await engine.gone.wait()
        assert not made.upstream.connections


async def test_a_refused_connection_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        upstream = Upstream(url, None, PATIENCE, Outbox(asyncio.get_running_loop()))
        with pytest.raises(UpstreamBroke) as broke:
            await upstream.send(b"", Body(), Relay(b""), Client())
    assert broke.value.kind == "connect_failed"


async def test_a_connection_that_was_called_off_is_given_back_by_no_answer() -> None:
    """It is half closed: what the next request sent on it would be lost."""
    async with engines() as made:
        made.react = silence
        client = Client()
        asking = asyncio.create_task(made.ask(client))
        engine = await made.asked()
        engine.eof_received = lambda: True  # type: ignore[attr-defined]  # it is slow to see that nobody asks any more
        assert client.source is not None
        client.source.call_off()
        engine.transport.write(ANSWER)
        assert (await asking).state is State.DONE
        assert made.upstream.pooled() is None


async def test_interim_answers_and_heads_are_no_sign_of_life() -> None:
    """Time to the first byte counts from the request, whatever is said before the answer."""
    async with engines() as made:
        made.react = silence
        asking = asyncio.create_task(made.ask())
        engine = await made.asked()
        (connection,) = made.upstream.connections
        asked_at = connection.heard_at
        relay = connection._relay
        assert relay is not None
        engine.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 3 + ANSWER[:-2])
        async with asyncio.timeout(PATIENCE_S):
            while relay.head is None:
                await asyncio.sleep(0)
        assert connection.heard_at == asked_at
        made.upstream.sweep(asked_at + 4.9)
        await asyncio.sleep(0)
        assert not asking.done()
        made.upstream.sweep(asked_at + 5.1)
        with pytest.raises(UpstreamBroke) as broke:
            await asking
        assert broke.value.kind == "timeout"


async def test_silence_before_and_within_an_answer_has_limits_of_its_own() -> None:
    async with engines() as made:
        made.react = silence
        asking = asyncio.create_task(made.ask())
        engine = await made.asked()
        now = monotonic()
        made.upstream.sweep(now + 4.5)
        engine.transport.write(ANSWER[:-1])
        (connection,) = made.upstream.connections
        async with asyncio.timeout(PATIENCE_S):
            while connection.heard_at < now:
                await asyncio.sleep(0)
        made.upstream.sweep(monotonic() + 0.5)
        await asyncio.sleep(0)
        assert not asking.done()
        made.upstream.sweep(monotonic() + 1.5)
        with pytest.raises(UpstreamBroke) as broke:
            await asking
        assert broke.value.kind == "timeout"


async def test_silence_is_counted_from_the_last_byte_of_any_answer_and_heads_are_none() -> None:
    async with engines() as made:
        made.react = lambda engine: engine.transport.write(ANSWER[:-2])
        asking = asyncio.create_task(made.ask())
        engine = await made.asked()
        (connection,) = made.upstream.connections
        assert made.upstream.heard_at == 0.0
        assert made.upstream.silence_s(connection.heard_at + 3.0) == pytest.approx(3.0, abs=0.2)
        engine.transport.write(b"{}")
        await asking
        assert made.upstream.heard_at > 0
        assert made.upstream.silence_s(monotonic() + 60) == 0.0


async def test_a_slow_client_stops_the_engine_and_is_no_silence_of_the_engines() -> None:
    block = bytes(256 * 1024)
    length = 64 * len(block)
    async with engines() as made:

        def pour(engine: Engine) -> None:
            engine.transport.write(ANSWER.split(b"content-length")[0] + b"content-length: %d\r\n\r\n" % length)
            for _ in range(64):
                engine.transport.write(block)

        made.react = pour
        client = Client()
        client.slow()
        asking = asyncio.create_task(made.ask(client))
        async with asyncio.timeout(PATIENCE_S):
            engine = await made.accepted.get()
            while not engine.paused:
                await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(client.text) < length // 2
        made.upstream.sweep(monotonic() + 100)
        assert made.upstream.silence_s(monotonic() + 100) == 0.0
        client.ready()
        async with asyncio.timeout(PATIENCE_S):
            await asking
        assert len(client.text.partition(b"\r\n\r\n")[2]) == length


async def test_a_client_slow_to_the_last_byte_leaves_no_paused_connection_in_the_pool() -> None:
    async with engines() as made:

        class SlowAtLast(Client):
            def write(self, data: bytes) -> None:
                super().write(data)
                self.slow()

        await made.ask(SlowAtLast())
        async with asyncio.timeout(PATIENCE_S):
            assert (await made.ask()).state is State.DONE
        assert made.accepted.qsize() == 1


async def test_bytes_nobody_asked_for_close_the_connection() -> None:
    async with engines() as made:
        await made.ask()
        engine = await made.accepted.get()
        engine.transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await engine.gone.wait()


async def test_sockets_send_at_once_and_carry_the_engines_own_key() -> None:
    async with engines() as made:
        await made.ask()
        (connection,) = made.upstream.connections
        assert connection.transport is not None
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert b"authorization: Bearer the-engines-key\r\n" in made.upstream.head("/v1/completions")


async def test_an_engine_known_to_be_dead_is_waited_for_by_nobody() -> None:
    async with engines() as made:
        asked: list[Engine] = []
        made.react = asked.append
        asking = [asyncio.create_task(made.ask()) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 3:
                await asyncio.sleep(0)
        made.upstream.fail_all("ejected", "gone")
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [error.kind for error in found if isinstance(error, UpstreamBroke)] == ["ejected"] * 3


async def test_who_is_in_the_middle_of_an_event_is_ended_after_it() -> None:
    async with engines() as made:
        whole, (half, rest) = b'data: {"n": 1}\n\n', (b'data: {"n"', b": 2}\n\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        asked: list[Engine] = []
        made.react = asked.append
        clients = [Client(), Client()]
        asking = [asyncio.create_task(made.ask(client)) for client in clients]
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 2:
                await asyncio.sleep(0)
            for engine, event in zip(asked, (whole, half), strict=True):
                engine.transport.write(head + chunk(event + b" " * FIRST_EVENT if event is half else event))
            while not all(client.text for client in clients):
                await asyncio.sleep(0)
            assert made.upstream.fail_at_seams("shutdown", "over") == 1
            asked[1].transport.write(chunk(rest))
            while made.upstream.fail_at_seams("shutdown", "over"):
                await asyncio.sleep(0)
            found = await asyncio.gather(*asking, return_exceptions=True)
        assert [error.kind for error in found if isinstance(error, UpstreamBroke)] == ["shutdown"] * 2
        assert sum(client.text.endswith(chunk(rest)) for client in clients) == 1


def test_a_connection_that_stands_when_its_asker_leaves_is_closed_and_forgotten() -> None:
    """On uvloop, which tells nobody of the end of a connection whose making was cancelled."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        upstream = Upstream(url, None, PATIENCE, Outbox(loop))
        standing = loop.create_future()
        upstream.connections = Noticing(standing)
        sending = asyncio.ensure_future(upstream.send(b"", Body(), Relay(b""), Client()))
        await standing
        sending.cancel()
        await asyncio.wait((sending,))
        assert sending.cancelled()
        assert not upstream.connections
        server.close()

    uvloop.run(run())


class Noticing(set[Connection]):
    """Connections; tells of the first before anybody else knows."""

    def __init__(self, standing: asyncio.Future[None]) -> None:
        super().__init__()
        self._standing = standing

    def add(self, connection: Connection) -> None:
        super().add(connection)
        if not self._standing.done():
            self._standing.set_result(None)


@pytest.mark.skipif(QUICKACK is None, reason="TCP_QUICKACK is Linux's")
async def test_a_stream_that_flows_is_acknowledged_by_twos_and_a_new_request_as_ever() -> None:
    """The option reads 0 while the kernel takes the two sides to converse."""
    assert QUICKACK is not None
    event = chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    quick: list[int] = []

    async with engines() as made:

        def stream(engine: Engine) -> None:
            asyncio.get_running_loop().create_task(flow(engine))

        async def flow(engine: Engine) -> None:
            engine.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            engine.transport.write(b"transfer-encoding: chunked\r\n\r\n" + event)
            for number in range(4):
                await until_read(client, event)
                if not number:  # as a silence before the first token does
                    sock_of(client).setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
                quick.append(sock_of(client).getsockopt(socket.IPPROTO_TCP, QUICKACK))
                client.text.clear()
                engine.transport.write(event)
            engine.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        made.react = stream
        for _ in range(2):
            client = Client()
            assert (await made.ask(client)).state is State.DONE
            assert quick == [1, 0, 0, 0]
            quick.clear()


def sock_of(client: Client) -> socket.socket:
    assert client.source is not None
    assert client.source.transport is not None
    found: socket.socket = client.source.transport.get_extra_info("socket")
    return found


async def until_read(client: Client, event: bytes) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while event not in client.text:
            await asyncio.sleep(0)


async def test_a_kernel_without_such_acknowledgements_breaks_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    event = chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = head + 3 * event + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    monkeypatch.setattr("gateway.upstream.QUICKACK", 255)  # which no kernel has
    async with engines() as made:
        made.react = lambda engine: engine.transport.write(whole)
        assert (await made.ask()).state is State.DONE
