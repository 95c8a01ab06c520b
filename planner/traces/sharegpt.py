"""Reads ShareGPT conversations as token ids: real prompts with their real prefixes.

Source: casys-kaist/LLMServingSim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from planner.traces.recorded_request import Tokens, TraceRequest
from planner.traces.trace_lines import TraceError, parse_lines

TOKENS = 16


class _Line(msgspec.Struct):
    input_toks: Tokens
    output_toks: Tokens
    arrival_time_ns: float
    input_tok_ids: list[int]


def sharegpt(lines: Iterable[bytes], name: str = "trace") -> Iterator[TraceRequest]:
    """Yield the requests of ShareGPT conversations in the order of the file.

    The prompts are divided into blocks of 16 tokens. Two prompts share block ids as far as their
    tokens from the beginning are equal.
    """
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for number, row in parse_lines(_Line, lines, name):
        if not row.input_tok_ids or len(row.input_tok_ids) != row.input_toks:
            raise TraceError(
                f"{name}:{number}: input_toks is {row.input_toks}, but there are "
                f"{len(row.input_tok_ids)} token ids"
            )
        blocks, previous = [], -1
        for start in range(0, row.input_toks, TOKENS):
            link = previous, tuple(row.input_tok_ids[start : start + TOKENS])
            previous = known.setdefault(link, len(known))
            blocks.append(previous)
        yield TraceRequest(
            row.arrival_time_ns / 1e9,
            row.input_toks,
            max(1, row.output_toks),
            tuple(blocks),
            TOKENS,
        )
