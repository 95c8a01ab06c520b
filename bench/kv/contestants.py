"""Who takes part: how each is installed and started as two processes, and how the two are told what to do.

Not here: what is measured (bench/kv/measure.py) and what is asked of it (bench/kv/goals.py).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PEERS = ROOT / "build" / "peers-kv"
PEERS_PYTHON = PEERS / "venv" / "bin" / "python"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
LIBRARIES = ("libibverbs1", "librdmacm1", "libnuma1")  # what Mooncake's wheel links to

TCP_ONLY = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self"}
SAME_HOST = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,cma,self"}
MANY_BLOCKS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
PATIENCE_S = 60.0


class NotMeasurable(Exception):
    """A contestant could not be installed, started, or do its work; the others go on and the table says so."""


@dataclass(frozen=True)
class Contestant:
    """A name for the table, the module of its sides, who initiates, and how its processes are set up."""

    name: str
    module: str
    initiator: str = "source"
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)

    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 2 << 20)

    @property
    def by_layers(self) -> bool:
        """It takes the layer-wise measurement and no other."""
        return not self.sizes


def everyone() -> list[Contestant]:
    """All contestants. NIXL without its progress thread: with it every size is slower and dearer here."""
    return [
        Contestant("memcpy", "side_memcpy", "sink"),
        Contestant("memcpy, memory files", "side_memcpy", "sink", {"files": True}),
        Contestant("raw tcp", "side_raw"),
        Contestant("raw tcp, scattered", "side_raw", settings={"scattered": True}),
        Contestant(
            "raw tcp, scattered, xxh3", "side_raw", settings={"scattered": True, "checked": True}
        ),
        *(Contestant(name, "side_ours", settings=settings) for name, settings in OURS.items()),
        Contestant(
            "ours agents tcp", "side_agent", "sink", {"transport": "tcp"}, sizes=(64 << 10,)
        ),
        Contestant(
            "ours agents shm", "side_agent", "sink", {"transport": "shm"}, sizes=(64 << 10,)
        ),
        Contestant(
            "layer-wise", "side_agent", settings={"transport": "tcp", "layers": True}, sizes=()
        ),
        _nixl("nixl tcp write", "WRITE", TCP_ONLY),
        _nixl("nixl tcp read", "READ", TCP_ONLY),
        _nixl("nixl cma write", "WRITE", SAME_HOST),
        _nixl("nixl cma read", "READ", SAME_HOST),
        _mooncake("mooncake tcp write", "WRITE"),
        _mooncake("mooncake tcp read", "READ"),
    ]


OURS: dict[str, dict[str, Any]] = {
    "ours tcp": {"transport": "tcp", "lanes": 3},
    "ours tcp, one lane": {"transport": "tcp"},
    "ours tcp xxh3": {"transport": "tcp", "checked": True},
    "ours tcp xxh3, two lanes": {"transport": "tcp", "checked": True, "lanes": 2},
    "ours tcp aes": {"transport": "tcp", "sealed": True},
    "ours shm": {"transport": "shm"},
}


def _nixl(name: str, op: str, env: Mapping[str, str]) -> Contestant:
    who = "source" if op == "WRITE" else "sink"
    return Contestant(name, "side_nixl", who, {"op": op, "progress": False}, env, PEERS_PYTHON)


def _mooncake(name: str, op: str) -> Contestant:
    who = "source" if op == "WRITE" else "sink"
    return Contestant(name, "side_mooncake", who, {"op": op}, MANY_BLOCKS, PEERS_PYTHON)


# ---- installing ----


def install_peers() -> dict[str, str]:
    """Puts the peers into an environment of their own, without their CUDA dependencies. Module -> why it is missing."""
    if not PEERS_PYTHON.exists():
        subprocess.run(
            ["sh", str(ROOT / "deploy" / "venv.sh"), sys.executable, str(PEERS / "venv")],
            check=True,
        )
        _pip("numpy")
    missing = {}
    for module, packages in (("side_nixl", NIXL), ("side_mooncake", MOONCAKE)):
        if not _have(packages):
            problem = _pip("--no-deps", *packages)
            if problem:
                missing[module] = problem
    if "side_mooncake" not in missing and not _mooncake_links():
        _apt(*LIBRARIES)
    return missing


def _have(packages: tuple[str, ...]) -> bool:
    wanted = {
        name: version for name, _, version in (package.partition("==") for package in packages)
    }
    code = f"import importlib.metadata as m; assert all(m.version(n) == v for n, v in {wanted!r}.items())"
    return (
        subprocess.run([PEERS_PYTHON, "-c", code], capture_output=True, check=False).returncode == 0
    )


def _pip(*what: str) -> str | None:
    command = [PEERS_PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        f"pip cannot install {what[-1]}: {done.stderr.strip().splitlines()[-1:]}"
        if done.returncode
        else None
    )


def _mooncake_links() -> bool:
    code = "import os, mooncake.engine; os._exit(0)"
    return (
        subprocess.run([PEERS_PYTHON, "-c", code], capture_output=True, check=False).returncode == 0
    )


def _apt(*packages: str) -> None:
    """Where it may be done without asking; elsewhere Mooncake is left out and its import says what it lacks."""
    if os.geteuid() == 0:
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, capture_output=True, check=False, env=env)


# ---- running ----


class Process:
    """One worker of a pair: a command is a line of JSON, its answer too."""

    def __init__(self, who: Contestant, role: str, expected: Path) -> None:
        command = [
            who.python,
            HERE / "worker.py",
            who.module,
            role,
            json.dumps(dict(who.settings)),
            expected,
        ]
        env = {**os.environ, **who.env, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.name = f"{who.name} ({role})"
        self.log = (PEERS / f"{who.name.replace(' ', '-')}-{role}.log").open("w")
        self.popen = subprocess.Popen(
            [str(part) for part in command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        self.rest = b""

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError as error:
            raise NotMeasurable(f"{self.name} ended by itself, see {self.log.name}") from error

    def answer(self) -> Any:
        """What the last command gave back; raises NotMeasurable when it failed or nothing comes for a minute."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self.rest:
            ready, _, _ = select.select(
                [self.popen.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            piece = os.read(self.popen.stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                raise NotMeasurable(
                    f"{self.name} {'ended' if ready else 'hangs'}, see {self.log.name}"
                )
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise NotMeasurable(f"{self.name}: {reply['error']}")
        return reply["ok"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def end(self) -> None:
        """It is the worker's last line that it waits for; a worker stuck in a library is killed."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(2)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.log.close()


class Pair:
    """Source and sink of one contestant, connected."""

    def __init__(self, who: Contestant, expected: Path) -> None:
        self.who = who
        self.source = Process(who, "source", expected)
        self.sink = Process(who, "sink", expected)
        try:
            addresses = [side.ask("address") for side in self.sides]
            for side, peer in zip(self.sides, reversed(addresses), strict=True):
                side.ask("connect", peer={**peer, "expected": str(expected)})
        except NotMeasurable:
            self.end()
            raise

    @property
    def sides(self) -> tuple[Process, Process]:
        return self.source, self.sink

    @property
    def initiator(self) -> Process:
        return self.source if self.who.initiator == "source" else self.sink

    def both(self, do: str, **arguments: Any) -> list[Any]:
        """Tells both, then waits for both."""
        for side in self.sides:
            side.tell(do, **arguments)
        return [side.answer() for side in self.sides]

    def end(self) -> None:
        for side in self.sides:
            side.end()
