"""What a turn of the event loop writes and what it puts off, and that no byte is lost, doubled or overtaken by that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.framing import chunk
from gateway.outbox import MOST, MOST_BYTES, TURN, Outbox
from gateway.relay import Relay, State
from gateway.upstream import Connection, Patience, Upstream
from tests.unit.gateway.test_upstream import Body, Client

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = chunk(b'data: {"choices":[{"delta":{"content":"."}}]}\n\n')
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
RELAY = Relay(b"")


class Loop:
    """Turns of an event loop, taken by hand."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def turn(self) -> bool:
        """Whether there was something to do."""
        soon, self._soon = self._soon, []
        for callback in soon:
            callback()
        return bool(soon)


class Said:
    """An engine's connection whose bytes go to a client of its own as they are."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._wire = Mock(is_closing=lambda: False, write=self._write)
        self.sent = b""

    def say(self, data: bytes) -> None:
        if self._outbox.full:
            self._outbox.put_off(self, RELAY, data)
        else:
            self.catch_up(RELAY, data)

    def catch_up(self, relay: Relay, data: bytes) -> None:
        assert relay is RELAY
        self._outbox.post(self._wire, data)

    def _write(self, data: bytes) -> None:
        self.sent += data


def outbox() -> tuple[Outbox, Loop]:
    loop = Loop()
    return Outbox(cast(asyncio.AbstractEventLoop, loop)), loop


def test_a_turn_relays_so_much_and_who_asks_meanwhile_is_answered_before_the_rest() -> None:
    made, loop = outbox()
    streams = [Said(made) for _ in range(10 * TURN)]
    for one in streams:
        one.say(b".")
    loop.turn()
    behind = [one.sent for one in streams].count(b"")
    refused = Said(made)
    refused.catch_up(RELAY, b"429")
    loop.turn()
    assert refused.sent == b"429"
    assert behind == 8 * TURN
    assert [one.sent for one in streams].count(b"") == 7 * TURN
    while loop.turn():
        pass
    assert all(one.sent == b"." for one in streams)
    assert not made.full


def test_a_few_pieces_are_written_in_the_turn_in_which_they_came() -> None:
    made, loop = outbox()
    streams = [Said(made) for _ in range(TURN)]
    for one in streams:
        one.say(b".")
    loop.turn()
    assert all(one.sent for one in streams)
    assert not loop.turn()


def test_beyond_so_many_pieces_reading_is_as_slow_as_relaying() -> None:
    made, _ = outbox()
    stream = Said(made)
    for _ in range(TURN + MOST):
        stream.say(b".")
    assert not stream.sent
    for read in range(1, 4):
        stream.say(b".")
        made.flush()
        assert len(stream.sent) == TURN + read


def test_large_pieces_are_put_off_up_to_so_many_bytes() -> None:
    """By number alone, a few engines that answer fast took hundreds of MiB."""
    made, loop = outbox()
    stream, piece = Said(made), b"x" * (MOST_BYTES // 16)
    for _ in range(TURN):
        stream.say(b".")
    for _ in range(17):
        stream.say(piece)
    made.flush()
    assert len(stream.sent) == TURN + len(piece)
    while loop.turn():
        pass
    assert len(stream.sent) == TURN + 17 * len(piece)
    assert made._late_bytes == 0


def test_a_piece_that_cannot_be_relayed_holds_nobody_up() -> None:
    made, loop = outbox()
    broken, streams = Mock(catch_up=Mock(side_effect=ValueError("a bug"))), [Said(made) for _ in range(TURN)]
    for one in streams:
        one.say(b".")
    made.put_off(broken, RELAY, b"?")
    for one in streams:
        one.say(b".")
    with pytest.raises(ValueError, match="a bug"):
        loop.turn()
    while loop.turn():
        pass
    assert all(one.sent == b".." for one in streams)


@pytest.mark.parametrize("late", [0, 1])
def test_what_a_write_makes_somebody_post_is_written_although_that_write_failed(late: int) -> None:
    made, loop = outbox()
    stream, behind = Said(made), Said(made)

    def fail(_: bytes) -> None:
        stream.say(b".")
        raise OSError("gone")

    made.post(Mock(is_closing=lambda: False, write=fail), b"x")
    for _ in range(late):
        made.put_off(behind, RELAY, b".")
    with pytest.raises(OSError, match="gone"):
        loop.turn()
    while loop.turn():
        pass
    assert (stream.sent, behind.sent) == (b".", b"." * late)


def test_who_can_be_written_to_no_more_costs_the_others_nothing() -> None:
    made, loop = outbox()
    gone = Mock(side_effect=RuntimeError("after write_eof()"))
    closed, stream = Mock(is_closing=lambda: False, write=gone), Said(made)
    made.post(closed, b"x")
    stream.say(b".")
    loop.turn()
    assert stream.sent == b"."
    closed.abort.assert_called_once_with()


@given(st.lists(st.sampled_from(["turn", "end 0", "end 1", *["burst"] * 4]), max_size=30), st.integers(1, 90))
def test_whatever_is_put_off_each_client_gets_all_of_its_bytes_in_their_order(steps: list[str], size: int) -> None:
    made, loop = outbox()
    streams = [Said(made) for _ in range(3)]
    said = [b""] * 3
    for number, step in enumerate(steps):
        if step == "turn":
            loop.turn()
        elif step == "burst":
            for at in range(size):
                data = b"%d.%d " % (number, at)
                streams[at % 3].say(data)
                said[at % 3] += data
        else:
            ending = int(step[-1])
            made.hurry(streams[ending])
            made.flush()
            assert streams[ending].sent == said[ending]
    while loop.turn():
        pass
    assert [one.sent for one in streams] == said


class Asked:
    """A connection to an engine that is to answer, and its client."""

    def __init__(self, pool: Upstream) -> None:
        self.connection, self.client, self.relay = Connection(pool), Client(), Relay(b"")
        self.wire = Mock(is_closing=Mock(return_value=False))
        self.connection.connection_made(self.wire)
        self.done = self.connection.carry(b"", Body(), self.relay, self.client)
        self.connection.data_received(HEAD)


@pytest.fixture
async def pool() -> Upstream:
    """Connections to one engine."""
    return Upstream("http://engine", None, Patience(1.0, 1.0, 1.0), Outbox(asyncio.get_running_loop()))


def full(pool: Upstream) -> None:
    """Let this turn have written enough."""
    for _ in range(TURN):
        pool.outbox.post(Mock(), b".")


async def test_an_answer_whose_end_was_put_off_is_whole_although_the_engine_closed_behind_it(pool: Upstream) -> None:
    asked = Asked(pool)
    full(pool)
    asked.connection.data_received(EVENT)
    asked.connection.data_received(END)
    assert EVENT not in asked.client.text
    asked.connection.connection_lost(None)
    await asked.done
    assert asked.relay.state is State.DONE
    assert asked.client.text.endswith(EVENT + END)


async def test_what_an_aborted_answer_had_put_off_reaches_nobody(pool: Upstream) -> None:
    asked = Asked(pool)
    full(pool)
    asked.connection.data_received(EVENT)
    asked.connection.abort()
    await asyncio.sleep(0)
    assert EVENT not in asked.client.text


async def test_bytes_put_off_behind_an_answers_end_close_the_connection(pool: Upstream) -> None:
    asked = Asked(pool)
    full(pool)
    asked.connection.data_received(EVENT + END)
    asked.connection.data_received(EVENT)
    await asyncio.sleep(0)
    assert asked.client.text.endswith(EVENT + END)
    asked.wire.abort.assert_called_once()
