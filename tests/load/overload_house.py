"""The processes of an overload: mock TP groups, a gateway, a server that does nothing, and the load generator's two.

All on 127.0.0.1, all ended by their pid. Not here: what is asked (overload_plan.py), what it amounts to
(overload_figures.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from tests.e2e import processes
from tests.e2e.processes import ENV, Gateway
from tests.load.overload_figures import Refusal
from tests.load.overload_load import LAST_WORDS_S, STILL_EVERY_S, STILL_KNOCKS, Knocks, Stream
from tests.load.overload_plan import GROUP, SLO, SPEED, Plan
from tests.scraped import total

T = TypeVar("T")
READY_S = 3.0 + 2 * STILL_KNOCKS * STILL_EVERY_S
"""From a plan to its beginning: the load generator starts and looks at the idle machine first."""

TICKS = os.sysconf("SC_CLK_TCK")
LOAD = "tests.load.overload_load"
BEHIND = ("nice", "-n", "10")
"""Who reads the streams would have a machine of its own elsewhere: it does not keep a core from the others."""


class House:
    """What runs. `cpu_s()` tells each process's time so far."""

    def __init__(
        self, gateway: Gateway, engines: list[str], still_url: str, log: Path, pids: Mapping[str, int]
    ) -> None:
        self.gateway = gateway
        self.still_url = still_url
        self._engines = engines
        self._log = log
        self._pids = pids

    def reached(self) -> int:
        """Requests that the engines have been sent so far."""
        found = 0.0
        for url in self._engines:
            with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
                page = answer.read().decode()
            names = ("vllm:request_success_total", "vllm:num_requests_running", "vllm:num_requests_waiting")
            found += sum(total(page, name) for name in names)
        return int(found)

    def refusals(self) -> dict[str, Refusal]:
        """Everybody refused, by id, as the access log tells."""
        lines = (json.loads(line) for line in self._log.read_text().splitlines())
        return {one["id"]: Refusal(one["reason"], one["done_us"] / 1e6) for one in lines if one["status"] == 429}

    def cpu_s(self) -> dict[str, float]:
        """Seconds of a core that each has used."""
        return {name: _cpu_s(pid) for name, pid in self._pids.items()}


@contextmanager
def house(admission: str, policy: str, longest_s: float) -> Iterator[House]:
    """Everything but the load generator, up and well."""
    processes.WITHIN_S = longest_s / 4  # the processes' watchdog waits for four of these
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        mock = stack.enter_context(_piped("-m", "mockgpu", "--port", "0", "--json", *_groups()))
        engines = [str(json.loads(_line(mock))["ready"]) for _ in range(GROUP.count)]
        still = stack.enter_context(_piped("-m", "tests.load.overload_still"))
        log = folder / "access.jsonl"
        file = folder / processes.FILE
        file.write_text(_configuration(admission, policy, engines, log))
        serve = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
        running = stack.enter_context(
            processes.running(serve, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV)
        )
        gateway = Gateway(running)
        assert running.stderr is not None
        gateway.hear(running.stderr)
        pids = {"gateway": running.pid, "engines": mock.pid}
        yield House(gateway, engines, _line(still).strip(), log, pids)


def load(plan: Plan, house: House) -> tuple[Knocks, list[Stream], int, dict[str, float]]:
    """Carry the plan out: what clients saw, requests that reached the engines from the storm on, and shares of a core
    that gateway and engines took in the spike."""
    with ExitStack() as stack:
        asking = [
            stack.enter_context(_generator(plan, *BEHIND, sys.executable, "-m", LOAD, "streams")),
            stack.enter_context(_generator(plan, sys.executable, "-m", LOAD, "knocks")),
        ]
        spike, storm = plan.window("spike"), plan.window("storm")
        _until(plan.begin_s + spike[0])
        before = house.cpu_s()
        _until(plan.begin_s + spike[1])
        used = {name: (spent - before[name]) / (spike[1] - spike[0]) for name, spent in house.cpu_s().items()}
        _until(plan.begin_s + storm[0])
        reached = house.reached()
        ends_s = plan.ends_s + LAST_WORDS_S + 10.0
        held, seen = (each.communicate(timeout=ends_s - time.monotonic())[0] for each in asking)
        sent = house.reached() - reached
    return msgspec.json.decode(seen, type=Knocks), msgspec.json.decode(held, type=list[Stream]), sent, used


def _groups() -> list[str]:
    return [
        *("--groups", str(GROUP.count), "--model", GROUP.model, "--gpu", GROUP.gpu, "--tp", str(GROUP.tp)),
        *("--speed", str(SPEED)),
    ]


def _configuration(admission: str, policy: str, engines: list[str], log: Path) -> str:
    listed = ", ".join(f"{{url: '{url}', max_concurrency: {GROUP.max_concurrency}}}" for url in engines)
    standard = f"{{ttft: {SLO.ttft_s:g}s, tpot: {SLO.tpot_s * 1e3:g}ms}}"
    return (
        "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\n"
        f"observability: {{access_log: '{log}'}}\nslo: {{classes: {{standard: {standard}}}}}\n"
        f"pools: {{main: {{policy: {policy}, admission: {admission}, endpoints: [{listed}]}}}}\n"
    )


@contextmanager
def _piped(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with processes.running([sys.executable, *arguments], stdout=subprocess.PIPE, env=ENV) as process:
        yield process


@contextmanager
def _generator(plan: Plan, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A part of the load generator at work; ended in any case."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        process.stdin = None  # or communicate() would write to it
        yield process
    finally:
        process.kill()
        process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a process ended before it was ready"
    return line


def _until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
