"""Tests of estimating how many more tokens an endpoint's running answers will have."""

from __future__ import annotations

import pytest

from policies import load_ledger
from policies.endpoint_load import EndpointLoad
from policies.engine.output_length import CLASSES, RecentLengths
from policies.engine.peer_load import PeerShare
from policies.engine.running_answer_lengths import LEAST_TOKENS, MOST_ENDED
from policies.load_ledger import LoadReservation
from tests.unit.policies.builders import ask


def endpoint(*lengths: int) -> EndpointLoad:
    # Return the load of an endpoint whose 100 recent answers had these lengths, 100 expected.
    load = EndpointLoad(0)
    load.kv_tokens = 600_000.0
    for number in range(100):
        load.timeline.lengths.record(lengths[number % len(lengths)], 100)
    return load


def begin(load: EndpointLoad, now: float, output: int = 100) -> LoadReservation:
    reservation = load_ledger.reserve(load, ask(1000, output).request, 0, now)
    reservation.on_first_token(now + 0.1)
    return reservation


def lengths(load: EndpointLoad, now: float) -> list[tuple[float, float]]:
    # Return (expected number of answers, length in tokens).
    groups = load.timeline.answer_groups(load, now)
    return [(count, 1.0 / per_token) for count, per_token, _ in groups]


def test_an_answer_that_has_just_begun_may_have_any_of_the_usual_lengths() -> None:
    load = endpoint(20, 20, 20, 20, 500)
    begin(load, 100.0)
    assert lengths(load, 100.1) == [
        (pytest.approx(1 / CLASSES), pytest.approx(length)) for length in (20, 20, 20, 20, 500)
    ]


def test_an_answer_longer_than_the_short_ones_is_a_long_one() -> None:
    load = endpoint(20, 20, 20, 20, 500)
    begin(load, 100.0)
    later = 100.1 + 30 * load.timeline.decode_s
    assert lengths(load, later) == [(pytest.approx(1.0), pytest.approx(500.0))]


def test_an_answer_longer_than_all_earlier_ones_is_expected_to_double() -> None:
    load = endpoint(20)
    begin(load, 100.0)
    step_s = load.timeline.decode_s
    for tokens in (30, 70):
        ((count, length),) = lengths(load, 100.1 + tokens * step_s)
        assert count == 1.0
        assert tokens < length <= 2.0 * tokens + 4.0


def test_an_answer_ages_by_steps_while_prompts_are_computed_only_as_the_model_knows_them() -> None:
    load = endpoint(20, 20, 20, 20, 500)
    begin(load, 100.0)
    load_ledger.reserve(load, ask(100_000, 100).request, 0, 100.11)
    assert len(lengths(load, 100.1 + 30 * load.timeline.decode_s)) == 2 * CLASSES


def test_lengths_scale_with_what_was_expected_of_the_request() -> None:
    load = endpoint(100)
    begin(load, 100.0, output=1000)
    assert {round(length) for _, length in lengths(load, 100.1)} == {1000}


def test_an_answer_has_a_least_length() -> None:
    load = endpoint(1)
    begin(load, 100.0)
    assert {length for _, length in lengths(load, 100.1)} == {LEAST_TOKENS}


def test_answers_that_wait_for_their_first_token_count_as_begun_now() -> None:
    load = endpoint(20, 500)
    load_ledger.reserve(load, ask(1000, 100).request, 0, 100.0)
    assert sum(count for count, _ in lengths(load, 100.0)) == pytest.approx(1.0)


def test_ended_answers_and_prompts_of_one_token_do_not_count() -> None:
    load = endpoint(20, 500)
    first, second = begin(load, 100.0), begin(load, 100.2)
    prefill = begin(load, 100.4, output=1)
    first.finish(101.0, output_tokens=20)
    assert sum(count for count, _ in lengths(load, 101.0)) == pytest.approx(1.0)
    second.finish(101.5)
    prefill.finish(101.6)
    assert lengths(load, 102.0) == []


def test_other_gateways_answers_are_distributed_like_the_own_ones() -> None:
    load = endpoint(20, 20, 20, 20, 500)
    begin(load, 100.0)
    load_ledger.set_peer_load(load, b"other", PeerShare(in_flight=3, answers=3), 100.2)
    later = 100.2 + 40 * load.timeline.decode_s
    assert lengths(load, later) == [(pytest.approx(4.0), pytest.approx(500.0))]


def test_groups_tell_how_much_prefill_their_answers_have_had() -> None:
    load = endpoint(500)
    begin(load, 100.0)
    begin(load, 101.0)
    (_, _, began_s) = load.timeline.answer_groups(load, 101.1)[0]
    before_s = load.timeline.prefill_s - began_s
    begin(load, 102.0)
    (_, _, began_s) = load.timeline.answer_groups(load, 102.1)[0]
    assert load.timeline.prefill_s - began_s > before_s > 0.0


def test_ended_answers_take_no_memory_where_no_policy_asks_for_lengths() -> None:
    load = endpoint(20, 500)
    begin(load, 100.0)
    for number in range(1000):
        begin(load, 101.0 + number).finish(101.5 + number, output_tokens=20)
    assert len(load.timeline.answers._next) <= MOST_ENDED + 4
    assert sum(count for count, _ in lengths(load, 1200.0)) == pytest.approx(1.0)


def test_an_endpoint_without_ended_answers_expects_the_lengths_that_others_of_its_pool_had() -> (
    None
):
    learned = RecentLengths()
    quick, slow = EndpointLoad(0, lengths=learned), EndpointLoad(1, lengths=learned)
    for number in range(100):
        begin(quick, 100.0 + number).finish(100.5 + number, output_tokens=20)
    begin(slow, 200.0)
    assert {round(length) for _, length in lengths(slow, 200.1)} == {20}


def test_lengths_are_kept_while_no_policy_reads_the_forecast() -> None:
    load = endpoint(20)
    load_ledger.set_modelled(load, False, 100.0)
    load_ledger.set_modelled(load, True, 101.0)
    begin(load, 102.0)
    assert {round(length) for _, length in lengths(load, 102.1)} == {20}
