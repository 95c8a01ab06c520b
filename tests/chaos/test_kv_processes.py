"""Tests of KV transfers between processes, one of which is suspended or killed.

The transfer agent of the other process must notice this, and free all KV memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvtransfer.protocol.outcomes import EndReason, OutcomeKind
from kvtransfer.transfer.handles import Landing
from kvtransfer.util.agent_options import AgentOptions
from tests.chaos.kv_peer import BLOCKS, SLOW, TOKENS, options
from tests.contract.kvtransfer.groups import SMALL, Group, groups, until
from tests.contract.kvtransfer.links import PATIENCE_S, TRANSPORTS
from tests.duration_limits import Stopwatch

pytestmark = pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "inproc"])

# The contract is 1 s; the rest is for a machine with ten other jobs.
NOTICED_S = (1.0 + 0.6) * SLOW
TRIES = 3
MISSES = AgentOptions().max_missed_beats
PATIENT = 20 * MISSES  # missed heartbeats that tests allow unless they test silence


class Peer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def heard(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
        assert line, "the peer has died"
        reply: dict[str, str] = json.loads(line)
        return reply

    def say(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")

    async def signal(self, number: signal.Signals) -> Stopwatch:
        # Send a signal; return a stopwatch that starts when a killed process has ended.
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:  # without a CPU, a killed process keeps its connections
            await asyncio.wait_for(self._process.wait(), PATIENCE_S)
        return Stopwatch()


@asynccontextmanager
async def peer(transport: str, role: str, *rest: str, misses: int = MISSES) -> AsyncIterator[Peer]:
    process = await asyncio . create_subprocess_exec ( sys . executable , "-m" , "tests.chaos.kv_peer" , transport , str ( misses ) , role , * rest , stdin = asyncio . subprocess . PIPE , stdout = asyncio . subprocess . PIPE )  # fmt: skip
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def agent(transport: str, misses: int = MISSES) -> AsyncIterator[Group]:
    async with groups(transport, SMALL, options=[options(misses)]) as (alone,):
        yield alone


@asynccontextmanager
async def under_way(
    transport: str, sink: Group, ready_layers: int
) -> AsyncIterator[tuple[Peer, Landing]]:
    # Yield a source process and a fetch of its KV that is in progress.
    #
    # Retries if a slow machine loses the link before.
    ends = []
    for _ in range(TRIES):
        async with peer(transport, "source") as source:
            there = await source.heard()
            landing = sink.agent.fetch(
                there["address"], "r", BLOCKS, TOKENS, ticket=there["ticket"]
            )
            source.say("ready", ready_layers)
            await until(
                lambda: landing.outcome or sink.agent.stats()["reservations"]["moving"],  # noqa: B023
                "nothing moves",
            )
            if landing.outcome is None:
                yield source, landing
                return
            ends.append(landing.outcome)
    raise AssertionError(f"each of {TRIES} KV transfers ended before it was seen to move: {ends}")


async def test_two_processes_can_transfer(transport: str) -> None:
    async with (
        agent(transport, PATIENT) as sink,
        peer(transport, "source", misses=PATIENT) as source,
    ):
        there = await source.heard()
        landing = sink.agent.fetch(there["address"], "r", BLOCKS, TOKENS, ticket=there["ticket"])
        source.say("ready", 4)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed
        assert (await source.heard())["end"] == "landed"
        for region in sink.regions:
            assert (region.bytes.reshape(32, -1)[BLOCKS] == 0x55).all()


@ pytest . mark . parametrize ( ( "number" , "reasons" ) , [ ( signal . SIGSTOP , { EndReason . SILENT } ) , ( signal . SIGKILL , { EndReason . LINK_LOST } ) ] )  # fmt: skip
async def test_a_source_that_goes_away_is_noticed_and_never_lands(
    transport: str, number: signal.Signals, reasons: set[EndReason]
) -> None:
    async with agent(transport) as sink, under_way(transport, sink, 1) as (source, landing):
        took = await source.signal(number)
        end = await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)
        assert took.fair_s < NOTICED_S
        assert (end.kind, end.is_retriable) == (OutcomeKind.FAILED, True)
        assert end.reason in reasons
        # The engine may reuse the blocks now. Bytes that the source sends after SIGCONT must not
        # be written to them.
        for region in sink.regions:
            region.bytes[:] = 0xAA
        if number is signal.SIGSTOP:
            source.say("ready", 4)
            await source.signal(signal.SIGCONT)
            assert (await source.heard())["end"] in ("peer_silent", "link_lost")
        assert all((region.bytes == 0xAA).all() for region in sink.regions)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_sink_that_goes_away_gives_the_blocks_back(
    transport: str, number: signal.Signals
) -> None:
    async with agent(transport) as source:
        before = source.regions[0].generations[BLOCKS[0]]
        offer = source.agent.offer("r", BLOCKS, TOKENS, ready_layers=0, public=True)
        async with peer(transport, "sink", source.agent.address) as sink:
            await sink.heard()
            await until(lambda: source.agent.stats()["leases"]["claimed"], "not claimed")
            took = await sink.signal(number)
            end = await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)
            assert took.fair_s < NOTICED_S
            assert end.reason in (EndReason.SILENT, EndReason.LINK_LOST)
            assert source.regions[0].generations[BLOCKS[0]] == before + 1
            if number is signal.SIGSTOP:
                await sink.signal(signal.SIGCONT)
                assert (await sink.heard())["end"] in ("peer_silent", "link_lost")


async def test_a_source_that_was_frozen_for_a_moment_goes_on(transport: str) -> None:
    async with (
        agent(transport, PATIENT) as sink,
        under_way(transport, sink, 0) as (source, landing),
    ):
        await source.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        await source.signal(signal.SIGCONT)
        source.say("ready", 4)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed
