"""Tests that the gateway knows exactly which blocks two real engines have cached, by KV events."""

from __future__ import annotations

import pytest

from bench.kv_index_exactness_real import missed_goals, run
from tests.real.engines import REAL

SECONDS, SEED = 60.0, 2


async def test_the_index_equals_the_block_pools_under_churn_and_cuts_lead_to_belief() -> None:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    summary = await run(SECONDS, SEED)
    # The goal `turnover` depends on the machine's speed, so only `make events` checks it.
    assert [name for name in missed_goals(summary) if name != "turnover"] == [], summary
