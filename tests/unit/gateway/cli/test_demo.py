"""Tests of `penstock demo`: the printed commands work, and Ctrl-C leaves no process behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.duration_limits import Stopwatch, pace
from tests.ports import free_port

ROOT = Path(__file__).parents[4]
WITHIN_S = 120.0
ENV = os.environ | {"PYTHONPATH": str(ROOT)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gateway", *arguments]


def failing_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    ports = ("--port", str(free_port()), "--admin-port", str(free_port()))
    return subprocess.run(
        command("demo", *ports, *options),
        cwd=folder,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    # Run a demo until it has printed its welcome.
    #
    # Yields the process, the welcome text, and the API port.
    port = free_port()
    asked = command("demo", "--port", str(port), "--admin-port", str(free_port()), *options)
    with subprocess.Popen(
        asked,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ENV,
        start_new_session=True,
        text=True,
    ) as process:
        watchdog = threading.Timer(WITHIN_S, process.terminate)
        watchdog.start()
        try:
            assert process.stdout
            welcome = ""
            for line in process.stdout:
                welcome += line
                if "Ctrl-C to stop everything" in line:
                    break
            assert process.poll() is None, welcome
            yield process, welcome, port
        finally:
            watchdog.cancel()
            process.terminate()


@contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def ended(handle: int, within_s: float) -> bool:
    return bool(select.select([handle], [], [], within_s)[0])


def mocks_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="reads the process tree from /proc"
)


def test_demo_serves_the_printed_request_and_ctrl_c_stops_everything(tmp_path: Path) -> None:
    with demo(tmp_path, "--groups", "2", "--speed", "20") as (process, welcome, port):
        body = re.search(r"-d '(\{.+?\})'", welcome, re.DOTALL)
        assert body, welcome
        assert f"http://127.0.0.1:{port}/v1" in welcome
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
        connection.request(
            "POST", "/v1/chat/completions", body[1], {"content-type": "application/json"}
        )
        streamed = connection.getresponse().read().decode()
        connection.close()
        assert streamed.rstrip().endswith("data: [DONE]")
        assert json.loads(streamed.split("\n\n")[0].removeprefix("data: "))["model"] == "demo-8b"
        edit = re.search(r"(sed -i 's/[^']+') (\S+)", welcome)
        assert edit, welcome
        took = Stopwatch(process.pid)
        subprocess.run([*shlex.split(edit[1]), edit[2]], cwd=tmp_path, check=True)
        assert process.stdout
        line = next(line for line in process.stdout if line.startswith("re"))
        assert line.startswith("reloaded gateway.yaml v2 (1 change: pools.chat.policy) in "), line
        assert line.endswith(" ms, 0 requests affected\n"), line
        assert took.fair_s < 2.0 * pace(), "half a second, and a busy machine"
        with watched(mocks_of(process.pid)) as mocks:
            assert mocks
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=WITHIN_S)
            assert process.returncode == 0
            assert all(ended(mock, 0) for mock in mocks)
        assert "Traceback" not in welcome + rest
    checked = command("check", str(tmp_path / "penstock-demo" / "gateway.yaml"))
    assert subprocess.run(checked, env=ENV, capture_output=True).returncode == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_split_demo_prints_a_request_that_is_split(tmp_path: Path) -> None:
    with demo(tmp_path, "--split", "--groups", "2", "--speed", "20") as (_, welcome, _port):
        curl = re.search(r"both endpoints:\n\n(.+?)\n\n", welcome, re.DOTALL)
        assert curl, welcome
        # On a busy machine a mock may be ejected for a moment; the request is then served whole.
        answers = (
            subprocess.run(["bash", "-c", curl[1]], capture_output=True, text=True, check=True)
            for _ in range(10)
        )
        headers = next(
            filter(lambda text: "-prefill:" in text, (a.stdout.lower() for a in answers))
        )
        assert "x-penstock-prefill: prefill-0" in headers
        assert "x-penstock-endpoint: decode-0" in headers
    checked = command("check", str(tmp_path / "penstock-demo" / "gateway.yaml"))
    assert subprocess.run(checked, env=ENV, capture_output=True).returncode == 0


def test_two_demos_started_together_use_different_ports(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    both_run = threading.Barrier(2, timeout=WITHIN_S)

    def engines(folder: Path) -> set[str]:
        try:
            with demo(folder, "--groups", "2") as (process, _, _port):
                both_run.wait()
                assert mocks_of(process.pid)
        except BaseException:
            both_run.abort()
            raise
        return set(
            re.findall(
                r"url: http://127.0.0.1:(\d+)",
                (folder / "penstock-demo" / "gateway.yaml").read_text(),
            )
        )

    with ThreadPoolExecutor(2) as terminals:
        running = [terminals.submit(engines, folder) for folder in folders]
    # A demo that waits for a failed one raises BrokenBarrierError, which is not the cause.
    for failure in (one.exception() for one in running):
        if failure and not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    assert len(set().union(*(one.result() for one in running))) == 4


def test_a_demo_of_one_group_cannot_be_split(tmp_path: Path) -> None:
    done = failing_demo(tmp_path, "--split", "--groups", "1")
    assert done.returncode == 1
    assert "at least two groups" in done.stderr


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_killed_demo_leaves_no_mock_behind(tmp_path: Path) -> None:
    with (
        demo(tmp_path, "--groups", "1") as (process, _, _port),
        watched(mocks_of(process.pid)) as mocks,
    ):
        assert mocks
        process.kill()
        assert all(ended(mock, WITHIN_S) for mock in mocks)


def test_a_demo_with_an_unknown_policy_does_not_start(tmp_path: Path) -> None:
    done = failing_demo(tmp_path, "--policy", "prefix_awre")
    assert done.returncode == 1
    assert 'did you mean "prefix_aware"' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_demo_in_the_same_folder_does_not_start(tmp_path: Path) -> None:
    # A second demo would overwrite the configuration, so that the first demo's gateway would use
    # the second one's engines.
    with demo(tmp_path, "--groups", "1") as (_, _, _port):
        before = (tmp_path / "penstock-demo" / "gateway.yaml").read_bytes()
        done = failing_demo(tmp_path, "--groups", "1")
        assert done.returncode == 1
        assert "another demo is running in this folder" in done.stderr
        assert (tmp_path / "penstock-demo" / "gateway.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "taken", ["penstock-demo", "penstock-demo/gateway.yaml/x", "penstock-demo/mock.log/x"]
)
def test_a_demo_names_a_folder_that_it_cannot_write(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / taken).touch()
    done = failing_demo(tmp_path)
    assert done.returncode == 1
    assert "cannot write to penstock-demo" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_demo_prints_the_log_of_mocks_that_do_not_start(tmp_path: Path) -> None:
    done = failing_demo(tmp_path, "--model", "no-such-model")
    assert done.returncode == 1
    assert "the mock TP groups failed to start" in done.stderr
    assert "no-such-model" in done.stderr
