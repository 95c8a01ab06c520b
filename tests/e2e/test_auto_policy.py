"""Tests of a real gateway that chooses its own routing policy from its access log.

The log contains simulated traffic, so that nothing depends on how fast this machine is.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import pytest

from gateway.cli import main
from tests import auto_log
from tests.command_runner import CommandRunner
from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet

LONG_S = 600.0
"""Maximum seconds of the replay process, which computes for about 15 s."""

CONFIG = """
workers: {workers}
slo: {{classes: {{standard: {{ttft: 1s, tpot: 50ms}}}}}}
models: [{{name: demo-8b, pool: main, parameters: 8B}}]
pools:
  main:
    policy: round_robin    # loses
    admission: none
    auto: {{portfolio: [prefix_aware], interval: 2s, cpu_percent: 50}}
    endpoints:
    - {{url: '{first}', name: e0, labels: {{gpu: h100}}, kv_tokens: 60000}}
    - {{url: '{second}', name: e1, labels: {{gpu: h100}}, kv_tokens: 60000}}
"""
COMPLETION = {"model": "demo-8b", "prompt": "Where does the water go?", "max_tokens": 4}


def run_command(running: GatewayProcess, *words: str) -> tuple[int, str]:
    result = CommandRunner().invoke(main.run, [*words, "--admin", running.admin_url])
    return result.exit_code, result.output


def auto_state(running: GatewayProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{running.admin_url}/auto", timeout=PATIENCE_S) as reply:
        pool: dict[str, Any] = json.load(reply)["pools"][0]
    return pool


def wait_until(condition: Callable[[], bool], running: GatewayProcess) -> None:
    ends = monotonic() + LONG_S
    while not condition():
        assert monotonic() < ends, f"{auto_state(running)}\n{running.stderr_text}"
        assert running.is_alive
        sleep(0.2)


def wait_for_replay(condition: Callable[[], bool], running: GatewayProcess) -> None:
    # Do the same as wait_until(), with the replay process at normal priority. At the lowest
    # priority, which it gives itself, it would not run while other processes use every core.
    def is_met() -> bool:
        for process in replay_processes(running.pid):
            raise_priority(process)
        return condition()

    wait_until(is_met, running)


def raise_priority(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # root only
        os.sched_setscheduler(process, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, process, 0)


def ask(running: GatewayProcess) -> str:
    # Send a request, and return its id.
    body = json.dumps(COMPLETION).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{running.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return str(reply.headers["x-request-id"])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pool_that_began_with_a_bad_policy_switches_and_an_operator_can_undo_it(
    tmp_path: Path, workers: int
) -> None:
    log, lines = tmp_path / "access.jsonl", auto_log.serve("round_robin", 500)
    with mock_fleet() as (first, second):
        config = CONFIG.format(workers=workers, first=first, second=second)
        with gateway_process(tmp_path, config, observability=f"{{access_log: '{log}'}}") as running:
            auto_log.write(log, lines, time() + 1.0)
            wait_for_replay(lambda: bool(auto_state(running)["switches"]), running)
            state = auto_state(running)
            assert state["policy"] == "prefix_aware", state
            assert state["switches"][0]["version"] == 2
            code, output = run_command(running, "history")
            assert (code, "auto" in output.splitlines()[0]) == (0, True), output
            assert "because prefix_aware would have served" in output
            assert "pools.main.policy: round_robin -> prefix_aware" in output
            code, output = run_command(running, "diff")
            assert (code, output) == (0, "  pools.main.policy: prefix_aware -> round_robin\n")
            code, output = run_command(running, "explain", ask_until_explained(running))
            assert (code, "policy    chosen in v2: prefix_aware would" in output) == (0, True), (
                output
            )

            code, output = run_command(running, "auto", "pin")
            assert (code, "v3 (1 change: pools.main.auto.pinned)" in output) == (0, True), output
            code, output = run_command(running, "auto")
            assert output.startswith("pool main: prefix_aware (auto, pinned)\n"), output
            code, output = run_command(running, "rollback", "1")
            assert code == 0, output
            state = auto_state(running)
            assert (state["policy"], state["held"]) == ("round_robin", "rolled back")
            code, output = run_command(running, "auto", "unpin", "main")
            assert (code, output) == (0, "pool main may change its policy\n")
            assert auto_state(running)["held"] == ""
            page = metrics(running)
            assert 'penstock_auto_switches_total{pool="main"} 1' in page
            assert "penstock_auto_replay_cpu_seconds_total" in page
            assert "Traceback" not in running.stderr_text, running.stderr_text


def ask_until_explained(running: GatewayProcess) -> str:
    # Return the id of a request that has ended and can be explained.
    request_id = ask(running)
    wait_until(lambda: run_command(running, "explain", request_id)[0] == 0, running)
    return request_id


def metrics(running: GatewayProcess) -> str:
    with urllib.request.urlopen(f"{running.admin_url}/metrics", timeout=PATIENCE_S) as reply:
        return str(reply.read(), "utf-8")


def test_the_replay_process_has_the_lowest_priority_and_ends_with_its_gateway(
    tmp_path: Path,
) -> None:
    log, lines = tmp_path / "access.jsonl", auto_log.serve("round_robin", 500)
    auto_log.write(log, lines, time())
    with mock_fleet() as (first, second):
        config = CONFIG.format(workers=1, first=first, second=second)
        config = config.replace("cpu_percent: 50", "cpu_percent: 0.01")
        with gateway_process(tmp_path, config, observability=f"{{access_log: '{log}'}}") as running:
            wait_until(lambda: bool(replay_processes(running.pid)), running)
            (child,) = replay_processes(running.pid)
            wait_until(lambda: os.getpriority(os.PRIO_PROCESS, child) == 19, running)
            wait_until(lambda: os.sched_getscheduler(child) == os.SCHED_IDLE, running)
            raise_priority(child)
            os.kill(running.pid, 9)
        ends = monotonic() + LONG_S
        while is_running(child):
            assert monotonic() < ends
            sleep(0.1)


def is_running(process: int) -> bool:
    # Return whether a process runs; one that has ended may wait for its parent to notice.
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def replay_processes(gateway: int) -> list[int]:
    # Return the replay processes that a gateway's process, or a worker of it, has started.
    parents, replays = {}, []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            process = int(folder.name)
            parents[process] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"planner.auto" in (folder / "cmdline").read_bytes():
                replays.append(process)
    workers = {process for process, parent in parents.items() if parent == gateway}
    return [process for process in replays if parents[process] in workers | {gateway}]
