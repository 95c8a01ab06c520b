"""What a request costs in instructions of the interpreter, function by function: a count that no other load disturbs.

    python bench/opcodes.py                            # the totals
    python bench/opcodes.py --kinds plain --functions  # and where they go, as a tree of calls

The gateway of the bench (bench/systems.py) runs here, in this process, on the bench's backend, and answers one request after
the other. Counted is whatever runs in the callbacks that carry a request: those of its client's connection, of its
engine's, the writing at the end of a turn and the accounting after it. Sweeps, probes and scrapes are not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any

import uvloop
from cells import chat_body, paced, prompt_tree
from systems import ROOT, SOURCES, all_systems, backend, build_tools, free_base

sys.path.insert(0, str(ROOT))

from gateway.app import App
from gateway.config import load_config

CALLBACKS = frozenset(("Front.data_received", "Connection.data_received", "Outbox._turn", "Accounts.settle"))
WARM_UP, COUNTED = 32, 33
SHORT, LONG = 4, 24  # chunks of two streams: what one costs more than the other is what chunks cost
QUESTION = "How does a water wheel work? ################"
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench/1\r\nAccept: */*\r\n"
    "Authorization: Bearer sk-bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@dataclass(frozen=True)
class Kind:
    """One kind of request: its policy and its bodies, asked in turn."""

    name: str
    policy: str
    bodies: list[bytes]


def kinds() -> list[Kind]:
    """What is counted. A stream's chunks come 10 ms apart, so that each is read by itself."""
    stream = {chunks: [paced(chunks, 10_000, 10_000)] for chunks in (SHORT, LONG)}
    long_prompts = prompt_tree(2_000, random.Random(2_000))
    return [
        Kind("plain", "round_robin", [chat_body(QUESTION, stream=False)]),
        Kind("plain, prefix_aware", "prefix_aware", [chat_body(QUESTION, stream=False)]),
        Kind("2k-token prompt, prefix_aware", "prefix_aware", long_prompts),
        Kind(f"stream of {SHORT} chunks", "round_robin", stream[SHORT]),
        Kind(f"stream of {LONG} chunks", "round_robin", stream[LONG]),
    ]


@dataclass
class Call:
    """A function where it was called: instructions of its own, and what it called in turn."""

    name: str
    own: int = 0
    calls: dict[str, Call] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Of its own and of all below it."""
        return self.own + sum(call.total for call in self.calls.values())

    def lines(self, depth: int = 0) -> Iterator[str]:
        """The tree, callees in the order in which they were called first."""
        yield f"{self.total:6} {self.own:6}  {'  ' * depth}{self.name}"
        for call in self.calls.values():
            yield from call.lines(depth + 1)


class Counting:
    """Counts from the moment it is entered; `found` is the tree of what has run since then."""

    def __init__(self) -> None:
        self.found = Call("request")
        self._stack: list[Call] = []

    def __enter__(self) -> Counting:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_qualname
        if not self._stack and name not in CALLBACKS:
            frame.f_trace = None  # a coroutine that was stepped in a callback before goes on in a task
            return None
        inside = self._stack[-1] if self._stack else self.found
        self._stack.append(inside.calls.setdefault(name, Call(name)))
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._went_on

    def _went_on(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._stack[-1].own += 1
        elif event == "return":
            self._stack.pop()
        return self._went_on


async def count(kind: Kind, base: int, work: Path) -> Call:
    """The median request of its kind, by its total."""
    system = next(each for each in all_systems(base) if each.key == f"{SOURCES}/{kind.policy}")
    return await median_call(Path(system.command(work, system.port)[-1]), system.port, kind.bodies)


async def median_call(config: Path, port: int, bodies: list[bytes]) -> Call:
    """The median, by its total, of requests with these bodies, asked in turn of a gateway that runs here."""
    app = App(load_config(config, {}))
    await app.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        found = []
        for number in range(WARM_UP + COUNTED):
            body = bodies[number % len(bodies)].replace(b"#" * 16, b"%016x" % number)
            with Counting() as counting:
                writer.write((HEAD % len(body)).encode() + body)
                await answered(reader)
                await asyncio.sleep(0)
            found.append(counting.found)
        writer.close()
    finally:
        await app.stop()
    counted = found[WARM_UP:]
    middle = median_low(call.total for call in counted)
    return next(call for call in counted if call.total == middle)


async def answered(reader: asyncio.StreamReader) -> None:
    """Until an answer, whole or streamed, has come to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert " 200 " in head.partition("\r\n")[0], head
    if "transfer-encoding: chunked" in head:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        await reader.readexactly(int(head.partition("content-length:")[2].partition("\r\n")[0]))


def main() -> None:
    """Prints a line per kind, and what a chunk costs where both streams were counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="", help="only those whose name begins so")
    parser.add_argument("--functions", action="store_true", help="show the calls: instructions with all below, own")
    options = parser.parse_args()
    build_tools()
    base, totals = free_base(), {}
    with tempfile.TemporaryDirectory(prefix="penstock-opcodes-") as work, backend(base):
        for kind in kinds():
            if kind.name.startswith(options.kinds):
                call = uvloop.run(count(kind, base, Path(work)))
                totals[kind.name] = call.total
                print(f"{call.total:6}  {kind.name}")
                if options.functions:
                    print("\n".join(call.lines()))
    ends = [totals.get(f"stream of {chunks} chunks") for chunks in (SHORT, LONG)]
    if None not in ends:
        print(f"{(ends[1] - ends[0]) / (LONG - SHORT):6.0f}  a chunk that is read by itself")


if __name__ == "__main__":
    main()
