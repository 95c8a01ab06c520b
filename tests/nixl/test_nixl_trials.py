"""The seeded fault trials with NIXL moving the bytes, in processes of their own: a crash fails, and names its seed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from tests.rdma.test_trials import landed, some

TRIALS = int(os.environ.get("PENSTOCK_NIXL_TRIALS", "100"))
AT_ONCE, EACH = 4, 5
PACE = 6.0  # an agent of NIXL's takes some ten milliseconds to come about, and while it does a link says nothing


def test_whatever_breaks_nothing_wrong_lands_over_nixl() -> None:
    firsts = range(0, TRIALS, EACH)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda first: some(range(first, min(first + EACH, TRIALS)), PACE, "nixl"), firsts)
        outcomes = [outcome for each in found for outcome in each]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert len(outcomes) == TRIALS
    assert landed(outcomes) > TRIALS / 4
