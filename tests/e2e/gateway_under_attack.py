"""A gateway under attack, with one engine for regular clients and one for the attacker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

from tests.e2e.process_cost import ProcessCost
from tests.e2e.processes import ENV, GatewayProcess, complete_config, run_process
from tests.e2e.timed_gateway import TICK_S

MIB = 2**20
MOST_GROWTH = 32 * MIB  # maximum growth of memory in addition to the body budget
KEYS = {"CALM_KEY": "sk-bench", "ATTACKER_KEY": "sk-attacker", "ADMIN_KEY": "sk-admin"}
CONFIG = """
tenants: [{{name: calm, key: '${{CALM_KEY}}'}}, {{name: attacker, key: '${{ATTACKER_KEY}}'}}]
admin: {{key: '${{ADMIN_KEY}}'}}
models:
  - {{name: {model}, pool: calm}}
  - {{name: hostile, aliases: [alias], pool: hostile, served_model: demo}}
  - {{name: resumed, pool: hostile, served_model: demo, resume: {{}}}}
pools:
  calm: {{policy: round_robin, endpoints: [{calm}]}}
  hostile:
    policy: round_robin
    native_apis: []
    endpoints: [{{url: 'http://127.0.0.1:{hostile}'}}]
health: {{failures: 1000000, timeout: 10s, progress: 60s}}
timeouts: {{connect: 10s}}
limits: {{body: 32MiB, body_budget: 64MiB}}
"""


class Attacked(NamedTuple):
    gateway: GatewayProcess
    cost: ProcessCost
    process: subprocess.Popen[str]

    @property
    def ports(self) -> tuple[int, int]:
        return self.gateway.port, int(self.gateway.admin_url.rpartition(":")[2])

    def gaps(self) -> list[float]:
        # Return the CPU seconds between consecutive event loop ticks since the last call.
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))


def wait_s(gaps: list[float], share: float) -> float:
    # Return a percentile of how long an event waits for the event loop, in seconds.
    #
    # An event that occurs at a random time waits no longer than this with probability `share`. It
    # waits until the end of the interval between ticks in which it occurs.
    left = (1.0 - share) * sum(max(gap, TICK_S) for gap in gaps)
    longest_first = sorted(gaps, reverse=True)
    later = 0.0
    for number, gap in enumerate(longest_first, 1):
        shorter = longest_first[number] if number < len(longest_first) else 0.0
        if later + number * (gap - shorter) >= left:
            return gap - (left - later) / number
        later += number * (gap - shorter)
    return 0.0


@contextmanager
def canned_engine(*options: str) -> Iterator[int]:
    # Run an engine with canned responses; yield its port.
    command = [sys.executable, "-m", "tests.e2e.canned_engine", *options]
    with run_process(command, env=ENV, stdout=PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextmanager
def attacked_gateway(
    folder: Path, calm: list[str], hostile: int, model: str = "demo", prefix: Sequence[str] = ()
) -> Iterator[Attacked]:
    # Run a gateway in front of two pools of engines.
    #
    # calm     URLs of the engines that serve `model` to regular clients
    # hostile  port of the attacker's engine
    # prefix   command that runs the gateway's command, such as taskset or nice
    urls = ", ".join(f"{{url: '{url}', max_concurrency: 8192}}" for url in calm)
    file = folder / "gateway.yaml"
    file.write_text(complete_config(CONFIG.format(calm=urls, hostile=hostile, model=model)))
    command = [
        *prefix,
        sys.executable,
        "-m",
        "tests.e2e.timed_gateway",
        "serve",
        "--config",
        str(file),
    ]
    with run_process(command, env=ENV | KEYS, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stderr is not None
        started = GatewayProcess(process)
        started.read_until_ready(process.stderr)
        admin = int(started.admin_url.rpartition(":")[2])
        yield Attacked(
            started, ProcessCost(process.pid, (started.port, admin), (hostile,)), process
        )
