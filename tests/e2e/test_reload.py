"""Tests of a real gateway's configuration changes: edits, diff, rollback, bad edits, SIGHUP."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest

from gateway.cli import main
from tests.command_runner import CommandRunner
from tests.duration_limits import PATIENCE_S, Stopwatch, pace
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.e2e.recording_engine import MODEL, recording_engine

CONFIG = """
models: [{{name: {model}, pool: main}}]
pools:
  main:
    policy: least_loaded
    endpoints: [{{url: '{url}'}}]
"""


class Operator:
    def __init__(self, running: GatewayProcess, file: Path) -> None:
        self.running = running
        self.file = file

    def run(self, *words: str) -> tuple[int, str]:
        # Run a penstock command; return its exit code and output.
        return run_command(*words, "--admin", self.running.admin_url)

    def edit(self, old: str, new: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(self.file.read_text().replace(old, new))
        fresh.replace(self.file)

    def wait_for_output(self, words: str) -> float:
        # Wait until the gateway has printed these words; return the seconds that this took.
        took = Stopwatch(self.running.pid)
        while words not in self.running.stderr_text:
            assert took.wall_s < PATIENCE_S, self.running.stderr_text
            sleep(0.01)  # another process cannot signal this one
        return took.fair_s


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("reload")
    with (
        recording_engine() as stub,
        gateway_process(folder, CONFIG.format(model=MODEL, url=stub.url)) as running,
    ):
        yield Operator(running, folder / "gateway.yaml")
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def test_an_edit_a_diff_a_rollback_and_a_rejected_edit_print_what_changed(
    operator: Operator,
) -> None:
    operator.edit("policy: least_loaded", "policy: prefix_aware")
    assert (
        operator.wait_for_output("reloaded gateway.yaml v2 (1 change: pools.main.policy) in ")
        < 1.5 * pace()
    )
    assert "0 requests affected" in operator.running.stderr_text

    code, output = operator.run("diff")
    assert code == 0
    assert "the file matches the running configuration, v2" in output
    assert "  pools.main.policy: least_loaded -> prefix_aware\n" in output

    code, output = operator.run("rollback", "1")
    assert (code, "v3 (1 change: pools.main.policy)" in output) == (0, True), output
    code, output = operator.run("diff", str(operator.file))
    assert (code, output) == (0, "  pools.main.policy: least_loaded -> prefix_aware\n")

    operator.edit("policy: prefix_aware", "policy: prefix_awre")
    assert operator.wait_for_output("Still serving v3.") < 1.5 * pace()
    assert (
        "rejected gateway.yaml:8:13 pools.main.policy: there is no policy 'prefix_awre'"
        in operator.running.stderr_text
    )
    code, output = operator.run("status")
    assert code == 0
    assert output.startswith("v3 ")
    assert "1 of 1 endpoints available" in output
    assert "last reload rejected (file, " in output
    code, output = operator.run("diff", str(operator.file))
    assert (code, f"{operator.file}:8:13 pools.main.policy: there is no policy" in output) == (
        1,
        True,
    ), output
    code, output = operator.run("reload")
    assert (code, "there is no policy" in output) == (1, True)

    operator.edit("policy: prefix_awre", "policy: round_robin")
    operator.wait_for_output("v4 (1 change: pools.main.policy)")
    code, output = operator.run("history")
    versions = [line.split()[-5:] for line in output.splitlines() if "gateway.yaml" in line]
    assert [(name, source) for name, _, source, _, _ in versions] == [
        *(("v4", "file"), ("v3", "rollback"), ("v2", "file"), ("v1", "start")),
    ]


def test_sighup_reloads_the_file_even_if_nothing_changed(operator: Operator) -> None:
    os.kill(operator.running.pid, signal.SIGHUP)
    operator.wait_for_output("gateway.yaml is already in force: v4")


def test_commands_print_json_and_name_a_gateway_that_does_not_answer(operator: Operator) -> None:
    code, output = operator.run("status", "--json")
    assert (code, json.loads(output)["version"]) == (0, 4)
    code, output = operator.run("rollback", "99", "--json")
    assert (code, json.loads(output)["result"]) == (1, "nothing")
    code, output = run_command("status", "--admin", "http://127.0.0.1:9")
    assert (code, "cannot reach a gateway at http://127.0.0.1:9" in output) == (1, True)
    assert run_command("status", "--admin", "ftp://x")[0] == 2


def run_command(*words: str) -> tuple[int, str]:
    result = CommandRunner().invoke(main.run, [*words], env={"NO_COLOR": "1", "COLUMNS": "200"})
    return result.exit_code, result.output
