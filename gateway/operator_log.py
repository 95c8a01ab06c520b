"""The operator's log on stderr: each record has a time and a level, as text or as one JSON object.

Messages may quote engines and clients, so control characters are escaped and a record stays one
line. Only the traceback of an internal error takes several lines of text.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from gateway.config import OperatorLog

ROOT_LEVEL = logging.WARNING  # for asyncio, aiohttp and other libraries


class LogLine(msgspec.Struct, omit_defaults=True):
    """One log record as JSON.

    `worker` is the number of the gateway process, where there are several.
    """

    time: str
    level: str
    message: str
    pid: int
    worker: int | None = None
    logger: str = "penstock"
    traceback: str = ""


class TextFormatter(logging.Formatter):
    """Formats records as text.

    Example: `2026-11-23T10:20:30.123Z WARNING endpoint a: up -> ejected (connect_failed)`
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = "" if worker is None else f"worker {worker}: "

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {self._worker}{escape(record.getMessage())}"
        traceback = _traceback(self, record)
        return f"{line}\n{traceback}" if traceback else line


class JsonFormatter(logging.Formatter):
    """Formats each record as one LogLine."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line = LogLine(
            _time(record),
            record.levelname.lower(),
            record.getMessage(),
            os.getpid(),
            self._worker,
            record.name,
            _traceback(self, record),
        )
        return escape(msgspec.json.encode(line).decode("utf-8", "replace"))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current value of sys.stderr, which may change after the handler is created."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        raise AttributeError("the stream is always sys.stderr")


def configure(settings: OperatorLog, worker: int | None = None) -> None:
    """Write this process's log to stderr in the configured format.

    Replaces an earlier configuration.
    """
    handler = StderrHandler()
    handler.setFormatter(
        JsonFormatter(worker) if settings.format == "json" else TextFormatter(worker)
    )
    root = logging.getLogger()
    root.handlers[:] = [
        existing for existing in root.handlers if not isinstance(existing, StderrHandler)
    ] + [handler]
    root.setLevel(ROOT_LEVEL)
    logging.getLogger("penstock").setLevel(settings.level.upper())


def escape(text: str) -> str:
    """Escape every character that a terminal or line-based reader could interpret as a command."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return (
        formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
    )
