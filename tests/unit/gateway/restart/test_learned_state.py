"""Tests that a restarted gateway restores what it has learned, also if endpoints have changed."""

from __future__ import annotations

from math import inf
from random import Random
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from gateway.restart import handover_channel
from gateway.restart.handover_channel import LENGTH, BoundListener, HandoverOffer, pack_message
from gateway.restart.handover_messages import EndpointState
from gateway.restart.learned_state import Restorer, collect_state
from gateway.routes_and_snapshot import Gateway
from policies import restart_state
from policies.admission.cap_admission import SessionCap
from policies.admission.priced_admission import PricedAdmission, PricedAdmissionParams
from policies.admission.quota import Quota, QuotaLimits
from policies.admission.session_refusals import ON_EVIDENCE
from policies.engine.output_length import OutputLengths
from policies.engine.step_time import FILLS, SpeedBelief, shape_for
from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.prefix_index import PrefixIndex
from policies.restart_state import AdmissionState, BeliefState, Blocks, SessionState
from tests.unit.gateway.fleet.tables import table_of

CAP_BYTES = 8 << 20
PROMPTS = Fingerprinter(b"secret" * 6, 64)


def prompt(number: int, blocks: int = 40) -> Fingerprint:
    text = Random(number).randbytes(64 * blocks)
    return PROMPTS.fingerprint(b"tenant", memoryview(text))


def transfer_state(index: PrefixIndex, into: PrefixIndex, slots: dict[int, int]) -> None:
    # Transfer the state of one prefix index to another through the channel used at restarts.
    #
    # `slots` maps old slots of endpoints to new ones.
    tables: dict[bytes, int] = {}
    for blocks in restart_state.index_blocks(index):
        assert len(pack_message(blocks)) < handover_channel.MAX_MESSAGE_BYTES
        restart_state.restore_blocks(
            into, msgspec.msgpack.decode(msgspec.msgpack.encode(blocks), type=Blocks), slots, tables
        )
    for holder in restart_state.index_holders(index):
        if holder.slot in slots:
            restart_state.restore_holder(into, holder, slots[holder.slot])


def learned(seed: int) -> tuple[PrefixIndex, list[Fingerprint]]:
    # Return a prefix index with prompts at three slots, and the prompts.
    #
    # The oldest prompts of slot 0 have expired.
    rng, index = Random(seed), PrefixIndex(CAP_BYTES)
    index.set_capacity(0, 20_000)
    prompts = [prompt(number) for number in range(60)]
    for item in rng.choices(prompts, k=200):
        index.insert(item, rng.randrange(3), 640)
    return index, prompts


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_index_finds_every_prompt_at_its_new_slot(seed: int) -> None:
    index, prompts = learned(seed)
    after = PrefixIndex(CAP_BYTES)
    transfer_state(index, after, {0: 2, 2: 0})  # the endpoint in slot 1 was removed
    for item in prompts:
        before_held, after_held = index.match(item, 640), after.match(item, 640)
        assert (after_held[2], after_held[0]) == (before_held[0], before_held[2])
    assert after.cached_tokens(2) == index.cached_tokens(0)
    assert not any(after.match(item, 640)[1] for item in prompts)


@pytest.mark.parametrize("seed", range(3))
def test_a_restored_index_learns_and_ages_like_the_original(seed: int) -> None:
    index, prompts = learned(seed)
    after = PrefixIndex(CAP_BYTES)
    transfer_state(index, after, {0: 0, 1: 1, 2: 2})
    for item in (index, after):
        item.set_capacity(0, 20_000)
    rng = Random(seed + 100)
    for item in rng.choices([*prompts, *(prompt(number) for number in range(100, 160))], k=200):
        slot = rng.randrange(3)
        index.insert(item, slot, 640)
        after.insert(item, slot, 640)
    assert [after.match(item, 640) for item in prompts] == [
        index.match(item, 640) for item in prompts
    ]
    assert after.stats().blocks == index.stats().blocks


def test_prompts_that_many_endpoints_hold_are_restored_and_share_their_tables() -> None:
    index, restored = PrefixIndex(CAP_BYTES), PrefixIndex(CAP_BYTES)
    for slot in range(40):
        index.insert(prompt(1), slot, 640)
        index.insert(prompt(2, blocks=5), slot // 2, 80)
    transfer_state(index, restored, {slot: slot + 1 for slot in range(39)})
    assert restored.match(prompt(1), 640) == [0, *[640] * 39]
    assert restored.match(prompt(2, blocks=5), 80) == [0, *[80] * 20, *[0] * 19]
    assert restored.tables.blocks.keys() == {-1, -2}
    restored.insert(prompt(1), 50, 640)
    assert restored.match(prompt(1), 640)[50] == 640


@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_blocks_are_restored_only_with_the_state_of_all_their_holders(
    is_cut_off: bool,
) -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    old, new = (cast(Gateway, SimpleNamespace(endpoints=table_of(urls)[0])) for _ in ("old", "new"))
    for live in old.endpoints.all():
        old.endpoints.prefixes.index.insert(prompt(1), live.load.slot, 640)
    restorer = Restorer(new, has_same_keys=True)
    states = 0
    for state in collect_state(old):
        restorer.restore(state)
        states += isinstance(state, EndpointState)
        if states == (1 if is_cut_off else 2):
            break
    assert restorer.blocks > 0
    restorer.finish()
    assert (restorer.blocks == 0) == is_cut_off
    restored = new.endpoints.prefixes.index
    found = list(restored.match_holders(prompt(1), 640))
    assert not any(found) if is_cut_off else found == [640, 640]
    restored.insert(prompt(1), 1, 640)
    assert restored.match(prompt(1), 640)[1] == 640


def test_an_index_that_changes_while_it_is_saved_is_restored_as_far_as_it_remains() -> None:
    index, restored = PrefixIndex(32 << 10), PrefixIndex(CAP_BYTES)
    dropped, renewed = ([prompt(kind + number, 1) for number in range(6)] for kind in (0, 100))
    for item in (*dropped, *renewed):
        for slot in range(12):
            index.insert(item, slot, 16)
    before = {item: index.match(item, 16) for item in renewed}
    parts = restart_state.index_blocks(index)
    saved = [next(parts)]
    for item in renewed:
        for slot in range(20, 36):
            index.insert(item, slot, 16)
    assert index.stats().evictions > 0
    saved += parts
    tables: dict[bytes, int] = {}
    for part in saved:
        restart_state.restore_blocks(restored, part, {slot: slot for slot in range(36)}, tables)
    for holder in restart_state.index_holders(index):
        restart_state.restore_holder(restored, holder, holder.slot)
    after = [(restored.match(item, 16), index.match(item, 16), before[item]) for item in renewed]
    assert all(found in (now, then + [0] * 24) for found, now, then in after)
    assert any(found == now for found, now, _ in after)


def test_parts_of_a_saved_index_stay_small_however_many_endpoints_hold_each_block() -> None:
    index = PrefixIndex(CAP_BYTES)
    for number in range(40):
        for slot in range(1000):
            index.insert(prompt(number, blocks=1), slot, 16)
    sizes = [len(part.stamps) // 8 for part in restart_state.index_blocks(index)]
    assert sum(sizes) == 40 * 1000
    assert max(sizes) < restart_state.STAMPS + 1000


def test_restoring_a_larger_index_respects_the_size_limit() -> None:
    index, _ = learned(1)
    small = PrefixIndex(64 * 192 * 4)
    transfer_state(index, small, {0: 0, 1: 1, 2: 2})
    assert 0 < small.stats().blocks * 192 <= 64 * 192 * 4 + 512 * 192


def test_inconsistent_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="the saved prefix index is inconsistent"):
        restart_state.restore_blocks(
            PrefixIndex(CAP_BYTES), Blocks(b"x" * 16, b"\1\0", b"y" * 8), {}, {}
        )


def slow_endpoint() -> SpeedBelief:
    belief = SpeedBelief()
    for _ in range(40):
        belief.observe_prefill(1.5, [0.0] * FILLS + [1.0], 0.1, 0.01)
        belief.observe_step_overhead(1.2, 0.01)
        belief.observe_decode(3.0, 1.0, 0.2, 0.01)
        belief.observe_api_latency(0.05)
    return belief


def through_the_channel(state: BeliefState) -> BeliefState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=BeliefState)


def test_a_restored_belief_predicts_the_same() -> None:
    belief, after = slow_endpoint(), SpeedBelief()
    assert after.token_s != belief.token_s
    assert restart_state.restore_belief(
        after, through_the_channel(restart_state.belief_state(belief))
    )
    for name in (
        "token_s",
        "pair_s",
        "layers_s",
        "base_s",
        "context_s",
        "sequence_s",
        "request_s",
        "paces",
    ):
        assert getattr(after, name) == getattr(belief, name), name
    belief.observe_prefill(0.8, [0.5] * (FILLS + 1), 0.1, 0.01)
    after.observe_prefill(0.8, [0.5] * (FILLS + 1), 0.1, 0.01)
    assert after.token_s == belief.token_s


def test_beliefs_of_other_hardware_and_invalid_numbers_are_ignored() -> None:
    state = restart_state.belief_state(slow_endpoint())
    other, fresh = SpeedBelief(shape_for("a100")), SpeedBelief()
    assert not restart_state.restore_belief(other, state)
    assert not restart_state.restore_belief(
        fresh, msgspec.structs.replace(state, request_s=float("nan"))
    )
    far_off = msgspec.structs.replace(state.layers, logs=[99.0])
    assert not restart_state.restore_belief(fresh, msgspec.structs.replace(state, layers=far_off))
    assert fresh.token_s == SpeedBelief().token_s


def test_quota_usage_is_restored_unless_its_limits_have_changed() -> None:
    limits = QuotaLimits(requests_per_minute=10, tokens_per_minute=1000)
    quota, after, other = Quota(limits), Quota(limits), Quota(QuotaLimits(requests_per_minute=20))
    for _ in range(10):
        assert quota.take(50, 100.0) is None
    state = restart_state.quota_state(quota)
    assert restart_state.restore_quota(after, state)
    refused = after.take(1, 100.5)
    assert refused is not None
    assert refused.what == "requests"
    assert not restart_state.restore_quota(other, state)
    assert other.take(1, 100.5) is None


def test_admission_means_and_sessions_are_restored() -> None:
    after = PricedAdmission(PricedAdmissionParams())
    rows = [SessionState("one", 700, 5.0), SessionState(17, 300, 6.0)]
    restart_state.restore_admission(
        after, AdmissionState((0.5, 20.0, 1.5, 1.0, None), 0.8, 90.0, rows, 1.2)
    )
    assert (after.sessions.tokens, after.sessions.contains("one"), after.is_calm) == (
        1000,
        True,
        False,
    )
    assert restart_state.admission_state(after) == AdmissionState(
        (0.5, 20.0, 1.5, 1.0, None), 0.8, 90.0, rows, 1.2
    )


@pytest.mark.parametrize("share", [0.6, 1.3, inf])
def test_a_limit_on_sessions_and_its_sessions_are_restored(share: float) -> None:
    before, after = SessionCap(ON_EVIDENCE), SessionCap(ON_EVIDENCE)
    before.sessions.memory_share = share
    before.sessions.on_reserved("one", 700, 0, 0, 5.0)
    restart_state.restore_admission(after, restart_state.admission_state(before))
    assert (after.sessions.tokens, after.sessions.contains("one")) == (700, True)
    assert after.sessions.memory_share == share
    assert after.is_calm == (share == inf)


def test_sessions_are_restored_where_the_admission_has_changed() -> None:
    cap, priced = SessionCap(ON_EVIDENCE), PricedAdmission(PricedAdmissionParams())
    cap.sessions.on_reserved("one", 700, 0, 0, 5.0)
    restart_state.restore_admission(priced, restart_state.admission_state(cap))
    assert (priced.sessions.tokens, priced.sessions.memory_share) == (700, 0.7)
    other = SessionCap(ON_EVIDENCE)
    restart_state.restore_admission(other, restart_state.admission_state(priced))
    assert (other.sessions.tokens, other.sessions.memory_share) == (700, 0.7)


def test_expected_output_lengths_are_restored() -> None:
    before, after = OutputLengths(), OutputLengths()
    for tokens in (10, 20, 60):
        before.record("m", "t", "s", tokens)
    restart_state.restore_lengths(after, restart_state.length_states(before))
    assert after.estimate("m", "t", "s") == before.estimate("m", "t", "s") == 30


def test_an_offer_of_another_version_has_its_sockets() -> None:
    bound = BoundListener("api", "127.0.0.1", 8080, is_activated=False)
    offer = msgspec.msgpack.encode([99, 1234, [bound], {"anything": "else"}, "more"])
    assert handover_channel._offer(offer) == HandoverOffer(99, 1234, [bound])
    ours = pack_message(HandoverOffer(handover_channel.VERSION, 1, [bound], b"s", 64))[
        LENGTH.size :
    ]
    assert handover_channel._offer(ours) == HandoverOffer(
        handover_channel.VERSION, 1, [bound], b"s", 64
    )
