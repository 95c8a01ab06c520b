"""The operator's log on stderr: text lines with time and level, or one JSON object per line.

Control characters are escaped, because messages may quote text from engines and clients. A record
takes one line; only the traceback of an internal error takes several.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from gateway.config import OperatorLog

LIBRARY_LEVEL = logging.WARNING  # log level of asyncio, aiohttp and other libraries


class LogLine(msgspec.Struct, omit_defaults=True):
    """One record of the operator's log, as a JSON object on one line.

    `worker` is the number of the worker process; None without workers. The other members have the
    meaning of a Python log record's attributes.
    """

    time: str
    level: str
    message: str
    pid: int
    worker: int | None = None
    logger: str = "penstock"
    traceback: str = ""


class TextFormatter(logging.Formatter):
    """Formats a log record as one line of text.

    Example: `2026-11-23T10:20:30.123Z WARNING endpoint a: up -> ejected`
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = "" if worker is None else f"worker {worker}: "

    def format(self, record: logging.LogRecord) -> str:
        message = escape_unprintable(record.getMessage())
        line = f"{_time(record)} {record.levelname} {self._worker}{message}"
        traceback = _traceback(self, record)
        return f"{line}\n{traceback}" if traceback else line


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON, the encoding of a LogLine."""

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
        return escape_unprintable(msgspec.json.encode(line).decode("utf-8", "replace"))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes log records to sys.stderr, looked up at each record because it may be replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr; its stream cannot be set")


def configure_log(settings: OperatorLog, worker: int | None = None) -> None:
    """Set up the process's log on stderr, in place of any earlier setup.

    `worker` is the number of the worker process; None without workers.
    """
    handler = StderrHandler()
    handler.setFormatter(
        JsonFormatter(worker) if settings.format == "json" else TextFormatter(worker)
    )
    root = logging.getLogger()
    others = [other for other in root.handlers if not isinstance(other, StderrHandler)]
    root.handlers[:] = [*others, handler]
    root.setLevel(LIBRARY_LEVEL)
    logging.getLogger("penstock").setLevel(settings.level.upper())


def escape_unprintable(text: str) -> str:
    """Return `text` with unprintable characters escaped.

    Unescaped, they could control a terminal or forge a log line.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info or not record.exc_info[0]:
        return ""
    return formatter.formatException(record.exc_info)
