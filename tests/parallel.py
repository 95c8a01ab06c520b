"""Runs type checks and all tests in a few processes, as `make test` does; with arguments, pytest.

The test files are divided into parts. Each process takes the next part when it has finished one.
The process of a part is forked from this one, which has imported pytest and the project. So a part
starts at once, and its garbage collections are short, because it has no objects of other parts.

Some tests start whole processes, and mostly wait; the others mostly compute. One process runs tests
of the first kind, the others those of the second kind, so that the cores are busy while tests wait.
A process whose kind has no parts left takes those of the other kind.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import NoReturn

ROOT = Path(__file__).parents[1]
SHIPPED = ("command_line", "gateway", "kvtransfer", "mockgpu", "planner", "policies")
PRELOADED = ("pytest", "numpy", "gateway.app", "gateway.cli.main", "mockgpu.cli", "planner.replay")
TYPES = "types"
WAITING = ("tests/e2e", "tests/chaos")
COMPUTING = ("tests/architecture", "tests/sim", "tests/property", "tests/contract", "tests/unit")
LINES_OF_A_PART = {"tests/e2e": 300, "tests/chaos": 300, "tests/sim": 300}
USUAL_LINES = 1200
GC_THRESHOLDS = 20_000, 20, 20  # Python's own values take 5 to 10 % of the time of tests


@dataclass
class Running:
    """A part of the tests that is running now: in which process, its output, and its start time."""

    place: int
    name: str
    log: Path
    began: float


def parts(folders: tuple[str, ...]) -> Iterator[list[str]]:
    # Yield the test files of folders in parts of similar lengths.
    for folder in folders:
        files: list[str] = []
        lines = 0
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            files.append(str(path.relative_to(ROOT)))
            lines += path.read_text().count("\n")
            if lines >= LINES_OF_A_PART.get(folder, USUAL_LINES):
                yield files
                files, lines = [], 0
        if files:
            yield files


def run_part(files: list[str], log: Path) -> NoReturn:
    # Run a part in a forked process. All output goes to the log.
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = log.open("w")
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        random.seed()
        if files == [TYPES]:
            os.execv(sys.executable, [sys.executable, "-m", "mypy"])
        status = import_module("pytest").main([f"--basetemp={log.with_suffix('')}", *files])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class Parts:
    """Runs all parts of the tests in `places` processes.

    Prints a line for each part, and the output of failed ones.
    """

    def __init__(self, logs: Path, places: int, with_types: bool = True) -> None:
        self._logs = logs
        self._waiting = [*parts(WAITING)]
        self._computing = [*([[TYPES]] if with_types else []), *parts(COMPUTING)]
        self._count = len(self._waiting) + len(self._computing)
        self._running: dict[int, Running] = {}
        self._started = self._ended = 0
        self._failed: list[str] = []
        self._results: Counter[str] = Counter()
        for place in range(places):
            self._start(place)

    def run(self) -> int:
        began = monotonic()
        try:
            while self._running:
                pid, status = os.wait()
                ended = self._running.pop(pid)
                self._finish(ended, failed=status != 0)
                self._start(ended.place)
        finally:
            for pid in self._running:
                os.kill(pid, signal.SIGTERM)
            for pid in self._running:
                os.waitpid(pid, 0)
        counts = ", ".join(f"{count:,} {result}" for result, count in self._results.items())
        print(f"{counts} in {monotonic() - began:.0f} s")
        if self._failed:
            print("Failed:", *self._failed, sep="\n  ")
        return 1 if self._failed else 0

    def _start(self, place: int) -> None:
        own, other = self._waiting, self._computing
        if place:
            own, other = other, own
        if not (queue := own or other):
            return
        files = queue.pop(0)
        self._started += 1
        log = self._logs / f"{self._started}.log"
        if not (pid := os.fork()):
            run_part(files, log)
        first, *rest = (name.removeprefix("tests/") for name in files)
        name = f"{first} and {len(rest)} files" if rest else first
        self._running[pid] = Running(place, name, log, monotonic())

    def _finish(self, ended: Running, failed: bool) -> None:
        self._ended += 1
        output = ended.log.read_text(errors="replace")
        last = output.rstrip().rpartition("\n")[2]
        for count, result in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last):
            self._results[result] += int(count)
        took = f"{monotonic() - ended.began:.1f} s"
        print(f"[{self._ended}/{self._count}] {ended.name}: {last} ({took})", flush=True)
        # A test that ends its process with status 0 must not count as a success.
        if failed or not re.search(r"\b(passed|skipped|Success)\b", last):
            self._failed.append(ended.name)
            print(output, flush=True)


def preload() -> None:
    """Import the modules that most tests use, and make garbage collection rare in all parts."""
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def main() -> int:
    # Tests compile each module once, not again in each of the hundreds of processes they start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # aiohttp loads all certificates of the machine's authorities when it is imported, which takes
    # a fifth of a process's start. Tests trust authorities of their own; this one has no private
    # key.
    os.environ["SSL_CERT_FILE"] = str(ROOT / "tests/data/authority.pem")
    os.environ["SSL_CERT_DIR"] = str(ROOT / "tests/data/authorities")
    if arguments := sys.argv[1:]:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j0", *SHIPPED], cwd=ROOT, check=True
    )
    preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # One place more than cores, because tests also wait.
    with tempfile.TemporaryDirectory(prefix="penstock-tests-") as logs:
        return Parts(Path(logs), len(os.sched_getaffinity(0)) + 1).run()


if __name__ == "__main__":
    sys.exit(main())
