"""Tests that a running gateway records the lengths of requests, and reports changes of traffic."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.cli.doctor.drift_check import check_drift
from gateway.cli.main import run as cli
from gateway.config import load_text
from gateway.drift.drift_monitor import DriftMonitor
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from gateway.telemetry import drift_records
from gateway.telemetry.drift_records import ShapeRecord, ShapeRecorder
from planner.drift.access_log_requests import read_log
from planner.drift.request_measures import count_shapes
from policies.sizing.workload_drift import BINS, ShapeCounts, ShapeMemory
from tests.command_runner import CommandRunner
from tests.ports import free_port
from tests.replacement import stand_in
from tests.unit.gateway.reload import running as gateway_running
from tests.unit.gateway.reload.running import running


def block(bin_of: dict[str, int]) -> str:
    lines = [
        f"    {name}: {[float(n == bin_of.get(name, 0)) for n in range(bins)]}"
        for name, bins in BINS.items()
    ]
    return "\n".join(["sized_for:", "  chat:", *lines, ""])


async def ask(harness: Any, prompt: str, session: str) -> None:
    body = {"model": "demo-8b", "max_tokens": 3, "messages": [{"role": "user", "content": prompt}]}
    url = f"{harness.app.url}/v1/chat/completions"
    async with harness.http.post(url, json=body, headers={"x-session-id": session}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def test_the_log_and_the_running_gateway_see_the_same_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "access.jsonl"
    text = gateway_running.CONFIG.replace("access_log: 'off'", f"access_log: '{log}'")
    monkeypatch.setattr(gateway_running, "CONFIG", text)
    taken: list[ShapeRecord] = []
    monkeypatch.setattr(DriftMonitor, "feed", lambda _, records: taken.extend(records))
    async with running(tmp_path, more=block({})) as harness:
        assert harness.app.gateway.accounts.shapes.pools == {"chat"}
        for number in range(12):
            turn, session = divmod(number, 3)
            await ask(harness, "word " * 700 * (turn + 1), f"s{session}")
        for _ in range(400):
            await asyncio.sleep(0.05)
            if len(taken) == 12 and log.exists() and log.read_text().count("\n") == 12:
                break
    memory, live = ShapeMemory(), ShapeCounts()
    for record in taken:
        live.add(
            memory.shape(record.prompt_tokens, record.output_tokens, record.blocks, record.session)
        )
    begin_s, requests = read_log(log, ["demo-8b"])
    assert live.counts == count_shapes(requests).counts
    assert live.counts["turns"][:3] == [3, 6, 3]
    assert abs(begin_s - time()) < 600
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert not any("s1" in str(line["session_id"]) for line in lines)
    assert len({line["session_id"] for line in lines}) == 3


async def test_drift_is_on_the_admin_page_in_status_and_among_the_causes(tmp_path: Path) -> None:
    async with running(tmp_path, more=block({})) as harness:
        monitor, begin_s = harness.app.drift, time()
        assert monitor is not None
        for n in range(1900):
            monitor.feed([ShapeRecord("chat", begin_s + n, 5000, 900, 0, ())])
        async with harness.http.get(f"{harness.app.admin_url}/drift") as answer:
            (row,) = (await answer.json())["pools"]
        assert row["drift"] is True
        assert row["measures"] == ["prompt", "output"]
        async with harness.http.get(f"{harness.app.admin_url}/live") as answer:
            why = [line["text"] for line in (await answer.json())["why"]]
        assert any("Pool chat was sized for other requests: prompt lengths" in text for text in why)
        address = harness.app.admin_url.removeprefix("http://")
        shown = await asyncio.to_thread(
            CommandRunner().invoke, cli, ["status", "--admin", harness.app.admin_url]
        )
        assert "drift of pool chat: since " in shown.output, shown.output
        config = harness.app.reloader.running.config
        port = int(address.rpartition(":")[2])
        listener = config.listeners.admin.model_copy(update={"port": port})
        listeners = config.listeners.model_copy(update={"admin": listener})
        own = config.model_copy(update={"listeners": listeners})
        (finding,) = await asyncio.to_thread(lambda: list(check_drift(own)))
        assert (finding.verdict, finding.subject) == ("warn", "pool chat")
        assert (await harness.put(harness.text()))[0] == 200
        assert harness.app.gateway.accounts.shapes.pools == frozenset()


def test_doctor_cannot_tell_without_a_running_gateway() -> None:
    text = b"version: 1\npools: {chat: {endpoints: [{url: 'http://127.0.0.1:9'}]}}\n"
    port = f"listeners: {{admin: {{port: {free_port()}}}}}\n"
    own = load_text(text + port.encode() + block({}).encode(), "gateway.yaml", {}).config
    (finding,) = check_drift(own)
    assert finding.verdict == "unknown"


def test_records_beyond_the_limit_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_records, "MAX_IDS", 20)
    recorder = ShapeRecorder()
    endpoint = SimpleNamespace(pool="chat")
    pick = SimpleNamespace(candidate=SimpleNamespace(endpoint=endpoint))
    for n, status in enumerate((200, 200, 200, 429, 499, 502, 0)):
        fake = SimpleNamespace(pick=pick, status=status, body_bytes=400)
        exchange = stand_in(Exchange, fake)
        recorder.add(exchange, Relay(b""), TokenUsage(), float(n), list(range(15)), 0)
    assert [record.at_s for record in recorder.pop_records()] == [0.0, 1.0]
    assert recorder.dropped == 1
