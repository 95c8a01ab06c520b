"""Reads the lines of a trace file of any format, also compressed: limits, JSON, error messages."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TypeVar

import msgspec

Row = TypeVar("Row")

MOST_LINE_BYTES = 64 << 20
"""Maximum bytes of a line of a trace.

A longer line cannot be a request; it is refused before it fills the memory.
"""


class TraceError(ValueError):
    """Raised if a file or line does not have the expected trace format.

    The message contains the file and the number of the line.
    """


@contextmanager
def open_lines(path: Path) -> Iterator[Iterable[bytes]]:
    """Open a file, and yield an iterator over its lines.

    A file whose name ends in .gz is decompressed. Raises TraceError, also during the iteration, if
    the file is missing, corrupt or truncated, or has a line of MOST_LINE_BYTES or more.
    """
    try:
        with (
            path.open("rb") as file,
            gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as unpacked,
        ):
            yield _bounded(unpacked, str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _bounded(file: IO[bytes] | gzip.GzipFile, name: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MOST_LINE_BYTES):
        number += 1
        if len(line) == MOST_LINE_BYTES:
            raise TraceError(
                f"{name}:{number}: the line is too long; it must be shorter than "
                f"{MOST_LINE_BYTES >> 20} MiB"
            )
        yield line


def parse_lines(kind: type[Row], lines: Iterable[bytes], name: str) -> Iterator[tuple[int, Row]]:
    """Yield (line number, parsed line) for every non-empty line, parsed as JSON of type `kind`.

    Raises TraceError if a line is invalid.
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TraceError(f"{name}:{number}: {error}") from None
            yield number, row
