"""Tests of the requests of `penstock bench`: equal for equal seeds, with the documented lengths."""

from __future__ import annotations

from itertools import islice
from statistics import mean, median

import pytest

from planner.bench.workloads import WorkloadSession, open_loop, poisson, shapes
from planner.text_generator import BYTES_PER_TOKEN, text


def first(name: str, count: int, seed: int = 1) -> list[WorkloadSession]:
    return list(islice(shapes()[name].sessions(seed), count))


@pytest.mark.parametrize("name", sorted(shapes()))
def test_a_seed_gives_the_same_sessions_and_another_seed_others(name: str) -> None:
    assert first(name, 5) == first(name, 5)
    assert first(name, 5) != first(name, 5, seed=2)


@pytest.mark.parametrize("name", sorted(shapes()))
def test_the_mean_number_of_turns_is_the_one_rates_reckon_with(name: str) -> None:
    turns = mean(len(session.turns) for session in first(name, 300))
    assert turns == pytest.approx(shapes()[name].mean_turns, rel=0.1)


def test_chat_has_the_lengths_of_the_azure_conversations() -> None:
    turns = [session.turns[0] for session in first("chat", 600)]
    assert median(len(turn.content) / BYTES_PER_TOKEN for turn in turns) == pytest.approx(
        1020, rel=0.1
    )
    assert median(turn.output_tokens for turn in turns) == pytest.approx(129, rel=0.15)


def test_chat_sessions_share_a_system_prompt_and_nothing_more() -> None:
    sessions = first("chat", 20)
    assert len({session.system for session in sessions}) == 1
    assert len({session.turns[0].content[:64] for session in sessions}) == 20


def test_rag_requests_popular_documents_more_often() -> None:
    heads = [session.turns[0].content[:200] for session in first("rag", 200)]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert counts[0] > 3 * median(counts)
    assert len({session.turns[0].content for session in first("rag", 200)}) == 200


def test_shared_prefix_is_a_tree_of_ten_trunks_with_fifteen_branches_each() -> None:
    sessions = first("shared-prefix", 2000)
    shared = {session.system for session in sessions if session.system}
    assert len(shared) == 150
    assert {len(prompt) for prompt in shared} == {6_000 * BYTES_PER_TOKEN}
    assert len({prompt[: 2_000 * BYTES_PER_TOKEN] for prompt in shared}) == 10


def test_poisson_arrivals_keep_their_rate_and_grow() -> None:
    moments = list(islice(poisson(50.0, seed=3), 5000))
    assert moments == sorted(moments)
    assert len(moments) / moments[-1] == pytest.approx(50.0, rel=0.05)


def test_a_rate_of_requests_spreads_sessions_by_their_turns() -> None:
    agent = shapes()["agent"]
    last = list(islice(open_loop(agent, 80.0, seed=1), 500))[-1]
    assert 500 / last.due_s == pytest.approx(80.0 / agent.mean_turns, rel=0.15)


def test_a_longer_text_of_a_key_begins_with_the_shorter_one() -> None:
    assert text(1500, "k").startswith(text(600, "k"))
    assert len(text(600, "k")) == 600 * BYTES_PER_TOKEN
    assert text(600, "k") != text(600, "l")
