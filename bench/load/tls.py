"""TLS with the clients that people use, while the gateway's certificate is exchanged again and again: 0 may fail.

    python -m bench.load.tls [--requests 1000] [--only curl ...]

curl, the openai SDK, Java's HttpClient and Node's https, fetch and openai package send requests, half of them streamed,
and compare each answer with the expected text. A client that is not installed is an error. Ports are of 127.0.0.1.
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

from tests.authority import Authority
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
pools: {{main: {{policy: round_robin, admission: none, endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}}}
"""
REQUEST = {
    "model": "demo-8b",
    "messages": [{"role": "user", "content": "How deep is the reservoir behind the dam?"}],
    "max_tokens": 32,
}


class Client(NamedTuple):
    """How a client is started, what it needs, and the Debian package of that."""

    command: Sequence[str]
    program: str
    package: str
    env: Mapping[str, str] = {}


NODE = ("node", str(PROGRAMS / "requests.mjs"))
CLIENTS: Mapping[str, Client] = {
    "curl": Client((sys.executable, str(PROGRAMS / "curl.py")), "curl", "curl"),
    "openai, Python": Client((sys.executable, str(PROGRAMS / "sdk.py")), sys.executable, "python3"),
    "HttpClient, Java": Client(("java", str(PROGRAMS / "Requests.java")), "javac", "openjdk-17-jdk-headless"),
    "https, Node": Client(NODE, "node", "nodejs", {"CLIENT": "https"}),
    "fetch, Node": Client(NODE, "node", "nodejs", {"CLIENT": "fetch"}),
    "openai, Node": Client(NODE, "npm", "npm", {"CLIENT": "openai"}),
}


class Rotation:
    """Exchanges the certificate, waits until a new connection is shown it, and begins again. `count`: how often."""

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
            while self._shown(trust) != wanted:
                if time.monotonic() > ends:
                    self.problem = f"a new certificate was not used within {NOTICED_WITHIN_S:g} s"
                    return
                time.sleep(0.05)
            self.count += 1

    def _shown(self, trust: ssl.SSLContext) -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", self._port), NOTICED_WITHIN_S) as raw,
            trust.wrap_socket(raw, server_hostname="localhost") as line,
        ):
            return line.getpeercert(binary_form=True)


def _first(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    return pem[: pem.index(end) + len(end)]


def missing(clients: Mapping[str, Client]) -> list[str]:
    """What has to be installed before all clients can be started."""
    found = [
        f"{name} needs {each.program}: install the Debian package {each.package}"
        for name, each in clients.items()
        if shutil.which(each.program) is None
    ]
    if not found and "openai, Node" in clients and not (MODULES / "node_modules" / "openai").is_dir():
        MODULES.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--prefix", str(MODULES), OPENAI_NODE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            found.append(
                f"openai, Node needs the npm package {OPENAI_NODE}: {done.stderr.strip() or done.stdout.strip()}"
            )
    return found


def send(client: Client, env: Mapping[str, str], requests: int) -> tuple[Counter[str], list[str]]:
    """What came of `requests` requests, by processes one after the other, and the first errors."""
    counts: Counter[str] = Counter()
    errors: list[str] = []
    for _ in range(requests // PER_PROCESS):
        done = subprocess.run(client.command, env={**env, **client.env}, capture_output=True, text=True, check=False)
        try:
            told: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            told = {"failed": PER_PROCESS, "errors": [done.stderr.strip()[-500:] or f"exit status {done.returncode}"]}
        errors += told.pop("errors")
        counts.update(told)
        counts["failed"] += PER_PROCESS - sum(told.values())
    return counts, errors[:5]


def expected(url: str, trust: ssl.SSLContext) -> str:
    """The text of the mock's answer."""
    http = openai.DefaultHttpxClient(verify=trust)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
        answer: Any = client.chat.completions.create(**REQUEST)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def run(home: GatewayProcess, authority: Authority, clients: Mapping[str, Client], requests: int) -> bool:
    """Prints a row for each client; whether nothing failed."""
    text = expected(home.url, ssl.create_default_context(cafile=str(authority.ca)))
    env = (
        os.environ
        | ENV
        | {
            "URL": home.url,
            "CA": str(authority.ca),
            "NODE_EXTRA_CA_CERTS": str(authority.ca),
            "EXPECTED": text,
            "COUNT": str(PER_PROCESS),
            "THREADS": str(THREADS),
            "MODULES": str(MODULES),
            "WHOLE": json.dumps(REQUEST | {"stream": False}),
            "STREAMED": json.dumps(REQUEST | {"stream": True}),
        }
    )
    rotation, total = Rotation(authority, home.port), Counter[str]()
    print(f"{'client':18} {'whole':>7} {'streamed':>9} {'failed':>7} {'rotations':>10} {'seconds':>8}", flush=True)
    with rotation.running():
        for name, client in clients.items():
            before, began = rotation.count, time.monotonic()
            counts, errors = send(client, env, requests)
            took, rotated = time.monotonic() - began, rotation.count - before
            figures = f"{counts['whole']:7} {counts['streamed']:9} {counts['failed']:7} {rotated:10} {took:8.1f}"
            print(f"{name:18} {figures}", *(f"\n    {error}" for error in errors), flush=True)
            total.update(counts)
            if not rotated:
                rotation.problem = rotation.problem or f"no certificate was exchanged while {name} asked"
    print(f"{'all':18} {total['whole']:7} {total['streamed']:9} {total['failed']:7} {rotation.count:10}")
    if rotation.problem:
        print(rotation.problem)
    return not total["failed"] and rotation.problem is None


def failed_handshakes(home: GatewayProcess) -> float:
    """TLS handshakes that failed at the gateway."""
    with urllib.request.urlopen(f"{home.admin_url}/metrics") as answer:
        page = answer.read().decode()
    found = re.findall(r"^penstock_tls_handshake_failures_total\{.*\} (\S+)$", page, re.MULTILINE)
    return sum(float(each) for each in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of each client, in hundreds")
    parser.add_argument("--only", action="append", choices=CLIENTS)
    asked = parser.parse_args()
    clients = {name: each for name, each in CLIENTS.items() if asked.only is None or name in asked.only}
    absent = missing(clients)
    for line in absent:
        print(line, file=sys.stderr)
    if absent:
        return 1
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as folder, mock_fleet() as urls:
        authority = Authority(Path(folder) / "tls")
        authority.issue("server", "localhost", "127.0.0.1")
        with gateway_process(Path(folder), CONFIG.format(*urls), complete=False) as home:
            good = run(home, authority, clients, asked.requests)
            failures = failed_handshakes(home)
    print(f"handshakes that failed at the gateway: {failures:g}")
    return 0 if good and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
