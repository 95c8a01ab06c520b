"""A leg reports its end once, and reports nothing after it was closed, in whatever state."""

from __future__ import annotations

import pytest

from tests.unit.gateway.disagg.wires import There, Told, Wire, leg_to


async def test_it_reports_its_end_and_then_keeps_no_callbacks() -> None:
    wire, told = Wire(), Told()
    leg = leg_to(There(wire), told)
    leg.start()
    assert wire.carried == [b"head body"]
    leg.relay.on_first_token = lambda: None
    wire.ends()
    assert told.ends == [None]
    assert leg.is_over
    assert leg.relay.on_first_token is None
    leg.close()
    assert not wire.aborted


async def test_a_pooled_connection_that_was_dead_costs_nothing_and_says_once_that_it_was_sent() -> None:
    wire, told, sent = Wire(), Told(), list[int]()
    there = There(wire)
    leg = leg_to(there, told)
    leg.start(lambda: sent.append(1))
    wire.ends("reset")
    there.open()
    assert there.made[0].carried == [b"head body"]
    assert (told.ends, sent) == ([], [1])
    there.made[0].ends("reset")
    assert told.ends == ["reset"]
    assert len(there.made) == 1


@pytest.mark.parametrize("answered", [True, False])
async def test_what_an_engine_has_seen_is_not_sent_again(answered: bool) -> None:
    wire, told = Wire(), Told()
    there = There(wire)
    leg = leg_to(there, told)
    leg.start()
    if answered:
        leg.relay.feed(b"HTTP/1.1 200 OK\r\n", 0.0)
    kind = "reset" if answered else "stalled"
    wire.ends(kind)
    assert told.ends == [kind]
    assert there.made == []


async def test_closed_it_is_heard_of_no_more_and_its_connection_ends() -> None:
    wire, told = Wire(), Told()
    leg = leg_to(There(wire), told)
    leg.start()
    leg.close()
    assert wire.aborted
    assert wire.done.cancelled()
    assert leg.is_over
    assert told.ends == []


@pytest.mark.parametrize("late", [True, False])
async def test_closed_while_it_connects_it_sends_nothing(late: bool) -> None:
    """Also where the connection was just made."""
    there, told = There(), Told()
    there.deaf = late
    leg = leg_to(there, told)
    leg.start()
    leg.close()
    assert there.cancelled
    assert [(wire.carried, wire.aborted) for wire in there.made] == ([([], True)] if late else [])
    assert told.ends == []
    assert leg.sent_at is None


async def test_a_bug_ends_it_and_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    wire, told = Wire(), Told()
    wire.bug = ValueError("a bug")
    leg_to(There(wire), told).start()
    assert told.ends == ["internal"]
    assert wire.aborted
    assert "failed inside the gateway" in caplog.text


async def test_left_alone_it_is_closed_by_its_first_token_but_not_within_that_callback() -> None:
    wire, told = Wire(), Told()
    there = There(wire)
    leg = leg_to(there, told)
    leg.start()
    leg.close_in(5.0)
    assert leg.is_over
    assert [delay_s for delay_s, _ in there.loop.later] == [5.0]
    assert leg.relay.on_first_token is not None
    leg.relay.on_first_token()
    assert not wire.aborted
    there.loop.pass_by()
    assert wire.aborted
    assert told.ends == []


async def test_closed_later_with_a_callback_it_goes_on_until_its_time_is_over() -> None:
    wire, told, other = Wire(), Told(), Told()
    there = There(wire)
    leg = leg_to(there, told)
    leg.start()
    leg.close_in(5.0, other)
    assert leg.relay.on_first_token is None
    wire.ends()
    assert (told.ends, other.ends) == ([], [None])


async def test_its_bytes_can_be_let_go_of() -> None:
    wire, told = Wire(), Told()
    leg = leg_to(There(wire), told)
    leg.start()
    leg.release()
    assert leg.body == b""
