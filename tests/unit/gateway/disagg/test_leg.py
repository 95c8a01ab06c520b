"""Tests that each of the two HTTP requests of a split request reports its end exactly once.

If it was closed before its end, it reports nothing.
"""

from __future__ import annotations

import pytest

from tests.unit.gateway.disagg.fake_upstream import (
    EndRecorder,
    FakeConnection,
    FakeUpstream,
    leg_to,
)


async def test_it_reports_its_end_and_then_keeps_no_callbacks() -> None:
    connection, recorder = FakeConnection(), EndRecorder()
    leg = leg_to(FakeUpstream(connection), recorder)
    leg.start()
    assert connection.carried == [b"head body"]
    leg.relay.on_first_token = lambda: None
    connection.ends()
    assert recorder.ends == [None]
    assert leg.is_over
    assert leg.relay.on_first_token is None
    leg.close()
    assert not connection.aborted


async def test_a_dead_pooled_connection_is_retried_and_the_send_is_reported_once() -> None:
    connection, recorder, sent = FakeConnection(), EndRecorder(), list[int]()
    upstream = FakeUpstream(connection)
    leg = leg_to(upstream, recorder)
    leg.start(lambda: sent.append(1))
    connection.ends("reset")
    upstream.open()
    assert upstream.opened[0].carried == [b"head body"]
    assert (recorder.ends, sent) == ([], [1])
    upstream.opened[0].ends("reset")
    assert recorder.ends == ["reset"]
    assert len(upstream.opened) == 1


@pytest.mark.parametrize("answered", [True, False])
async def test_what_an_engine_has_seen_is_not_sent_again(answered: bool) -> None:
    connection, recorder = FakeConnection(), EndRecorder()
    upstream = FakeUpstream(connection)
    leg = leg_to(upstream, recorder)
    leg.start()
    if answered:
        leg.relay.feed(b"HTTP/1.1 200 OK\r\n", 0.0)
    kind = "reset" if answered else "stalled"
    connection.ends(kind)
    assert recorder.ends == [kind]
    assert upstream.opened == []


async def test_a_closed_leg_reports_nothing_and_aborts_its_connection() -> None:
    connection, recorder = FakeConnection(), EndRecorder()
    leg = leg_to(FakeUpstream(connection), recorder)
    leg.start()
    leg.close()
    assert connection.aborted
    assert connection.done.cancelled()
    assert leg.is_over
    assert recorder.ends == []


@pytest.mark.parametrize("late", [True, False])
async def test_a_leg_closed_while_it_connects_sends_nothing(late: bool) -> None:
    upstream, recorder = FakeUpstream(), EndRecorder()
    upstream.ignores_cancel = late
    leg = leg_to(upstream, recorder)
    leg.start()
    leg.close()
    assert upstream.cancelled
    assert [(connection.carried, connection.aborted) for connection in upstream.opened] == (
        [([], True)] if late else []
    )
    assert recorder.ends == []
    assert leg.sent_at is None


async def test_an_exception_ends_the_leg_and_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection, recorder = FakeConnection(), EndRecorder()
    connection.bug = ValueError("a bug")
    leg_to(FakeUpstream(connection), recorder).start()
    assert recorder.ends == ["internal"]
    assert connection.aborted
    assert "failed inside the gateway" in caplog.text


async def test_a_detached_leg_is_closed_after_its_first_token_outside_that_callback() -> None:
    connection, recorder = FakeConnection(), EndRecorder()
    upstream = FakeUpstream(connection)
    leg = leg_to(upstream, recorder)
    leg.start()
    leg.close_in(5.0)
    assert leg.is_over
    assert [delay_s for delay_s, _ in upstream.loop.later] == [5.0]
    assert leg.relay.on_first_token is not None
    leg.relay.on_first_token()
    assert not connection.aborted
    upstream.loop.run_due()
    assert connection.aborted
    assert recorder.ends == []


async def test_a_leg_closed_with_a_delay_continues_until_the_delay_is_over() -> None:
    connection, recorder, other = FakeConnection(), EndRecorder(), EndRecorder()
    upstream = FakeUpstream(connection)
    leg = leg_to(upstream, recorder)
    leg.start()
    leg.close_in(5.0, other)
    assert leg.relay.on_first_token is None
    connection.ends()
    assert (recorder.ends, other.ends) == ([], [None])


async def test_the_request_bytes_can_be_released() -> None:
    connection, recorder = FakeConnection(), EndRecorder()
    leg = leg_to(FakeUpstream(connection), recorder)
    leg.start()
    leg.release()
    assert leg.body == b""
