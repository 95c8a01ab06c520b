"""Tests that the number of sequences which an engine runs concurrently is learned from its
metrics.
"""

from __future__ import annotations

from math import inf

from policies import ledger
from policies.load import EndpointLoad


def load_after_scrapes(*scrapes: tuple[int, int, float], decoding: int = 64) -> EndpointLoad:
    load = EndpointLoad(0)
    load.is_modelled = False
    load.in_flight, load.decoding = 80, decoding
    for number, (running, waiting, kv_usage) in enumerate(scrapes):
        ledger.record_scrape(load, running, waiting, kv_usage, 600_000, float(number))
    return load


def test_prompts_that_wait_at_two_scrapes_while_kv_is_free_show_the_slots() -> None:
    assert load_after_scrapes((64, 9, 0.4), (64, 12, 0.5)).slots == 64


def test_one_scrape_shows_nothing_because_a_prompt_may_wait_for_the_end_of_a_step() -> None:
    assert load_after_scrapes((64, 1, 0.4)).slots == inf
    assert load_after_scrapes((64, 1, 0.4), (63, 0, 0.4), (64, 1, 0.4)).slots == inf


def test_prompts_that_wait_for_kv_or_for_another_prompt_do_not_show_slots() -> None:
    assert load_after_scrapes((64, 9, 0.97), (64, 9, 0.98)).slots == inf
    assert load_after_scrapes((64, 9, 0.4), (64, 9, 0.4), decoding=63).slots == inf


def test_more_running_sequences_than_slots_correct_them() -> None:
    assert load_after_scrapes((64, 9, 0.4), (64, 9, 0.4), (96, 2, 0.5)).slots == 96
