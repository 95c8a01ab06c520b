"""`make clients`: runs real client programs against `penstock demo` and prints a table of results.

    python -m bench.clients.run FOLDER [--only codex ...] [--turns 20] [--sessions 4]
        [--record FOLDER] [--policy NAME]

FOLDER contains the clients, installed by install.sh. Each client runs several conversations at the
same time, with streaming and one tool call in each. Its requests pass a recording proxy. All
processes listen on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.clients.cache_share import READERS, endless_hits
from bench.clients.catalogue import CATALOGUE, ClientSpec
from bench.clients.recorder import Exchange, Recorder, recorder, to_line
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
KEY = "sk-any-key"
LIMIT_S = 540.0
WANTED_SHARE = 0.95


class Result(NamedTuple):
    """The result of one tested client program.

    problem  why the client does not work; "" if it works
    sources  how the gateway identified sessions, such as by a header, with the number of requests
    share    cached tokens divided by those of one KV cache without a size limit (1 is the best)
    """

    spec: ClientSpec
    version: str
    problem: str
    turns: int
    calls: int
    streams: int
    sources: Counter[str]
    share: float

    def row(self) -> str:
        spec, named = self.spec, ", ".join(f"{name} {n}" for name, n in self.sources.most_common())
        state = f"fails: {self.problem}" if self.problem else "works"
        cells = (spec.name, self.version, spec.api, state, self.turns, self.calls, self.streams)
        return "| " + " | ".join(map(str, cells)) + f" | {named} | {self.share:.3f} |"


HEAD = """\
| client | version | API | state | turns | tool calls | streams | session named by | share |
|---|---|---|---|---|---|---|---|---|"""


@contextmanager
def demo(folder: Path, policy: str) -> Iterator[int]:
    """Run `penstock demo` in a folder during a `with` block; yield the port of its API."""
    process, port = started_demo(folder, policy)
    try:
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def started_demo(folder: Path, policy: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start `penstock demo`, and return its process and the port of its API once it is ready.

    The ports are chosen at random and may be in use, so three attempts are made.

    Raises RuntimeError if all of them fail.
    """
    for _ in range(3):
        port, admin = free_port(), free_port()
        ports = ("--port", str(port), "--admin-port", str(admin), "--policy", policy)
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "demo", *ports],
            stdout=subprocess.PIPE,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        assert process.stdout is not None
        if any(b"Try it" in line for line in process.stdout):
            return process, port
        process.wait()
    raise RuntimeError("penstock demo did not become ready in three attempts")


def access_lines(folder: Path) -> dict[str, Any]:
    lines = (folder / "penstock-demo" / "access.log").read_text().splitlines()
    return {line["id"]: line for line in map(json.loads, lines)}


def counted_hits(folder: Path) -> int:
    """Return the total number of cached prompt tokens that the mock engines of a demo report."""
    config = (folder / "penstock-demo" / "gateway.yaml").read_text()
    pages = [
        urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        for url in re.findall(r"url: (http://[0-9.:]+)", config)
    ]
    found = re.findall(
        r"^vllm:prefix_cache_hits_total\S* ([0-9.e+]+)$", "".join(pages), re.MULTILINE
    )
    return int(sum(map(float, found)))


def interpreter(spec: ClientSpec, installed: Path) -> Path | None:
    """Return the program that runs a client's script, such as Node; None: it is not installed."""
    if spec.runtime == "node":
        if spec.program.endswith(".mjs"):
            return Path(shutil.which("node") or "node")
        return Path(sys.executable)
    python = installed / spec.runtime / "bin" / "python"
    return python if python.exists() else None


def version_of(spec: ClientSpec, installed: Path) -> str:
    name = spec.packages[-1]
    if spec.runtime == "node":
        page = installed / "node" / "node_modules" / name / "package.json"
        return str(json.loads(page.read_text())["version"]) if page.exists() else ""
    program = f"from importlib.metadata import version; print(version({name!r}))"
    python = str(interpreter(spec, installed))
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def converse(spec: ClientSpec, installed: Path, url: str, turns: int, sessions: int) -> Any:
    program = interpreter(spec, installed)
    if program is None:
        return {"errors": ["not installed"]}
    env = os.environ | {
        "GATEWAY_URL": url,
        "GATEWAY_KEY": KEY,
        "GATEWAY_MODEL": spec.model,
        "VARIANT": spec.variant,
        "TURNS": str(turns),
        "SESSIONS": str(sessions),
        "FIRST_SITE": str(10 * CATALOGUE.index(spec)),
        "MODULES": str(installed / "node"),
        "PATH": f"{installed / 'node' / 'node_modules' / '.bin'}:{os.environ['PATH']}",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": KEY,
    }
    command = [str(program), str(PROGRAMS / spec.program)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"errors": [f"not done after {LIMIT_S:g} s"]}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith("{"):
        return {"errors": [(done.stderr.strip().splitlines() or ["no output"])[-1][:200]]}
    return json.loads(last)


def judge(
    spec: ClientSpec,
    version: str,
    counted: Any,
    exchanges: Sequence[Exchange],
    lines: Any,
    engine_hits: int,
) -> Result:
    """Decide from a client program's recorded requests whether it works with the gateway.

    spec         the program
    version      its version
    counted      the turns, calls, chunks and errors that the program counted
    exchanges    its recorded HTTP requests and responses
    lines        lines of the gateway's access log, by request
    engine_hits  cached tokens reported by the engines; used if streams have no `usage`
    """
    asked = [each for each in exchanges if each.path in READERS]
    logged = [lines.get(_request_id(each), {}) for each in asked]
    counts = [line.get("cached_tokens") for line in logged]
    hits = engine_hits if None in counts else sum(counts)
    best = endless_hits(asked)
    # Claude Code opens its connection with HEAD /, whose answer it does not read.
    refused = Counter(
        f"{each.method} {each.path} {each.status}"
        for each in exchanges
        if each.status != 200 and each.method != "HEAD"
    )
    problems = [*counted["errors"][:1], *(f"{what} ({n})" for what, n in refused.items())]
    return Result(
        spec,
        version,
        "; ".join(problems),
        counted.get("turns", 0),
        counted.get("calls", 0),
        sum(_is_stream(each) for each in asked),
        Counter(line.get("session", "none") for line in logged),
        hits / best if best else 1.0,
    )


def _request_id(exchange: Exchange) -> str:
    return exchange.response.header("x-request-id") if exchange.response is not None else ""


def _is_stream(exchange: Exchange) -> bool:
    answer = exchange.response
    return answer is not None and answer.header("content-type").startswith("text/event-stream")


def recording_name(spec: ClientSpec) -> str:
    return f"{spec.program.partition('.')[0]}-{spec.variant or spec.api.rpartition('/')[2]}"


def run_client(
    spec: ClientSpec, installed: Path, proxy: Recorder, folder: Path, options: argparse.Namespace
) -> Result:
    proxy.clear()
    counted = converse(spec, installed, proxy.url, options.turns, options.sessions)
    time.sleep(0.5)  # the access log is written in batches
    exchanges, hits = proxy.exchanges(), counted_hits(folder)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        page = "".join(to_line(each) + "\n" for each in exchanges)
        (options.record / f"{recording_name(spec)}.jsonl").write_text(page)
    version = version_of(spec, installed)
    return judge(spec, version, counted, exchanges, access_lines(folder), hits)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "installed",
        type=lambda name: Path(name).resolve(),  # programs run in other folders
        help="folder in which install.sh has installed the client programs",
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="run only the clients whose name contains one of these texts",
    )
    parser.add_argument(
        "--turns", type=int, default=20, help="number of turns per session (default: %(default)s)"
    )
    parser.add_argument(
        "--sessions",
        type=int,
        default=4,
        help="number of concurrent sessions per client (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        default="prefix_aware",
        help="routing policy of the gateway (default: %(default)s)",
    )
    parser.add_argument(
        "--record", type=Path, help="folder to which the recorded HTTP exchanges are written"
    )
    return parser.parse_args()


def main() -> int:
    """Run all client programs one after another, and print a table of the results.

    Returns 1 if one of them does not work, otherwise 0.
    """
    options = parse()
    wanted = [part.lower() for part in options.only]
    chosen = [
        spec
        for spec in CATALOGUE
        if not wanted or any(part in f"{spec.name} {spec.api}".lower() for part in wanted)
    ]
    failed = 0
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-clients-") as name:
        for spec in chosen:
            folder = Path(tempfile.mkdtemp(dir=name))
            try:
                with demo(folder, options.policy) as port, recorder(port) as proxy:
                    result = run_client(spec, options.installed, proxy, folder, options)
            except (OSError, RuntimeError) as error:
                result = Result(spec, "", f"{error}", 0, 0, 0, Counter(), 0.0)
            failed += bool(result.problem) or result.share < WANTED_SHARE
            print(result.row(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
