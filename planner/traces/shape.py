"""The one shape that all readers yield, the error they raise, and how they read lines. No format lives here."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from planner.words import BLOCK_TOKENS, BYTES_PER_TOKEN, block

Row = TypeVar("Row")

PRIVATE = 1 << 32
"""Block ids from here on belong to one session; those below may be shared by sessions."""


class TraceError(ValueError):
    """A line that is not in the format; the message names file and line."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded request.

    arrival_s    when it came, seconds from the beginning of its trace
    blocks       chained: an equal id means an equal prompt up to the end of that block; the ragged last one included.
                 Empty: nothing is known of the prompt, and none is like another
    think_s      closed loop: it is sent so long after the request before it in its session was answered; None: it is
                 sent at arrival_s, whatever became of others
    slo          name of its service class
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    session: str = ""
    think_s: float | None = None
    tenant: str = ""
    slo: str = ""
    priority: int = 0

    def prompt(self) -> str:
        """A prompt of input_tokens tokens in which equal block ids are equal text. For blocks of 512 tokens."""
        return "".join(block("mooncake", one) for one in self.blocks)[: self.input_tokens * BYTES_PER_TOKEN]


@contextmanager
def lines_of(path: Path) -> Iterator[Iterable[bytes]]:
    """The lines of a file, unpacked if its name ends in .gz."""
    with path.open("rb") as file:
        if path.suffix == ".gz":
            with gzip.open(file) as unpacked:
                yield unpacked
        else:
            yield file


def parsed(kind: type[Row], lines: Iterable[bytes], name: str) -> Iterator[tuple[int, Row]]:
    """Every line that is not empty with its number, as JSON of that kind. Raises TraceError."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{name}:{number}: {error}") from None
