"""`make tls`: common TLS clients send requests while the gateway's certificate is replaced.

    python -m bench.load.tls [--requests 1000] [--only curl ...]

The clients are curl, the openai SDK, Java's HttpClient, and https, fetch and the openai package in
Node. Half of the requests are streamed. Each answer is compared with the expected text, and no
request may fail. It is an error if a client is not installed. All processes listen on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai

from tests.certificate_authority import Authority
from tests.e2e.processes import ENV, GatewayProcess, gateway_process, mock_fleet

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "tls_clients"
MODULES = ROOT / "build" / "tls-clients"
OPENAI_NODE = "openai@7.57.0"
PER_PROCESS, THREADS = 100, 5
NOTICED_WITHIN_S = 20.0
CONFIG = """
version: 1
listeners:
  api: {{port: 0, tls: {{certificate: tls/server.pem, key: tls/server.key}}}}
  admin: {{port: 0}}
observability: {{access_log: 'off'}}
models: [{{name: demo-8b, pool: main}}]
pools:
  main: {{policy: round_robin, admission: none, endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}
"""
REQUEST = {
    "model": "demo-8b",
    "messages": [{"role": "user", "content": "How deep is the reservoir behind the dam?"}],
    "max_tokens": 32,
}


class Client(NamedTuple):
    """A TLS client program that the test runs, such as curl.

    command  its command line
    program  the program that must be installed
    package  Debian package of that program
    env      additional environment variables
    """

    command: Sequence[str]
    program: str
    package: str
    env: Mapping[str, str] = {}


NODE = ("node", str(PROGRAMS / "requests.mjs"))
CLIENTS: Mapping[str, Client] = {
    "curl": Client((sys.executable, str(PROGRAMS / "curl.py")), "curl", "curl"),
    "openai, Python": Client((sys.executable, str(PROGRAMS / "sdk.py")), sys.executable, "python3"),
    "HttpClient, Java": Client(
        ("java", str(PROGRAMS / "Requests.java")), "javac", "openjdk-17-jdk-headless"
    ),
    "https, Node": Client(NODE, "node", "nodejs", {"CLIENT": "https"}),
    "fetch, Node": Client(NODE, "node", "nodejs", {"CLIENT": "fetch"}),
    "openai, Node": Client(NODE, "npm", "npm", {"CLIENT": "openai"}),
}


class Rotation:
    """A thread that keeps replacing the gateway's TLS certificate while clients send requests.

    It waits until the gateway uses the new certificate before it writes the next one.

    count    number of replacements
    problem  why the replacements stopped; None while there is no problem
    """

    def __init__(self, authority: Authority, port: int) -> None:
        self.count = 0
        self._authority, self._port = authority, port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.problem: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        trust = ssl.create_default_context(cafile=str(self._authority.ca))
        while not self._stop.is_set():
            issued = self._authority.issue("server", "localhost", "127.0.0.1")
            wanted = ssl.PEM_cert_to_DER_cert(_first(issued.certificate.read_text()))
            ends = time.monotonic() + NOTICED_WITHIN_S
            while self._current_certificate(trust) != wanted:
                if time.monotonic() > ends:
                    self.problem = f"a new certificate was not used within {NOTICED_WITHIN_S:g} s"
                    return
                time.sleep(0.05)
            self.count += 1

    def _current_certificate(self, trust: ssl.SSLContext) -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", self._port), NOTICED_WITHIN_S) as raw,
            trust.wrap_socket(raw, server_hostname="localhost") as connection,
        ):
            return connection.getpeercert(binary_form=True)


def _first(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    return pem[: pem.index(end) + len(end)]


def missing_programs(clients: Mapping[str, Client]) -> list[str]:
    """Return a message for each program that a client needs and that is not installed."""
    messages = [
        f"{name} needs {client.program}: install the Debian package {client.package}"
        for name, client in clients.items()
        if shutil.which(client.program) is None
    ]
    if (
        not messages
        and "openai, Node" in clients
        and not (MODULES / "node_modules" / "openai").is_dir()
    ):
        MODULES.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--prefix", str(MODULES), OPENAI_NODE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            output = done.stderr.strip() or done.stdout.strip()
            messages.append(f"openai, Node needs the npm package {OPENAI_NODE}: {output}")
    return messages


def run_client(
    client: Client, env: Mapping[str, str], requests: int
) -> tuple[Counter[str], list[str]]:
    """Send requests to the gateway with several processes of a TLS client, one after another.

    Returns the number of requests by outcome, and the first errors.
    """
    counts: Counter[str] = Counter()
    errors: list[str] = []
    for _ in range(requests // PER_PROCESS):
        done = subprocess.run(
            client.command, env={**env, **client.env}, capture_output=True, text=True, check=False
        )
        try:
            result: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            result = {
                "failed": PER_PROCESS,
                "errors": [done.stderr.strip()[-500:] or f"exit status {done.returncode}"],
            }
        errors += result.pop("errors")
        counts.update(result)
        counts["failed"] += PER_PROCESS - sum(result.values())
    return counts, errors[:5]


def read_expected_text(url: str, trust: ssl.SSLContext) -> str:
    """Return the text that every client must receive, from one request by the openai SDK."""
    http = openai.DefaultHttpxClient(verify=trust)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
        answer: Any = client.chat.completions.create(**REQUEST)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def _environment(url: str, authority: Authority) -> dict[str, str]:
    # Return the environment of a client process, with the gateway and the requests to send.
    text = read_expected_text(url, ssl.create_default_context(cafile=str(authority.ca)))
    return {
        **os.environ,
        **ENV,
        "URL": url,
        "CA": str(authority.ca),
        "NODE_EXTRA_CA_CERTS": str(authority.ca),
        "EXPECTED": text,
        "COUNT": str(PER_PROCESS),
        "THREADS": str(THREADS),
        "MODULES": str(MODULES),
        "WHOLE": json.dumps(REQUEST | {"stream": False}),
        "STREAMED": json.dumps(REQUEST | {"stream": True}),
    }


def run(
    server: GatewayProcess, authority: Authority, clients: Mapping[str, Client], requests: int
) -> bool:
    """Run all TLS clients and print a row for each. Returns True if no request failed."""
    env = _environment(server.url, authority)
    rotation, total = Rotation(authority, server.port), Counter[str]()
    print(
        f"{'client':18} {'whole':>7} {'streamed':>9} {'failed':>7} "
        f"{'rotations':>10} {'seconds':>8}",
        flush=True,
    )
    with rotation.running():
        for name, client in clients.items():
            before, started = rotation.count, time.monotonic()
            counts, errors = run_client(client, env, requests)
            seconds, rotated = time.monotonic() - started, rotation.count - before
            figures = (
                f"{counts['whole']:7} {counts['streamed']:9} {counts['failed']:7} "
                f"{rotated:10} {seconds:8.1f}"
            )
            print(f"{name:18} {figures}", *(f"\n    {error}" for error in errors), flush=True)
            total.update(counts)
            if not rotated:
                rotation.problem = (
                    rotation.problem or f"no certificate was replaced while {name} was running"
                )
    print(
        f"{'all':18} {total['whole']:7} {total['streamed']:9} {total['failed']:7} "
        f"{rotation.count:10}"
    )
    if rotation.problem:
        print(rotation.problem)
    return not total["failed"] and rotation.problem is None


def count_failed_handshakes(server: GatewayProcess) -> float:
    with urllib.request.urlopen(f"{server.admin_url}/metrics") as answer:
        page = answer.read().decode()
    values = re.findall(r"^penstock_tls_handshake_failures_total\{.*\} (\S+)$", page, re.MULTILINE)
    return sum(map(float, values))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=1000,
        help="number of requests per client; a multiple of 100 (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=CLIENTS,
        metavar="CLIENT",
        help="run only this client; repeat the option for more (default: all). Names: "
        + "; ".join(CLIENTS),
    )
    options = parser.parse_args()
    clients = {
        name: client
        for name, client in CLIENTS.items()
        if options.only is None or name in options.only
    }
    absent = missing_programs(clients)
    for line in absent:
        print(line, file=sys.stderr)
    if absent:
        return 1
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as folder, mock_fleet() as urls:
        authority = Authority(Path(folder) / "tls")
        authority.issue("server", "localhost", "127.0.0.1")
        with gateway_process(Path(folder), CONFIG.format(*urls), complete=False) as server:
            good = run(server, authority, clients, options.requests)
            failures = count_failed_handshakes(server)
    print(f"failed handshakes at the gateway: {failures:g}")
    return 0 if good and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
