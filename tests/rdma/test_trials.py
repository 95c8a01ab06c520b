"""The seeded fault trials over real queue pairs: whatever breaks, nothing wrong lands and nothing stays held.

Several worlds run at once, in processes of their own: most of a trial is waiting. A process that crashes or hangs is a
failure with its seed's name. The guest is slow, and so is everybody in these worlds.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

from tests.chaos.kv_trials import FAULTS, Outcome, trial

AT_ONCE, EACH, PACE, PATIENCE_S = 4, 17, 4.0, 120.0
BATCH = AT_ONCE * EACH
BATCHES = int(os.environ.get("PENSTOCK_RDMA_TRIALS", "68")) // BATCH


def worlds(seeds: range, told: Connection) -> None:
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        told.send(trial(seed, "rdma", PACE))


def some(seeds: range) -> list[Outcome]:
    """What became of these seeds, one after the other in a process of their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.kv_trials", "kvtransfer.transports.verbs"])
    hears, tells = context.Pipe(duplex=False)
    process = context.Process(target=worlds, args=(seeds, tells))
    process.start()
    tells.close()
    outcomes: list[Outcome] = []
    with suppress(EOFError):
        while True:
            outcomes.append(hears.recv())
    process.join()
    if process.exitcode or len(outcomes) < len(seeds):
        seed = seeds[min(len(outcomes), len(seeds) - 1)]
        outcomes.append(Outcome(seed, "rdma", "?", [f"its process ended with {process.exitcode}"]))
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return []


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_breaks_nothing_wrong_lands_over_verbs(outcomes: list[Outcome], batch: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(
            some, (range(first, first + EACH) for first in range(batch * BATCH, (batch + 1) * BATCH, EACH))
        ):
            outcomes += found
    assert [outcome for outcome in outcomes if outcome.wrong] == []


def test_the_trials_over_verbs_saw_every_fault_and_many_landings(outcomes: list[Outcome]) -> None:
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    assert ends["landing landed landed"] > len(outcomes) / 4
    assert len(outcomes) < 200 or {outcome.fault for outcome in outcomes} == set(FAULTS)
