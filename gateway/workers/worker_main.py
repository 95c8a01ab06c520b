"""The entry point of a worker: a gateway that serves on sockets inherited from its supervisor.

Its settings arrive through a pipe on stdin. The worker ends when the pipe closes, because the
supervisor has then ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from typing import BinaryIO

from gateway.app import App
from gateway.config import ConfigError, OperatorLog, load_text
from gateway.http.listener_sockets import API
from gateway.process_lifecycle import run_gateway
from gateway.restart.start_options import StartOptions
from gateway.restart.worker_launch_settings import (
    LENGTH,
    MAX_SETTINGS_BYTES,
    WorkerLaunchSettings,
    unpack_settings,
)
from gateway.telemetry import operator_log

log = logging.getLogger("penstock")


def main() -> int:
    """Run the worker and return the exit code; messages go to stderr."""
    operator_log.configure_log(OperatorLog())
    pipe = sys.stdin.buffer
    settings = _read_settings(pipe)
    if settings is None:
        return 2
    try:
        loaded = load_text(settings.text, settings.file, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            log.error("%s", problem)
        return 2
    operator_log.configure_log(loaded.config.observability.log, settings.worker.number)
    sockets = {API: (socket.socket(fileno=settings.listener),)}
    origin = StartOptions(
        loaded, settings.reload_path, os.environ, _no_report, settings.worker, sockets
    )
    return run_gateway(origin, ready=_stop_with_supervisor, hangup_reloads=False)


def _read_settings(pipe: BinaryIO) -> WorkerLaunchSettings | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return unpack_settings(pipe.read(length)) if length <= MAX_SETTINGS_BYTES else None


def _stop_with_supervisor(app: App) -> None:
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        loop.remove_reader(sys.stdin.fileno())
        log.warning("the supervisor has ended; this worker stops")
        app.request_end()

    loop.add_reader(sys.stdin.fileno(), on_readable)


def _no_report(line: str, is_error: bool) -> None:
    """Report nothing, because the supervisor reports a reload once for all workers."""


if __name__ == "__main__":
    sys.exit(main())
