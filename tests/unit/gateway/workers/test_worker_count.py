"""Tests that `workers: auto` starts one worker for each core that the gateway may use."""

from __future__ import annotations

import os

import pytest

from gateway.config import ConfigError, load_text
from gateway.workers.worker_count import cores_within_quotas, resolve_worker_count

POOL = b"pools: {main: {endpoints: [{url: 'http://a:1'}]}}\n"


@pytest.mark.parametrize(
    ("cores", "quotas", "count"),
    [
        (8, [], 8),
        (8, ["max 100000\n"], 8),
        (8, ["350000 100000\n"], 3),
        (8, ["max 100000", "200000 100000", "600000 100000"], 2),
        (2, ["800000 100000"], 2),
        (4, ["50000 100000"], 1),
        (4, ["", "nonsense", "100 0"], 4),
    ],
)
def test_quotas_leave_whole_cores(cores: int, quotas: list[str], count: int) -> None:
    assert cores_within_quotas(cores, quotas) == count


def test_auto_is_at_most_the_cores_of_the_affinity_mask() -> None:
    assert 1 <= resolve_worker_count("auto") <= len(os.sched_getaffinity(0))
    assert resolve_worker_count(3) == 3


@pytest.mark.parametrize(
    ("text", "workers"),
    [(b"3", 3), (b"auto", "auto"), (b"${WORKERS}", "auto"), (b"${NUMBER}", 2)],
)
def test_a_file_names_a_number_or_auto(text: bytes, workers: object) -> None:
    loaded = load_text(
        b"version: 1\nworkers: " + text + b"\n" + POOL, "g.yaml", {"WORKERS": "auto", "NUMBER": "2"}
    )
    assert loaded.config.workers == workers


@pytest.mark.parametrize("text", [b"0", b"65", b"true", b"1.5", b"'2'", b"many"])
def test_any_other_value_is_an_error_that_names_both(text: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(b"version: 1\nworkers: " + text + b"\n" + POOL, "g.yaml", {})
    (problem,) = caught.value.problems
    assert "must be from 1 to 64, or auto" in str(problem)
