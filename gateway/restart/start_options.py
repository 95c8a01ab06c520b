"""The options with which a gateway process starts: configuration, files, sockets, predecessor.

The values that distinguish one of several workers are in worker_launch_settings.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gateway.config import LoadedConfig
from gateway.http.listener_sockets import NO_SOCKETS, SocketsByName
from gateway.reload.reloader import ReportLine
from gateway.restart.new_process_side import Predecessor
from gateway.restart.worker_launch_settings import WorkerSettings

log = logging.getLogger("penstock")


def log_reload(line: str, is_error: bool) -> None:
    """Log the outcome of a reload for the operator; as an error if `is_error` is true."""
    log.log(logging.ERROR if is_error else logging.INFO, "%s", line)


class StartOptions(msgspec.Struct, frozen=True):
    """The options with which a gateway process was started.

    loaded       the configuration
    file         the file that a reload reads; None if the engines were given on the command line
    env          environment variables that the configuration may refer to
    report_line  function that reports the outcome of a reload to the operator
    local        the worker's settings; None without workers
    sockets      listening sockets opened by systemd, a supervisor or the predecessor
    activated    the listeners whose sockets systemd opened; their configured address is ignored
    predecessor  the process that this one replaces; None if there is none
    """

    loaded: LoadedConfig
    file: Path | None = None
    env: Mapping[str, str] = {}
    report_line: ReportLine = log_reload
    local: WorkerSettings | None = None
    sockets: SocketsByName = NO_SOCKETS
    activated: frozenset[str] = frozenset()
    predecessor: Predecessor | None = None
