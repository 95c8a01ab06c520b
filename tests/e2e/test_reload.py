"""An operator at work with real processes: signal, edit, difference, rollback, a bad edit, and nobody there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from typer.testing import CliRunner

from gateway.cli import main
from tests.e2e.processes import Gateway, gateway
from tests.e2e.stub import MODEL, recording_stub
from tests.fair_time import PATIENCE_S, Stopwatch, pace

CONFIG = """
models: [{{name: {model}, pool: main}}]
pools:
  main:
    policy: least_loaded
    endpoints: [{{url: '{url}'}}]
"""


class Operator:
    """Types commands at a running gateway and reads what it prints."""

    def __init__(self, running: Gateway, file: Path) -> None:
        self.running = running
        self.file = file

    def types(self, *words: str) -> tuple[int, str]:
        """(exit code, output) of a command."""
        return typed(*words, "--admin", self.running.admin_url)

    def edits(self, old: str, new: str) -> None:
        """As `sed -i` does: another file takes its name."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(self.file.read_text().replace(old, new))
        fresh.replace(self.file)

    def reads(self, words: str) -> float:
        """Seconds until the gateway had printed these words."""
        took = Stopwatch(self.running.pid)
        while words not in self.running.said:
            assert took.wall_s < PATIENCE_S, self.running.said
            sleep(0.01)  # what another process prints has nobody to wake us
        return took.fair_s


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("reload")
    with recording_stub() as stub, gateway(folder, CONFIG.format(model=MODEL, url=stub.url)) as running:
        yield Operator(running, folder / "gateway.yaml")
        assert running.alive
        assert "Traceback" not in running.said, running.said


def test_an_edit_a_difference_a_rollback_and_a_bad_edit_read_as_promised(operator: Operator) -> None:
    operator.edits("policy: least_loaded", "policy: prefix_aware")
    assert operator.reads("reloaded gateway.yaml v2 (1 change: pools.main.policy) in ") < 1.5 * pace()
    assert "0 requests affected" in operator.running.said

    code, said = operator.types("diff")
    assert code == 0
    assert "the file matches the running configuration, v2" in said
    assert "  pools.main.policy: least_loaded -> prefix_aware\n" in said

    code, said = operator.types("rollback", "1")
    assert (code, "v3 (1 change: pools.main.policy)" in said) == (0, True), said
    code, said = operator.types("diff", str(operator.file))
    assert (code, said) == (0, "  pools.main.policy: least_loaded -> prefix_aware\n")

    operator.edits("policy: prefix_aware", "policy: prefix_awre")
    assert operator.reads("Still serving v3.") < 1.5 * pace()
    assert "rejected gateway.yaml:8:13 pools.main.policy: there is no policy 'prefix_awre'" in operator.running.said
    code, said = operator.types("status")
    assert code == 0
    assert said.startswith("v3 ")
    assert "1 of 1 endpoints available" in said
    assert "last reload rejected (file, " in said
    code, said = operator.types("diff", str(operator.file))
    assert (code, f"{operator.file}:8:13 pools.main.policy: there is no policy" in said) == (1, True), said
    code, said = operator.types("reload")
    assert (code, "there is no policy" in said) == (1, True)

    operator.edits("policy: prefix_awre", "policy: round_robin")
    operator.reads("v4 (1 change: pools.main.policy)")
    code, said = operator.types("history")
    versions = [line.split()[-5:] for line in said.splitlines() if "gateway.yaml" in line]
    assert [(name, source) for name, _, source, _, _ in versions] == [
        *(("v4", "file"), ("v3", "rollback"), ("v2", "file"), ("v1", "start")),
    ]


def test_a_hangup_takes_the_file_over_even_if_nothing_is_new(operator: Operator) -> None:
    os.kill(operator.running.pid, signal.SIGHUP)
    operator.reads("gateway.yaml is already in force: v4")


def test_commands_speak_json_and_say_who_does_not_answer(operator: Operator) -> None:
    code, said = operator.types("status", "--json")
    assert (code, json.loads(said)["version"]) == (0, 4)
    code, said = operator.types("rollback", "99", "--json")
    assert (code, json.loads(said)["result"]) == (1, "nothing")
    code, said = typed("status", "--admin", "http://127.0.0.1:9")
    assert (code, "cannot reach a gateway at http://127.0.0.1:9" in said) == (1, True)
    assert typed("status", "--admin", "ftp://x")[0] == 2


def typed(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, [*words], env={"NO_COLOR": "1", "COLUMNS": "200"})
    return result.exit_code, result.output
