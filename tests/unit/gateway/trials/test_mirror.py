"""Tests of copies of requests that are sent to a second engine (mirror), to compare its answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.trials import mirror as mirror_module
from gateway.trials.mirror import PoolMirror
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

TENANTS = """\
tenants:
  - {name: a, key: sk-tenant-aaaaaaaaaaaaaaaa}
  - {name: b, key: sk-tenant-bbbbbbbbbbbbbbbb, mirror: false}
"""


def mirrored(harness: Running, options: str = "percent: 100, in_flight: 8", more: str = "") -> str:
    text = harness.text(0)
    url = harness.members[1].url
    pools = f"    mirror: {{to: candidate, {options}}}\n"
    pools += f"  candidate:\n    endpoints: [{{name: c, url: '{url}'}}]\n"
    place = text.index("timeouts:")
    return text[:place] + pools + text[place:] + more


async def reloaded(harness: Running, text: str) -> PoolMirror:
    status, reply = await harness.put(text)
    assert status == 200, reply
    mirrors = harness.app.gateway.mirrors
    assert mirrors is not None
    return mirrors.by_pool["chat"]


async def ended(harness: Running, count: int) -> dict[str, int]:
    # Return the numbers of sampled requests by result, once there are `count` of them.
    async with asyncio.timeout(PATIENCE_S):
        while True:
            mirrors = harness.app.gateway.mirrors
            assert mirrors is not None
            counts: dict[str, int] = mirrors.as_json()["mirrors"][0]["requests"]
            if sum(counts.values()) >= count:
                return counts
            await asyncio.sleep(0.01)


async def ask(harness: Running, prompt: str, **headers: str) -> None:
    body = {"model": "demo-8b", "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{harness.app.url}/v1/chat/completions"
    async with harness.http.post(url, json=body, headers=named) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def test_equal_engines_are_compared_and_no_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "BLOCK", 20)
    async with running(tmp_path) as harness:
        await reloaded(harness, mirrored(harness))
        for number in range(20):
            await ask(harness, f"question {number}")
            await ended(harness, number + 1)
        row = harness.app.gateway.mirrors.as_json()["mirrors"][0]  # type: ignore[union-attr]
        assert row["requests"] == {"compared": 20}
        assert row["last"]["is_worse"] is False
        measures = {each["name"]: each for each in row["last"]["measures"]}
        assert measures["equal answers"]["candidate"] == 1.0
        assert measures["divergence (KL)"]["floor"] == 0.0
        assert row["tokens"] > 0
        # Copies do not count as clients' requests: neither in metrics, in the list, nor in loads.
        _, _, listed = await harness.asked("GET", "/requests")
        assert len(listed["requests"]) == 20
        assert harness.app.gateway.accounts.answered_count == 20
        assert (
            sum(
                live.sent_tokens
                for live in harness.app._endpoints.all()
                if live.endpoint.pool == "candidate"
            )
            == 0
        )
        assert "question" not in json.dumps(row)


async def test_a_busy_mirror_a_spent_budget_and_a_dead_candidate_are_counted(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        mirror = await reloaded(harness, mirrored(harness, "percent: 100, in_flight: 1"))
        mirror._places = 0
        await ask(harness, "one")
        assert await ended(harness, 1) == {"busy": 1}
        await reloaded(harness, mirrored(harness, "percent: 100, tokens_per_minute: 5"))
        await ask(harness, "two")
        assert await ended(harness, 1) == {"budget": 1}
        await reloaded(harness, mirrored(harness))
        candidate = next(
            live for live in harness.app._endpoints.all() if live.endpoint.pool == "candidate"
        )
        harness.app._endpoints.set_drained(candidate, True)
        await ask(harness, "three")
        assert await ended(harness, 1) == {"down": 1}
        status, _ = await harness.put(harness.text(0))
        assert status == 200
        assert harness.app.gateway.mirrors is None
        await ask(harness, "four")


async def test_tenants_can_opt_out_and_required_isolation_excludes_all(tmp_path: Path) -> None:
    keys = {"a": "Bearer sk-tenant-aaaaaaaaaaaaaaaa", "b": "Bearer sk-tenant-bbbbbbbbbbbbbbbb"}
    async with running(tmp_path) as harness:
        await reloaded(harness, mirrored(harness, more=TENANTS))
        await ask(harness, "of b", Authorization=keys["b"])
        await ask(harness, "of a", Authorization=keys["a"])
        assert await ended(harness, 1) == {"compared": 1}
        required = TENANTS + "cache: {isolate: required, secret: '0123456789abcdef0123'}\n"
        await reloaded(harness, mirrored(harness, "percent: 99", more=required))
        await ask(harness, "of a", Authorization=keys["a"])
        mirrors: Any = harness.app.gateway.mirrors
        assert mirrors.as_json()["mirrors"][0]["requests"] == {}


async def test_a_mirror_that_was_removed_by_a_reload_counts_nothing_more(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        mirror = await reloaded(harness, mirrored(harness))
        await ask(harness, "one")
        assert await ended(harness, 1) == {"compared": 1}
        status, _ = await harness.put(harness.text(0))
        assert status == 200
        mirror.give_up("unanswered")
        assert mirror.as_json()["requests"] == {}


async def test_a_request_that_ends_after_its_mirror_was_closed_is_not_copied(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        mirror = await reloaded(harness, mirrored(harness))
        await ask(harness, "one")
        assert await ended(harness, 1) == {"compared": 1}
        slot = next(
            live.load.slot
            for live in harness.app._endpoints.all()
            if live.endpoint.pool == "chat" and live.load.is_available
        )
        members = {"model": msgspec.Raw(b'"demo-8b"')}
        mirror.begin(members, b"", slot)
        assert mirror._tasks, "an open mirror copies it"
        mirror.close()
        await asyncio.gather(*mirror._tasks, return_exceptions=True)
        mirror.begin(members, b"", slot)
        assert not mirror._tasks
