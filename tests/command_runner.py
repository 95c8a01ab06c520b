"""Runs command-line commands in this process, and captures their output."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from command_line import run_command

Program = Callable[[Sequence[str]], None]


@dataclass
class Result:
    """What a command printed, and how it ended.

    output     stdout and stderr, in the order in which they were printed
    exception  the exception that it raised, except SystemExit
    """

    exit_code: int
    stdout: str
    stderr: str
    output: str
    exception: BaseException | None = None


class _Copied(io.StringIO):
    def __init__(self, copy: io.StringIO) -> None:
        super().__init__()
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return super().write(text)


def program(command: Callable[..., Any], **given: object) -> Program:
    """Return a program that consists of one command.

    The arguments are values for the command's parameters that do not come from the command line.
    """
    return lambda words: run_command(command, words, "penstock", os.environ, **given)


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that commands of the gateway replace, after a `with` block."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class CommandRunner:
    """Runs command-line programs in this process, and captures what they print."""

    def invoke(
        self,
        run: Program,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        input: str = "",
    ) -> Result:
        both = io.StringIO()
        out, err = _Copied(both), _Copied(both)
        code, caught = 0, None
        with (
            kept_signal_handlers(),
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch.dict(os.environ, env or {}),
            mock.patch.object(sys, "stdin", io.StringIO(input)),
        ):
            try:
                run(words)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except Exception as error:
                code, caught = 1, error
        return Result(code, out.getvalue(), err.getvalue(), both.getvalue(), caught)
