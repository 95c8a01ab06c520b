"""Tests of how benchmarks count the tokens of a batch job that engines generated twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.batch_tokens import (
    Attempt,
    Attempts,
    JournalWatch,
    Regenerated,
    count_regenerated,
    long_stops,
)
from mockgpu.generation_log import GenerationLog


def attempts(*spans: tuple[int, int]) -> list[Attempt]:
    # One attempt per second: where it began in the answer, and how many tokens it generated.
    return [
        Attempt(start, generated, float(second), second + 0.5)
        for second, (start, generated) in enumerate(spans)
    ]


def count(
    own: list[Attempt], kept: list[int], final: int = 30, kills: tuple[float, ...] = ()
) -> Regenerated:
    found = count_regenerated({0: own}, {0: kept}, {0: final}, kills)
    # Nothing is counted twice, and nothing is forgotten.
    assert sum(attempt.generated for attempt in own) == final + found.total
    return found


def test_an_answer_that_continues_where_it_was_kept_is_generated_once() -> None:
    found = count(attempts((0, 12), (12, 18)), [12])
    assert found == Regenerated(Counter({0: 1}), 0, 0)


def test_tokens_on_their_way_at_a_stop_were_never_kept() -> None:
    found = count(attempts((0, 14), (12, 9), (20, 10)), [12, 20])
    assert found == Regenerated(Counter({2: 1, 1: 1}), 0, 0)
    assert found.in_flight_tokens == 3


def test_what_a_killed_gateway_had_not_kept_is_counted_apart() -> None:
    assert count(attempts((0, 8), (0, 30)), [], kills=(0.2,)) == Regenerated(Counter(), 8, 0)
    # Its whole answer had arrived, but was not in the journal yet.
    assert count(attempts((0, 30), (0, 30)), [], kills=(0.9,)) == Regenerated(Counter(), 30, 0)


@pytest.mark.parametrize(
    ("spans", "kept", "again"),
    [
        (((0, 12), (10, 20)), [12], 2),  # the next attempt began before the end of what was kept
        (((0, 12), (12, 5), (0, 30)), [12, 17], 17),  # what was kept is forgotten
        (((0, 12), (0, 30)), [12], 12),
        (((0, 12), (12, 10), (12, 18)), [12, 20], 8),
    ],
)
def test_kept_tokens_that_are_generated_again_are_counted(
    spans: tuple[tuple[int, int], ...], kept: list[int], again: int
) -> None:
    assert count(attempts(*spans), kept).kept_again == again


def test_a_kept_part_of_a_later_attempt_is_no_loss_of_an_earlier_one() -> None:
    found = count(attempts((0, 25), (0, 22), (22, 8)), [22], kills=(0.2,))
    assert (found.killed, found.kept_again) == (25, 0)


def test_attempts_are_found_by_the_beginning_of_their_prompts(tmp_path: Path) -> None:
    log = GenerationLog(str(tmp_path / "log"))
    log.write(b"prompt 1", 3, 5.0)
    log.write(b"prompt 2", 9, 6.0)
    log.write(b"prompt 1 ace", 27, 7.0)
    log.write(b"others..", 4, 8.0)
    found = Attempts((tmp_path / "log").read_bytes().splitlines(), [b"prompt 1", b"prompt 2"])
    spans = {index: [(a.start, a.generated) for a in own] for index, own in found.of.items()}
    assert spans == {0: [(0, 3), (1, 27)], 1: [(0, 9)]}
    assert (found.generated, found.others) == (43, 4)


def test_the_journal_says_how_many_tokens_each_stop_kept(tmp_path: Path) -> None:
    journal = tmp_path / "batches" / "tenant" / "batch" / "journal"
    journal.parent.mkdir(parents=True)
    entries = [
        {"number": 1, "kept": {"tokens": [1] * 5}},
        {"number": 1, "kept": {"tokens": [1] * 21}},
        {"number": 1, "kept": {"tokens": [1] * 21}},
        {"number": 2, "result": "{}"},
    ]
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    watch = JournalWatch(tmp_path)
    watch.open_if_created()
    assert watch.kept() == {1: [5, 21, 21]}
    assert long_stops({1: [5, 21, 21], 2: [30]}, 20) == 2
