"""A worker: a gateway like any other, with a listening socket, an admin socket and a hub that its supervisor gave it.

It ends when its supervisor does: the pipe that its settings came through has an end then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from typing import BinaryIO

from gateway.app import App
from gateway.config import ConfigError, OperatorLog, examine_text
from gateway.http.listener_sockets import API
from gateway.lifecycle import run
from gateway.restart.start_options import Local, Origin
from gateway.telemetry import operator_log
from gateway.workers.settings import CAP_BYTES, LENGTH, Settings, unpacked

log = logging.getLogger("penstock")


def main() -> int:
    """The exit code. What it has to say goes to stderr."""
    operator_log.configure(OperatorLog())
    pipe = sys.stdin.buffer
    settings = _settings(pipe)
    if settings is None:
        return 2
    try:
        loaded = examine_text(settings.text, settings.file, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            log.error("%s", problem)
        return 2
    operator_log.configure(loaded.config.observability.log, settings.number)
    local = Local(
        settings.hub,
        settings.secret,
        settings.number,
        settings.admin,
        settings.version,
        settings.drained,
    )
    sockets = {API: (socket.socket(fileno=settings.listener),)}
    origin = Origin(loaded, settings.reloads, os.environ, _quiet, local, sockets)
    return run(origin, ready=_follow_the_pipe, hangup_reloads=False)


def _settings(pipe: BinaryIO) -> Settings | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return unpacked(pipe.read(length)) if length <= CAP_BYTES else None


def _follow_the_pipe(app: App) -> None:
    """Nothing more comes through it. Its end is the supervisor's."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(sys.stdin.fileno())
        log.warning("worker: the supervisor is gone")
        app.end()

    loop.add_reader(sys.stdin.fileno(), ended)


def _quiet(line: str, bad: bool) -> None:
    """The supervisor tells the operator of reloads, once for all."""


if __name__ == "__main__":
    sys.exit(main())
