"""Reads Qwen's Bailian traces: chats with several turns, in blocks of 16 tokens.

Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from planner.traces.recorded_request import BlockId, Tokens, TraceRequest
from planner.traces.trace_lines import TraceError, parse_lines

TOKENS = 16


class _Line(msgspec.Struct):
    chat_id: int
    timestamp: float
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...]
    parent_chat_id: int = -1
    turn: int = 1
    type: str = ""


def bailian(lines: Iterable[bytes], name: str = "trace") -> Iterator[TraceRequest]:
    """Yield the requests of a Bailian trace in the order of the file, at recorded times in seconds.

    Each request's session is named after the first chat of its conversation. Its service class is
    its type (text, search, image or file).
    """
    roots: dict[int, int] = {}
    for number, row in parse_lines(_Line, lines, name):
        if not 0 < row.input_length <= len(row.hash_ids) * TOKENS:
            raise TraceError(
                f"{name}:{number}: input_length is {row.input_length} tokens, which do not fit "
                f"the {len(row.hash_ids)} blocks of 16 tokens in hash_ids"
            )
        root = roots[row.chat_id] = roots.get(
            row.parent_chat_id, row.chat_id if row.turn <= 1 else row.parent_chat_id
        )
        yield TraceRequest(
            row.timestamp,
            row.input_length,
            max(1, row.output_length),
            row.hash_ids,
            TOKENS,
            session=f"chat {root}",
            slo=row.type,
        )
