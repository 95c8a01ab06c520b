"""Property tests of the tenants' fair shares of work, for any weights, and of their prices."""

from __future__ import annotations

from math import isclose, isnan

from hypothesis import example, given
from hypothesis import strategies as st

from policies.admission.tenant_demand import TenantDemand

WEIGHTS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=1), st.floats(1e-300, 1000.0), max_size=6
)
WORK = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.floats(0.0, 1e6), st.booleans()), max_size=40
)


@given(WEIGHTS, WORK)
@example({"a": 1000.0, "b": 1e-14}, [("a", 1.0, True), ("b", 1.0, True)])
def test_every_tenant_has_an_excess_whatever_the_weights(
    weights: dict[str, float], work: list[tuple[str, float, bool]]
) -> None:
    usage = TenantDemand(weights)
    for tenant, work_s, admitted in work:
        usage.record(tenant, work_s, admitted)
    usage.tick(1.0)
    usage.tick(0.5)
    assert not isnan(usage.level)
    assert all(0.0 <= usage.price_share(tenant) <= 1.0 for tenant in "abcdefg")


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40),
    st.floats(0.0, 10.0),
    st.floats(0.0, 1e3),
)
def test_demand_of_few_requests_is_discounted(
    works: list[float], doubt: float, waiting_s: float
) -> None:
    few, many = TenantDemand({}), TenantDemand({})
    for work_s in works:
        few.record("a", work_s, True)
        for _ in range(4):
            many.record("a", work_s / 4, True)
    assert isclose(few.demand(waiting_s, 0.0), many.demand(waiting_s, 0.0))
    assert 0.0 <= few.demand(waiting_s, doubt) <= many.demand(waiting_s, doubt) * (1 + 1e-9)
    assert many.demand(waiting_s, doubt) <= many.demand(waiting_s, 0.0)
    ratio = few.demand(0.0, 1.0) / few.demand(0.0, 0.0)
    few.tick(0.0)
    few.tick(5.0)
    # The demand decays equally with and without doubt.
    assert isclose(few.demand(0.0, 1.0), ratio * few.demand(0.0, 0.0), rel_tol=1e-6, abs_tol=1e-9)
