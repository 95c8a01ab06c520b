"""Reads agent sessions (callanjfox/kv-cache-tester): one session per line, with think times.

A think time is the pause between an answer and the next request, which waits for it. The subagents
of a session run at the same time, and become sessions of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Annotated

import msgspec
from msgspec import Meta

from planner.text_generator import BLOCK_TOKENS
from planner.traces.recorded_request import PRIVATE, TRACE_BITS, Tokens, TraceRequest
from planner.traces.trace_lines import TraceError, parse_lines

MOST_CONTEXT = 128 * 1024
"""Maximum tokens of a request; the simulated models accept no more.

A session ends before its first longer request.
"""

MOST_SESSIONS = (1 << TRACE_BITS) // PRIVATE
"""Maximum number of sessions, because each has its own range of block ids."""

# First id and length of a run of blocks: their sum stays within the session's range of ids.
_InRange = Annotated[int, Meta(ge=0, lt=PRIVATE // 2)]


class _Agent(msgspec.Struct):
    tool_tokens: Tokens
    system_tokens: Tokens
    requests: list[_Request]


class _Request(msgspec.Struct, rename={"input": "in"}):
    # One request in the file.
    #
    # runs  the blocks of the prompt, as pairs (first id, number of consecutive ids)

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


def agents(
    lines: Iterable[bytes], name: str = "trace", most_context: int = MOST_CONTEXT
) -> Iterator[TraceRequest]:
    """Yield the requests of agent sessions, session by session.

    The first request of a session has its own time, the others follow answers after `think_s`. A
    session ends before the first request that exceeds `most_context` tokens. Block ids in the file
    are local to a session: tools and system prompts of equal lengths are assumed to be shared
    between sessions. Blocks are merged to 512 tokens. Raises TraceError if a line is invalid or
    there are too many sessions.
    """
    trunks = _SharedPrefixes()
    count = 0
    for number, row in parse_lines(_Session, lines, name):
        where = f"{name}:{number}"
        if BLOCK_TOKENS % row.block_size:
            raise TraceError(
                f"{where}: block_size must be a divisor of {BLOCK_TOKENS}, not {row.block_size}"
            )
        waiting = deque[tuple[str, float, _Agent]]([(row.id, 0.0, row)])
        while waiting:
            key, begin_s, agent = waiting.popleft()
            count += 1
            if count >= MOST_SESSIONS:
                raise TraceError(f"{where}: the file has more than {MOST_SESSIONS} sessions")
            requests = list(_within(agent.requests, most_context))
            shared = trunks.of(agent.tool_tokens, agent.system_tokens)
            yield from _conversation(
                key, begin_s, requests, _Blocks(row.block_size, count * PRIVATE, shared, where)
            )
            waiting.extend(
                (f"{key}/{index}", begin_s + request.t, request.agent)
                for index, request in enumerate(requests)
                if request.agent is not None
            )


def _within(requests: Sequence[_Request], most_context: int) -> Iterator[_Request]:
    # Yield the requests before the first one whose prompt and answer exceed `most_context` tokens.
    for request in requests:
        if (
            request.input is not None
            and request.out is not None
            and request.input + request.out > most_context
        ):
            return
        yield request


class _Blocks(msgspec.Struct, frozen=True):
    # Maps a session's own block ids to those of the trace.
    #
    # size      tokens of one of the file's blocks
    # first_id  start of the session's own range of ids
    # shared    ids of the 512-token blocks at the start of its prompts that other sessions may
    #           share
    # where     file and line, for errors

    size: int
    first_id: int
    shared: list[int]
    where: str

    def of(self, request: _Request, input_tokens: int) -> tuple[int, ...]:
        # Return the chained ids of a prompt's whole 512-token blocks.
        #
        # Each has the id of the last of its small blocks. Raises TraceError if blocks are missing.
        whole, step = input_tokens // BLOCK_TOKENS, BLOCK_TOKENS // self.size
        ids = chain.from_iterable(range(start, start + length) for start, length in request.runs)
        local = list(islice(ids, whole * step))
        if len(local) < whole * step:
            raise TraceError(
                f"{self.where}: {input_tokens} prompt tokens do not fit the {len(local)} listed "
                f"blocks of {self.size} tokens each"
            )
        own = [self.first_id + block_id for block_id in local[step - 1 :: step]]
        trunk = self.shared[:whole]
        return (*trunk, *own[len(trunk) :])


def _conversation(
    key: str, begin_s: float, requests: Iterable[_Request], blocks: _Blocks
) -> Iterator[TraceRequest]:
    # Yield the requests of one session.
    #
    # Requests without lengths only mark the start of a subagent and are left out.
    first = True
    for request in requests:
        if request.input is not None and request.out is not None:
            think_s = None if first else max(0.0, request.think or 0.0)
            ids = blocks.of(request, request.input)
            yield TraceRequest(
                begin_s + request.t,
                request.input,
                max(1, request.out),
                ids,
                session=key,
                think_s=think_s,
            )
            first = False


class _SharedPrefixes:
    # Ids of prefixes that sessions share: blocks of tools, and of tools plus system prompt.
    #
    # A prefix is identified by the lengths of its parts.

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, tools: int, system: int) -> list[int]:
        # Return the ids of a shared prefix's whole blocks, those of the tools first.
        #
        # `tools` and `system` are lengths in tokens.
        blocks = [self._id(tools, index) for index in range(tools // BLOCK_TOKENS)]
        return blocks + [
            self._id(tools, system, index)
            for index in range(len(blocks), (tools + system) // BLOCK_TOKENS)
        ]

    def _id(self, *key: int) -> int:
        return self._known.setdefault(key, len(self._known))
