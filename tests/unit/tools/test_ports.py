"""Tests of the port numbers that tests give to servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports

ROOT = Path(__file__).parents[3]
# Ranges outside that of all other tests, and one for each test: locks last until the process ends.
ONE_PROCESS = (14_000, 14_060)
TWO_PROCESSES = (14_100, 14_160)
TAKE_40 = f"""
import sys
from tests import ports
ports.LOWEST, ports.HIGHEST = {TWO_PROCESSES}
print(*(ports.free_port() for _ in range(40)), flush=True)
sys.stdin.read()
"""


def set_range(monkeypatch: pytest.MonkeyPatch, lowest: int, highest: int) -> None:
    monkeypatch.setattr(ports, "LOWEST", lowest)
    monkeypatch.setattr(ports, "HIGHEST", highest)


def test_a_port_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_range(monkeypatch, *ONE_PROCESS)
    runs = {ports.free_run(2) for _ in range(5)}
    single = {ports.free_port() for _ in range(30)}
    in_runs = runs | {first + 1 for first in runs}
    assert len(in_runs | single) == 40


def test_another_test_process_does_not_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    set_range(monkeypatch, *TWO_PROCESSES)
    arguments = [sys.executable, "-c", TAKE_40]
    with subprocess.Popen(
        arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin
        assert other.stdout
        taken = {int(port) for port in other.stdout.readline().split()}
        here = {ports.free_port() for _ in range(10)}
        other.stdin.close()
    assert len(taken | here) == 50
