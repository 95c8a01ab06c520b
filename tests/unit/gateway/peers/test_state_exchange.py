"""Tests of how a gateway applies the state messages of other gateways, on the test's clock."""

from __future__ import annotations

from random import Random

import pytest

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.peers import peer_messages
from gateway.peers.bus_interface import FRAME_CAP_BYTES
from policies.admission.gateway_share import total_capacity
from policies.health.endpoint_health import HealthEvent
from policies.load_ledger import own_load
from tests.unit.gateway.peers.peer_gateways import SECRET, Gateway, run, turn, warm

PROMPT = Random(1).randbytes(64 * 200)


async def test_a_prompt_sent_by_one_gateway_is_in_the_index_of_all() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 1) as reservation:
        reservation.on_first_token()
        run([one, two], now, 0.2)
    assert one.cached(PROMPT) == two.cached(PROMPT)
    assert two.cached(PROMPT)[0] == 0
    assert two.cached(PROMPT)[1] >= len(PROMPT) // 4 * 31 // 32
    assert (
        two.candidates[1].load.prefix_cache_tokens == one.candidates[1].load.prefix_cache_tokens > 0
    )


async def test_prompts_of_a_removed_endpoint_are_not_recorded_for_its_slots_next_owner() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 1):
        (frame,) = one.view.outgoing_frames(now, is_connected=False)
        two.table.all()[1].is_leaving = True
        two.take(frame, now)
    assert two.cached(PROMPT)[1] == 0
    assert two.dropped() == {"unknown_endpoint": 1.0}


async def test_a_prompt_that_was_never_computed_is_removed_from_all_indexes() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 0):
        run([one, two], now, 0.2)
        assert two.cached(PROMPT)[0] > 0
    run([one, two], now + 0.2, 0.2)
    assert one.cached(PROMPT) == two.cached(PROMPT) == [0, 0]


async def test_reported_cache_hits_correct_the_index_of_every_gateway() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    prompts = [Random(seed).randbytes(64 * 100) for seed in range(20)]
    for prompt in prompts:
        with one.reserve(prompt, 0) as reservation:
            reservation.on_first_token()
    for _ in range(30):
        one.prefixes.confirm_cached_share(one.table.all()[0], 1.0, 0.1)
    run([one, two], now, 0.3)
    trusts = [gateway.prefixes.index._holders[0].trust for gateway in (one, two)]
    assert trusts[0] == trusts[1] < 0.5


async def test_reservations_of_one_gateway_count_at_the_others_until_they_end() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 0), one.reserve(PROMPT, 0):
        now = run([one, two], now, 0.2)
        load, idle = two.candidates[0].load, two.candidates[1].load
        assert (load.in_flight, own_load(load).in_flight) == (2, 0)
        assert load.prefill_tokens == 2 * (len(PROMPT) // 4)
        assert load.prefill_done_at > idle.prefill_done_at
        assert total_capacity(two.candidates) == 14
    run([one, two], now, 0.3)
    assert two.candidates[0].load.in_flight == 0
    assert own_load(one.candidates[0].load) == own_load(two.candidates[0].load)
    assert total_capacity(two.candidates) == 16


async def test_a_gateway_keeps_an_equal_share_of_capacity_whatever_the_others_reserve() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    holdings = [one.reserve(PROMPT, slot) for slot in (0, 1) for _ in range(8)]
    run([one, two], now, 0.2)
    assert total_capacity(two.candidates) == 8
    for reservation in holdings:
        reservation.__exit__(None, None, None)


async def test_reservations_of_a_gateway_expire_two_seconds_after_its_last_message() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 0):
        now = run([one, two], now, 0.2)
        assert two.candidates[0].load.in_flight == 1
        now = run([two], now, 1.3)
        assert two.candidates[0].load.in_flight == 1
        run([two], now, 1.0)
        assert two.candidates[0].load.in_flight == 0
        assert len(two.view.peers) == 0


async def test_a_gateway_that_stops_has_no_reservations() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 0):
        now = run([one, two], now, 0.2)
        two.take(one.view.bye_frame(), now)
        assert two.candidates[0].load.in_flight == 0


async def test_an_ejection_by_another_gateway_leads_to_a_probe_only() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    suspected: list[LiveEndpoint] = []
    two.view.on_suspect = suspected.append
    with two.reserve(PROMPT, 0) as reservation:
        reservation.on_first_token()
    one.table.on_event(one.table.all()[0], HealthEvent.CONNECT_FAILED)
    run([one, two], now, 0.2)
    assert [live.endpoint.url for live in suspected] == ["http://a:1"]
    assert two.candidates[0].load.is_available
    assert two.cached(PROMPT)[0] > 0


async def test_a_new_gateway_is_warmed_up_by_the_oldest_within_a_second() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    prompts = [Random(seed).randbytes(64 * (20 + seed)) for seed in range(100)]
    for number, prompt in enumerate(prompts):
        with (one, two)[number % 2].reserve(prompt, number % 2) as reservation:
            reservation.on_first_token()
    now = run([one, two], now, 0.3)
    three = Gateway(3)
    three.view.start(now)
    tellers = set()
    for _ in range(10):
        now += 0.1
        frames = turn([one, two, three], now)
        tellers |= {id(gateway) for gateway, (to, _) in frames if to == three.view.own_id}
    assert tellers == {id(one)}
    assert three.view.warm_up.is_warm
    assert three.view.warm_up.took_s < 1.0
    assert [three.cached(prompt) for prompt in prompts] == [
        one.cached(prompt) for prompt in prompts
    ]
    holdings = [
        [item.load.prefix_cache_tokens for item in gateway.candidates] for gateway in (one, three)
    ]
    assert holdings[0] == holdings[1]


async def test_a_warm_up_leaves_out_lost_caches() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 0) as reservation:
        reservation.on_first_token()
    now = run([one, two], now, 0.2)
    for gateway in (one, two):
        gateway.table.on_event(gateway.table.all()[0], HealthEvent.CONNECT_FAILED)
    now = run([one, two], now, 0.2)
    three = Gateway(3)
    three.view.start(now)
    run([one, two, three], now, 1.0)
    assert three.view.warm_up.received_messages > 0
    assert three.cached(PROMPT) == [0, 0]


async def test_a_new_gateway_asks_the_second_oldest_if_the_oldest_does_not_answer() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 0) as reservation:
        reservation.on_first_token()
    now = run([one, two], now, 0.2)
    three = Gateway(3)
    three.view.start(now)
    while not three.view.warm_up.is_warm:
        now += 0.1
        one.view.new_peers.clear()
        turn([one, two, three], now)
        one.view.new_peers = []
        frames = one.view.outgoing_frames(now, is_connected=True)
        for frame in frames:
            two.take(frame, now)
            three.take(frame, now)
        assert now < 110
    assert three.cached(PROMPT)[0] > 0


async def test_picks_before_a_gateway_is_warm_are_counted_as_blind() -> None:
    one = Gateway(1)
    one.view.start(100.0)
    with one.reserve(PROMPT, 0):
        one.view.outgoing_frames(100.1, is_connected=False)
    assert one.metrics.blind_picks_total.value == 1
    now = run([one], 100.0, 1.5)
    assert one.view.warm_up.is_warm
    with one.reserve(PROMPT, 0):
        one.view.outgoing_frames(now, is_connected=True)
    assert one.metrics.blind_picks_total.value == 1


async def test_broadcasts_during_a_warm_up_are_applied_after_it() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    three = Gateway(3)
    three.view.start(now)
    for frame in three.view.outgoing_frames(now, is_connected=True):
        one.take(frame, now)
    with one.reserve(PROMPT, 1) as reservation:
        reservation.on_first_token()
    for frame in one.view.outgoing_frames(now + 0.05, is_connected=True):
        three.take(frame, now + 0.05)
    assert three.cached(PROMPT) == [0, 0]
    run([one, two, three], now + 0.1, 1.0)
    assert three.cached(PROMPT)[1] > 0


async def test_during_a_disconnect_only_prompts_are_queued() -> None:
    one = Gateway(1)
    now = warm(one)
    with one.reserve(PROMPT, 0):
        frames = one.view.outgoing_frames(now + 1.0, is_connected=False)
    assert len(frames) == 1


async def test_a_gateway_with_another_key_is_ignored() -> None:
    one, two = Gateway(1), Gateway(2, b"another secret of sixteen bytes or more")
    now = warm(one, two)
    with one.reserve(PROMPT, 0):
        run([one, two], now, 0.5)
        assert two.candidates[0].load.in_flight == 0
    assert len(two.view.peers) == len(one.view.peers) == 0
    assert two.dropped()["forged"] > 0


OTHER = Random(2).randbytes(64 * 100)
NEXT = b"the next secret of sixteen bytes"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((SECRET, None), (SECRET, NEXT)),
        ((SECRET, NEXT), (NEXT, SECRET)),
        ((NEXT, SECRET), (NEXT, None)),
    ],
)
async def test_gateways_understand_each_other_in_every_step_of_a_change_of_the_key(
    first: tuple[bytes, bytes | None], second: tuple[bytes, bytes | None]
) -> None:
    one = Gateway(1, first[0], other_secret=first[1])
    two = Gateway(2, second[0], other_secret=second[1])
    now = warm(one, two)
    with one.reserve(PROMPT, 0), two.reserve(PROMPT, 1):
        now = run([one, two], now, 0.5)
        assert (one.candidates[1].load.in_flight, two.candidates[0].load.in_flight) == (1, 1)
    assert not one.dropped()
    assert not two.dropped()


async def test_block_keys_under_another_key_are_left_out_and_sessions_are_not() -> None:
    one = Gateway(1, SECRET, other_secret=NEXT)
    now = warm(one)
    with one.reserve(PROMPT, 0) as reservation:
        reservation.on_first_token()
    two = Gateway(2, NEXT, other_secret=SECRET)
    two.view.start(now)
    now = run([one, two], now, 2.0)
    assert two.view.warm_up.is_warm
    with one.reserve(OTHER, 0):
        run([one, two], now, 0.3)
    assert two.prefixes.index.stats().blocks == 0
    assert not two.dropped()


async def test_with_a_cache_secret_prompts_are_known_under_both_keys() -> None:
    one = Gateway(1, SECRET, other_secret=NEXT, stable_secret=b"a secret of the caches")
    now = warm(one)
    with one.reserve(PROMPT, 0) as reservation:
        reservation.on_first_token()
    two = Gateway(2, NEXT, other_secret=SECRET, stable_secret=b"a secret of the caches")
    two.view.start(now)
    run([one, two], now, 2.0)
    assert two.cached(PROMPT) == one.cached(PROMPT)
    assert two.cached(PROMPT)[0] > 0


async def test_replayed_frames_are_dropped() -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    with one.reserve(PROMPT, 0):
        frames = one.view.outgoing_frames(now + 0.6, is_connected=True)
    done = one.view.outgoing_frames(now + 1.2, is_connected=True)
    for frame in (*frames, *done, *frames):
        two.take(frame, now + 1.2)
    assert two.candidates[0].load.in_flight == 0
    assert two.dropped()["replayed"] == len(frames)


@pytest.mark.parametrize("seed", range(20))
async def test_arbitrary_bytes_neither_raise_nor_change_anything(seed: int) -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    rng = Random(seed)
    with one.reserve(PROMPT, 0):
        frames = one.view.outgoing_frames(now + 0.6, is_connected=True)
        for _, frame in frames:
            spoilt = bytearray(frame)
            for _ in range(rng.randint(1, 4)):
                spoilt[rng.randrange(20, len(spoilt))] ^= 1 << rng.randrange(8)
            for bytes_ in (
                bytes(spoilt),
                frame[: rng.randrange(len(frame))],
                rng.randbytes(200),
                b"",
                b"PSv1",
            ):
                two.take((b"", bytes_), now + 0.6)
        assert two.cached(PROMPT) == [0, 0]
        assert two.candidates[0].load.in_flight == 0
    two.take((b"", bytes(FRAME_CAP_BYTES + 1)), now)
    assert two.dropped().keys() <= {"forged", "foreign", "replayed", "too_long", "malformed"}


@pytest.mark.parametrize(
    "message",
    [
        peer_messages.SentPrompts(64, [peer_messages.SentPrompt(1, 3, 192, 40, bytes(24))]),
        peer_messages.SentPrompts(64, [peer_messages.SentPrompt(1, 2**40, 2**40, 40, bytes(24))]),
        peer_messages.SentPrompts(64, [peer_messages.SentPrompt(1, 0, 0, 0, b"")]),
        peer_messages.SentPrompts(65536, [peer_messages.SentPrompt(1, 3, 192, 40, bytes(24))]),
        peer_messages.WarmUpPart(0, True, [b"junk", b"\x93\xa3odd\x01\x02"]),
        peer_messages.WarmUpPart(0, True, [peer_messages.encode(peer_messages.Hello(0))]),
    ],
)
async def test_malformed_messages_with_a_valid_key_are_counted_and_change_nothing(
    message: peer_messages.Message,
) -> None:
    one, two = Gateway(1), Gateway(2)
    now = warm(one, two)
    digest = two.view._digest(two.candidates[0].endpoint)
    if isinstance(message, peer_messages.SentPrompts):
        odd = [
            peer_messages.SentPrompt(1 if p.blocks == 3 else digest, *_rest(p))
            for p in message.prompts
        ]
        message = peer_messages.SentPrompts(message.block_bytes, odd)
    before = two.prefixes.index.stats().blocks
    two.take((b"", one.seal.seal(peer_messages.encode(message))), now)
    assert two.prefixes.index.stats().blocks == before
    assert isinstance(message, peer_messages.WarmUpPart) or sum(two.dropped().values()) == 1


def _rest(prompt: peer_messages.SentPrompt) -> tuple[int, int, int, bytes]:
    return prompt.blocks, prompt.n_bytes, prompt.prompt_tokens, prompt.keys


async def test_no_secret_or_name_is_sent_in_clear_text() -> None:
    one = Gateway(1)
    now = warm(one)
    one.view.updates.add_charge("main", "canary-tenant", 10.0)
    with one.reserve(PROMPT, 0):
        frames = b"".join(
            frame for _, frame in one.view.outgoing_frames(now + 1.0, is_connected=True)
        )
    for secret in (
        SECRET,
        b"canary-tenant",
        b"http://a:1",
        PROMPT[:16],
        one.seal.fingerprint_secret,
    ):
        assert secret not in frames
