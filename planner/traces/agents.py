"""Agent sessions (callanjfox/kv-cache-tester): one session per line, closed loop with think times.

A session's subagents run beside it and become sessions of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Annotated

import msgspec
from msgspec import Meta

from planner.traces.shape import PRIVATE, TRACE_BITS, Tokens, TraceError, TraceRequest, parsed
from planner.words import BLOCK_TOKENS

MOST_CONTEXT = 128 * 1024
"""Requests beyond it are left out with all that follow them: the models we run take no more."""

MOST_SESSIONS = (1 << TRACE_BITS) // PRIVATE
"""Each has a range of block ids of its own."""

# First id and length of a run of blocks: their sum stays within the session's range of ids.
_InRange = Annotated[int, Meta(ge=0, lt=PRIVATE // 2)]


class _Agent(msgspec.Struct):
    """One conversation, and the lengths of what its prompts begin with."""

    tool_tokens: Tokens
    system_tokens: Tokens
    requests: list[_Request]


class _Request(msgspec.Struct, rename={"input": "in"}):
    """One request. `runs`: its prompt's blocks as (first id, how many of consecutive ids)."""

    t: float
    type: str
    input: Annotated[int, Meta(ge=1)] | None = None
    out: Tokens | None = None
    think: float | None = None
    runs: list[tuple[_InRange, _InRange]] = []
    agent: _Agent | None = None


class _Session(_Agent):
    id: str
    block_size: Annotated[int, Meta(ge=1)]


def agents(lines: Iterable[bytes], name: str = "trace", most_context: int = MOST_CONTEXT) -> Iterator[TraceRequest]:
    """Requests session by session. The first of a session is due at its own moment, the others `think_s` after answers.

    Block ids are local to a session in the file: what sessions share here is their tools and system prompt, where
    these are equally long. Blocks of other sizes are joined to 512 tokens. Raises TraceError.
    """
    trunks = _Trunks()
    count = 0
    for number, row in parsed(_Session, lines, name):
        where = f"{name}:{number}"
        if BLOCK_TOKENS % row.block_size:
            raise TraceError(f"{where}: blocks of {row.block_size} tokens do not divide {BLOCK_TOKENS}")
        waiting = deque[tuple[str, float, _Agent]]([(row.id, 0.0, row)])
        while waiting:
            key, begin_s, agent = waiting.popleft()
            count += 1
            if count >= MOST_SESSIONS:
                raise TraceError(f"{where}: more than {MOST_SESSIONS} sessions")
            requests = list(_within(agent.requests, most_context))
            shared = trunks.of(agent.tool_tokens, agent.system_tokens)
            yield from _conversation(key, begin_s, requests, _Blocks(row.block_size, count * PRIVATE, shared, where))
            waiting.extend(
                (f"{key}/{place}", begin_s + one.t, one.agent)
                for place, one in enumerate(requests)
                if one.agent is not None
            )


def _within(requests: Sequence[_Request], most_context: int) -> Iterator[_Request]:
    """Those before the first whose prompt and answer are longer than the context."""
    for one in requests:
        if one.input is not None and one.out is not None and one.input + one.out > most_context:
            return
        yield one


class _Blocks(msgspec.Struct, frozen=True):
    """From a session's own block ids to those of the trace.

    size      tokens of one of the file's blocks
    first_id  where the session's own range of ids begins
    shared    ids of the 512-token blocks that its prompts begin with and other sessions' may too
    where     file and line, for errors
    """

    size: int
    first_id: int
    shared: list[int]
    where: str

    def of(self, one: _Request, input_tokens: int) -> tuple[int, ...]:
        """The chained ids of a prompt's whole 512-token blocks: the last small block within each names it."""
        whole, step = input_tokens // BLOCK_TOKENS, BLOCK_TOKENS // self.size
        ids = chain.from_iterable(range(start, start + length) for start, length in one.runs)
        local = list(islice(ids, whole * step))
        if len(local) < whole * step:
            raise TraceError(f"{self.where}: {input_tokens} tokens do not fit {len(local)} blocks of {self.size}")
        own = [self.first_id + each for each in local[step - 1 :: step]]
        trunk = self.shared[:whole]
        return (*trunk, *own[len(trunk) :])


def _conversation(key: str, begin_s: float, requests: Iterable[_Request], blocks: _Blocks) -> Iterator[TraceRequest]:
    """The requests of one session; those without lengths only say when a subagent began."""
    first = True
    for one in requests:
        if one.input is not None and one.out is not None:
            think_s = None if first else max(0.0, one.think or 0.0)
            ids = blocks.of(one, one.input)
            yield TraceRequest(begin_s + one.t, one.input, max(1, one.out), ids, session=key, think_s=think_s)
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
