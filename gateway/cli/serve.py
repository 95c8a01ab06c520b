"""The command `penstock serve`: runs the gateway for a configuration file or for given engines."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from command_line import Option, UsageError
from gateway.cli.check import exit_with_problems
from gateway.cli.shared_options import (
    AdminPortOption,
    EngineKeyOption,
    PolicyOption,
    check_engine_key,
)
from gateway.cli.terminal_output import exit_with_error, print_line
from policies.default_policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from gateway.app import App
    from gateway.config import Config, LoadedConfig
    from gateway.http.listener_sockets import SocketsByName
    from gateway.restart.new_process_side import Predecessor
    from gateway.workers.supervisor import Supervisor

_SLOW_HASHING = (
    "prompts are hashed by plain Python, which takes up to 100 times as long as numpy: "
    "pip install 'penstock[demo]'"
)


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
    host: Annotated[str | None, Option("--host", help="Address on which the API listens.")] = None,
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
    # Ignore these signals until this process serves: their default action would end it.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    from gateway.config import ConfigError, load_with_warnings

    try:
        if config is not None:
            loaded = load_with_warnings(config, os.environ)
        else:
            address = host or "127.0.0.1", _value_or(port, 8080), _value_or(admin_port, 8081)
            loaded = _load_engines(engine or [], policy or DEFAULT_POLICY, *address, engine_key)
    except ConfigError as error:
        exit_with_problems(error, as_json=False)
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


def _inherit_sockets(config: Config) -> tuple[Predecessor | None, SocketsByName]:
    # Return the process that this one replaces, if any, and the sockets inherited from it or from
    # systemd.
    from gateway.http.listener_sockets import ActivationError, sockets_from_systemd
    from gateway.restart.handover_channel import ChannelError
    from gateway.restart.new_process_side import find_predecessor

    try:
        predecessor = find_predecessor(os.environ)
        if predecessor is None:
            return None, sockets_from_systemd(os.environ)
        return predecessor, predecessor.take_sockets(config)
    except (ActivationError, ChannelError) as error:
        exit_with_error(f"cannot use the inherited listening sockets: {error}")


def _serve(loaded: LoadedConfig, file: Path | None, workers: int) -> int:
    from gateway.process_lifecycle import run_gateway
    from gateway.restart.start_options import StartOptions, log_reload
    from gateway.telemetry import operator_log
    from policies.prefix import fingerprint

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
    from gateway.http.listener_sockets import ADMIN, API, is_port_free

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
