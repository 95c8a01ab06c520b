"""Tests of how `penstock status` shows policies that are being tried out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from gateway.cli import main
from gateway.trials.shadow import MIN_COMPARED
from tests.command_runner import CommandRunner
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

PLAIN = "    policy: prefix_aware\n"
TRIED = PLAIN + "    shadow: [least_loaded]\n    canary: {policy: round_robin, percent: 50}\n"


async def typed(harness: Running, *words: str) -> str:
    words = ("status", *words, "--admin", harness.app.admin_url)
    done = await asyncio.to_thread(CommandRunner().invoke, main.run, words)
    assert done.exit_code == 0, done.output
    return str(done.output)


async def test_status_shows_shadows_and_both_arms_of_a_canary(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        assert (await harness.put(harness.text().replace(PLAIN, TRIED)))[0] == 200
        said = await typed(harness)
        assert (
            "shadow least_loaded of pool chat: 0 of 0 picks scored; 0 compared, too few to judge\n"
            in said
        )
        assert "canary round_robin of pool chat: 0 requests (canary: 50 %)\n" in said
        for number in range(3 * MIN_COMPARED):  # the canary serves half of them
            shadows = harness.app.gateway.snapshot.trials["chat"].shadows
            assert shadows is not None
            shadows._budget_s = 1.0
            assert await harness.ask(f"prompt {number}") == "ok"
        said = await typed(harness)
        assert "picks scored, agrees with " in said
        assert " ms to the first token and " in said
        assert "primary prefix_aware of pool chat: " in said
        assert "100.0% goodput, 0 failed, 0 rejected, TTFT p50 " in said
        reply = json.loads(await typed(harness, "--json"))
        assert reply["shadows"][0]["pool"] == reply["canaries"][0]["pool"] == "chat"
