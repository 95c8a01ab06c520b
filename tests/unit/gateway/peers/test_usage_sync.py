"""Tests that a gateway counts what tenants have used at other gateways: quotas and sessions."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import msgspec

from gateway.peers.known_peers import EXPIRY_S
from gateway.peers.usage_sync import MAX_ROWS
from gateway.protocol.errors import GatewayError
from policies.admission.admission_policy import RequestOutcome
from policies.routing_types import Pick, Request
from tests.unit.gateway.peers.peer_gateways import SECRET, Gateway, run, turn, warm

LIMITS = {"requests_per_minute": 10, "tokens_per_minute": 100_000}
TENANTS = [
    {"name": "a", "key": "sk-a-of-the-fleet", "limits": LIMITS},
    {"name": "b", "key": "sk-b-of-the-fleet"},
]
REQUEST = Request("r", "m", "a", 1000, 100, session="talk")


def gateways(count: int = 2) -> list[Gateway]:
    return [Gateway(number + 1, tenants=TENANTS) for number in range(count)]


def send_requests(gateway: Gateway, times: int = 1) -> int:
    # Send `times` requests of the tenant; return how many are admitted.
    admitted = 0
    for _ in range(times):
        try:
            gateway.gate.quotas.take(REQUEST)
        except GatewayError:
            continue
        admitted += 1
    return admitted


def converse(gateway: Gateway, session: str, tokens: int, now: float) -> Callable[[float], None]:
    # Admit a request of the session.
    #
    # Returns a function that ends it, at a given time, with ten output tokens.
    (room,) = gateway.gate.pool_queues()
    request = msgspec.structs.replace(REQUEST, session=session, prompt_tokens=tokens - 10)
    result = msgspec.structs.replace(gateway.ask(b""), request=request, now=now)
    room.on_reserved(result, Pick(gateway.candidates[0], 0, 0.0, 1, ""))
    return lambda now: room.on_finished(request, lambda: RequestOutcome(now, 0.1, None, 10))


def active_sessions(gateway: Gateway) -> tuple[int, int]:
    (room,) = gateway.gate.pool_queues()
    assert room.sessions is not None
    return len(room.sessions), room.sessions.tokens


async def test_quota_used_at_one_gateway_is_deducted_at_all() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    assert send_requests(one, 7) == 7
    run([one, two], now, 0.2)
    assert send_requests(two, 7) == 3
    run([one, two], now + 0.2, 0.2)
    assert (send_requests(one), send_requests(two)) == (0, 0)


async def test_quota_is_agreed_on_while_the_gateways_change_their_key() -> None:
    old, new = SECRET, b"the next secret of sixteen bytes"
    one = Gateway(1, old, TENANTS, other_secret=new)
    two = Gateway(2, new, TENANTS, other_secret=old)
    now = warm(one, two, now=monotonic())
    assert send_requests(one, 7) == 7
    run([one, two], now, 0.2)
    assert send_requests(two, 7) == 3
    run([one, two], now + 0.2, 0.2)
    assert (send_requests(one), send_requests(two)) == (0, 0)


async def test_quota_refunded_at_one_gateway_is_available_at_another() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    charge = one.gate.quotas.take(REQUEST)
    assert charge is not None
    assert send_requests(one, 9) == 9
    now = run([one, two], now, 0.2)
    assert send_requests(two) == 0
    one.gate.quotas.settle(charge, REQUEST, None)
    run([one, two], now, 0.2)
    assert send_requests(two) == 1


async def test_use_during_a_disconnect_is_not_sent_afterwards() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    assert (send_requests(one, 20), send_requests(two, 20)) == (10, 10)
    for gateway in (one, two):
        gateway.view.outgoing_frames(now + 0.1, is_connected=False)
        assert not gateway.view.updates.quota_use
        assert not gateway.view.updates.charges
    run([one, two], now + 0.2, 0.2)
    for gateway in (one, two):
        left = gateway.gate.quotas.by_tenant["a"].levels(now)[0]
        assert left is not None
        assert left >= 0.0


async def test_waiting_updates_are_bounded_during_a_disconnect() -> None:
    (one,) = gateways(1)
    now = warm(one, now=monotonic())
    live = one.table.all()[0]
    one.view.updates.cache_reports += [(live.endpoint, 1.0, 0.5)] * (3 * MAX_ROWS)
    one.view.outgoing_frames(now + 0.1, is_connected=False)
    assert len(one.view.updates.cache_reports) == MAX_ROWS


async def test_late_quota_messages_are_dropped() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    send_requests(one, 10)
    for frame in one.view.outgoing_frames(now + 0.1, is_connected=True):
        two.take(frame, now + EXPIRY_S + 1.0, age_s=EXPIRY_S + 0.9)
    assert send_requests(two, 10) == 10


async def test_a_session_counts_once_at_all_gateways() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    converse(one, "talk", 1000, now)(now + 0.1)
    converse(one, "more", 500, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.2)
    assert active_sessions(one) == active_sessions(two) == (2, 1500)
    converse(two, "talk", 2000, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.2)
    assert active_sessions(one) == active_sessions(two) == (2, 2500)


async def test_a_session_of_another_gateway_expires_like_an_own_one() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    converse(one, "talk", 1000, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.2)
    one.view.bye_frame()
    for room in two.gate.pool_queues():
        room.tick(now + 170.0)
        assert active_sessions(two) == (1, 1000)
        room.tick(now + 181.0)
        assert active_sessions(two) == (0, 0)


async def test_sessions_served_during_a_disconnect_are_sent_afterwards() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    converse(one, "talk", 1000, now)(now + 0.1)
    one.view.outgoing_frames(now + 0.2, is_connected=False)
    run([one, two], now + 30.0, 0.2)
    assert active_sessions(two) == (1, 1000)


async def test_a_new_gateway_receives_the_sessions_of_all_others() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    for number in range(2 * MAX_ROWS):
        converse((one, two)[number % 2], f"talk {number}", 100, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.3)
    three = gateways(3)[2]
    three.view.start(now)
    run([one, two, three], now, 1.5)
    assert three.view.warm_up.is_warm
    assert (
        active_sessions(one) == active_sessions(three) == (2 * MAX_ROWS, 200_000 * MAX_ROWS // 1000)
    )


async def test_no_name_of_a_tenant_or_session_is_sent_in_clear_text() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    send_requests(one)
    converse(one, "canary-session", 1000, now)(now + 0.1)
    frames = b"".join(frame for _, (_, frame) in turn([one, two], now + 0.2))
    assert b"taken" in frames
    assert b"inside" in frames
    assert b"canary-session" not in frames
    assert b"sk-a" not in frames


def limited(most: int, count: int = 2) -> list[Gateway]:
    limits = {"concurrent_requests": most}
    tenants = [{"name": "a", "key": "sk-a-of-the-fleet", "limits": limits}, TENANTS[1]]
    return [Gateway(number + 1, tenants=tenants) for number in range(count)]


async def test_requests_in_progress_at_one_gateway_count_at_all_until_they_end() -> None:
    one, two = limited(5)
    now = warm(one, two, now=monotonic())
    charges = [one.gate.quotas.take(REQUEST) for _ in range(3)]
    now = run([one, two], now, 0.2)
    assert send_requests(two, 5) == 2
    now = run([one, two], now, 0.2)
    assert send_requests(one) == 0
    for charge in charges:
        assert charge is not None
        one.gate.quotas.settle(charge, REQUEST, 10)
    run([one, two], now, 0.2)
    assert (send_requests(two, 5), send_requests(one, 5)) == (3, 3)


async def test_requests_in_progress_at_a_gateway_that_is_gone_are_forgotten() -> None:
    one, two = limited(5)
    now = warm(one, two, now=monotonic())
    assert send_requests(one, 5) == 5
    now = run([one, two], now, 0.2)
    assert send_requests(two) == 0
    two.view.expire_peers(now + EXPIRY_S + 0.5)
    assert send_requests(two, 9) == 5
