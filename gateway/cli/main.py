"""The command line: what an operator types, and how the answer is printed. Exit codes: 0 done, 1 failed, 2 wrong usage.

Lives here: arguments and output. Not here: what the commands do. Rooms the gateway must not depend on (mockgpu,
planner) and everything heavy are imported when a command needs them, never before.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import platform
import signal
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer
import typer.core
import typer.main
from rich.console import Console

from gateway.cli.admin_client import AdminAddress, Server, with_admin_options
from gateway.cli.output import Json, all_letters, fail, print_json, say
from gateway.util.version import is_compiled, own_version

if TYPE_CHECKING:
    from gateway.config import ConfigError, Loaded, Problem
    from gateway.workers.supervisor import Supervisor

_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {"mock": "mockgpu.cli:mock", "bench": "planner.bench.cli:bench", "replay": "planner.replay.cli:replay"}
    | {name: f"gateway.cli.config_commands:{name}" for name in ("status", "reload", "diff", "rollback", "history")}
    | {name: f"gateway.cli.drain:{name}" for name in ("drain", "undrain")}
    | {"explain": "gateway.cli.explain:explain", "chaos": "gateway.cli.chaos:chaos"}
    | {"top": "gateway.cli.top.command:top", "doctor": "gateway.cli.doctor.command:doctor"}
)
"""Commands that live elsewhere: name -> module:function, a function as typer takes it."""

_ORDER = (
    *("demo", "serve", "mock", "bench", "replay", "check", "status", "reload", "diff", "plan", "rollback", "history"),
    *("drain", "undrain", "top", "explain", "doctor", "chaos", "schema", "version"),
)


class _Commands(typer.core.TyperGroup):
    """The commands in the order a newcomer meets them, those of other rooms imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_ORDER)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, function = _ELSEWHERE[cmd_name].partition(":")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(alone)


app = typer.Typer(
    name="penstock",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with locals would show secrets
)

_POLICIES = "prefix_aware, priced, or any other name of docs/policies.md."
_DIALECTS = "vllm_nixl, vllm_push, mooncake, sglang or trtllm."

PolicyName = Annotated[str | None, typer.Option("--policy", help=_POLICIES)]
AdminPort = Annotated[int | None, typer.Option("--admin-port", min=0, max=65535, help="Port of the admin server.")]


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The gate in front of a row of TP groups: request router and prefill/decode gateway for LLM inference."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""How a disk says that it takes nothing more."""


def main() -> None:
    """Runs the command that was typed, and ends the process."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy hashes prompts here; its matrix threads would only idle
    if isinstance(sys.stdout, TextIOWrapper) and not all_letters():
        sys.stdout.reconfigure(errors="replace")  # question marks for what it cannot show
    try:
        app(prog_name="penstock")
    except OSError as error:
        if error.errno not in FULL:
            raise
        say(f"the output cannot be written: {error.strerror}", style="red", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else what is left would be tried once more
        sys.exit(1)


@app.command()
def demo(
    groups: Annotated[int, typer.Option("--groups", min=1, max=64, help="Mock TP groups to start.")] = 4,
    policy: Annotated[str, typer.Option("--policy", help=_POLICIES)] = "prefix_aware",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the OpenAI API.")] = 8080,
    admin_port: Annotated[int, typer.Option("--admin-port", min=1, max=65535, help="Port of the admin server.")] = 8081,
    model: Annotated[str, typer.Option("--model", help="The model the mock TP groups serve.")] = "demo-8b",
    speed: Annotated[float, typer.Option("--speed", min=0.01, help="How much faster than real the mocks run.")] = 1.0,
    split: Annotated[bool, typer.Option("--split", help="Half of the groups prefill for the other half.")] = False,
    dialect: Annotated[str, typer.Option("--dialect", help=f"With --split: {_DIALECTS}")] = "vllm_nixl",
) -> None:
    """Start mock TP groups and the gateway here, no GPU needed, and show what to try. Ctrl-C ends everything."""
    from gateway.cli.demo import Demo, DemoError, run

    try:
        raise typer.Exit(run(Demo(groups, policy, port, admin_port, model, speed, dialect if split else None)))
    except DemoError as error:
        fail(str(error))


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="URL of an engine; repeat for more.")] = None,
    policy: PolicyName = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port of the OpenAI API.")] = None,
    admin_port: AdminPort = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, max=64, help="Gateway processes.")] = None,
) -> None:
    """Serve the engines of a configuration file, or those given with --engine."""
    if (config is None) == (not engine):
        raise typer.BadParameter("give either --config FILE or --engine URL, once per engine")
    if config is not None and (policy, host, port, admin_port) != (None, None, None, None):
        raise typer.BadParameter("with --config, the policy, host and ports are what the file says")
    from gateway.config import ConfigError, examine, from_engines

    try:
        if config is not None:
            wanted = examine(config, os.environ)
        else:
            choices = (policy or "prefix_aware", host or "127.0.0.1", _or(port, 8080), _or(admin_port, 8081))
            wanted = from_engines(engine or [], *choices)
    except ConfigError as error:
        _refuse(error, as_json=False)
    raise typer.Exit(_serve(wanted, config, workers or wanted.config.workers))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Configuration file.")],
    as_json: Json = False,
) -> None:
    """Check a configuration file: everything that is wrong, with line and column."""
    from gateway.config import ConfigError, examine

    try:
        loaded = examine(file, os.environ)
    except ConfigError as error:
        _refuse(error, as_json=as_json)
    config = loaded.config
    endpoints = sum(len(pool.endpoints) for pool in config.pools.values())
    if as_json:
        warnings = [_plain(problem) for problem in loaded.warnings]
        print_json({"ok": True, "file": str(file), "endpoints": endpoints, "problems": [], "warnings": warnings})
        return
    for problem in loaded.warnings:
        say(f"{problem} (warning)", style="yellow", err=True)
    say(f"{file} is good: {len(config.models)} models, {len(config.pools)} pools, {endpoints} endpoints", style="green")


@app.command()
@with_admin_options
def plan(
    admin: AdminAddress,
    file: Annotated[Path, typer.Argument(help="The configuration that might come.")],
    last: Annotated[str, typer.Option("--last", metavar="TIME", help="How far back to look.")] = "10m",
    log: Annotated[Path | None, typer.Option("--log", help="Access log; the running gateway's unless given.")] = None,
    running: Annotated[Path | None, typer.Option("--running", help="File in force; asked of --admin else.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="What mock groups serve, as in penstock mock.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="What they run on, where endpoints have no label.")] = None,
    fail_if_worse: Annotated[
        float | None,
        typer.Option("--fail-if-worse", min=0, metavar="POINTS", help="Exit 3 if a class loses more than this."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a configuration would have made of the last minutes: the access log, replayed through it and through the
    one in force."""
    from gateway.config import ConfigError, examine
    from gateway.util.units import duration_s
    from planner.plan import CaseError, Taken, as_plain, cases, recent, show
    from planner.plan import plan as planned
    from planner.traces import TraceError

    try:
        seconds = duration_s(last)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--last") from None
    try:
        candidate = examine(file, os.environ).config.model_dump(mode="json", by_alias=True)
        if running is not None:
            now = examine(running, os.environ).config.model_dump(mode="json", by_alias=True)
        else:
            now = Server(admin, None).ask("GET", "/config")["config"]
        taken = Taken(model, gpu)
        outcome = planned(cases(now, taken), cases(candidate, taken), recent(log or _log_of(now), seconds))
    except ConfigError as error:
        _refuse(error, as_json=as_json)
    except (CaseError, TraceError) as error:
        fail(str(error))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(as_plain(outcome)), indent=2).decode())
    else:
        show(outcome, Console(highlight=False))
    worst = min((each.gain for each in outcome.pools), default=0.0)
    if fail_if_worse is not None and worst < -fail_if_worse / 100:
        raise typer.Exit(3)


def _log_of(config: Mapping[str, Any]) -> Path:
    """Where the running gateway writes its access log, if that is a file."""
    where = str(config["observability"]["access_log"])
    if where in ("off", "stdout"):
        fail(f"the gateway's access log is {where}; name a file with --log")
    return Path(where)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from gateway.config import json_schema

    print_json(json_schema())


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version, and whether its hot path was compiled."""
    ours, python, compiled = own_version(), platform.python_version(), is_compiled()
    if as_json:
        print_json({"penstock": ours, "python": python, "compiled": compiled})
    else:
        say(f"penstock {ours} (Python {python}{', compiled' if compiled else ''})")


def _serve(loaded: Loaded, file: Path | None, workers: int) -> int:
    from gateway.app import App
    from gateway.http.listener_sockets import ADMIN, API, ActivationError, from_systemd
    from gateway.lifecycle import run
    from gateway.restart.channel import ChannelError
    from gateway.restart.predecessor import find_predecessor
    from gateway.restart.start_options import Origin, log_reload
    from gateway.telemetry import operator_log
    from gateway.util.addresses import is_free

    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a restart can be asked for once this process serves
    config = loaded.config
    try:
        predecessor = find_predecessor(os.environ)
        sockets = from_systemd(os.environ) if predecessor is None else predecessor.sockets(config)
    except (ActivationError, ChannelError) as error:
        fail(f"the listening sockets that were given cannot be used: {error}")
    activated = frozenset(sockets) if predecessor is None else predecessor.activated
    for name, listener, flag in (
        (API, config.listeners.api, "--port"),
        (ADMIN, config.listeners.admin, "--admin-port"),
    ):
        if name not in sockets and listener.port and not is_free(listener.host, listener.port):
            fail(f"port {listener.port} is taken by another program; choose another in the file or with {flag}")

    operator_log.configure(config.observability.log)

    def tell(started: App | Supervisor) -> None:
        logging.getLogger("penstock").info("API %s/v1, admin %s; Ctrl-C ends it", started.url, started.admin_url)

    if workers > 1:
        from gateway.workers import supervisor

        return supervisor.run(loaded, file, os.environ, log_reload, workers, tell, sockets, predecessor)
    origin = Origin(loaded, file, os.environ, sockets=sockets, activated=activated, predecessor=predecessor)
    return run(origin, ready=tell)


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _refuse(error: ConfigError, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json({"ok": False, "problems": [_plain(problem) for problem in error.problems], "warnings": []})
    else:
        for problem in error.problems:
            say(str(problem), err=True)
        count = len(error.problems)
        say(f"{count} problem{'s' if count > 1 else ''}", style="red", err=True)
    raise typer.Exit(1)


def _plain(problem: Problem) -> dict[str, object]:
    return {name: getattr(problem, name) for name in problem.__struct_fields__}
