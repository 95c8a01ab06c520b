"""A gateway's log can be replayed: the same requests with the same shared prefixes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from planner.replay import FleetSpec, GroupKind, replay, traffic
from planner.traces import read_trace
from policies import registry
from tests.chaos.house import house


async def test_a_log_with_blocks_replays_with_the_hits_that_were_there(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    seen = {"access_log": str(log), "access_flush": "10ms", "access_blocks": True}
    shared = "word " * 4000
    async with house(2, pool={"policy": "prefix_aware"}, observability=seen) as home:
        for question in ("one", "two", "six"):
            answer = await home.ask(
                stream=True, tokens=5, prompt=f"{shared}{question} " + f"{question} " * 900
            )
            assert answer.fate == "ok"
        await home.at_rest()
    requests = read_trace(log)
    told = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    assert [one.output_tokens for one in requests] == [5, 5, 5]
    assert [one.input_tokens for one in requests] == pytest.approx([6000 - 80] * 3, rel=0.02)
    beginnings = {one.blocks[:9] for one in requests}
    assert len(beginnings) == 1
    assert len({one.blocks[-1] for one in requests}) == 3
    run = replay(FleetSpec("one", (GroupKind(),)), traffic(requests), registry.build("prefix_aware", {}))
    cached = sum(one.cached_tokens for one in run.records)
    assert cached == pytest.approx(
        sum(line.get("believed_cached_tokens", 0) for line in told), rel=0.15
    )


@pytest.mark.parametrize("policy", registry.names())
async def test_every_policy_logs_the_blocks_of_prompts_when_asked_to(
    tmp_path: Path, policy: str
) -> None:
    log = tmp_path / "access.jsonl"
    seen = {"access_log": str(log), "access_flush": "10ms", "access_blocks": True}
    async with house(2, pool={"policy": policy}, observability=seen) as home:
        for question in ("one", "two"):
            answer = await home.ask(stream=True, tokens=2, prompt="word " * 2000 + question * 300)
            assert answer.fate == "ok"
        await home.at_rest()
    first, second = read_trace(log)
    assert first.blocks
    assert first.blocks[:4] == second.blocks[:4]
    assert first.blocks[-1] != second.blocks[-1]


async def test_a_log_has_no_prompt_blocks_unless_configured(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    seen = {"access_log": str(log), "access_flush": "10ms"}
    async with house(1, pool={"policy": "prefix_aware"}, observability=seen) as home:
        await home.ask(stream=False, tokens=5, prompt="word " * 4000)
        await home.at_rest()
    (line,) = map(msgspec.json.decode, log.read_bytes().splitlines())
    assert "blocks" not in line
    assert read_trace(log)[0].blocks == ()
