"""Agent sessions (callanjfox/kv-cache-tester): one session per line, closed loop with think times.

A session's subagents run beside it and become sessions of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from planner.traces.shape import PRIVATE, TraceError, TraceRequest, parsed
from planner.words import BLOCK_TOKENS

MOST_CONTEXT = 128 * 1024
"""Requests beyond it are left out with all that follow them: the models we run take no more."""


class _Agent(msgspec.Struct):
    tool_tokens: int
    system_tokens: int
    requests: list[_Request]


class _Request(msgspec.Struct, rename={"input": "in"}):
    t: float
    type: str
    input: int | None = None
    out: int | None = None
    think: float | None = None
    runs: list[tuple[int, int]] = []
    agent: _Agent | None = None


class _Session(_Agent):
    id: str
    block_size: int


def agents(lines: Iterable[bytes], name: str = "trace", most_context: int = MOST_CONTEXT) -> Iterator[TraceRequest]:
    """Requests session by session. The first of a session is due at its own moment, the others `think_s` after answers.

    Block ids are local to a session in the file: what sessions share here is their tools and system prompt, where
    these are equally long. Blocks of other sizes are joined to 512 tokens.
    """
    trunks = _Trunks()
    count = 0
    for number, row in parsed(_Session, lines, name):
        if row.block_size < 1 or BLOCK_TOKENS % row.block_size:
            raise TraceError(f"{name}:{number}: blocks of {row.block_size} tokens do not divide {BLOCK_TOKENS}")
        waiting = [(row.id, 0.0, row.requests, row.tool_tokens, row.system_tokens)]
        while waiting:
            key, begin_s, requests, tools, system = waiting.pop(0)
            count += 1
            shared = trunks.of(tools, system)
            first = True
            for place, one in enumerate(requests):
                if one.agent is not None:
                    inner = one.agent
                    waiting.append(
                        (f"{key}/{place}", begin_s + one.t, inner.requests, inner.tool_tokens, inner.system_tokens)
                    )
                if one.input is None or one.out is None:
                    continue
                if one.input + one.out > most_context:
                    break
                blocks = _blocks(one, row.block_size, count, shared, f"{name}:{number}")
                think_s = None if first else max(0.0, one.think or 0.0)
                yield TraceRequest(begin_s + one.t, one.input, max(1, one.out), blocks, session=key, think_s=think_s)
                first = False


class _Trunks:
    """Ids for what sessions share: the blocks of tools, and of tools and system prompt, by their lengths."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, tools: int, system: int) -> list[int]:
        """Ids of the whole blocks of the trunk, those of the tools alone first."""
        blocks = [self._id(tools, index) for index in range(tools // BLOCK_TOKENS)]
        return blocks + [
            self._id(tools, system, index) for index in range(len(blocks), (tools + system) // BLOCK_TOKENS)
        ]

    def _id(self, *key: int) -> int:
        return self._known.setdefault(key, len(self._known))


def _blocks(one: _Request, size: int, session: int, shared: list[int], where: str) -> tuple[int, ...]:
    """The chained ids of a request's 512-token blocks: the last small block within each names it."""
    assert one.input is not None
    local = [each for start, length in one.runs for each in range(start, start + length)]
    whole = one.input // BLOCK_TOKENS
    step = BLOCK_TOKENS // size
    if len(local) < whole * step or any(each < 0 for each, _ in one.runs):
        raise TraceError(f"{where}: {one.input} tokens do not fit {len(local)} blocks of {size}")
    own = [session * PRIVATE + each for each in local[step - 1 : whole * step : step]]
    trunk = shared[:whole]
    return (*trunk, *own[len(trunk) :])
