"""Tests of finding out how many requests an engine runs at once, from its metrics or its label."""

from __future__ import annotations

from math import inf

from policies import load_ledger, scraped_load
from policies.endpoint_load import EndpointLoad
from policies.routing_types import Endpoint, Layout
from tests.unit.policies.builders import ask


def busy(
    prompt_tokens: int = 80, decoding: int = 60, in_step: int = 4, waiting: int = 12
) -> EndpointLoad:
    # Return an endpoint whose engine runs `decoding` sequences and `in_step` prompts without a
    # first token; a scrape at 101 s has seen further prompts wait.
    load = EndpointLoad(0)
    load.kv_tokens = 600_000.0
    sent = [
        load_ledger.reserve(load, ask(prompt_tokens).request, 0, 100.0)
        for _ in range(decoding + in_step + waiting)
    ]
    for reservation in sent[:decoding]:
        reservation.on_first_token(100.2)
    scrape(load, decoding + in_step, waiting, 101.0)
    assert load.slots == inf
    return load


def scrape(
    load: EndpointLoad, running: int, waiting: int, at_s: float, kv_usage: float = 0.4
) -> None:
    scraped_load.record_scrape(load, running, waiting, kv_usage, 600_000, at_s)


def test_a_prompt_that_waits_for_long_shows_the_slots() -> None:
    load = busy()
    scrape(load, 64, 9, 102.0)
    assert load.slots == 64


def test_short_answers_show_the_slots_too_although_some_prompts_are_in_a_step() -> None:
    load = busy(decoding=40)
    scrape(load, 44, 9, 102.0)
    assert load.slots == 44


def test_prompts_that_have_just_been_sent_may_wait_for_the_end_of_a_step() -> None:
    # At each scrape one prompt waits, as at any busy engine, but never the same one.
    load = busy(decoding=64, in_step=0, waiting=0)
    for at_s in (102.0, 103.0, 104.0):
        sent = load_ledger.reserve(load, ask(80).request, 0, at_s - 0.01)
        scrape(load, 64, 1, at_s)
        sent.finish(at_s + 0.5, 20)
    assert load.slots == inf


def test_a_changed_number_of_running_sequences_shows_no_slots() -> None:
    load = busy()
    scrape(load, 63, 9, 102.0)
    assert load.slots == inf


def test_prompts_that_wait_for_kv_or_for_other_prompts_show_no_slots() -> None:
    full = busy()
    scrape(full, 64, 9, 102.0, kv_usage=0.97)
    assert full.slots == inf
    long_prompts = busy(prompt_tokens=2000)
    scrape(long_prompts, 64, 9, 102.0)
    assert long_prompts.slots == inf


def test_more_running_sequences_than_slots_correct_them() -> None:
    load = busy()
    scrape(load, 64, 9, 102.0)
    scrape(load, 96, 2, 103.0, kv_usage=0.5)
    assert load.slots == 96


def test_a_label_states_the_slots_of_each_rank() -> None:
    labels, ranks = {"max_num_seqs": "128"}, Layout(dp=4)
    engine = Endpoint("e", "http://127.0.0.1:9000", "pool", "model", labels=labels, layout=ranks)
    pinned = Endpoint(
        "e/dp1", "http://127.0.0.1:9000", "pool", "model", labels=labels, layout=ranks, rank=1
    )
    assert (engine.stated_slots, pinned.stated_slots) == (512, 128)
    assert Endpoint("e", "http://127.0.0.1:9000", "pool", "model").stated_slots == inf
