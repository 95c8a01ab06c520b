"""The seeded fault trials over real queue pairs: whatever breaks, nothing wrong lands and nothing stays held.

Each world runs in a process of its own, several at once: most of a trial is waiting. A process that crashes or hangs is
a failure with its seed's name. The guest is slow, and so is everybody in these worlds.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from tests.chaos.kv_trials import FAULTS, Outcome, trial

AT_ONCE, PACE, BATCH, PATIENCE_S = 4, 4.0, 17, 120.0
BATCHES = int(os.environ.get("PENSTOCK_RDMA_TRIALS", "68")) // BATCH


def world(seed: int, told: Connection) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    logging.disable(logging.CRITICAL)
    told.send(trial(seed, "rdma", PACE))


def one(seed: int) -> Outcome:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.kv_trials", "kvtransfer.transports.rdma"])
    hears, tells = context.Pipe(duplex=False)
    process = context.Process(target=world, args=(seed, tells))
    process.start()
    tells.close()
    try:
        outcome = hears.recv()
    except EOFError:
        process.join()
        return Outcome(seed, "rdma", "?", [f"its process ended with {process.exitcode}"])
    process.join()
    assert isinstance(outcome, Outcome)
    if process.exitcode:
        outcome.wrong.append(f"its process ended with {process.exitcode}")
    return outcome


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return []


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_breaks_nothing_wrong_lands_over_verbs(outcomes: list[Outcome], batch: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes += pool.map(one, range(batch * BATCH, (batch + 1) * BATCH))
    assert [outcome for outcome in outcomes if outcome.wrong] == []


def test_the_trials_over_verbs_saw_every_fault_and_many_landings(outcomes: list[Outcome]) -> None:
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    assert ends["landing landed landed"] > len(outcomes) / 2
    assert len(outcomes) < 200 or {outcome.fault for outcome in outcomes} == set(FAULTS)
