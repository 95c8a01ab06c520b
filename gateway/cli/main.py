"""The `penstock` command line: arguments, options and dispatch to the commands.

Exit codes: 0 success, 1 failure, 2 wrong usage. Each command is implemented in its own module.
Modules that the gateway must not depend on (mockgpu, planner) and heavy modules are imported only
when their command runs.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import msgspec

from command_line import Argument, Option, UsageError, run_command, write_line
from gateway.cli.admin_client import AdminAddress, AdminClient, with_admin_options
from gateway.cli.commands import COMMANDS, command_function
from gateway.cli.output import (
    EngineKeyOption,
    JsonOption,
    check_engine_key,
    exit_with_error,
    is_utf8_output,
    print_json,
    print_line,
)
from gateway.util.version import version_facts, version_line

if TYPE_CHECKING:
    from gateway.config import Config, ConfigError, LoadedConfig, Problem
    from gateway.http.listener_sockets import SocketsByName
    from gateway.restart.predecessor import Predecessor
    from gateway.workers.supervisor import Supervisor


def config_in_text(text: str) -> dict[str, Any]:
    """Return the configuration in the text of a gateway.yaml, in the form that GET /config returns.

    Raises ConfigError if the text is not a valid configuration.
    """
    from gateway.config import load_text

    loaded = load_text(text.encode(), "gateway.yaml", os.environ)
    return loaded.config.model_dump(mode="json", by_alias=True)


_POLICIES = "Routing policy: prefix_aware, priced, or any other name in docs/policies.md."
_DIALECTS = "KV transfer dialect of the engines: vllm_nixl, vllm_push, mooncake, sglang or trtllm."

PolicyOption = Annotated[str | None, Option("--policy", help=_POLICIES)]
AdminPortOption = Annotated[
    int | None, Option("--admin-port", min=0, max=65535, help="Port of the admin server.")
]


RunningFileOption = Annotated[
    Path | None,
    Option(
        "--running",
        help="Configuration file to compare with; default: the running configuration, "
        "requested from --admin.",
    ),
]
FailIfWorseOption = Annotated[
    float | None,
    Option(
        "--fail-if-worse",
        min=0,
        metavar="POINTS",
        help="Exit with status 3 if the new configuration lowers a pool's goodput by more than "
        "this many percentage points.",
    ),
]


EXTRAS: Mapping[str, str] = MappingProxyType(
    {"numpy": "demo", "rich": "demo", "textual": "top", "cryptography": "seal"}
)
"""Optional Python modules, each with the extra of this project that installs it."""

_SLOW_HASHING = (
    "prompts are hashed by plain Python, which takes up to 100 times as long as numpy: "
    "pip install 'penstock[demo]'"
)

WRITE_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers that mean that the output device accepts no more data."""


def main() -> None:
    """Run the command given on the command line and exit."""
    # numpy is only used to hash prompts, so its linear algebra threads would only idle.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, TextIOWrapper) and not is_utf8_output():
        sys.stdout.reconfigure(errors="replace")
    try:
        run(sys.argv[1:])
    except ModuleNotFoundError as error:
        _exit_without_extra(error)
    except OSError as error:
        if error.errno not in WRITE_FAILURES:
            raise
        print_line(f"cannot write the output: {error.strerror}", style="red", err=True)
        # Python flushes stdout once more on exit; without this, that flush would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def run(words: Sequence[str]) -> None:
    """Run the command that command-line words name.

    Raises SystemExit where it does not succeed, with status 2 for wrong words.
    """
    name = words[0] if words else "--help"
    if name == "--version":
        version()
    elif name in ("--help", "-h"):
        print_line(_overview())
        if not words:
            raise SystemExit(2)
    elif name not in COMMANDS:
        close = [f"; did you mean {each}?" for each in get_close_matches(name, COMMANDS, n=1)]
        print_line(f"penstock: unknown command {name!r}{''.join(close)}", err=True)
        print_line("Try 'penstock --help' for a list.", err=True)
        raise SystemExit(2)
    else:
        function = command_function(name)
        program = f"penstock {name}"
        run_command(function, words[1:], program, os.environ, read_config=config_in_text)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: penstock COMMAND [OPTIONS] [ARGUMENTS]",
            "",
            "A request router and prefill/decode gateway for LLM inference engines.",
            "",
            *(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()),
            "",
            "`penstock COMMAND --help` shows the options of a command.",
            "`penstock --version` prints the version.",
        ]
    )


def _exit_without_extra(error: ModuleNotFoundError) -> NoReturn:
    # Print which extra installs the missing package, and exit with status 1.
    #
    # Raises the error again if no extra does.
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        raise error
    print_line(
        f"this needs {module}, which is not installed: pip install 'penstock[{EXTRAS[module]}]'",
        style="red",
        err=True,
    )
    sys.exit(1)


def demo(
    groups: Annotated[
        int, Option("--groups", min=1, max=64, help="Number of mock TP groups to start.")
    ] = 4,
    policy: Annotated[str, Option("--policy", help=_POLICIES)] = "prefix_aware",
    port: Annotated[int, Option("--port", min=1, max=65535, help="Port of the OpenAI API.")] = 8080,
    admin_port: Annotated[
        int, Option("--admin-port", min=1, max=65535, help="Port of the admin server.")
    ] = 8081,
    model: Annotated[
        str, Option("--model", help="Name of the model that the mock TP groups serve.")
    ] = "demo-8b",
    speed: Annotated[
        float,
        Option(
            "--speed",
            min=0.01,
            help="Speed of the mock TP groups relative to real time (2 is twice as fast).",
        ),
    ] = 1.0,
    split: Annotated[
        bool,
        Option("--split", help="Let half of the TP groups do prefill and the other half decode."),
    ] = False,
    dialect: Annotated[
        str, Option("--dialect", help=f"KV transfer dialect, with --split: {_DIALECTS}")
    ] = "vllm_nixl",
) -> None:
    """Start the gateway with mock TP groups on this machine, and show what to try. No GPU needed.

    Ctrl-C stops everything.
    """
    from gateway.cli.demo import DemoError, DemoOptions, run_demo

    try:
        raise SystemExit(
            run_demo(
                DemoOptions(
                    groups, policy, port, admin_port, model, speed, dialect if split else None
                )
            )
        )
    except DemoError as error:
        exit_with_error(str(error))


def serve(
    config: Annotated[
        Path | None, Option("--config", "-c", help="Configuration file (YAML) to run with.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        Option("--engine", help="URL of an engine; repeat the option for more engines."),
    ] = None,
    engine_key: EngineKeyOption = None,
    policy: PolicyOption = None,
    host: Annotated[str | None, Option("--host", help="Address to listen on.")] = None,
    port: Annotated[
        int | None, Option("--port", min=0, max=65535, help="Port of the OpenAI API.")
    ] = None,
    admin_port: AdminPortOption = None,
    workers: Annotated[
        str | None,
        Option(
            "--workers",
            metavar="N|auto",
            help="Number of gateway processes, at most 64, or auto: one for each core that they "
            "may use. Overrides the configuration.",
        ),
    ] = None,
) -> None:
    """Run the gateway for the engines in a configuration file, or for those given with --engine."""
    if (config is None) == (not engine):
        raise UsageError("give either --config FILE, or --engine URL (repeatable), but not both")
    if config is not None and (policy, host, port, admin_port) != (None, None, None, None):
        raise UsageError("with --config, the policy, host and ports must be set in the file")
    worker_count = None if workers is None else _parse_workers(workers)
    check_engine_key(config, engine_key)
    from gateway.config import ConfigError, load_with_warnings

    try:
        if config is not None:
            loaded = load_with_warnings(config, os.environ)
        else:
            address = host or "127.0.0.1", _value_or(port, 8080), _value_or(admin_port, 8081)
            loaded = _load_engines(engine or [], policy or "prefix_aware", *address, engine_key)
    except ConfigError as error:
        _exit_with_problems(error, as_json=False)
    from gateway.workers.worker_count import resolve_worker_count

    count = resolve_worker_count(worker_count or loaded.config.workers)
    raise SystemExit(_serve(loaded, config, count))


def _load_engines(urls: list[str], *settings: Any) -> LoadedConfig:
    # Print the kinds of the engines, and return their configuration. Raises ConfigError.
    from gateway.cli.engine_detection import config_with_kinds
    from gateway.config import config_from_engines

    loaded, notes = config_with_kinds(urls, partial(config_from_engines, urls, *settings))
    for note in notes:
        print_line(note, err=True)
    return loaded


def _parse_workers(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not (text.isdecimal() and 1 <= int(text) <= 64):
        raise UsageError("--workers: the number of workers must be from 1 to 64, or auto")
    return int(text)


def check(
    file: Annotated[Path, Argument(help="Configuration file (YAML) to check.")],
    as_json: JsonOption = False,
) -> None:
    """Check a configuration file and print every problem with its line and column."""
    from gateway.config import ConfigError, load_with_warnings

    try:
        loaded = load_with_warnings(file, os.environ)
    except ConfigError as error:
        _exit_with_problems(error, as_json=as_json)
    config = loaded.config
    specs = [spec for pool in config.pools.values() for spec in pool.endpoints]
    endpoints = len(specs)
    gpus = sum(spec.layout.tp * spec.layout.pp * spec.layout.dp for spec in specs)
    if as_json:
        warnings = [_problem_as_json(problem) for problem in loaded.warnings]
        print_json(
            {
                "ok": True,
                "file": str(file),
                "endpoints": endpoints,
                "gpus": gpus,
                "problems": [],
                "warnings": warnings,
            }
        )
        return
    for problem in loaded.warnings:
        print_line(f"{problem} (warning)", style="yellow", err=True)
    print_line(
        f"{file} is valid: {len(config.models)} models, {len(config.pools)} pools, "
        f"{endpoints} endpoints, {gpus} GPUs",
        style="green",
    )


LastOption = Annotated[
    str,
    Option(
        "--last",
        metavar="TIME",
        help="Length of the period, up to the end of the access log, whose requests are replayed.",
    ),
]
LogOption = Annotated[
    Path | None,
    Option(
        "--log",
        help="Path of the access log to replay; default: the one of the running gateway.",
    ),
]
PlanModelOption = Annotated[
    str | None,
    Option("--model", help="Model for the simulated engines, as in `penstock mock`."),
]
PlanGpuOption = Annotated[
    str | None,
    Option("--gpu", help="GPU type of endpoints without a `gpu` label, for example h100."),
]


@with_admin_options
def plan(
    admin: AdminAddress,
    file: Annotated[Path, Argument(help="New configuration file to evaluate.")],
    last: LastOption = "10m",
    log: LogOption = None,
    running: RunningFileOption = None,
    model: PlanModelOption = None,
    gpu: PlanGpuOption = None,
    fail_if_worse: FailIfWorseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a new configuration with the running one on the recent access log.

    The log's requests are replayed through simulated engines under both configurations.
    """
    from gateway.config import ConfigError
    from planner.plan import Assumptions, PoolCaseError, as_plain, cases, recent, show
    from planner.plan import plan as planned
    from planner.traces import TraceError

    seconds = _parse_last(last)
    try:
        candidate = _config_as_json(file)
        if running is not None:
            running_config = _config_as_json(running)
        else:
            running_config = AdminClient(admin, None).request("GET", "/config")["config"]
        defaults = Assumptions(model, gpu)
        outcome = planned(
            cases(running_config, defaults),
            cases(candidate, defaults),
            recent(log or _access_log_file(running_config), seconds),
        )
    except ConfigError as error:
        _exit_with_problems(error, as_json=as_json)
    except (PoolCaseError, TraceError) as error:
        exit_with_error(str(error))
    if as_json:
        write_line(msgspec.json.format(msgspec.json.encode(as_plain(outcome)), indent=2).decode())
    else:
        show(outcome)
    worst = min((pool.gain for pool in outcome.pools), default=0.0)
    if fail_if_worse is not None and worst < -fail_if_worse / 100:
        raise SystemExit(3)


def _parse_last(text: str) -> float:
    from gateway.util.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--last: {error}") from None


def _config_as_json(file: Path) -> dict[str, Any]:
    # Return a configuration file in the form of GET /config. Raises ConfigError.
    from gateway.config import load_with_warnings

    return load_with_warnings(file, os.environ).config.model_dump(mode="json", by_alias=True)


def _access_log_file(config: Mapping[str, Any]) -> Path:
    # Return the path of the running gateway's access log.
    #
    # Prints a message and exits with status 1 when the log is not a file.
    target = str(config["observability"]["access_log"])
    if target in ("off", "stdout"):
        exit_with_error(f"the gateway's access log is {target!r}; name a file with --log")
    return Path(target)


def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from gateway.config import json_schema

    print_json(json_schema())


def version(as_json: JsonOption = False) -> None:
    """Print the version, and whether the hot path is compiled or runs from sources."""
    if as_json:
        print_json(version_facts())
    else:
        print_line(version_line())


def _inherit_sockets(config: Config) -> tuple[Predecessor | None, SocketsByName]:
    # Return the process that this one replaces, if any, and the sockets inherited from it or from
    # systemd.
    from gateway.http.listener_sockets import ActivationError, sockets_from_systemd
    from gateway.restart.channel import ChannelError
    from gateway.restart.predecessor import find_predecessor

    try:
        predecessor = find_predecessor(os.environ)
        if predecessor is None:
            return None, sockets_from_systemd(os.environ)
        return predecessor, predecessor.take_sockets(config)
    except (ActivationError, ChannelError) as error:
        exit_with_error(f"cannot use the inherited listening sockets: {error}")


def _serve(loaded: LoadedConfig, file: Path | None, workers: int) -> int:
    from gateway.app import App
    from gateway.lifecycle import run_gateway
    from gateway.restart.start_options import StartOptions, log_reload
    from gateway.telemetry import operator_log
    from policies.prefix import fingerprint

    # A restart is possible only once this process serves; by default the signal would end it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    config = loaded.config
    predecessor, sockets = _inherit_sockets(config)
    activated = frozenset(sockets) if predecessor is None else predecessor.activated_listeners
    _check_ports(config, sockets)
    operator_log.configure_log(config.observability.log)
    if fingerprint.is_hashing_slow():
        logging.getLogger("penstock").warning(_SLOW_HASHING)

    def log_addresses(started: App | Supervisor) -> None:
        logging.getLogger("penstock").info(
            "gateway ready: API at %s/v1, admin server at %s; press Ctrl-C to stop",
            started.url,
            started.admin_url,
        )

    if workers > 1:
        from gateway.workers import supervisor

        return supervisor.run_workers(
            loaded, file, os.environ, log_reload, workers, log_addresses, sockets, predecessor
        )
    origin = StartOptions(
        loaded, file, os.environ, sockets=sockets, activated=activated, predecessor=predecessor
    )
    return run_gateway(origin, ready=log_addresses)


def _check_ports(config: Config, inherited: Container[str]) -> None:
    # End with an error if another program uses a port that this process would have to open.
    from gateway.http.listener_sockets import ADMIN, API
    from gateway.util.addresses import is_port_free

    for name, listener, flag in (
        (API, config.listeners.api, "--port"),
        (ADMIN, config.listeners.admin, "--admin-port"),
    ):
        is_inherited = name in inherited
        if not is_inherited and listener.port and not is_port_free(listener.host, listener.port):
            exit_with_error(
                f"port {listener.port} is in use by another program; "
                f"choose another in the configuration file or with {flag}"
            )


def _value_or(value: int | None, default: int) -> int:
    return default if value is None else value


def _exit_with_problems(error: ConfigError, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json(
            {
                "ok": False,
                "problems": [_problem_as_json(problem) for problem in error.problems],
                "warnings": [],
            }
        )
    else:
        for problem in error.problems:
            print_line(str(problem), err=True)
        count = len(error.problems)
        print_line(f"{count} problem{'s' if count > 1 else ''}", style="red", err=True)
    raise SystemExit(1)


def _problem_as_json(problem: Problem) -> dict[str, object]:
    return {name: getattr(problem, name) for name in problem.__struct_fields__}
