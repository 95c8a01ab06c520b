"""Tests that run randomized KV transfers with faults over a real RDMA device.

Several trials run at the same time, each in its own process. A crash or a hang is reported with its
random seed. The virtual machine is slow, so its speed is measured first, and all times of the
trials are scaled by it.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.chaos.kv_trials import FAULTS, Outcome, trial
from tests.chaos.kv_undisturbed_time import first_landing_s

AT_ONCE, EACH = 4, 17
LEAST_PACE = 4.0
HANGS_AT = 30.0  # seconds after which a trial counts as hanging, at a pace of 1
# No trial of a batch begins after this time. A busy machine runs fewer.
ENOUGH_S = 400.0
BATCH = AT_ONCE * EACH
BATCHES = int(os.environ.get("PENSTOCK_RDMA_TRIALS", "68")) // BATCH


def worlds(connection: Connection, seeds: range, pace: float, transport: str) -> None:
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    ends = time.monotonic() + ENOUGH_S
    for seed in seeds:
        if time.monotonic() > ends:
            break
        faulthandler.dump_traceback_later(HANGS_AT * pace, exit=True)
        connection.send(trial(seed, transport, pace))


def calm(connection: Connection) -> None:
    connection.send(first_landing_s("rdma"))


def run_process(target: Callable[..., None], *args: object) -> tuple[list[Any], int | None]:
    # Run a function in a process; return the objects that it sent back, and the exit code.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.chaos.kv_undisturbed_time", "kvtransfer.transports.rdma.verbs"]
    )
    hears, tells = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(tells, *args))
    process.start()
    tells.close()
    messages = []
    with suppress(EOFError):
        while True:
            messages.append(hears.recv())
    process.join()
    return messages, process.exitcode


def run_seeds(seeds: range, pace: float, transport: str = "rdma") -> list[Outcome]:
    outcomes, code = run_process(worlds, seeds, pace, transport)
    if code or not outcomes:
        seed = seeds[min(len(outcomes), len(seeds) - 1)]
        outcomes.append(Outcome(seed, transport, "?", [f"its process ended with {code}"]))
    return outcomes


def measured_pace(pool: ThreadPoolExecutor) -> float:
    # Return a pace at which a transfer without faults takes half of its shortest time limit.
    #
    # The pace is measured while as many trials run as in the test.
    calms = list(pool.map(lambda _: run_process(calm), range(AT_ONCE)))
    assert all(len(messages) == 1 for messages, _ in calms), (
        f"nothing lands even where nothing breaks: {calms}"
    )
    return max(LEAST_PACE, 2 * max(messages[0] for messages, _ in calms))


def landed(outcomes: list[Outcome]) -> int:
    return sum(outcome.ends["landing landed landed"] for outcome in outcomes)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return []


@pytest.mark.parametrize("batch", range(BATCHES))
def test_under_any_fault_nothing_wrong_lands_over_verbs(
    outcomes: list[Outcome], batch: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(outcomes)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pace = measured_pace(pool)
        firsts = range(batch * BATCH, (batch + 1) * BATCH, EACH)
        for item in pool.map(lambda first: run_seeds(range(first, first + EACH), pace), firsts):
            outcomes += item
    new = outcomes[before:]
    with capfd.disabled():
        print(f"\n{len(new)} of {BATCH} trials at a pace of {pace:.1f}: {landed(new)} landings")
    assert [outcome for outcome in outcomes if outcome.wrong] == []


def test_the_trials_over_verbs_saw_every_fault_and_many_landings(outcomes: list[Outcome]) -> None:
    assert len(outcomes) < 200 or {outcome.fault for outcome in outcomes} == set(FAULTS)
    results = outcomes
    for slower in (2, 4):
        if has_many_landings(results):
            break
        results = rerun_seeds(slower)
        assert [outcome for outcome in results if outcome.wrong] == []
    assert has_many_landings(results), sum((outcome.ends for outcome in results), Counter[str]())


def has_many_landings(outcomes: list[Outcome]) -> bool:
    return landed(outcomes) > len(outcomes) / 4


def rerun_seeds(slower: int) -> list[Outcome]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pace = slower * measured_pace(pool)
        batches = pool.map(
            lambda first: run_seeds(range(first, first + 3), pace), range(0, BATCH, EACH)
        )
        return [outcome for batch in batches for outcome in batch]
