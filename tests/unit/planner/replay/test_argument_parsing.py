"""Tests of the option syntax of `penstock replay`: classes, faults and fleets, and errors for
invalid ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.replay import (
    CacheView,
    FleetError,
    GroupFault,
    GroupFaultKind,
    ReplayOptions,
    preset,
    read_fleet,
)
from planner.replay.argument_parsing import (
    ArgumentError,
    apply_faults,
    parse_classes,
    parse_loads,
    parse_seconds,
)
from policies.routing_types import STANDARD, Role, Slo


def test_times_and_loads() -> None:
    assert [parse_seconds(text) for text in ("250ms", "30s", "5m", "1.5h", "7")] == [
        0.25,
        30.0,
        300.0,
        5400.0,
        7.0,
    ]
    assert parse_loads("0.5,1, 2") == [0.5, 1.0, 2.0]


def test_an_slo_is_two_budgets_or_a_file_of_classes(tmp_path: Path) -> None:
    assert parse_classes("ttft=2s,tpot=50ms") == (Slo("standard", 2.0, 0.05), {})
    assert parse_classes("tpot=50ms")[0].ttft_s == STANDARD.ttft_s
    file = tmp_path / "classes.yaml"
    file.write_text("chat: {ttft: 1s, tpot: 50ms, weight: 4}\nbatch: {ttft: 60s, tpot: 1s}\n")
    standard, named = parse_classes(str(file))
    assert (standard, named["chat"]) == (STANDARD, Slo("chat", 1.0, 0.05, 4.0))


def test_faults_change_the_fleet_and_the_view_of_it() -> None:
    text = (
        "lose=0@5m+60s, slow=1@30+10sx3, drain=2@1m, cold=7@10m, stale=5s, events=0.3, view=exact"
    )
    spec, options = apply_faults(text, preset("F1"), ReplayOptions())
    lost, slow, drained = (
        GroupFault(300.0, 0, duration_s=60.0),
        GroupFault(30.0, 1, GroupFaultKind.SLOW, 10.0, 3.0),
        GroupFault(60.0, 2, GroupFaultKind.DRAIN),
    )
    assert options.faults == (lost, slow, drained)
    assert [kind.up_at_s for kind in spec.groups] == [0.0] * 7 + [600.0]
    assert (options.scrape_s, options.scrape_age_s, options.lost_events, options.view) == (
        5.0,
        5.0,
        0.3,
        CacheView.EXACT,
    )
    assert apply_faults("", preset("F1"), ReplayOptions())[0].groups == preset("F1").groups


@pytest.mark.parametrize(
    "text",
    [
        *("lose=8@5", "burn=0@5", "lose=0", "events=2", "view=none", "stale=soon"),
        *("slow=0@5x1.2.3", "slow=0@.x2", "slow=0@5x0", "lose=0@5x3", "cold=0@5+3"),
    ],
)
def test_a_fault_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(ArgumentError):
        apply_faults(text, preset("F1"), ReplayOptions())


@pytest.mark.parametrize("text", ["tpt=3s", "ttft=soon", "nowhere.yaml"])
def test_a_budget_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_classes(text)


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
