"""The command `penstock demo`: start mock engines and the gateway, and print what to try next.

The mocks run as subprocesses, because the gateway must not import mockgpu. They have separate
process groups. Therefore Ctrl-C reaches only this process, which then ends all of them.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType

import msgspec

from gateway.cli.shared_options import DEFAULT_ADMIN_URL
from gateway.cli.terminal_output import print_line
from gateway.config import ConfigError, LoadedConfig, json_schema, load_with_warnings
from gateway.http.listener_sockets import is_port_free
from gateway.util.version import build_kind
from kvtransfer.dialects import DIALECTS, Prerequisite

FOLDER = Path("penstock-demo")
_HOST = "127.0.0.1"
_MOCK_PORTS = range(9100, 9900)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
# The README's `penstock bench --shape shared-prefix --rate 20` needs 20,000 output tokens per
# second at contexts of 8k tokens. Four groups of one GPU decode a third of that; groups of four
# GPUs decode all of it, with about 50 requests in flight each.
DEMO_TP = 4
MAX_CONCURRENCY = 128
# Agents allow 4,096 to 32,000 tokens for each answer, of which a model uses a small part. Some
# continue from a response that the engine keeps.
_AGENTS = ["--may-end-from", "1024", "--responses-store"]
_FAULT_PORTS = 2  # maximum number of fault injection servers: one per process of mocks


class DemoError(Exception):
    """Raised if the demo cannot start or continue; the message says why and what to do."""


class DemoOptions(msgspec.Struct, frozen=True):
    """The options of the command `penstock demo`.

    groups      number of mock TP groups (engines)
    policy      name of the routing policy
    port        port of the API
    admin_port  port of the admin server
    model       name of the model that the mocks serve
    speed       speed of the mocks relative to real time; with 2, they take half the time
    dialect     protocol by which engines hand over KV for split requests; None: requests are not
                split
    """

    groups: int
    policy: str
    port: int
    admin_port: int
    model: str
    speed: float
    dialect: str | None = None

    @property
    def prefill_groups(self) -> int:
        """Return how many mock TP groups of the demo only prefill; 0 if requests are not split."""
        return self.groups // 2 if self.dialect is not None else 0


def run_demo(demo: DemoOptions) -> int:
    """Run the demo until Ctrl-C or SIGTERM, and return the exit code.

    Raises DemoError if it cannot start.
    """
    try:
        return _run(demo)
    except KeyboardInterrupt:
        return 0


def _run(demo: DemoOptions) -> int:
    if demo.port == demo.admin_port:
        raise DemoError(
            "the API and the admin server need different ports; set --port and --admin-port"
        )
    _require_free_port(demo.port, "--port")
    _require_free_port(demo.admin_port, "--admin-port")
    if demo.dialect is not None and (demo.groups < 2 or demo.dialect not in DIALECTS):
        raise DemoError(
            f"--split needs at least two groups and one of these dialects: {', '.join(DIALECTS)}"
        )
    with ExitStack() as running:
        print_line(f"Starting {demo.groups} mock TP groups")
        with _machine_lock():
            file, loaded = _start_mocks(demo, running)
        # These slow imports come late, so that they do not delay the start of the mocks.
        from gateway import process_lifecycle
        from gateway.restart import start_options

        def print_report(line: str, is_error: bool) -> None:
            print_line(line, style="red" if is_error else None)

        return process_lifecycle.run_gateway(
            start_options.StartOptions(loaded, file, os.environ, print_report),
            ready=lambda _: print_line(_welcome_text(demo, file)),
            hangup_reloads=False,
        )


def _start_mocks(demo: DemoOptions, running: ExitStack) -> tuple[Path, LoadedConfig]:
    # Write the configuration, start the mocks and wait until they are ready.
    #
    # Returns the configuration's path and its content. The mocks end with `running`.
    # The groups' ports come first, then the bootstrap servers', then the fault injection servers'.
    first_port = _find_free_ports(demo.groups + demo.prefill_groups + _FAULT_PORTS)
    try:
        FOLDER.mkdir(exist_ok=True)
        running.enter_context(_folder_lock())
        file = _write_config(demo, first_port)
        _log().open("ab").close()
    except OSError as error:
        problem = f"cannot write to {FOLDER} ({error.strerror}); start the demo in another folder"
        raise DemoError(problem) from None
    try:
        loaded = load_with_warnings(file, os.environ)
    except ConfigError as error:
        raise DemoError(str(error)) from None
    # The default action would end this process without stopping the mocks.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_keyboard_interrupt)
    processes = running.enter_context(_mocks(demo, first_port))
    _wait_until_ready(processes, range(first_port, first_port + demo.groups))
    return file, loaded


@contextmanager
def _machine_lock() -> Iterator[None]:
    # Hold a lock that makes demos on this machine start one after another.
    #
    # Two that start at once would find the same ports free, and one would use the other's mocks.
    with open(__file__, "rb") as file:  # any file that both processes can open
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _folder_lock() -> Iterator[None]:
    # Hold a lock on the demo's folder. Raises DemoError while another demo runs in it.
    #
    # Without the lock, the gateway of that demo would reload the configuration of this one.
    with (FOLDER / "lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(
                f"another demo is running in this folder ({FOLDER}); "
                "start this one in another folder"
            ) from None
        yield


def _raise_keyboard_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _require_free_port(port: int, flag: str) -> None:
    if not is_port_free(_HOST, port):
        raise DemoError(f"port {port} is in use by another program; choose another with {flag}")


def _find_free_ports(length: int) -> int:
    # Return the first of `length` consecutive free ports for the mocks.
    #
    # Raises DemoError if there are none.
    run_length = 0
    for port in _MOCK_PORTS:
        run_length = run_length + 1 if is_port_free(_HOST, port) else 0
        if run_length == length:
            return port - length + 1
    raise DemoError(
        f"the mocks need {length} consecutive free ports between {_MOCK_PORTS.start} and "
        f"{_MOCK_PORTS.stop - 1}; end programs that use ports in this range"
    )


@contextmanager
def _mocks(demo: DemoOptions, first: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _log().open("wb") as log:
            for options in _mock_options(demo, first):
                command = [*_kill_with_parent(), sys.executable, "-m", "gateway", "mock", *options]
                command += ["--model", demo.model, "--speed", str(demo.speed)]
                processes.append(
                    subprocess.Popen(  # noqa: S603
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            _stop(process)


def _mock_options(demo: DemoOptions, first: int) -> list[list[str]]:
    if demo.dialect is None:
        fault_port = str(_fault_port(demo, first, 0))
        return [
            [*_port_options(first, demo.groups), "--tp", str(DEMO_TP), "--chaos-port", fault_port]
        ]
    shared = ["--dialect", demo.dialect]
    bootstrap = ["--bootstrap-port", str(first + demo.groups)]
    decode_groups = demo.groups - demo.prefill_groups
    fault_ports = [str(_fault_port(demo, first, number)) for number in (0, demo.prefill_groups)]
    return [
        [
            *_port_options(first, demo.prefill_groups),
            "--role",
            "prefill",
            "--chaos-port",
            fault_ports[0],
            *shared,
            *bootstrap,
        ],
        [
            *_port_options(first + demo.prefill_groups, decode_groups),
            "--role",
            "decode",
            "--chaos-port",
            fault_ports[1],
            *shared,
        ],
    ]


def _port_options(first: int, groups: int) -> list[str]:
    return ["--port", str(first), "--groups", str(groups), *_AGENTS]


def _fault_port(demo: DemoOptions, first: int, number: int) -> int:
    return (
        first
        + demo.groups
        + demo.prefill_groups
        + (1 if demo.dialect is not None and number >= demo.prefill_groups else 0)
    )


def _kill_with_parent() -> list[str]:
    # Return the start of a command line that makes a mock end when this process is killed.
    #
    # The result is empty where the `setpriv` tool is missing.
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Stop the whole process group with SIGTERM, then SIGKILL.
    #
    # A second Ctrl-C only moves on to the next signal, so that no mock is left running.
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_STOP_TIMEOUT_S)
        except (ProcessLookupError, PermissionError):
            process.poll()
            return
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
        return


def _wait_until_ready(processes: list[subprocess.Popen[bytes]], ports: range) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    waiting = list(ports)
    while waiting:
        if any(process.poll() is not None for process in processes):
            raise DemoError(f"the mock TP groups failed to start:\n{_log_tail()}")
        if time.monotonic() > deadline:
            raise DemoError(
                f"the mock TP groups were not ready within {_START_TIMEOUT_S:.0f} s:\n{_log_tail()}"
            )
        if _is_healthy(waiting[0]):
            waiting.pop(0)
        else:
            time.sleep(0.05)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _log() -> Path:
    return FOLDER / "mock.log"


def _log_tail() -> str:
    return "\n".join(_log().read_text(errors="replace").splitlines()[-15:])


def _write_config(demo: DemoOptions, first: int) -> Path:
    # Write the configuration and its JSON Schema into FOLDER.
    #
    # Returns the path of the configuration.
    (FOLDER / "gateway.schema.json").write_text(json.dumps(json_schema(), indent=1) + "\n")
    endpoints = "\n".join(
        f"      - {{{_endpoint(demo, first, number)}}}" for number in range(demo.groups)
    )
    split = (
        f"    split: {{dialect: {demo.dialect}, threshold_tokens: 512}}\n"
        if demo.dialect is not None
        else ""
    )
    file = FOLDER / "gateway.yaml"
    file.write_text(
        _CONFIG.format(
            port=demo.port,
            admin_port=demo.admin_port,
            model=json.dumps(demo.model),
            split=split,
            policy=demo.policy if demo.policy.isidentifier() else json.dumps(demo.policy),
            endpoints=endpoints,
            log=json.dumps(str(FOLDER / "access.log")),
            batch=json.dumps(str(FOLDER / "batch")),
        )
    )
    return file


def _endpoint(demo: DemoOptions, first: int, number: int) -> str:
    # Return the YAML mapping of one endpoint for the demo's configuration, without braces.
    address = f"url: http://127.0.0.1:{first + number}, max_concurrency: {MAX_CONCURRENCY}"
    labels = f'labels: {{chaos: "127.0.0.1:{_fault_port(demo, first, number)}"}}'
    if demo.dialect is None:
        return f"name: group-{number}, {address}, layout: {{tp: {DEMO_TP}}}, {labels}"
    engine = f"engine: {DIALECTS[demo.dialect].engine}"
    if number >= demo.prefill_groups:
        name = f"decode-{number - demo.prefill_groups}"
        return f"name: {name}, {address}, role: decode, {engine}, {labels}"
    bootstrap = ""
    if DIALECTS[demo.dialect].needs in (Prerequisite.ADDRESS, Prerequisite.QUERY):
        bootstrap = f"bootstrap: 127.0.0.1:{first + demo.groups + number}, "
    return f"name: prefill-{number}, {address}, role: prefill, {engine}, {bootstrap}{labels}"


_CONFIG = """\
# yaml-language-server: $schema=gateway.schema.json
#
# Edit and save this file while the demo runs: the gateway applies it within a second, or prints
# what is wrong with it. `penstock demo` overwrites it at every start; copy it to keep your changes.
# All keys: docs/reference/config.md. Check a file: penstock check FILE.
# Use a file: penstock serve --config FILE.
version: 1

listeners:
  api: {{port: {port}}}         # for applications; the default host is 127.0.0.1
  admin: {{port: {admin_port}}}       # the live page, /metrics, /endpoints, /config

models:
  - name: {model}
    pool: chat
    aliases: [demo, "claude-*", "gpt-*"]   # agents ask for models of their own
{split}
pools:
  chat:
    policy: {policy}      # or prefix_aware, least_loaded, ...: docs/policies.md
    admission: priced      # or cap, none, ...: docs/admission.md; priced reads agents' sessions
    # One endpoint per TP group, which is one engine process behind one URL. The label `chaos` is
    # the address where `penstock chaos` injects faults into a mock.
    endpoints:
{endpoints}
    waiting_room: {{size: 256, timeout: 30s}}   # used while every group is at its max_concurrency

# Secrets are references, never text in this file:
# tenants:
#   - {{name: team-a, key: "${{TEAM_A_KEY}}"}}
#   - {{name: team-b, key: "${{file:/run/secrets/team-b}}"}}

batch: {{dir: {batch}}}   # files and batches of the Batch API: docs/batch.md

observability:
  access_log: {log}   # one JSON line per request: stages, pick and reason
"""


def _welcome_text(demo: DemoOptions, file: Path) -> str:
    url, admin = f"http://{_HOST}:{demo.port}", f"http://{_HOST}:{demo.admin_port}"
    return _WELCOME.format(
        groups=demo.groups,
        model=demo.model,
        policy=demo.policy,
        url=url,
        admin=admin,
        file=file,
        folder=FOLDER,
        build=_BUILDS[build_kind()],
        split="" if demo.dialect is None else _SPLIT.format(url=url, model=demo.model),
        next_steps=_next_steps(demo, file, url, admin),
    )


def _next_steps(demo: DemoOptions, file: Path, url: str, admin: str) -> str:
    other = "least_loaded" if demo.policy != "least_loaded" else "prefix_aware"
    installed = Path(sys.executable).with_name("penstock")
    penstock = "penstock" if shutil.which("penstock") else os.path.relpath(installed)
    victim = "group-0" if demo.dialect is None else "decode-0"
    steps = (
        {}
        if admin == DEFAULT_ADMIN_URL
        else {f"export PENSTOCK_ADMIN={admin}": "the admin server for the commands below"}
    )
    set_policy = f"sed -i 's/policy: {demo.policy}/policy: {other}/' {file}"
    steps |= {
        f"{penstock} bench --url {url} --for 30s": "measure TTFT, TPOT and goodput",
        f"{penstock} top": "watch the fleet in this terminal (or open the live view)",
        f"{penstock} chaos kill {victim}": "watch the other groups take over; then: chaos restore",
        f"{penstock} explain": "why the newest request was routed as it was",
        set_policy: "change the policy while requests run",
        f"{penstock} diff && {penstock} rollback": "show the last change, then undo it",
        f"{penstock} demo --split": "split requests: prefill on one group, decode on another",
        f"{penstock} serve --engine http://HOST:8000": "route to your own engines, without a file",
    }
    width = max(map(len, steps))
    return "\n".join(f"  {step:{width}}   # {purpose}" for step, purpose in steps.items())


_BUILDS = MappingProxyType(
    {
        "compiled": "compiled, as installed from a wheel",
        "sources": "running from sources; a wheel with compiled modules needs less CPU "
        "(docs/install.md)",
    }
)

_WELCOME = """\
Penstock demo: {groups} mock TP groups serve "{model}" with policy {policy}. No GPU needed.

  API        {url}/v1
  Live view  {admin}   (/metrics /endpoints /config)
  Config     {file}
  Requests   {folder}/access.log
  Runs       {build}

Try it in another terminal:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model":"{model}","stream":true,"max_tokens":64,
         "messages":[{{"role":"user","content":"Why gates?"}}]}}'

Or from Python (pip install openai):

  from openai import OpenAI

  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.chat.completions.create(
      model="{model}", stream=True, messages=[{{"role": "user", "content": "Why gates?"}}]
  ):
      print(chunk.choices[0].delta.content or "", end="", flush=True)
{split}
Then:

{next_steps}

Press Ctrl-C to stop everything.
"""
_SPLIT = """
A prompt of 512 tokens or more is split; the response headers name both endpoints:

  curl -s -o /dev/null -D - {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model":"{model}","messages":[{{"role":"user","content":"'"$(seq -s ' ' 2000)"'"}}]}}'
"""
