"""Starts the processes of an overload run: mock engines, gateway, null server and load generators.

All run on 127.0.0.1. If the machine has several cores, the gateway has one of them alone, as it
would on a machine of its own.

The plan is in bench/load/overload_plan.py, the results in bench/load/overload_figures.py.
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

from bench.compared_systems import pinned
from bench.load.overload_figures import Refusal
from bench.load.overload_load import (
    GRACE_S,
    NULL_EVERY_S,
    NULL_REQUESTS,
    ClientRecords,
    Stream,
)
from bench.load.overload_plan import GROUP, SLO, SPEED, Plan
from tests.e2e import processes
from tests.e2e.processes import ENV, GatewayProcess
from tests.metrics_page import total

T = TypeVar("T")
READY_S = 3.0 + 2 * NULL_REQUESTS * NULL_EVERY_S
"""Seconds from the start of the load generator to the beginning of the plan.

In this time it starts, and measures round trips on the idle machine.
"""

OWN_CORE = 0
LOAD = "bench.load.overload_load"
BEHIND = ("nice", "-n", "10")
"""Prefix of the command that starts the stream readers.

It lowers their priority, so that the processes under test get the CPU first.
"""


class CpuTimes(NamedTuple):
    """The CPU seconds in which one process ran, and those in which it waited for a core."""

    core_s: float
    runnable_s: float


class OverloadFleet:
    """The processes of one overload run: engines, gateway and null server.

    `pids` has their ids by name.
    """

    def __init__(
        self,
        gateway: GatewayProcess,
        engines: list[str],
        null_url: str,
        log: Path,
        pids: Mapping[str, int],
    ) -> None:
        self.gateway = gateway
        self.null_url = null_url
        self.pids = pids
        self._engines = engines
        self._log = log

    def count_engine_requests(self) -> int:
        count = 0.0
        for url in self._engines:
            with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
                page = answer.read().decode()
            names = (
                "vllm:request_success_total",
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
            )
            count += sum(total(page, name) for name in names)
        return int(count)

    def refusals(self) -> dict[str, Refusal]:
        lines = (json.loads(line) for line in self._log.read_text().splitlines())
        return {
            line["id"]: Refusal(line["reason"], line["done_us"] / 1e6)
            for line in lines
            if line["status"] == 429
        }


@contextmanager
def run_fleet(admission: str, policy: str, longest_s: float) -> Iterator[OverloadFleet]:
    """Run all processes except the load generator, for at most `longest_s` seconds."""
    processes.AT_MOST_S = longest_s
    with ExitStack() as stack:
        stack.enter_context(_off_the_gateways_core())
        folder = Path(stack.enter_context(TemporaryDirectory()))
        mock = stack.enter_context(
            _piped("-m", "mockgpu", "--port", "0", "--json", *_mock_options())
        )
        engines = [str(json.loads(_read_line(mock))["ready"]) for _ in range(GROUP.count)]
        null_server = stack.enter_context(
            _piped("-m", "bench.load.overload_null_server", core=OWN_CORE)
        )
        log = folder / "access.jsonl"
        file = folder / processes.FILE
        file.write_text(_gateway_config(admission, policy, engines, log))
        serve = pinned(OWN_CORE, [sys.executable, "-m", "gateway", "serve", "--config", str(file)])
        running = stack.enter_context(
            processes.run_process(serve, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV)
        )
        gateway = GatewayProcess(running)
        assert running.stderr is not None
        gateway.read_until_ready(running.stderr)
        pids = {"gateway": running.pid, "engines": mock.pid}
        yield OverloadFleet(gateway, engines, _read_line(null_server).strip(), log, pids)


def generate_load(
    plan: Plan, fleet: OverloadFleet
) -> tuple[ClientRecords, list[Stream], int, dict[str, CpuTimes]]:
    """Run the load generator with a plan against the fleet, and return the records of all requests.

    The records are those of the clients, the progress of the streams, the number of requests that
    reached the engines since the storm began, and the CPU time of each process in the spike.
    """
    with ExitStack() as stack:
        command = (sys.executable, "-m", LOAD)
        streams = stack.enter_context(_generator(plan, *BEHIND, *command, "streams"))
        clients = stack.enter_context(_generator(plan, *command, "clients"))
        pids = {**fleet.pids, "streams": streams.pid, "clients": clients.pid}
        spike, storm = plan.window("spike"), plan.window("storm")
        _sleep_until(plan.begin_s + spike[0])
        before = {name: _cpu_times(pid) for name, pid in pids.items()}
        _sleep_until(plan.begin_s + spike[1])
        used = {
            name: _share(before[name], _cpu_times(pid), spike[1] - spike[0])
            for name, pid in pids.items()
        }
        _sleep_until(plan.begin_s + storm[0])
        before_storm = fleet.count_engine_requests()
        ends_s = plan.ends_s + GRACE_S + 10.0
        outputs = [
            process.communicate(timeout=ends_s - time.monotonic())[0]
            for process in (streams, clients)
        ]
        sent = fleet.count_engine_requests() - before_storm
    return (
        msgspec.json.decode(outputs[1], type=ClientRecords),
        msgspec.json.decode(outputs[0], type=list[Stream]),
        sent,
        used,
    )


def _mock_options() -> list[str]:
    return [
        *(
            "--groups",
            str(GROUP.count),
            "--model",
            GROUP.model,
            "--gpu",
            GROUP.gpu,
            "--tp",
            str(GROUP.tp),
        ),
        *("--speed", str(SPEED)),
    ]


def _gateway_config(admission: str, policy: str, engines: list[str], log: Path) -> str:
    endpoints = ", ".join(
        f"{{url: '{url}', max_concurrency: {GROUP.max_concurrency}}}" for url in engines
    )
    standard = f"{{ttft: {SLO.ttft_s:g}s, tpot: {SLO.tpot_s * 1e3:g}ms}}"
    return (
        "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\n"
        f"observability: {{access_log: '{log}'}}\nslo: {{classes: {{standard: {standard}}}}}\n"
        f"pools: {{main: {{policy: {policy}, admission: {admission}, endpoints: [{endpoints}]}}}}\n"
    )


@contextmanager
def _off_the_gateways_core() -> Iterator[None]:
    # Keep processes started in this block off the gateway's core, unless it is the only one.
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
    with processes.run_process(placed, stdout=subprocess.PIPE, env=ENV) as process:
        yield process


@contextmanager
def _generator(plan: Plan, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        process.stdin = None  # otherwise communicate() would write to it
        yield process
    finally:
        process.kill()
        process.wait()


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a process ended before it was ready"
    return line


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


def _cpu_times(pid: int) -> CpuTimes:
    tasks = [
        (task / "schedstat").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return CpuTimes(
        sum(int(task[0]) for task in tasks) / 1e9, sum(int(task[1]) for task in tasks) / 1e9
    )


def _share(before: CpuTimes, after: CpuTimes, seconds: float) -> CpuTimes:
    return CpuTimes(
        (after.core_s - before.core_s) / seconds, (after.runnable_s - before.runnable_s) / seconds
    )
