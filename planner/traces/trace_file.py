"""Reads any trace file. Its format is detected from the first line, unless it is given.

A .yaml file describes a mix of traces (mix_file.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from planner.traces.access_log import access
from planner.traces.agents import agents
from planner.traces.azure import azure
from planner.traces.bailian import bailian
from planner.traces.mix import mix_parts
from planner.traces.mix_file import read_mix_file
from planner.traces.mooncake import mooncake
from planner.traces.recorded_request import TraceRequest
from planner.traces.sharegpt import sharegpt
from planner.traces.trace_lines import TraceError, open_lines

Reader = Callable[[Iterable[bytes], str], Iterator[TraceRequest]]

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "mooncake": mooncake,
        "azure": azure,
        "agents": agents,
        "sharegpt": sharegpt,
        "bailian": bailian,
        "access": access,
    }
)
_SIGNS = (
    ("chat_id", "bailian"),
    ("hash_ids", "mooncake"),
    ("input_tok_ids", "sharegpt"),
    ("tool_tokens", "agents"),
    ("outcome", "access"),
)


def read_trace(path: Path, kind: str | None = None) -> list[TraceRequest]:
    """Return all requests of a trace file, which may be compressed (.gz).

    `kind` is the format; None: it is detected. Raises TraceError if the file cannot be read, or has
    another format.
    """
    return _read(path, kind, ())


def _read(path: Path, kind: str | None, within: tuple[Path, ...]) -> list[TraceRequest]:
    # Return the requests of a file; `within` are the mixes that contain it, outermost first.
    if path.suffix in (".yaml", ".yml"):
        return _mix(path, within)
    if kind is not None and kind not in READERS:
        raise TraceError(f"unknown format {kind!r}; known formats: {', '.join(READERS)}")
    with open_lines(path) as lines:
        return list(READERS[kind or looks_like(path)](lines, str(path)))


def looks_like(path: Path) -> str:
    """Detect the format of a trace file from its first line, and return its name.

    Raises TraceError if it is none of the known formats.
    """
    with open_lines(path) as lines:
        first = next((line for line in lines if line.strip()), b"")
    if not first:
        raise TraceError(f"{path}:1: the file is empty")
    if first.lstrip(b"\xef\xbb\xbf").upper().startswith(b"TIMESTAMP,"):
        return "azure"
    try:
        fields = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:1: the line is neither JSON nor Azure's CSV: {error}") from None
    for field, kind in _SIGNS:
        if field in fields:
            return kind
    raise TraceError(f"{path}:1: unknown format; known formats: {', '.join(READERS)}")


def _mix(path: Path, within: tuple[Path, ...]) -> list[TraceRequest]:
    resolved = path.resolve()
    if resolved in within:
        raise TraceError(f"{path}: a mix cannot contain itself")
    parts = [
        member.part(_read(path.parent / member.trace, member.format, (*within, resolved)))
        for member in read_mix_file(path)
    ]
    try:
        return mix_parts(parts)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None
