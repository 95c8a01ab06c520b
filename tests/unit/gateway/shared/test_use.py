"""What tenants and sessions use at one gateway, the others take into account. Time begins now."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import msgspec

from gateway.answer import GatewayError
from gateway.shared.peers import GONE_S
from gateway.shared.use import MOST_ROWS
from policies.admission import Outcome
from policies.model import Pick, Request
from tests.unit.gateway.shared.fleet import Gateway, run, turn, warm

LIMITS = {"requests_per_minute": 10, "tokens_per_minute": 100_000}
TENANTS = [{"name": "a", "key": "sk-a-of-the-fleet", "limits": LIMITS}, {"name": "b", "key": "sk-b-of-the-fleet"}]
REQUEST = Request("r", "m", "a", 1000, 100, session="talk")


def gateways(count: int = 2) -> list[Gateway]:
    return [Gateway(number + 1, tenants=TENANTS) for number in range(count)]


def asks(gateway: Gateway, times: int = 1) -> int:
    """How many requests of the tenant are not refused."""
    taken = 0
    for _ in range(times):
        try:
            gateway.gate.quotas.take(REQUEST)
        except GatewayError:
            continue
        taken += 1
    return taken


def converse(gateway: Gateway, session: str, tokens: int, now: float) -> Callable[[float], None]:
    """A request of the session is booked; what ends it, with an answer of ten tokens."""
    (room,) = gateway.gate.rooms()
    request = msgspec.structs.replace(REQUEST, session=session, prompt_tokens=tokens - 10)
    asked = msgspec.structs.replace(gateway.ask(b""), request=request, now=now)
    room.booked(asked, Pick(gateway.candidates[0], 0, 0.0, 1, ""))
    return lambda now: room.ended(request, lambda: Outcome(now, 0.1, None, 10))


def inside(gateway: Gateway) -> tuple[int, int]:
    """How many sessions are in, and their contexts' tokens."""
    (room,) = gateway.gate.rooms()
    assert room.sessions is not None
    return len(room.sessions), room.sessions.tokens


async def test_what_a_tenant_took_at_one_gateway_is_missing_from_its_quota_at_all() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    assert asks(one, 7) == 7
    run([one, two], now, 0.2)
    assert asks(two, 7) == 3
    run([one, two], now + 0.2, 0.2)
    assert (asks(one), asks(two)) == (0, 0)


async def test_what_was_given_back_at_one_gateway_can_be_taken_at_another() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    quota = one.gate.quotas.take(REQUEST)
    assert quota is not None
    assert asks(one, 9) == 9
    now = run([one, two], now, 0.2)
    assert asks(two) == 0
    one.gate.quotas.settle(quota, REQUEST, None)
    run([one, two], now, 0.2)
    assert asks(two) == 1


async def test_while_nobody_can_hear_each_gateway_counts_for_itself_and_tells_nothing_of_it_afterwards() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    assert (asks(one, 20), asks(two, 20)) == (10, 10)
    for each in (one, two):
        each.view.flush(now + 0.1, connected=False)
        assert not each.view.news.taken
        assert not each.view.news.charged
    run([one, two], now + 0.2, 0.2)
    for each in (one, two):
        left = each.gate.quotas.by_tenant["a"].spent(0, 0, now).requests_left
        assert left is not None
        assert left >= 0.0


async def test_what_waits_to_be_told_is_bounded_while_nobody_can_hear() -> None:
    (one,) = gateways(1)
    now = warm(one, now=monotonic())
    live = one.table.all()[0]
    one.view.news.confirmed += [(live.endpoint, 1.0, 0.5)] * (3 * MOST_ROWS)
    one.view.flush(now + 0.1, connected=False)
    assert len(one.view.news.confirmed) == MOST_ROWS


async def test_words_of_quotas_that_come_late_are_not_counted() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    asks(one, 10)
    for frame in one.view.flush(now + 0.1, connected=True):
        two.take(frame, now + GONE_S + 1.0, age_s=GONE_S + 0.9)
    assert asks(two, 10) == 10


async def test_a_session_is_in_at_all_gateways_once_whichever_serves_it() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    converse(one, "talk", 1000, now)(now + 0.1)
    converse(one, "more", 500, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.2)
    assert inside(one) == inside(two) == (2, 1500)
    converse(two, "talk", 2000, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.2)
    assert inside(one) == inside(two) == (2, 2500)


async def test_a_session_told_of_is_let_go_when_it_has_been_silent_as_long_as_ones_own() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    converse(one, "talk", 1000, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.2)
    one.view.bye()
    for room in two.gate.rooms():
        room.tick(now + 170.0)
        assert inside(two) == (1, 1000)
        room.tick(now + 181.0)
        assert inside(two) == (0, 0)


async def test_sessions_served_while_nobody_could_hear_are_told_afterwards() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    converse(one, "talk", 1000, now)(now + 0.1)
    one.view.flush(now + 0.2, connected=False)
    run([one, two], now + 30.0, 0.2)
    assert inside(two) == (1, 1000)


async def test_a_newcomer_knows_all_sessions_whoever_served_them() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    for number in range(2 * MOST_ROWS):
        converse((one, two)[number % 2], f"talk {number}", 100, now)(now + 0.1)
    now = run([one, two], now + 0.1, 0.3)
    three = gateways(3)[2]
    three.view.begin(now)
    run([one, two, three], now, 1.5)
    assert three.view.warming.warm
    assert inside(one) == inside(three) == (2 * MOST_ROWS, 200_000 * MOST_ROWS // 1000)


async def test_nothing_of_a_tenant_or_a_session_travels_in_clear() -> None:
    one, two = gateways()
    now = warm(one, two, now=monotonic())
    asks(one)
    converse(one, "canary-session", 1000, now)(now + 0.1)
    said = b"".join(frame for _, (_, frame) in turn([one, two], now + 0.2))
    assert b"taken" in said
    assert b"inside" in said
    assert b"canary-session" not in said
    assert b"sk-a" not in said
