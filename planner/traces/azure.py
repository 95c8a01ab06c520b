"""Reads Azure's inference traces of 2023: CSV of times and lengths, without prefixes.

Source: Azure/AzurePublicDataset, Splitwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from planner.traces.recorded_request import TraceRequest
from planner.traces.trace_lines import TraceError

_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_ROW = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?(?:\+00:00)?,(\d{1,8}),(\d{1,8})\s*")


def azure(lines: Iterable[bytes], name: str = "trace") -> Iterator[TraceRequest]:
    """Yield the requests of an Azure trace in order of arrival, with times relative to the first.

    The trace has no prompts, so no prefixes are shared.
    """
    begin_s: float | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.strip().lstrip(b"\xef\xbb\xbf") == _HEADER):
            continue
        row = _ROW.fullmatch(line.rstrip(b"\r\n"))
        if row is None or not int(row[3]):
            raise TraceError(
                f"{name}:{number}: expected TIMESTAMP,ContextTokens,GeneratedTokens with at least "
                f"one context token, got {line[:80]!r}"
            )
        at_s = _seconds(row, f"{name}:{number}")
        begin_s = at_s if begin_s is None else begin_s
        yield TraceRequest(at_s - begin_s, int(row[3]), max(int(row[4]), 1))


def _seconds(row: re.Match[bytes], where: str) -> float:
    try:
        whole = (
            datetime.strptime(row[1].decode(), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        )
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from None
    return whole + float(row[2] or 0)
