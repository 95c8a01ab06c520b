"""docs/first-five-minutes.md, typed as it stands: every command is run, every line below it must come out.

A shell of its own runs the blocks in order, on free ports in place of the page's. `...` in a line stands for anything.
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
    """A command, or none for what the demo prints by itself, and the lines that must come of it."""

    command: str | None
    lines: list[str]


def steps() -> Iterator[Step]:
    """The page's, in order."""
    for of_the_demo, block in re.findall(r"^```console( demo)?\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        if of_the_demo:
            yield Step(None, block.splitlines())
            continue
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *lines = part.splitlines()
            yield Step(command, lines)


def pattern(line: str) -> re.Pattern[str]:
    """Columns may be wider than on the page; `...` is anything, nothing included."""
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in line.split("...")]
    return re.compile(".*".join(parts).replace(r"\s+\s+", r"\s+"))


def missing(lines: list[str], said: str) -> str | None:
    """The first line of the page that did not come out, in order."""
    rest = iter(said.splitlines())
    for line in lines:
        if not any(pattern(line.strip()).search(each) for each in rest):
            return line
    return None


class Terminal:
    """A shell with `penstock` in it, and the demo in the other window."""

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self._ports = ports
        self._folder = folder
        self.demo_said: list[str] = []
        self._heard = 0
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

    def _here(self, text: str) -> str:
        return re.sub("|".join(self._ports), lambda found: self._ports[found[0]], text)

    def open_demo(self) -> None:
        """The page's first command, on our ports, in a window of its own."""
        ports = ["--port", self._ports["8080"], "--admin-port", self._ports["8081"]]
        process = self._start([sys.executable, "-m", "gateway", "demo", *ports], stdin=subprocess.DEVNULL)
        assert process.stdout
        threading.Thread(target=self.demo_said.extend, args=(process.stdout,), daemon=True).start()
        self.demo_says(["Press Ctrl-C to stop everything."], keep=True)
        config = (self._folder / "penstock-demo" / "gateway.yaml").read_text()
        first = [int(port) for port in re.findall(r"url: http://127\.0\.0\.1:(\d+)", config)]
        self._ports |= {"9100": str(first[0]), "9101": str(first[1])}

    def demo_says(self, lines: list[str], *, keep: bool = False) -> None:
        """Wait until it has said these, after what it had said before."""
        began = monotonic()
        while (lost := missing(lines, self._news())) is not None:
            assert monotonic() - began < WITHIN_S, f"{lost!r} did not come in:\n{self._news()}"
            sleep(0.02)  # what another process prints has nobody to wake us
        if not keep:
            self._heard = len(self.demo_said)

    def _news(self) -> str:
        return "".join(self.demo_said[self._heard :])

    def types(self, command: str) -> str:
        """What a command prints."""
        self._write(f"{self._here(command)}\nprintf '\\n{END}\\n'")
        assert self._shell.stdout
        said = ""
        for line in self._shell.stdout:
            if line.startswith(END):
                return said
            said += line
        raise AssertionError(f"the shell has ended in {command!r}: {said}")

    def expects(self, lines: list[str], said: str) -> None:
        lost = missing([self._here(line) for line in lines], said)
        assert lost is None, f"{lost!r} did not come out:\n{said}"

    def close(self) -> None:
        for process in self._processes:  # whole groups: the shell has jobs, the demo has mocks
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
    opened = Terminal(folder, {name: str(free_port()) for name in ("8080", "8081", "8090", "8091")})
    watchdog = threading.Timer(WITHIN_S * 3, opened.close)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield opened
    finally:
        watchdog.cancel()
        opened.close()


def test_the_page_holds_what_it_promises(tmp_path: Path) -> None:
    first, *others = steps()
    assert first.command == "penstock demo"
    with terminal(tmp_path) as window:
        window.open_demo()
        window.expects(first.lines, "".join(window.demo_said))
        window._heard = len(window.demo_said)
        for step in others:
            if step.command is None:
                window.demo_says(step.lines)
            else:
                window.expects(step.lines, window.types(step.command))
        assert "Traceback" not in "".join(window.demo_said)


def test_the_page_shows_every_step_of_a_newcomer() -> None:
    typed = " ".join(step.command or "" for step in steps())
    wanted = (
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
    assert [word for word in wanted if f"penstock {word}" not in typed] == []


@pytest.mark.parametrize(
    ("lines", "said", "lost"),
    [
        (["a ... c"], "a b c", None),
        (["killed x", "took 3"], "killed x\nnoise\ntook    3", None),
        (["took 3", "killed x"], "killed x\ntook 3", "killed x"),
        (["a.c"], "abc", "a.c"),
    ],
)
def test_lines_are_found_in_order_and_dots_are_no_wildcards_but_three(
    lines: list[str], said: str, lost: str | None
) -> None:
    assert missing(lines, said) == lost
