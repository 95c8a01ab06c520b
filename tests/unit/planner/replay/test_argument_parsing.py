"""Tests of the option syntax of `penstock replay`: durations, loads and fleets,
and errors for invalid ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.replay import (
    FleetError,
    preset,
    read_fleet,
)
from planner.replay.argument_parsing import (
    parse_loads,
    parse_seconds,
)
from policies.routing_types import Role


def test_times_and_loads() -> None:
    assert [parse_seconds(text) for text in ("250ms", "30s", "5m", "1.5h", "7")] == [
        0.25,
        30.0,
        300.0,
        5400.0,
        7.0,
    ]
    assert parse_loads("0.5,1, 2") == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("name", ["F1", "f2", "F3", "F4", "F5", "F6", "F5:3p5d@10"])
def test_presets_hold_weights_and_kv(name: str) -> None:
    spec = preset(name)
    assert all(kind.capacity_tokens > 20_000 for kind in spec.groups)


def test_presets_are_those_that_routers_have_been_compared_on() -> None:
    assert [len(preset(name).groups) for name in ("F1", "F2", "F3", "F4", "F5", "F6")] == [
        8,
        8,
        8,
        12,
        8,
        64,
    ]
    roles = [kind.role for kind in preset("F5:3p5d@10").groups]
    assert (roles.count(Role.PREFILL), roles.count(Role.DECODE)) == (3, 5)
    assert preset("F5:3p5d@10").groups[0].link_gb_s == 10.0
    with pytest.raises(FleetError, match="F9"):
        preset("F9")


def test_a_fleet_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "kinds:\n- {model: qwen3-32b, gpu: h100, tp: 2, count: 3}\n- {gpu: h200, max_concurrency: 24}\n"
    )
    spec = read_fleet(file)
    assert (spec.name, len(spec.groups), spec.groups[3].max_concurrency) == ("mine", 4, 24)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("kinds: []", "at least one"),
        ("kinds: [{gpu: h900}]", "h900"),
        ("kinds: [{gpu: l40s, tp: 1}]", "no memory"),
        ("kinds: [{gpus: h100}]", "gpus"),
        ("kinds: [{role: decode}]", "other role"),
        ("kinds: [{count: 0}]", "count must be positive"),
        ("kinds: [{tp: 0}]", "tp must be positive"),
        ("kinds: [{kv_scalar_bytes: 0}]", "kv_scalar_bytes"),
        ("kinds: [{slowness: .nan}]", "slowness"),
        ("kinds: [{link_gb_s: .inf}]", "link_gb_s"),
        ("kinds: [{max_num_seqs: 0}]", "max_num_seqs"),
        ("kinds: [{max_num_seqs: 9000}]", "max_num_batched_tokens"),
        ("kinds: [{up_at_s: .nan}]", "up_at_s"),
        ("kinds: [{profile: '1999'}]", "1999"),
        ("kinds: [{count: 100000000}]", "at most 4096 groups"),
        ("{block_tokens: 0, kinds: [{}]}", "block_tokens"),
        ("kinds: {", "mine.yaml"),
    ],
)
def test_an_invalid_fleet_is_refused_with_the_reason(
    tmp_path: Path, content: str, said: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(FleetError, match=said):
        read_fleet(file)
