"""Tests of the faults that the option `--faults` of `penstock replay` accepts."""

from __future__ import annotations

import pytest

from planner.replay import CacheView, GroupFault, GroupFaultKind, ReplayOptions, preset
from planner.replay.argument_parsing import ArgumentError
from planner.replay.fault_grammar import apply_faults


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
