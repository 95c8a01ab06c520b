"""Shares of offered work: a level that exists whatever the weights are, and excess between 0 and 1."""

from __future__ import annotations

from math import isnan

from hypothesis import example, given
from hypothesis import strategies as st

from policies.usage import Usage

WEIGHTS = st.dictionaries(st.text("abcdef", min_size=1, max_size=1), st.floats(1e-300, 1000.0), max_size=6)
WORK = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.0, 1e6), st.booleans()), max_size=40)


@given(WEIGHTS, WORK)
@example({"a": 1000.0, "b": 1e-14}, [("a", 1.0, True), ("b", 1.0, True)])
def test_every_tenant_has_an_excess_whatever_the_weights(
    weights: dict[str, float], work: list[tuple[str, float, bool]]
) -> None:
    usage = Usage(weights)
    for tenant, work_s, admitted in work:
        usage.offered(tenant, work_s, admitted)
    usage.tick(1.0)
    usage.tick(0.5)
    assert not isnan(usage.level)
    assert all(0.0 <= usage.excess(tenant) <= 1.0 for tenant in "abcdefg")
