"""The seeded fault trials over real queue pairs: whatever breaks, nothing wrong lands and nothing stays held.

Several worlds run at once, in processes of their own: most of a trial is waiting. The guest is slow, and so is
everybody in these worlds.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter

from tests.chaos.kv_trials import FAULTS, Outcome, trial

TRIALS, AT_ONCE, PACE = 204, 4, 4.0


def one(seed: int) -> Outcome:
    logging.disable(logging.CRITICAL)
    return trial(seed, "rdma", PACE)


def test_two_hundred_trials_over_verbs_land_their_own_bytes_or_end_by_name() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.kv_trials", "kvtransfer.transports.rdma"])
    with context.Pool(AT_ONCE) as pool:
        outcomes = pool.map(one, range(TRIALS), chunksize=1)
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert {outcome.fault for outcome in outcomes} == set(FAULTS)
    assert sum((outcome.ends for outcome in outcomes), Counter[str]())["landing landed landed"] >= TRIALS
