"""The processes of an overload: mock TP groups, a gateway, a server that does nothing, and the load generator's two.

All on 127.0.0.1, all ended by their pid. The gateway has a core of its own where there is a second one for the others:
on a machine of its own nobody would take it away. Not here: what is asked (bench/load/overload_plan.py), what it amounts to
(bench/load/overload_figures.py).
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
from typing import NamedTuple, TypeVar

import msgspec

from bench.load.overload_figures import Refusal
from bench.load.overload_load import LAST_WORDS_S, STILL_EVERY_S, STILL_KNOCKS, Knocks, Stream
from bench.load.overload_plan import GROUP, SLO, SPEED, Plan
from bench.systems import pinned
from tests.e2e import processes
from tests.e2e.processes import ENV, GatewayProcess
from tests.scraped import total

T = TypeVar("T")
READY_S = 3.0 + 2 * STILL_KNOCKS * STILL_EVERY_S
"""From a plan to its beginning: the load generator starts and looks at the idle machine first."""

OWN_CORE = 0
LOAD = "bench.load.overload_load"
BEHIND = ("nice", "-n", "10")
"""Who reads the streams would have a machine of its own elsewhere: it does not keep a core from the others."""


class Spent(NamedTuple):
    """Seconds in which a process had a core, and in which it could have run and others had it."""

    core_s: float
    waited_s: float


class House:
    """What runs. `pids`: processes by name."""

    def __init__(
        self, gateway: GatewayProcess, engines: list[str], still_url: str, log: Path, pids: Mapping[str, int]
    ) -> None:
        self.gateway = gateway
        self.still_url = still_url
        self.pids = pids
        self._engines = engines
        self._log = log

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


@contextmanager
def house(admission: str, policy: str, longest_s: float) -> Iterator[House]:
    """Everything but the load generator, up and well."""
    processes.AT_MOST_S = longest_s
    with ExitStack() as stack:
        stack.enter_context(_beside_the_gateway())
        folder = Path(stack.enter_context(TemporaryDirectory()))
        mock = stack.enter_context(_piped("-m", "mockgpu", "--port", "0", "--json", *_groups()))
        engines = [str(json.loads(_line(mock))["ready"]) for _ in range(GROUP.count)]
        still = stack.enter_context(_piped("-m", "bench.load.overload_still", core=OWN_CORE))
        log = folder / "access.jsonl"
        file = folder / processes.FILE
        file.write_text(_configuration(admission, policy, engines, log))
        serve = pinned(OWN_CORE, [sys.executable, "-m", "gateway", "serve", "--config", str(file)])
        running = stack.enter_context(
            processes.running(serve, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV)
        )
        gateway = GatewayProcess(running)
        assert running.stderr is not None
        gateway.read_until_ready(running.stderr)
        pids = {"gateway": running.pid, "engines": mock.pid}
        yield House(gateway, engines, _line(still).strip(), log, pids)


def load(plan: Plan, house: House) -> tuple[Knocks, list[Stream], int, dict[str, Spent]]:
    """Carry the plan out: what clients saw, requests that reached the engines from the storm on, and what of a core
    each process had in the spike, in shares of it."""
    with ExitStack() as stack:
        held = stack.enter_context(_generator(plan, *BEHIND, sys.executable, "-m", LOAD, "streams"))
        seen = stack.enter_context(_generator(plan, sys.executable, "-m", LOAD, "knocks"))
        pids = {**house.pids, "streams": held.pid, "knocks": seen.pid}
        spike, storm = plan.window("spike"), plan.window("storm")
        _until(plan.begin_s + spike[0])
        before = {name: _spent(pid) for name, pid in pids.items()}
        _until(plan.begin_s + spike[1])
        used = {name: _share(before[name], _spent(pid), spike[1] - spike[0]) for name, pid in pids.items()}
        _until(plan.begin_s + storm[0])
        reached = house.reached()
        ends_s = plan.ends_s + LAST_WORDS_S + 10.0
        told = [each.communicate(timeout=ends_s - time.monotonic())[0] for each in (held, seen)]
        sent = house.reached() - reached
    return msgspec.json.decode(told[1], type=Knocks), msgspec.json.decode(told[0], type=list[Stream]), sent, used


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
def _beside_the_gateway() -> Iterator[None]:
    """What is started from here on leaves the gateway's core alone, unless it is the machine's only one."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed - {OWN_CORE} or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def _piped(*arguments: str, core: int | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *arguments]
    placed = command if core is None else pinned(core, command)
    with processes.running(placed, stdout=subprocess.PIPE, env=ENV) as process:
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


def _spent(pid: int) -> Spent:
    """So far, by the scheduler's own account of all its threads."""
    tasks = [(task / "schedstat").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return Spent(sum(int(task[0]) for task in tasks) / 1e9, sum(int(task[1]) for task in tasks) / 1e9)


def _share(before: Spent, after: Spent, seconds: float) -> Spent:
    """Of so many seconds."""
    return Spent((after.core_s - before.core_s) / seconds, (after.waited_s - before.waited_s) / seconds)
