"""`penstock demo`: mock TP groups in one process of their own, the gateway in this one, and what to try next.

Lives here: starting, waiting, telling, ending. The mock is a subprocess rather than an import, so that the gateway
never depends on it, in a process group of its own, so that Ctrl-C reaches it through us and nothing is left behind.
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
from types import FrameType

import msgspec
from rich.console import Console

from gateway.cli.output import HERE
from gateway.config import ConfigError, Loaded, examine, json_schema
from gateway.util.addresses import is_free
from kvtransfer.dialects import DIALECTS, Needs

FOLDER = Path("penstock-demo")
_HOST = "127.0.0.1"
_MOCK_PORTS = range(9100, 9900)
_READY_WITHIN_S = 30.0
_GONE_WITHIN_S = 5.0
# README's `penstock bench --shape shared-prefix --rate 20` asks for 20,000 answer tokens a second at
# contexts of 8k tokens: four groups of one GPU decode a third of that, of four GPUs all of it, with
# about 50 requests open at each group.
TP = 4
MAX_CONCURRENCY = 128
_DOORS = 2  # at most: one for each process of mocks


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""


class Demo(msgspec.Struct, frozen=True):
    """What was asked for. `speed` is how much faster than real time the mocks run; `dialect` that of split requests,
    None: every request goes to one group."""

    groups: int
    policy: str
    port: int
    admin_port: int
    model: str
    speed: float
    dialect: str | None = None

    @property
    def halves(self) -> int:
        """Groups that prefill for the others; 0 when nothing is split."""
        return self.groups // 2 if self.dialect is not None else 0


def run(demo: Demo) -> int:
    """Runs until Ctrl-C or SIGTERM; the exit code. Raises DemoError when it cannot start."""
    console = Console(highlight=False)
    try:
        return _run(demo, console)
    except KeyboardInterrupt:
        return 0


def _run(demo: Demo, console: Console) -> int:
    if demo.port == demo.admin_port:
        raise DemoError("the API and the admin server need different ports: choose with --port and --admin-port")
    _refuse_taken(demo.port, "--port")
    _refuse_taken(demo.admin_port, "--admin-port")
    if demo.dialect is not None and (demo.groups < 2 or demo.dialect not in DIALECTS):
        raise DemoError(f"splitting needs two groups or more and a dialect of {', '.join(DIALECTS)}")
    with ExitStack() as running:
        with console.status(f"Starting {demo.groups} mock TP groups"), _one_at_a_time():
            file, loaded = _begun(demo, running)
        from gateway import lifecycle
        from gateway.restart import (
            start_options,  # after the wait: the mocks start while the processor is free
        )

        def say(line: str, bad: bool) -> None:
            console.print(line, markup=False, soft_wrap=True, style="red" if bad else None)

        return lifecycle.run(
            start_options.Origin(loaded, file, os.environ, say),
            ready=lambda started: _ready(demo, file, started.url, started.admin_url, console),
            hangup_reloads=False,
        )


def _begun(demo: Demo, running: ExitStack) -> tuple[Path, Loaded]:
    """The configuration, as a file and read, whose mocks answer; they end with `running`."""
    first = _free_run(demo.groups + demo.halves + _DOORS)  # behind the groups: bootstrap servers, doors for chaos
    try:
        FOLDER.mkdir(exist_ok=True)
        running.enter_context(_alone())
        file = _write_config(demo, first)
        _log().open("ab").close()
    except OSError as error:
        raise DemoError(f"{FOLDER} cannot be written ({error.strerror}); start the demo in another folder") from None
    try:
        loaded = examine(file, os.environ)
    except ConfigError as error:
        raise DemoError(str(error)) from None
    for number in (signal.SIGTERM, signal.SIGHUP):  # without a handler they would leave the mocks behind
        signal.signal(number, _leave)
    processes = running.enter_context(_mocks(demo, first))
    _wait_until_ready(processes, range(first, first + demo.groups))
    return file, loaded


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Another demo that starts meanwhile waits: it would find the same ports free, and take our mocks for its own."""
    with open(__file__, "rb") as held:  # any file would do that is there for both
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextmanager
def _alone() -> Iterator[None]:
    """No other demo in this folder: its configuration would be followed by the gateway of this one."""
    with (FOLDER / "lock").open("wb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another demo runs in this folder ({FOLDER}); start this one in another") from None
        yield


def _ready(demo: Demo, file: Path, url: str, admin_url: str, console: Console) -> None:
    console.print(_welcome(demo, file), markup=False, soft_wrap=True)
    if demo.dialect is not None:
        from gateway.cli import demo_sample

        demo_sample.show(url, admin_url, demo.model, lambda line: console.print(line, markup=False, soft_wrap=True))


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _refuse_taken(port: int, flag: str) -> None:
    if not is_free(_HOST, port):
        raise DemoError(f"port {port} is taken by another program; choose another with {flag}")


def _free_run(length: int) -> int:
    """The first of `length` free ports in a row."""
    run = 0
    for port in _MOCK_PORTS:
        run = run + 1 if is_free(_HOST, port) else 0
        if run == length:
            return port - length + 1
    raise DemoError(
        f"no {length} free ports in a row between {_MOCK_PORTS.start} and {_MOCK_PORTS.stop - 1} for the mocks"
    )


@contextmanager
def _mocks(demo: Demo, first: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The mock TP groups, each kind as one process in a group of its own, which is gone when the block is left."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _log().open("wb") as log:
            for options in _kinds(demo, first):
                command = [*_with_us(), sys.executable, "-m", "gateway", "mock", *options]
                command += ["--model", demo.model, "--speed", str(demo.speed)]
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
                )
        yield processes
    finally:
        for process in processes:
            _end(process)


def _kinds(demo: Demo, first: int) -> list[list[str]]:
    """Options of each process of mocks: all alike, or those that prefill and those that decode."""
    if demo.dialect is None:
        door = str(_door(demo, first, 0))
        return [[*_range(first, demo.groups), "--tp", str(TP), "--chaos-port", door]]
    shared = ["--dialect", demo.dialect]
    bootstrap = ["--bootstrap-port", str(first + demo.groups)]
    rest, doors = demo.groups - demo.halves, [str(_door(demo, first, number)) for number in (0, demo.halves)]
    return [
        [*_range(first, demo.halves), "--role", "prefill", "--chaos-port", doors[0], *shared, *bootstrap],
        [*_range(first + demo.halves, rest), "--role", "decode", "--chaos-port", doors[1], *shared],
    ]


def _range(first: int, groups: int) -> list[str]:
    return ["--port", str(first), "--groups", str(groups)]


def _door(demo: Demo, first: int, number: int) -> int:
    """The port where faults of this group may be set: its process's door."""
    return first + demo.groups + demo.halves + (1 if demo.dialect is not None and number >= demo.halves else 0)


def _with_us() -> list[str]:
    """A prefix that has the kernel end the mocks should this process be killed outright, where there is such a tool."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group: kindly first, then surely. A second Ctrl-C cannot leave it behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GONE_WITHIN_S)
        except (ProcessLookupError, PermissionError):
            process.poll()
            return
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
        return


def _wait_until_ready(processes: list[subprocess.Popen[bytes]], ports: range) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    waiting = list(ports)
    while waiting:
        if any(process.poll() is not None for process in processes):
            raise DemoError(f"the mock TP groups ended at once:\n{_tail()}")
        if time.monotonic() > deadline:
            raise DemoError(f"the mock TP groups were not ready within {_READY_WITHIN_S:.0f} s:\n{_tail()}")
        if _answers(waiting[0]):
            waiting.pop(0)
        else:
            time.sleep(0.05)


def _answers(port: int) -> bool:
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


def _tail() -> str:
    return "\n".join(_log().read_text(errors="replace").splitlines()[-15:])


def _write_config(demo: Demo, first: int) -> Path:
    """Writes the configuration and its schema into FOLDER; the configuration's path."""
    (FOLDER / "gateway.schema.json").write_text(json.dumps(json_schema(), indent=1) + "\n")
    endpoints = "\n".join(f"      - {{{_endpoint(demo, first, number)}}}" for number in range(demo.groups))
    split = f"    split: {{dialect: {demo.dialect}, threshold_tokens: 512}}\n" if demo.dialect is not None else ""
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
        )
    )
    return file


def _endpoint(demo: Demo, first: int, number: int) -> str:
    """One endpoint's mapping, braces left out."""
    where = f"url: http://127.0.0.1:{first + number}, max_concurrency: {MAX_CONCURRENCY}"
    door = f'labels: {{chaos: "127.0.0.1:{_door(demo, first, number)}"}}'
    if demo.dialect is None:
        return f"name: group-{number}, {where}, layout: {{tp: {TP}}}, {door}"
    engine = f"engine: {DIALECTS[demo.dialect].engine}"
    if number >= demo.halves:
        return f"name: decode-{number - demo.halves}, {where}, role: decode, {engine}, {door}"
    bootstrap = ""
    if DIALECTS[demo.dialect].needs in (Needs.ADDRESS, Needs.QUERY):
        bootstrap = f"bootstrap: 127.0.0.1:{first + demo.groups + number}, "
    return f"name: prefill-{number}, {where}, role: prefill, {engine}, {bootstrap}{door}"


_CONFIG = """\
# yaml-language-server: $schema=gateway.schema.json
#
# Edit and save it while the demo runs: the gateway takes it over within a second, or says what is wrong with it.
# Written by `penstock demo` at every start: copy it to keep your changes.
# All keys: docs/reference/config.md. Check a file: penstock check FILE. Serve it: penstock serve --config FILE.
version: 1

listeners:
  api: {{port: {port}}}         # applications; 127.0.0.1 unless a host is given
  admin: {{port: {admin_port}}}       # the live page, /metrics /endpoints /config

models:
  - name: {model}
    pool: chat
    aliases: [demo]
{split}
pools:
  chat:
    policy: {policy}      # or priced, least_loaded, ...: docs/policies.md
    endpoints:               # one per TP group: one engine process behind one URL; chaos: where mocks may be broken
{endpoints}
    waiting_room: {{size: 256, timeout: 30s}}   # while every group is at its max_concurrency

# Secrets never stand in the file:
# tenants:
#   - {{name: team-a, key: "${{TEAM_A_KEY}}"}}
#   - {{name: team-b, key: "${{file:/run/secrets/team-b}}"}}

observability:
  access_log: {log}   # one JSON line per request: stages, pick and reason
"""


def _welcome(demo: Demo, file: Path) -> str:
    url, admin = f"http://{_HOST}:{demo.port}", f"http://{_HOST}:{demo.admin_port}"
    return _WELCOME.format(
        groups=demo.groups,
        model=demo.model,
        policy=demo.policy,
        url=url,
        admin=admin,
        file=file,
        folder=FOLDER,
        next_steps=_next_steps(demo, file, url, admin),
    )


def _next_steps(demo: Demo, file: Path, url: str, admin: str) -> str:
    other = "least_loaded" if demo.policy != "least_loaded" else "prefix_aware"
    penstock = "penstock" if shutil.which("penstock") else os.path.relpath(Path(sys.executable).with_name("penstock"))
    victim = "group-0" if demo.dialect is None else "decode-0"
    steps = {} if admin == HERE else {f"export PENSTOCK_ADMIN={admin}": "where the commands below ask"}
    steps |= {
        f"{penstock} bench --url {url} --for 30s": "measure it: TTFT, TPOT, goodput",
        f"{penstock} top": "the fleet in this terminal (or open the live view)",
        f"{penstock} chaos kill {victim}": "watch the others carry on; then: chaos restore",
        f"{penstock} explain": "the newest request: who was considered, and why it went there",
        f"sed -i 's/policy: {demo.policy}/policy: {other}/' {file}": "another policy, while requests run",
        f"{penstock} diff && {penstock} rollback": "what changed, and back",
        f"{penstock} demo --split": "one group computes the prompt, another the answer",
        f"{penstock} serve --engine http://HOST:8000": "your own engines, no file needed",
    }
    width = max(map(len, steps))
    return "\n".join(f"  {step:{width}}   # {why}" for step, why in steps.items())


_WELCOME = """\
Penstock demo: {groups} mock TP groups serve "{model}", policy {policy}. No GPU.

  API        {url}/v1
  Live view  {admin}   (/metrics /endpoints /config)
  Config     {file}
  Requests   {folder}/access.log

Try it in another terminal:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model":"{model}","stream":true,"max_tokens":64,"messages":[{{"role":"user","content":"Why gates?"}}]}}'

Or from Python (pip install openai):

  from openai import OpenAI

  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.chat.completions.create(
      model="{model}", stream=True, messages=[{{"role": "user", "content": "Why gates?"}}]
  ):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

Then:

{next_steps}

Ctrl-C ends everything.
"""
