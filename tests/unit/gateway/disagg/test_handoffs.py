"""Tests of what is kept of KV handoffs: engine ids, statistics, late transfers, and freed KV."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.disagg.handoffs import RELEASE_TIMEOUT_S, Handoffs
from gateway.disagg.state_machine import State
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from gateway.protocol.response.relay import Relay
from gateway.request_record import SplitRecord
from policies.pricing.split_decision import EndpointPair
from tests.metrics_page import total
from tests.replacement import stand_in
from tests.unit.gateway.disagg.fake_upstream import FakeConnection, FakeUpstream


def made(there: FakeUpstream | None = None, rng: Any = None) -> Handoffs:
    return Handoffs(Metrics(), rng or Random(1), stand_in(WriteQueue, there or FakeUpstream()))


def pair(prefill: str = "p", decode: str = "d", pulled_tokens: int = 0) -> Any:
    def pick(name: str) -> Any:
        return SimpleNamespace(
            candidate=SimpleNamespace(endpoint=SimpleNamespace(name=name)), cached_tokens=0
        )

    return EndpointPair(pick(prefill), pick(decode), 0.1, pulled_tokens)

    # Releases


async def test_a_release_request_is_forgotten_when_it_ends() -> None:
    wire = FakeConnection()
    there = FakeUpstream(wire)
    handoffs = made(there)
    handoffs.send_release_request(there, (b"head ", b"body"), "client_gone")  # type: ignore[arg-type]
    assert wire.carried == [b"head body"]
    assert len(handoffs._running) == 1
    wire.ends()
    assert not handoffs._running
    assert (
        total(
            handoffs.metrics.render().decode(),
            "penstock_split_leases_given_up_total",
            reason="client_gone",
        )
        == 1
    )


async def test_a_release_request_is_closed_after_its_time_limit() -> None:
    wire = FakeConnection()
    there = FakeUpstream(wire)
    handoffs = made(there)
    handoffs.send_release_request(there, (b"head ", b"body"), "client_gone")  # type: ignore[arg-type]
    assert [delay_s for delay_s, _ in there.loop.later] == [RELEASE_TIMEOUT_S]
    there.loop.run_due()
    assert wire.aborted
    assert not handoffs._running


async def test_release_requests_end_with_the_gateway() -> None:
    wires = FakeConnection(), FakeConnection()
    there = FakeUpstream(*wires)
    handoffs = made(there)
    for _ in wires:
        handoffs.send_release_request(there, (b"head ", b"body"), "client_gone")  # type: ignore[arg-type]
    handoffs.close()
    assert all(wire.aborted for wire in wires)

    # Overdue transfers


class Moving:
    def __init__(self, handoffs: Handoffs, takes: Moving | None = None) -> None:
        self.handoffs, self.takes, self.told = handoffs, takes, 0

    def on_overdue(self) -> None:
        self.told += 1
        if self.takes is not None:
            self.handoffs.transfers.pop(self.takes, None)


def test_an_overdue_transfer_is_notified_once_at_its_deadline() -> None:
    handoffs = made()
    soon, late = Moving(handoffs), Moving(handoffs)
    handoffs.transfers |= {soon: 5.0, late: 5.1}
    handoffs.sweep(4.9)
    assert (soon.told, late.told) == (0, 0)
    for _ in range(2):
        handoffs.sweep(5.0)
        assert (soon.told, late.told) == (1, 0)
    assert list(handoffs.transfers) == [late]


def test_a_transfer_removed_during_another_notification_is_not_notified() -> None:
    handoffs = made()
    left = Moving(handoffs)
    first = Moving(handoffs, takes=left)
    handoffs.transfers |= {first: 5.0, left: 5.0}
    handoffs.sweep(6.0)
    assert (first.told, left.told) == (1, 0)

    # Handoff numbers


def test_live_handoffs_have_different_numbers() -> None:
    drawn = iter([7, 1 << 50, 1 << 50, 1 << 51, 1 << 50])
    handoffs = made(rng=SimpleNamespace(getrandbits=lambda bits: next(drawn)))
    assert [handoffs.take_number(), handoffs.take_number()] == [1 << 50, 1 << 51]
    assert handoffs.live_count == 2
    handoffs.give_back_number(1 << 50)
    assert handoffs.take_number() == 1 << 50

    # Pair figures


def ended(handoffs: Handoffs, state: State, transport: str | None = None, now: float = 0.0) -> None:
    record = SplitRecord("split")
    record.prefill_sent_at, record.prefilled_at = now + 1.0, now + 3.0
    record.transport = transport
    relay: Any = SimpleNamespace(first_token_at=now + 3.5)
    handoffs.count_attempt(pair(), handoffs.figures(pair()), state, record, relay)


@pytest.mark.parametrize(
    ("state", "served", "failed"),
    [(State.DONE, 1, 0), (State.FAILED, 0, 1), (State.GONE, 0, 0)],
    ids=str,
)
def test_each_attempt_of_a_pair_counts_once_and_disconnects_do_not_count(
    state: State, served: int, failed: int
) -> None:
    handoffs = made()
    for count in (1, 2):
        ended(handoffs, state)
        figures, text = handoffs.figures(pair()), handoffs.metrics.render().decode()
        assert (figures.served, figures.failed) == (count * served, count * failed)
        for result, counter in (("served", served), ("failed", failed)):
            assert total(text, "penstock_split_pairs_total", result=result) == count * counter
    assert (figures.prefill_s, figures.handoff_s) == ((2.0, 0.5) if served else (None, None))


@pytest.mark.parametrize(
    ("state", "tokens", "result"),
    [
        (State.DONE, 2048, "pulled"),
        (State.DONE, 0, "computed"),
        (State.FAILED, 2048, "failed"),
        (State.GONE, 2048, None),
    ],
)
def test_a_pull_is_counted_apart_from_split_requests(
    state: State, tokens: int, result: str | None
) -> None:
    handoffs, pull = made(), pair(pulled_tokens=2048)
    record, relay = SplitRecord("pull_cheaper"), SimpleNamespace(first_token_at=3.5)
    record.prefill_sent_at, record.prefilled_at, record.pulled_tokens = 1.0, 3.0, tokens
    handoffs.count_attempt(pull, handoffs.figures(pull), state, record, stand_in(Relay, relay))
    page = handoffs.metrics.render().decode()
    assert total(page, "penstock_pulls_total") == (result is not None)
    assert total(page, "penstock_pulled_tokens_total") == (2048 if result == "pulled" else 0)
    if result is not None:
        assert total(page, "penstock_pulls_total", result=result) == 1
    assert total(page, "penstock_split_pairs_total") == 0
    assert not handoffs.pairs
    assert list(handoffs.pulls) == [("p", "d")]
    handoffs.forget_endpoint("p")
    assert not handoffs.pulls


def test_the_transport_of_a_pair_is_the_last_one_reported() -> None:
    handoffs = made()
    ended(handoffs, State.DONE, "rdma")
    ended(handoffs, State.DONE)
    assert handoffs.figures(pair()).transport == "rdma"


def test_removing_an_endpoint_removes_its_pairs() -> None:
    handoffs = made()
    for names in (("p", "d"), ("p", "e"), ("q", "d"), ("q", "e")):
        handoffs.figures(pair(*names))
    handoffs.forget_endpoint("d")
    assert list(handoffs.pairs) == [("p", "e"), ("q", "e")]
