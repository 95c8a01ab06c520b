"""The KV transports that the benchmark compares: how to install, start and command each of them.

Each transport runs as two processes. bench/kv/measure.py measures them, and bench/kv/goals.py has
the goals.
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
LIBRARIES = ("libibverbs1", "librdmacm1", "libnuma1")  # libraries that Mooncake's wheel links to

TCP_ONLY = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self"}
SAME_HOST = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,cma,self"}
MANY_BLOCKS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
PATIENCE_S = 60.0


class NotMeasurable(Exception):
    """Raised when a transport cannot be installed, started or measured. The report has the
    reason.
    """


@dataclass(frozen=True)
class Contestant:
    """One KV transport that the benchmark compares, and how to install and start it.

    initiator  the process that starts transfers: "source" or "sink"
    settings   arguments of the module's function open_side
    env        additional environment variables of its processes
    python     interpreter of its processes
    sizes      block sizes in bytes; () if only transfers layer by layer are measured
    """

    name: str
    module: str
    initiator: str = "source"
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)

    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 2 << 20)

    @property
    def by_layers(self) -> bool:
        return not self.sizes


def all_contestants() -> list[Contestant]:
    """Return all KV transports that the benchmark compares.

    NIXL runs without its progress thread. With it, NIXL is slower at all block sizes and uses more
    CPU time on this machine.
    """
    return [
        Contestant("memcpy", "side_memcpy", "sink"),
        Contestant("memcpy, memory files", "side_memcpy", "sink", {"files": True}),
        Contestant("raw tcp", "side_raw"),
        Contestant("raw tcp, scattered", "side_raw", settings={"scattered": True}),
        Contestant(
            "raw tcp, scattered, xxh3", "side_raw", settings={"scattered": True, "checked": True}
        ),
        *(Contestant(name, "side_ours", settings=settings) for name, settings in OURS.items()),
        *(
            Contestant(f"ours tcp, {kind}", "side_ours", settings=settings, env=env)
            for kind, settings, env in WITHOUT_THE_LOCK
        ),
        Contestant(
            "ours agents tcp", "side_agent", "sink", {"transport": "tcp"}, sizes=(64 << 10,)
        ),
        *(
            Contestant(
                f"ours agents tcp, busy {kind}",
                "side_agent",
                "sink",
                {"transport": "tcp", "busy": kind},
                sizes=(64 << 10,),
            )
            for kind in ("thread", "process")
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


_ONE_LANE = {"transport": "tcp", "checked": True}
_LONG_WINDOWS = _ONE_LANE | {"window_bytes": 32 << 20}
_NO_PUMP = {"PENSTOCK_KV_PUMP": "off"}
# Cases that show the use of the native pump: Python code also computes, in a thread of the agent's
# process or, for comparison, in another process.
WITHOUT_THE_LOCK: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("no pump", _ONE_LANE, _NO_PUMP),
    ("busy thread", _ONE_LANE | {"busy": "thread"}, {}),
    ("busy process", _ONE_LANE | {"busy": "process"}, {}),
    ("busy thread, no pump", _ONE_LANE | {"busy": "thread"}, _NO_PUMP),
    ("busy process, no pump", _ONE_LANE | {"busy": "process"}, _NO_PUMP),
    ("busy thread, 32 MiB windows", _LONG_WINDOWS | {"busy": "thread"}, {}),
    ("busy process, 32 MiB windows", _LONG_WINDOWS | {"busy": "process"}, {}),
]


def _nixl(name: str, op: str, env: Mapping[str, str]) -> Contestant:
    initiator = "source" if op == "WRITE" else "sink"
    settings = {"op": op, "progress": False}
    return Contestant(name, "side_nixl", initiator, settings, env, PEERS_PYTHON)


def _mooncake(name: str, op: str) -> Contestant:
    initiator = "source" if op == "WRITE" else "sink"
    return Contestant(name, "side_mooncake", initiator, {"op": op}, MANY_BLOCKS, PEERS_PYTHON)


# ---- installing ----


def install_peers() -> dict[str, str]:
    """Install the transports of other projects into a virtual environment, without CUDA.

    Returns the reasons of failed installations, by module.
    """
    if not PEERS_PYTHON.exists():
        subprocess.run(
            ["sh", str(ROOT / "deploy" / "venv.sh"), sys.executable, str(PEERS / "venv")],
            check=True,
        )
        _pip("numpy")
    missing = {}
    for module, packages in (("side_nixl", NIXL), ("side_mooncake", MOONCAKE)):
        if not _has_versions(packages):
            problem = _pip("--no-deps", *packages)
            if problem:
                missing[module] = problem
    if "side_mooncake" not in missing and not _can_import_mooncake():
        _apt(*LIBRARIES)
    return missing


def _has_versions(packages: tuple[str, ...]) -> bool:
    wanted = {
        name: version for name, _, version in (package.partition("==") for package in packages)
    }
    code = (
        "import importlib.metadata as m; "
        f"assert all(m.version(n) == v for n, v in {wanted!r}.items())"
    )
    return (
        subprocess.run([PEERS_PYTHON, "-c", code], capture_output=True, check=False).returncode == 0
    )


def _pip(*packages: str) -> str | None:
    command = [
        str(PEERS_PYTHON),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        *packages,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.returncode:
        return None
    return f"pip cannot install {packages[-1]}: {result.stderr.strip().splitlines()[-1:]}"


def _can_import_mooncake() -> bool:
    code = "import os, mooncake.engine; os._exit(0)"
    return (
        subprocess.run([PEERS_PYTHON, "-c", code], capture_output=True, check=False).returncode == 0
    )


def _apt(*packages: str) -> None:
    # Install Debian packages if this process runs as root.
    #
    # Otherwise Mooncake is left out, and its import error names the missing library.
    if os.geteuid() == 0:
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, capture_output=True, check=False, env=env)


# ---- running ----


class Process:
    """A worker process of a KV transport. It reads commands and writes replies as lines of JSON."""

    def __init__(self, contestant: Contestant, role: str, expected: Path) -> None:
        command = [
            contestant.python,
            HERE / "worker.py",
            contestant.module,
            role,
            json.dumps(dict(contestant.settings)),
            expected,
        ]
        env = {**os.environ, **contestant.env, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.name = f"{contestant.name} ({role})"
        self.log = (PEERS / f"{contestant.name.replace(' ', '-')}-{role}.log").open("w")
        self.popen = subprocess.Popen(
            [str(part) for part in command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        self.unread = b""

    def send(self, do: str, **arguments: Any) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError as error:
            raise NotMeasurable(
                f"the process of {self.name} ended before it received the command {do!r}; read "
                f"its log {self.log.name}"
            ) from error

    def receive(self) -> Any:
        """Return the reply to the last command that was sent to the worker process.

        Raises NotMeasurable if the command failed, or if there is no reply within a minute.
        """
        assert self.popen.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self.unread:
            ready, _, _ = select.select(
                [self.popen.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            piece = os.read(self.popen.stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                raise NotMeasurable(
                    f"the process of {self.name} {'ended' if ready else 'does not reply'}; read "
                    f"its log {self.log.name}"
                )
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise NotMeasurable(f"the process of {self.name} reports the error: {reply['error']}")
        return reply["ok"]

    def call(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.receive()

    def end(self) -> None:
        """Stop the worker process by closing its stdin, and kill it if it does not end."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(2)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.log.close()


class Pair:
    """The two processes, source and sink, between which one way to transfer KV is measured."""

    def __init__(self, contestant: Contestant, expected: Path) -> None:
        self.contestant = contestant
        self.source = Process(contestant, "source", expected)
        self.sink = Process(contestant, "sink", expected)
        try:
            addresses = [side.call("address") for side in self.sides]
            for side, peer in zip(self.sides, reversed(addresses), strict=True):
                side.call("connect", peer={**peer, "expected": str(expected)})
        except NotMeasurable:
            self.end()
            raise

    @property
    def sides(self) -> tuple[Process, Process]:
        return self.source, self.sink

    @property
    def initiator(self) -> Process:
        return self.source if self.contestant.initiator == "source" else self.sink

    def call_both(self, do: str, **arguments: Any) -> list[Any]:
        for side in self.sides:
            side.send(do, **arguments)
        return [side.receive() for side in self.sides]

    def end(self) -> None:
        for side in self.sides:
            side.end()
