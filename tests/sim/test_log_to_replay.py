"""Tests that the simulator reads an access log: the same requests, with the same shared prompts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from planner.replay import FleetSpec, GroupKind, replay, traffic
from planner.traces import read_trace
from policies import policy_registry
from tests.chaos.gateway_fleet import gateway_fleet


async def test_a_replayed_log_with_blocks_has_the_cache_hits_of_the_original(
    tmp_path: Path,
) -> None:
    log = tmp_path / "access.jsonl"
    observability = {"access_log": str(log), "access_flush": "10ms", "access_blocks": True}
    shared = "word " * 4000
    async with gateway_fleet(
        2, pool={"policy": "prefix_aware"}, observability=observability
    ) as fleet:
        for question in ("one", "two", "six"):
            answer = await fleet.ask(
                stream=True, tokens=5, prompt=f"{shared}{question} " + f"{question} " * 900
            )
            assert answer.fate == "ok"
        await fleet.at_rest()
    requests = read_trace(log)
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    assert [request.output_tokens for request in requests] == [5, 5, 5]
    assert [request.input_tokens for request in requests] == pytest.approx(
        [6000 - 80] * 3, rel=0.02
    )
    beginnings = {request.blocks[:9] for request in requests}
    assert len(beginnings) == 1
    assert len({request.blocks[-1] for request in requests}) == 3
    run = replay(
        FleetSpec("one", (GroupKind(),)),
        traffic(requests),
        policy_registry.build("prefix_aware", {}),
    )
    cached = sum(record.cached_tokens for record in run.records)
    assert cached == pytest.approx(
        sum(line.get("believed_cached_tokens", 0) for line in lines), rel=0.15
    )


@pytest.mark.parametrize("policy", policy_registry.names())
async def test_every_policy_logs_the_blocks_of_prompts_when_asked_to(
    tmp_path: Path, policy: str
) -> None:
    log = tmp_path / "access.jsonl"
    observability = {"access_log": str(log), "access_flush": "10ms", "access_blocks": True}
    async with gateway_fleet(2, pool={"policy": policy}, observability=observability) as fleet:
        for question in ("one", "two"):
            answer = await fleet.ask(stream=True, tokens=2, prompt="word " * 2000 + question * 300)
            assert answer.fate == "ok"
        await fleet.at_rest()
    first, second = read_trace(log)
    assert first.blocks
    assert first.blocks[:4] == second.blocks[:4]
    assert first.blocks[-1] != second.blocks[-1]


@pytest.mark.parametrize(
    ("policy", "setting", "has_blocks"),
    [
        ("prefix_aware", {}, True),
        ("prefix_aware", {"access_blocks": False}, False),
        ("round_robin", {}, False),
    ],
)
async def test_a_log_has_prompt_blocks_by_default_where_the_policy_reads_prefixes(
    tmp_path: Path, policy: str, setting: dict[str, bool], has_blocks: bool
) -> None:
    log = tmp_path / "access.jsonl"
    observability = {"access_log": str(log), "access_flush": "10ms", **setting}
    async with gateway_fleet(1, pool={"policy": policy}, observability=observability) as fleet:
        await fleet.ask(stream=False, tokens=5, prompt="word " * 4000)
        await fleet.at_rest()
    (line,) = map(msgspec.json.decode, log.read_bytes().splitlines())
    assert ("blocks" in line) == has_blocks
    assert bool(read_trace(log)[0].blocks) == has_blocks
