"""Tests of placing engines on groups of GPUs with fast links, without overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sizing.parallel_layout import Layout
from policies.sizing.placement import PlacedGroup, placement_problems

NODES = {"a": 8, "b": 8, "c": 4}


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([(Layout(8), "a")], ""),
        ([(Layout(4), "a"), (Layout(4), "a"), (Layout(4), "c")], ""),
        ([(Layout(8, 2), "ab")], ""),
        ([(Layout(4), "a"), (Layout(8), "a")], "take 12 GPUs, and it has 8"),
        ([(Layout(8), "c")], "take 8 GPUs, and it has 4"),
        ([(Layout(8), "ab")], "valid: 1 domains"),
        ([(Layout(2, 6), "ac")], "c take 6 GPUs, and it has 4"),
        ([(Layout(2, 5), "ab")], "valid: 1, 5 domains"),
        ([(Layout(1), "x")], "unknown link domain x; valid: a, b, c"),
        ([(Layout(4), "aa")], "named twice"),
    ],
)
def test_a_group_takes_gpus_of_its_domains_in_whole_tp_groups(
    groups: list[tuple[Layout, str]], problem: str
) -> None:
    placed = [PlacedGroup(layout, list(domains)) for layout, domains in groups]
    found = list(placement_problems(NODES, placed))
    assert len(found) == bool(problem)
    assert all(place == len(groups) - 1 and problem in text for place, text in found)


@given(
    st.lists(
        st.tuples(
            st.builds(Layout, tp=st.sampled_from((1, 2, 4)), pp=st.integers(1, 3)),
            st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
        ),
        max_size=5,
    )
)
def test_no_domain_holds_more_gpus_than_it_has_without_a_problem(
    groups: list[tuple[Layout, list[str]]],
) -> None:
    placed = [PlacedGroup(layout, domains) for layout, domains in groups]
    used = dict.fromkeys(NODES, 0)
    for group in placed:
        for name in group.domains:
            used[name] += group.layout.gpus // len(group.domains)
    if any(used[name] > NODES[name] for name in NODES):
        assert list(placement_problems(NODES, placed))
