"""Runs every command of docs/first-five-minutes.md, and compares its output with the page.

A shell runs the commands in order, on free ports instead of those of the page. `...` in a line of
the page matches any text.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import pytest

from tests.e2e.processes import ENV, ROOT
from tests.ports import free_port

PAGE = ROOT / "docs" / "first-five-minutes.md"
WITHIN_S = 120.0
END = "__over__"


class Step(NamedTuple):
    command: str | None
    lines: list[str]


def steps() -> Iterator[Step]:
    for of_the_demo, block in re.findall(
        r"^```console( demo)?\n(.*?)^```", PAGE.read_text(), re.M | re.S
    ):
        if of_the_demo:
            yield Step(None, block.splitlines())
            continue
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *lines = part.splitlines()
            yield Step(command, lines)


def pattern(line: str) -> re.Pattern[str]:
    # Compile a line of the page to a regular expression.
    #
    # Columns may be wider; `...` matches any text, even none.
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in line.split("...")]
    return re.compile(".*".join(parts).replace(r"\s+\s+", r"\s+"))


def missing(lines: list[str], output: str) -> str | None:
    # Return the first line of the page that is missing in the output, or None.
    #
    # The lines must occur in the page's order.
    rest = iter(output.splitlines())
    for line in lines:
        if not any(pattern(line.strip()).search(output_line) for output_line in rest):
            return line
    return None


class Terminal:
    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self._ports = ports
        self._folder = folder
        self.demo_output: list[str] = []
        self._read_lines = 0
        self._env = ENV | {"PENSTOCK_ADMIN": f"http://127.0.0.1:{ports['8081']}", "COLUMNS": "120"}
        self._processes: list[subprocess.Popen[str]] = []
        self._shell = self._start(["bash", "--norc"], stdin=subprocess.PIPE)
        self._write(f'penstock() {{ {sys.executable} -m gateway "$@"; }}')

    def _start(self, command: list[str], **more: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **more,
        )
        self._processes.append(process)
        return process

    def _write(self, line: str) -> None:
        assert self._shell.stdin
        self._shell.stdin.write(line + "\n")
        self._shell.stdin.flush()

    def _with_our_ports(self, text: str) -> str:
        return re.sub("|".join(self._ports), lambda match: self._ports[match[0]], text)

    def open_demo(self) -> None:
        ports = ["--port", self._ports["8080"], "--admin-port", self._ports["8081"]]
        process = self._start(
            [sys.executable, "-m", "gateway", "demo", *ports], stdin=subprocess.DEVNULL
        )
        assert process.stdout
        threading.Thread(
            target=self.demo_output.extend, args=(process.stdout,), daemon=True
        ).start()
        self.wait_for_demo_output(["Press Ctrl-C to stop everything."], keep=True)
        config = (self._folder / "penstock-demo" / "gateway.yaml").read_text()
        first = [int(port) for port in re.findall(r"url: http://127\.0\.0\.1:(\d+)", config)]
        self._ports |= {"9100": str(first[0]), "9101": str(first[1])}

    def wait_for_demo_output(self, lines: list[str], *, keep: bool = False) -> None:
        began = monotonic()
        while (lost := missing(lines, self._unread_output())) is not None:
            assert monotonic() - began < WITHIN_S, f"{lost!r} is not in:\n{self._unread_output()}"
            sleep(0.02)  # another process cannot signal this one
        if not keep:
            self._read_lines = len(self.demo_output)

    def _unread_output(self) -> str:
        return "".join(self.demo_output[self._read_lines :])

    def run(self, command: str) -> str:
        self._write(f"{self._with_our_ports(command)}\nprintf '\\n{END}\\n'")
        assert self._shell.stdout
        output = ""
        for line in self._shell.stdout:
            if line.startswith(END):
                return output
            output += line
        raise AssertionError(f"the shell exited during {command!r}: {output}")

    def expect(self, lines: list[str], output: str) -> None:
        lost = missing([self._with_our_ports(line) for line in lines], output)
        assert lost is None, f"{lost!r} is not in:\n{output}"

    def close(self) -> None:
        # End whole process groups: the shell has jobs and the demo has mocks.
        for process in self._processes:
            for number in (15, 9):
                try:
                    os.killpg(process.pid, number)
                    process.wait(10)
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
                break


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    window = Terminal(folder, {name: str(free_port()) for name in ("8080", "8081", "8090", "8091")})
    watchdog = threading.Timer(WITHIN_S * 3, window.close)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield window
    finally:
        watchdog.cancel()
        window.close()


def test_every_command_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    first, *others = steps()
    assert first.command == "penstock demo"
    with terminal(tmp_path) as window:
        window.open_demo()
        window.expect(first.lines, "".join(window.demo_output))
        window._read_lines = len(window.demo_output)
        for step in others:
            if step.command is None:
                window.wait_for_demo_output(step.lines)
            else:
                window.expect(step.lines, window.run(step.command))
        assert "Traceback" not in "".join(window.demo_output)


def test_the_page_shows_the_commands_that_a_new_user_needs() -> None:
    typed = " ".join(step.command or "" for step in steps())
    expected = (
        "demo",
        "explain",
        "bench",
        "chaos kill",
        "chaos restore",
        "top --once",
        "diff",
        "rollback",
        "doctor",
        "serve",
    )
    assert [word for word in expected if f"penstock {word}" not in typed] == []


@pytest.mark.parametrize(
    ("lines", "output", "lost"),
    [
        (["a ... c"], "a b c", None),
        (["killed x", "took 3"], "killed x\nnoise\ntook    3", None),
        (["took 3", "killed x"], "killed x\ntook 3", "killed x"),
        (["a.c"], "abc", "a.c"),
    ],
)
def test_lines_are_matched_in_order_and_only_three_dots_are_a_wildcard(
    lines: list[str], output: str, lost: str | None
) -> None:
    assert missing(lines, output) == lost
