"""Tests that kill a decode engine's process in the middle of a split answer.

They run with the KV handoff protocol of each kind of engine. The engine to be killed stalls after
some tokens, so that the kill comes in the middle of its answers on any machine.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.duration_limits import PATIENCE_S, within
from tests.e2e.processes import ENV, GatewayProcess, gateway_process, run_process
from tests.e2e.split_fleet import MODEL, NEED_BOOTSTRAP, SENTENCE
from tests.e2e.test_split_resume import CAN_RESUME
from tests.metrics_page import total
from tests.ports import free_port

TOKENS = 24
TOKENS_BEFORE_THE_KILL = 7
REQUESTS = 6


@dataclass(frozen=True)
class EngineProcess:
    process: subprocess.Popen[str]
    url: str

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")


@dataclass(frozen=True)
class ProcessFleet:
    gateway: GatewayProcess
    doomed: EngineProcess
    other: EngineProcess


@contextmanager
def engine(*options: str) -> Iterator[EngineProcess]:
    command = [sys.executable, "-m", "mockgpu", "--port", "0", "--groups", "1", "--json"]
    command += ["--speed", "0", "--model", "demo-8b", "--kv-tokens", "16384", *options]
    with run_process(command, stdout=subprocess.PIPE, env=ENV) as process:
        assert process.stdout
        yield EngineProcess(process, json.loads(process.stdout.readline())["ready"])


@contextmanager
def process_fleet(folder: Path, dialect: str) -> Iterator[ProcessFleet]:
    bootstrap_port = free_port()
    roles = ["--dialect", dialect, "--role"]
    prefill_options = [*roles, "prefill"]
    prefill_member = "role: prefill"
    if dialect in NEED_BOOTSTRAP:
        prefill_options += ["--bootstrap-port", str(bootstrap_port)]
        prefill_member += f", bootstrap: '127.0.0.1:{bootstrap_port}'"
    with ExitStack() as stack:
        prefill = stack.enter_context(engine(*prefill_options))
        stall = f"stall:after={TOKENS_BEFORE_THE_KILL}"
        doomed = stack.enter_context(engine(*roles, "decode", "--fault", stall))
        other = stack.enter_context(engine(*roles, "decode"))
        config = f"""
models:
  - name: {MODEL}
    served_model: demo-8b
    pool: main
    split: {{dialect: {dialect}, threshold_tokens: 64, hysteresis: 0.0}}
    resume: {{}}
pools:
  main:
    endpoints:
      - {{url: '{prefill.url}', {prefill_member}, max_concurrency: 64}}
      - {{url: '{doomed.url}', role: decode, max_concurrency: 64}}
      - {{url: '{other.url}', role: decode, max_concurrency: 64}}
"""
        gateway = stack.enter_context(gateway_process(folder, config))
        yield ProcessFleet(gateway, doomed, other)


@dataclass
class SplitAnswer:
    body: dict[str, Any]
    began_at: str = ""
    raw: bytes = b""

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [line for line in self.raw.split(b"\n\n") if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    async def read(self, http: aiohttp.ClientSession, url: str) -> None:
        async with http.post(f"{url}/v1/completions", json=self.body) as response:
            assert response.status == 200, await response.text()
            self.began_at = response.headers["x-penstock-endpoint"]
            async for piece in response.content.iter_any():
                self.raw += piece


def completion(number: int) -> dict[str, Any]:
    prompt = f"{number} " + SENTENCE * 20
    return {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True}


async def metric(
    http: aiohttp.ClientSession, running: GatewayProcess, name: str, **labels: str
) -> float:
    async with http.get(f"{running.admin_url}/metrics") as response:
        return total(await response.text(), name, **labels)


async def start_until_some_stall(
    fleet: ProcessFleet, http: aiohttp.ClientSession, group: asyncio.TaskGroup
) -> list[SplitAnswer]:
    # Start requests until the first decode engine has begun some of the answers, and stalls.
    answers: list[SplitAnswer] = []
    while True:
        more = [SplitAnswer(completion(len(answers) + number)) for number in range(REQUESTS)]
        tasks = [group.create_task(one.read(http, fleet.gateway.url)) for one in more]
        answers += more
        while not all(
            task.done() or is_stalled(one, fleet) for one, task in zip(more, tasks, strict=True)
        ):
            await asyncio.sleep(0.01)
        if any(is_stalled(one, fleet) for one in answers):
            return answers


def is_stalled(answer: SplitAnswer, fleet: ProcessFleet) -> bool:
    return answer.began_at == fleet.doomed.name and len(answer.events) == TOKENS_BEFORE_THE_KILL


@pytest.mark.parametrize("dialect", CAN_RESUME)
async def test_a_decoder_process_killed_during_its_answers_loses_no_token(
    dialect: str, tmp_path: Path
) -> None:
    timeout = aiohttp.ClientTimeout(3 * PATIENCE_S)
    with process_fleet(tmp_path, dialect) as fleet:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            async with asyncio.TaskGroup() as group:
                starting = start_until_some_stall(fleet, http, group)
                answers = await within(PATIENCE_S, starting)
                broken = sum(is_stalled(one, fleet) for one in answers)
                fleet.doomed.process.send_signal(signal.SIGKILL)
            for answer in answers:
                assert answer.raw.endswith(b"data: [DONE]\n\n")
                assert answer.text == expected_text(answer.body, TOKENS)
            resumed = await metric(http, fleet.gateway, "penstock_resumes_total", result="resumed")
            assert resumed == broken
            assert resumed == await metric(http, fleet.gateway, "penstock_resumes_total")
            produced = await metric(http, fleet.gateway, "penstock_completion_tokens_total")
            assert produced == len(answers) * TOKENS
