"""`make load`: runs the load generator locust against a gateway for a limited time.

    python -m bench.load.locust_run [--users 20] [--time 20s] [--groups 4] [--speed 4] [--policy P]
    python -m bench.load.locust_run --host http://127.0.0.1:8080        # use a running gateway

Without --host, a gateway and mock engines are started on 127.0.0.1. The exit status is that of
locust: 0 if no request failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.ports import free_run

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "tests" / "load" / "locustfile.py"
READY_WITHIN_S = 30.0


def main() -> int:
    """Start a gateway and engines, unless --host names a gateway, and run locust.

    Returns locust's exit status.
    """
    options = _options()
    with ExitStack() as stack:
        host = options.host or stack.enter_context(
            fleet(options.groups, options.speed, options.policy)
        )
        locust = [
            sys.executable,
            "-m",
            "locust",
            "-f",
            str(LOCUSTFILE),
            "--headless",
            "--only-summary",
        ]
        locust += [
            "--users",
            str(options.users),
            "--spawn-rate",
            str(options.users),
            "--run-time",
            options.time,
        ]
        locust += ["--host", host, "--stop-timeout", "30s"]
        return subprocess.run(locust, cwd=ROOT, check=False).returncode


@contextmanager
def fleet(groups: int, speed: float, policy: str) -> Iterator[str]:
    """Run mock engines and a gateway during a `with` block; yield the gateway's URL."""
    first = free_run(groups + 2)
    port = first + groups
    mock = ["-m", "mockgpu", "--port", str(first), "--groups", str(groups), "--speed", str(speed)]
    serve = [
        "-m",
        "gateway",
        "serve",
        "--policy",
        policy,
        "--port",
        str(port),
        "--admin-port",
        str(port + 1),
    ]
    for engine in range(first, first + groups):
        serve += ["--engine", f"http://127.0.0.1:{engine}"]
    with _running(mock, f"http://127.0.0.1:{first}"), _running(serve, f"http://127.0.0.1:{port}"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(arguments: list[str], url: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        await_models(process, url)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_models(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server at `url` is ready, which means that it lists a model.

    Exits the program if the server's process ends, or if READY_WITHIN_S seconds pass.
    """
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(
                f"the command {process.args!r} ended with status "
                f"{process.returncode} before it served requests"
            )
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as answer:
                if json.load(answer)["data"]:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit(
        f"{url} listed no model within {READY_WITHIN_S:.0f} s; the server may be overloaded "
        "or misconfigured"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.locust_run",
        description="Run Locust against a gateway with mock TP groups.",
    )
    parser.add_argument("--host", help="URL of a running gateway to use instead of starting one")
    parser.add_argument(
        "--users", type=int, default=20, help="number of concurrent clients (default: %(default)s)"
    )
    parser.add_argument(
        "--time",
        default="20s",
        help="duration of the load with its unit, such as 20s (default: %(default)s)",
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=4,
        help="number of mock engines (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=4.0,
        help="factor by which the mock engines are faster than real time (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        default="prefix_aware",
        help="routing policy of the gateway (default: %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
