"""The seeded fault trials over real queue pairs: whatever breaks, nothing wrong lands and nothing stays held.

Several worlds run at once, in processes of their own: most of a trial is waiting. The guest is slow, and so is
everybody in these worlds.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest

from tests.chaos.kv_trials import FAULTS, Outcome, trial

AT_ONCE, PACE, BATCH = 4, 4.0, 17
BATCHES = int(os.environ.get("PENSTOCK_RDMA_TRIALS", "204")) // BATCH


class Worlds:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.outcomes: list[Outcome] = []


def one(seed: int) -> Outcome:
    logging.disable(logging.CRITICAL)
    return trial(seed, "rdma", PACE)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.kv_trials", "kvtransfer.transports.rdma"])
    with context.Pool(AT_ONCE) as pool:
        yield Worlds(pool)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_breaks_nothing_wrong_lands_over_verbs(worlds: Worlds, batch: int) -> None:
    outcomes = worlds.pool.map(one, range(batch * BATCH, (batch + 1) * BATCH), chunksize=1)
    worlds.outcomes += outcomes
    assert [outcome for outcome in outcomes if outcome.wrong] == []


def test_the_trials_over_verbs_saw_every_fault_and_many_landings(worlds: Worlds) -> None:
    if len(worlds.outcomes) < 200:
        pytest.skip("asked of the whole number only")
    ends = sum((outcome.ends for outcome in worlds.outcomes), Counter[str]())
    assert {outcome.fault for outcome in worlds.outcomes} == set(FAULTS)
    assert ends["landing landed landed"] > len(worlds.outcomes) / 2
    assert len(ends) > 20
