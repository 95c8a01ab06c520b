"""The gateways that the benchmark compares: how to install, configure and start them.

Each gateway runs on a core of its own and listens on 127.0.0.1. Measurements are in
bench/traffic_cells.py, tables in bench/compare_routers_table.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version as version_of
from itertools import count
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BIN = HERE / "bin"
PEERS_VENV = ROOT / ".venv-peers"
PEERS = {"sglang-router": "0.3.2", "vllm-router": "0.1.17", "smg": "1.13.0"}

GATEWAY_CORE, LOAD_CORE = 0, 1
BACKENDS = 4
COMPILED = ROOT / "build" / "compiled"
OURS, SOURCES = "penstock", "penstock sources"
ADMIN, SECOND = 100, 50
"""Offsets that are added to a system's port.

ADMIN gives the port of its metrics, SECOND the port of a second process of the system.
"""

MODEL = "bench-model"
DEFAULT = "default"
"""The policy that a system uses when its configuration names none."""


class NotMeasurable(Exception):
    """Raised if a gateway cannot be installed, started or measured. The report has the reason."""


_ANY_CERTIFICATE = ssl.create_default_context()
_ANY_CERTIFICATE.check_hostname = False
_ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE


@dataclass(frozen=True)
class System:
    """One gateway in the comparison, with one routing policy, and how to start it.

    port     port of its API
    command  function that returns its command line, from a folder for temporary files and the port
    home     working directory of its process
    scheme   "http" or "https"
    """

    name: str
    policy: str
    port: int
    command: Callable[[Path, int], list[str]]
    home: Path = ROOT
    scheme: str = "http"

    @property
    def key(self) -> str:
        return f"{self.name}/{self.policy}"


def free_base(ports: int = BACKENDS) -> int:
    """Return the first of `ports` consecutive free ports for the test engines, a multiple of 1000.

    The compared gateways use the ports from 100 above the first one. Exits the program if no such
    ports are free from 19000 to 25000.
    """
    for base in range(19000, 26000, 1000):
        try:
            for port in range(base, base + ports):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base
    raise SystemExit(
        "no free ports in a row for the test engines were found from 19000 to 25000; stop "
        "programs that use them"
    )


def backend_urls(base: int, ports: int = BACKENDS) -> list[str]:
    return [f"http://127.0.0.1:{base + i}" for i in range(ports)]


@dataclass(frozen=True)
class Certificate:
    """The file paths of a TLS certificate and its private key."""

    certificate: Path
    key: Path


def penstock_command(
    policy: str, urls: list[str], tls: Certificate | None = None
) -> Callable[[Path, int], list[str]]:
    """Return a function that builds the command line of our gateway.

    policy  routing policy; "default" leaves the choice to the gateway
    urls    URLs of the engines
    tls     certificate with which the gateway serves; None: no TLS

    The function's arguments are a folder for the configuration file, and a port.
    """
    policy_line = "" if policy == DEFAULT else f"    policy: {policy}\n"
    section = "" if tls is None else f", tls: {{certificate: {tls.certificate}, key: {tls.key}}}"

    def command(work: Path, port: int) -> list[str]:
        config = work / f"penstock-{port}.yaml"
        endpoints = "".join(f"      - {{url: {url}, max_concurrency: 8192}}\n" for url in urls)
        config.write_text(
            f"version: 1\n"
            f"listeners:\n  api: {{port: {port}{section}}}\n  admin: {{port: {port + ADMIN}}}\n"
            f"models:\n  - {{name: {MODEL}, pool: main}}\n"
            f"pools:\n  main:\n{policy_line}    endpoints:\n{endpoints}"
            f"observability:\n  access_log: {work / f'penstock-{port}.access'}\n"
        )
        return [sys.executable, "-m", "gateway", "serve", "--config", str(config)]

    return command


def _router(
    module: str, quiet: str, policy: str, urls: list[str]
) -> Callable[[Path, int], list[str]]:
    def command(work: Path, port: int) -> list[str]:
        return [
            *(str(PEERS_VENV / "bin" / "python"), "-m", module),
            *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls),
            *("--policy", policy, "--prometheus-port", str(port + ADMIN), "--log-level", quiet),
            *(
                "--max-concurrent-requests",
                "20000",
                "--queue-size",
                "20000",
                "--worker-startup-check-interval",
                "1",
            ),
        ]

    return command


def _smg(policy: str, urls: list[str]) -> Callable[[Path, int], list[str]]:
    def command(work: Path, port: int) -> list[str]:
        return [
            *(
                str(PEERS_VENV / "bin" / "smg"),
                "launch",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ),
            *("--worker-urls", *urls, "--policy", policy, "--log-level", "warn"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + ADMIN)),
            *("--max-concurrent-requests", "20000", "--queue-size", "20000"),
            *("--worker-startup-check-interval", "1", "--disable-tokenizer-autoload"),
        ]

    return command


def nginx_command(
    urls: list[str], work: Path, port: int, tls: Certificate | None = None
) -> list[str]:
    work = work / f"nginx-{port}"
    work.mkdir(exist_ok=True)
    config = work / "nginx.conf"
    config.write_text(_nginx_config(urls, work, port, tls))
    return [nginx_binary(), "-c", str(config), "-e", str(work / "nginx.err"), "-p", str(work)]


def _nginx_tls(tls: Certificate | None) -> str:
    # Return nginx's directives for TLS; nothing without a certificate.
    if tls is None:
        return ""
    return (
        f"ssl_certificate {tls.certificate}; ssl_certificate_key {tls.key}; "
        "ssl_protocols TLSv1.2 TLSv1.3;"
    )


def _nginx_config(urls: list[str], work: Path, port: int, tls: Certificate | None) -> str:
    servers = "\n".join(f"    server {url.removeprefix('http://')};" for url in urls)
    temp = "\n".join(
        f"  {kind}_temp_path {work / kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""
worker_processes 1;
daemon off;
pid {work / "nginx.pid"};
error_log {work / "nginx.err"} error;
worker_rlimit_nofile 20000;
events {{ worker_connections 9000; }}
http {{
  access_log off;
{temp}
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  tcp_nodelay on;
  keepalive_requests 1000000000;
  upstream groups {{
{servers}
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096{" ssl" if tls is not None else ""};
    {_nginx_tls(tls)}
    location / {{
      proxy_pass http://groups;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def all_systems(base: int) -> list[System]:
    """Return every gateway, with every routing policy that the benchmark uses.

    `direct` is the test engine without a gateway. Penstock is listed twice: compiled, as in the
    wheels and the image, and from its Python sources.
    """
    urls = backend_urls(base)
    routers: dict[str, Callable[[str, list[str]], Callable[[Path, int], list[str]]]] = {
        "sglang-router": partial(_router, "sglang_router.launch_router", "warn"),
        "vllm-router": partial(_router, "vllm_router.launch_router", "warning"),
        "smg": _smg,
    }
    systems = [
        System("direct", "none", base, lambda work, port: []),
        System("nginx", "round_robin", base + 100, partial(nginx_command, urls)),
    ]
    ports = count(base + 101)
    for name, home in ((OURS, COMPILED), (SOURCES, ROOT)):
        for policy in ("round_robin", DEFAULT, "prefix_aware"):
            command = penstock_command(policy, urls)
            systems.append(System(name, policy, next(ports), command, home))
    for name, build in routers.items():
        systems += [
            System(name, policy, next(ports), build(policy, urls))
            for policy in ("round_robin", "cache_aware")
        ]
    return systems


# ---- building and installing ----


def compile_penstock() -> dict[str, str]:
    """Compile Penstock as for the container image.

    Returns {} if the build succeeds, otherwise the reason of its failure by the gateway's name.
    """
    command = [sys.executable, "-m", "tools.compile.compile", str(COMPILED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return (
        {OURS: f"not compiled: {done.stderr.strip().splitlines()[-1:]}"} if done.returncode else {}
    )


def describe_build(*, compiled: bool) -> str:
    if not compiled:
        return f"{SOURCES} is not compiled"
    compiler = subprocess.run(
        ["cc", "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    return f"{OURS} is compiled by Cython {version_of('cython')} and {compiler}; {SOURCES} is not"


def build_tools() -> None:
    BIN.mkdir(exist_ok=True)
    for tool in ("backend", "load"):
        program, sources = BIN / tool, (HERE / f"{tool}.c", HERE / "wire.h")
        if program.exists() and all(
            program.stat().st_mtime > source.stat().st_mtime for source in sources
        ):
            continue
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise SystemExit(
                "the test engine and the load generator need a C compiler; install cc or gcc"
            )
        subprocess.run(
            [compiler, "-O2", "-std=gnu11", "-o", str(program), str(sources[0])], check=True
        )


def install_peers() -> dict[str, str]:
    """Install the other LLM routers into a virtual environment.

    Returns the reasons of failed installations, by the router's name.
    """
    python = PEERS_VENV / "bin" / "python"
    if not python.exists():
        subprocess.run(
            ["sh", str(ROOT / "deploy" / "venv.sh"), sys.executable, str(PEERS_VENV)], check=True
        )
    missing: dict[str, str] = {}
    for name, version in PEERS.items():
        module = name.replace("-", "_")
        wanted = (
            f"import importlib.metadata as m, {module}; assert m.version({name!r}) == {version!r}"
        )
        if (
            subprocess.run([str(python), "-c", wanted], capture_output=True, check=False).returncode
            == 0
        ):
            continue
        pip = [str(python), "-m", "pip", "install", "--quiet", f"{name}=={version}"]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            missing[name] = (
                f"pip cannot install {name}=={version}: {done.stderr.strip().splitlines()[-1:]}"
            )
    return missing


def nginx_binary() -> str:
    """Return the path of nginx's program. Raises NotMeasurable if it is not installed."""
    path = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if path is None:
        raise NotMeasurable("nginx is not installed; install it with apt-get install nginx-light")
    return path


def install_nginx() -> None:
    """Install nginx with apt-get if it is missing and this process runs as root."""
    if shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin") or os.geteuid() != 0:
        return
    if shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "nginx-light"]
        subprocess.run(
            command,
            capture_output=True,
            check=False,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )


# ---- running ----


def pinned(core: int, command: list[str]) -> list[str]:
    if shutil.which("taskset") is None or (os.cpu_count() or 1) < 2:
        return command
    return ["taskset", "-c", str(core), *command]


def process_tree(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += [int(child) for child in task.read_text().split()]
    return pids


def cpu_s(pids: list[int]) -> float:
    """Return the total processor time of processes in seconds, including that of ended threads."""
    # The clock id is CPUCLOCK_SCHED of a process (see clock_getcpuclockid).
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def core_busy_s(core: int) -> float:
    """Return the seconds that a core has been busy since the machine started.

    This is the time in /proc/stat that is neither idle nor iowait.
    """
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            ticks = [int(field) for field in line.split()[1:9]]
            return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def rss_bytes(pids: list[int]) -> int:
    """Return the total resident memory of processes in bytes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Running:
    system: System
    process: subprocess.Popen[bytes] | None

    @property
    def pids(self) -> list[int]:
        return process_tree(self.process.pid) if self.process else []

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            for pid in reversed(self.pids):
                os.kill(pid, signal.SIGKILL)
            self.process.wait(5)


def start(system: System, work: Path, wait_s: float = 40.0) -> Running:
    """Start a gateway on its core and wait until it serves requests.

    Raises NotMeasurable, with the end of the gateway's log, if it ends or does not serve within
    `wait_s` seconds.
    """
    command = system.command(work, system.port)
    if not command:
        return Running(system, None)
    log = work / f"{system.name}-{system.policy}.log"
    # The routers would look up a tokenizer of "bench-model" on a hub; keep all traffic local.
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "NO_COLOR": "1",
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(
            pinned(GATEWAY_CORE, command), cwd=system.home, stdout=sink, stderr=sink, env=env
        )
    running = Running(system, process)
    try:
        _await_service(running, time.monotonic() + wait_s)
    except NotMeasurable as error:
        running.stop()
        tail = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise NotMeasurable(f"{error}; the last lines of its log: {' | '.join(tail)}") from None
    return running


def start_second(system: System, work: Path) -> Running:
    """Start another process of a gateway that already runs, on a port of its own."""
    folder = work / "second"
    folder.mkdir(exist_ok=True)
    return start(replace(system, port=system.port + SECOND), folder)


def _await_service(running: Running, deadline: float) -> None:
    # Wait for twenty successful responses in a row.
    #
    # A router may start before it knows all its endpoints.
    in_a_row = 0
    while in_a_row < 20:
        if running.process is not None and running.process.poll() is not None:
            raise NotMeasurable(
                f"the system {running.system.key} ended with status "
                f"{running.process.returncode} before it served requests"
            )
        if time.monotonic() > deadline:
            raise NotMeasurable(
                f"the system {running.system.key} did not answer twenty requests in a row within "
                "its time limit for starting"
            )
        if _is_serving(running.system):
            in_a_row += 1
        else:
            in_a_row = 0
            time.sleep(0.2)


def _is_serving(system: System) -> bool:
    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"ready?"}}]}}'.encode()
    request = urllib.request.Request(
        f"{system.scheme}://127.0.0.1:{system.port}/v1/chat/completions", body
    )
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=2, context=_ANY_CERTIFICATE) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def backend(base: int, ports: int = BACKENDS) -> Iterator[None]:
    command = [str(BIN / "backend"), "--port", str(base), "--ports", str(ports)]
    process = subprocess.Popen(pinned(LOAD_CORE, command), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(
                f"the test engine cannot listen on the ports {base} to {base + ports - 1}; "
                "another program may use them"
            )
        yield
    finally:
        process.terminate()
        process.wait(5)
