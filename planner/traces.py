"""Recorded traffic, read into one shape: when a request came, how long it was, which prefix blocks it was made of.

Mooncake's JSON lines for now; other formats are further functions that yield TraceRequest. Nothing is sent from here.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

import msgspec

from planner.words import BLOCK_TOKENS, BYTES_PER_TOKEN, block

GRID_S = 3.0
"""Mooncake's timestamps sit on a grid of three seconds: sent as they stand they would be batches that nobody sent."""


class TraceError(ValueError):
    """A line that is not in the format; the message names file and line."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded request. `blocks` are chained: an equal id means an equal prompt up to the end of that block."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS

    def prompt(self) -> str:
        """A prompt of input_tokens tokens in which equal block ids are equal text."""
        return "".join(block("mooncake", one) for one in self.blocks)[: self.input_tokens * BYTES_PER_TOKEN]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_mooncake(path: Path, limit: int | None = None, speed: float = 1.0) -> Iterator[TraceRequest]:
    """The first `limit` requests of a Mooncake trace (.jsonl or .jsonl.gz) in order of arrival, `speed` times as fast.

    Source: kvcache-ai/Mooncake, FAST25-release/traces. Raises TraceError.
    """
    with path.open("rb") as file, gzip.open(file) if path.suffix == ".gz" else file as lines:
        for request in islice(mooncake(lines, str(path)), limit):
            yield msgspec.structs.replace(request, arrival_s=request.arrival_s / speed)


def mooncake(lines: Iterable[bytes], name: str = "trace") -> Iterator[TraceRequest]:
    """Requests from Mooncake JSON lines, each batch of one timestamp spread evenly over the 3 s it stands for."""
    for timestamp_ms, batch in groupby(_parsed(lines, name), key=lambda line: line.timestamp):
        members = list(batch)
        for place, line in enumerate(members):
            arrival_s = timestamp_ms / 1e3 + GRID_S * place / len(members)
            yield TraceRequest(arrival_s, line.input_length, max(line.output_length, 1), line.hash_ids)


def _parsed(lines: Iterable[bytes], name: str) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{name}:{number}: {error}") from None
        if not 0 < parsed.input_length <= len(parsed.hash_ids) * BLOCK_TOKENS:
            raise TraceError(f"{name}:{number}: {parsed.input_length} tokens do not fit {len(parsed.hash_ids)} blocks")
        yield parsed
