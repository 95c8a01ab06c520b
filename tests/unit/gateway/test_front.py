"""The seam between front and lobby: whatever comes, in whatever pieces, is read as aiohttp's parser reads it."""

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

from gateway.lobby import Lobby
from tests.fair_time import PATIENCE_S
from tests.unit.gateway.seam import LAST, ODD, ORDINARY, House, Pipe, Seen, request, turns
from tests.unit.gateway.split.halves import front, holds, prefills

SEQUENCES = st.tuples(
    st.lists(st.sampled_from(ORDINARY), max_size=3),
    st.lists(st.sampled_from(ODD), max_size=1),
    st.lists(st.sampled_from(ORDINARY), max_size=2),
    st.lists(st.sampled_from(LAST), max_size=1),
)


def same(one: Seen, other: Seen) -> bool:
    return one[:3] == other[:3]


async def by_the_lobby(house: House, requests: list[bytes]) -> Seen:
    """What aiohttp's parser makes of them, one at a time."""
    return await house.see(house.lobby(), requests)


@pytest.mark.parametrize("number", range(len(ORDINARY)))
async def test_an_ordinary_request_never_sees_the_lobby_and_is_read_as_there(number: int) -> None:
    house = House()
    here = await house.see(house.front(), [ORDINARY[number]])
    assert not here.moved
    assert here.answers[0][0] == 200
    assert same(here, await by_the_lobby(house, [ORDINARY[number]]))


@pytest.mark.parametrize("odd", ODD + LAST)
async def test_everything_else_is_for_the_lobby_and_fares_as_if_it_had_come_there(odd: bytes) -> None:
    house = House()
    here = await house.see(house.front(), [ORDINARY[1], odd])
    assert here.moved
    assert same(here, await by_the_lobby(house, [ORDINARY[1], odd]))


@pytest.mark.parametrize("slow", [False, True])
async def test_requests_cut_at_any_byte_are_the_same_requests(slow: bool) -> None:
    house = House(slow)
    requests = [ORDINARY[2], ORDINARY[4], ODD[1], ORDINARY[1]]
    expected = await by_the_lobby(house, requests)
    sent = b"".join(requests)
    for at in range(len(sent) + 1):
        assert same(await house.see(house.front(), [sent[:at], sent[at:]]), expected), at


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.booleans(), st.lists(st.integers(0, 2000), max_size=6))
def test_any_sequence_in_any_pieces_is_read_as_the_lobby_reads_it_one_by_one(
    sequence: tuple[list[bytes], ...], slow: bool, cuts: list[int]
) -> None:
    async def run() -> None:
        house = House(slow)
        requests = list(itertools.chain(*sequence))
        expected = await by_the_lobby(house, requests)
        at_last = requests.pop() if sequence[3] else b""
        sent = b"".join(requests)
        ends = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
        parts = [sent[start:end] for start, end in itertools.pairwise(ends)]
        assert same(await house.see(house.front(), [*parts, at_last]), expected)

    asyncio.run(run())


@pytest.mark.parametrize(("field", "moves"), [("X-Mark: dripped", False), ("X_Mark: dripped", True)])
async def test_a_head_in_many_pieces_is_read_once_it_is_whole(field: str, moves: bool) -> None:
    """And not after every piece: that would take as long again for each."""
    house = House()
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    sent = request(b"{}", field)
    for byte in sent[:-3]:
        front.data_received(bytes([byte]))
        assert pipe.protocol is front
    await pipe.deliver(sent[-3:])
    assert (pipe.protocol is not front) == moves
    assert [body for _, body, _ in house.served] == [b"{}"]
    pipe.close()
    await turns()


@pytest.mark.parametrize("wrong", [b"X: a\nY", b"X" * 70_000])
async def test_an_unfinished_head_that_is_wrong_is_refused_without_waiting_for_its_end(wrong: bytes) -> None:
    house = House()
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    for at in range(0, len(wrong), 1000):
        await pipe.deliver((b"" if at else b"GET /v1/models HTTP/1.1\r\nHost: a\r\n") + wrong[at : at + 1000])
    assert pipe.text.startswith(b"HTTP/1.1 4")
    pipe.close()
    await turns()


async def test_requests_behind_one_that_waits_are_served_in_their_order_and_more_is_not_read() -> None:
    house = House(slow=True)
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    front.data_received(request(b"first"))
    for _ in range(3):
        front.data_received(request(b"x" * 30_000))
    assert pipe.paused
    await turns()
    await turns()
    assert not pipe.paused
    assert [len(body) for _, body, _ in house.served] == [5, 30_000, 30_000, 30_000]
    pipe.close()
    await turns()


async def test_answers_that_nobody_reads_hold_back_the_next_request() -> None:
    house = House()
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    front.pause_writing()
    front.data_received(request(b"one"))
    front.data_received(request(b"two"))
    assert [body for _, body, _ in house.served] == [b"one"]
    front.resume_writing()
    await turns()
    assert [body for _, body, _ in house.served] == [b"one", b"two"]
    pipe.close()
    await turns()


async def test_a_stopping_gateway_lets_the_answer_under_way_end() -> None:
    house = House(slow=True)
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    front.data_received(request())
    gone = front.finish()
    assert not pipe.closed
    await turns()
    assert pipe.closed
    assert gone.done()
    assert b"connection: close" in pipe.text


async def test_a_client_that_does_not_read_stays_one_in_the_lobby() -> None:
    """The transport tells of a change alone: without being told, the lobby would let an engine fill memory."""
    house = House()
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    front.pause_writing()
    front.paused_at = since = 7.0
    front.data_received(ODD[1])
    lobby = pipe.protocol
    assert isinstance(lobby, Lobby)
    assert lobby.writing_paused
    assert lobby.paused_at == since
    pipe.close()
    await turns()


class Unread(Pipe):
    """Closed, but for an answer that its client has not read to the end."""

    cuts = 0

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.cuts += 1
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


async def test_a_stopping_gateway_lets_a_slow_client_read_its_answer_to_the_end() -> None:
    house = House(slow=True)
    front = house.front()
    pipe = Unread(front)
    front.connection_made(pipe)
    front.since = monotonic() - 100  # of an age: what counts is when it closed
    front.data_received(request())
    front.finish()
    await turns()
    assert pipe.closed
    patience_s = house.limits.slow_reader
    front.sweep(monotonic() + patience_s - 1)
    assert pipe.cuts == 0
    front.sweep(monotonic() + patience_s + 1)
    assert pipe.cuts == 1
    await turns()


@pytest.mark.parametrize("kind", ["front", "lobby"])
async def test_an_idle_connection_on_which_a_request_has_come_is_not_closed(kind: str) -> None:
    """It came after the last read, and before the sweep in the same turn of the event loop."""
    house = House()
    protocol = house.front() if kind == "front" else house.lobby()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pipe = SocketPipe(protocol, ours)
        protocol.connection_made(pipe)
        theirs.send(request())
        much_later = monotonic() + house.limits.idle_timeout + 1
        protocol.sweep(much_later)
        await turns()
        assert not pipe.closed
        ours.recv(1000)
        protocol.sweep(much_later)
        await turns()
        assert pipe.closed


class SocketPipe(Pipe):
    """A transport with a socket, of which it does not read by itself."""

    def __init__(self, protocol: asyncio.Protocol, sock: socket.socket) -> None:
        super().__init__(protocol)
        self._socket = sock

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else super().get_extra_info(name, default)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_behind_more_than_is_read_is_noticed_all_the_same(reset: bool) -> None:
    asking = b'{"model":"demo","messages":[{"role":"user","content":"hi"}]}'
    async with front("vllm_nixl", [prefills()], [holds]) as f:
        url = urlsplit(f.app.url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(request(asking))
        asked = await f.decode[0].was_asked()
        writer.write(request(b"x" * 100_000))
        async with asyncio.timeout(PATIENCE_S):
            while not any(each._reading_paused for each in f.app.fronts):
                await asyncio.sleep(0.001)
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        async with asyncio.timeout(PATIENCE_S):
            await asked.closed.wait()
        await f.at_rest()
        assert f.metric("penstock_client_disconnects_total") == 1
