"""Counts the Python instructions that the gateway executes per request.

    python bench/opcodes.py                            # totals
    python bench/opcodes.py --kinds plain --functions  # by function, as a tree of calls

Unlike times, the counts do not depend on how busy the machine is. The gateway runs in this process
and serves one request at a time.

Only the callbacks of a request are counted: those of the client's and the engine's connection, the
flush of the write queue, and the accounting. Health checks and metric scrapes are left out.
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
from compared_systems import (
    BACKENDS,
    ROOT,
    backend,
    backend_urls,
    build_tools,
    free_base,
    penstock_command,
)
from traffic_cells import chat_body, paced, prompt_tree

sys.path.insert(0, str(ROOT))

from gateway.app import App
from gateway.config import load_config
from gateway.http.engine_connections import UpstreamConnection
from gateway.http.fast_connection import FastConnection
from gateway.http.write_queue import WriteQueue
from gateway.telemetry.accounting import Accounting

CALLBACKS = frozenset(
    function.__qualname__
    for function in (
        FastConnection.data_received,
        UpstreamConnection.data_received,
        WriteQueue._run,
        Accounting.account_ended,
    )
)
"""Qualified names of the event loop's callbacks whose bytecode instructions are counted."""
WARM_UP, COUNTED = 32, 33
FLEETS = (4, 64, 1024)
SHORT, LONG = 4, 24
"""Numbers of chunks of the two streams from which the cost of one chunk is computed.

It is the difference of their instruction counts, divided by the number of additional chunks.
"""

QUESTION = "How does a water wheel work? ################"
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench/1\r\n"
    "Accept: */*\r\nAuthorization: Bearer sk-bench\r\nContent-Type: application/json\r\n"
    "Content-Length: %d\r\n\r\n"
)


@dataclass(frozen=True)
class Kind:
    """One kind of request to count: its routing policy, its bodies, and the number of endpoints."""

    name: str
    policy: str
    bodies: list[bytes]
    endpoints: int = BACKENDS


def kinds() -> list[Kind]:
    """Return the kinds of requests whose Python instructions in the gateway are counted.

    The chunks of streams are sent 10 ms apart, so that the gateway reads each of them separately.
    """
    stream = {chunks: [paced(chunks, 10_000, 10_000)] for chunks in (SHORT, LONG)}
    plain, long_prompts = (
        [chat_body(QUESTION, stream=False)],
        prompt_tree(2_000, random.Random(2_000)),
    )
    return [
        Kind("plain", "round_robin", [chat_body(QUESTION, stream=False)]),
        Kind("plain, prefix_aware", "prefix_aware", [chat_body(QUESTION, stream=False)]),
        Kind("2k-token prompt, prefix_aware", "prefix_aware", long_prompts),
        Kind(f"stream of {SHORT} chunks", "round_robin", stream[SHORT]),
        Kind(f"stream of {LONG} chunks", "round_robin", stream[LONG]),
        *(
            Kind(f"{endpoints} endpoints, {name}{policy}", policy, bodies, endpoints)
            for endpoints in FLEETS
            for policy in ("round_robin", "least_loaded", "prefix_aware", "priced")
            for name, bodies in (("", plain), ("2k-token prompt, ", long_prompts))
            if name == "" or policy in ("prefix_aware", "priced")
        ),
    ]


@dataclass
class Call:
    """A node in a tree of calls: a function, called from the function above it.

    own    number of bytecode instructions that the function executed itself in these calls
    calls  the functions that it called, by name
    """

    name: str
    own: int = 0
    calls: dict[str, Call] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.own + sum(call.total for call in self.calls.values())

    def lines(self, depth: int = 0) -> Iterator[str]:
        """Yield the call tree below this function as text, one function per line.

        A line has the instructions of a function with the functions that it calls, its own
        instructions, and its name. Called functions are indented.
        """
        yield f"{self.total:6} {self.own:6}  {'  ' * depth}{self.name}"
        for call in self.calls.values():
            yield from call.lines(depth + 1)


class CallCounter:
    """Counts the Python instructions that are executed in a `with` block, by function.

    root  the root of the call tree with the counts
    """

    def __init__(self) -> None:
        self.root = Call("request")
        self._stack: list[Call] = []

    def __enter__(self) -> CallCounter:
        sys.settrace(self._trace_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace_call(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_qualname
        if not self._stack and name not in CALLBACKS:
            # A coroutine that was first stepped in a callback may continue in a task.
            frame.f_trace = None
            return None
        parent = self._stack[-1] if self._stack else self.root
        self._stack.append(parent.calls.setdefault(name, Call(name)))
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace_frame

    def _trace_frame(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._stack[-1].own += 1
        elif event == "return":
            self._stack.pop()
        return self._trace_frame


async def count_kind(kind: Kind, base: int, work: Path) -> Call:
    """Send requests of one kind, and return the call tree of one of them.

    It is the request with the median number of instructions.
    """
    port = base + kind.endpoints + 100
    command = penstock_command(kind.policy, backend_urls(base, kind.endpoints))
    return await median_call(Path(command(work, port)[-1]), port, kind.bodies)


async def median_call(config: Path, port: int, bodies: list[bytes]) -> Call:
    """Send the request bodies one after another to a gateway in this process.

    Returns the call tree of the request with the median number of instructions.
    """
    app = App(load_config(config, {}))
    await app.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        calls = []
        for number in range(WARM_UP + COUNTED):
            body = bodies[number % len(bodies)].replace(b"#" * 16, b"%016x" % number)
            with CallCounter() as counting:
                writer.write((HEAD % len(body)).encode() + body)
                await read_answer(reader)
                await asyncio.sleep(0)
            calls.append(counting.root)
        writer.close()
    finally:
        await app.stop()
    counted = calls[WARM_UP:]
    middle = median_low(call.total for call in counted)
    return next(call for call in counted if call.total == middle)


async def read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert " 200 " in head.partition("\r\n")[0], head
    if "transfer-encoding: chunked" in head:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        await reader.readexactly(int(head.partition("content-length:")[2].partition("\r\n")[0]))


def main() -> None:
    """Print the Python instructions of each kind of request, and those of one stream chunk.

    The number for a chunk is computed from the difference between two streams of different length.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds",
        default="",
        help=(
            "count only the kinds of requests whose name begins with this text (default: all kinds)"
        ),
    )
    parser.add_argument(
        "--functions",
        action="store_true",
        help="print the tree of calls with total and own instructions of each function",
    )
    options = parser.parse_args()
    build_tools()
    totals: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-opcodes-") as work:
        for kind in kinds():
            if kind.name.startswith(options.kinds):
                base = free_base(kind.endpoints)
                with backend(base, kind.endpoints):
                    call = uvloop.run(count_kind(kind, base, Path(work)))
                totals[kind.name] = call.total
                print(f"{call.total:6}  {kind.name}")
                if options.functions:
                    print("\n".join(call.lines()))
    ends = [
        totals[name] for chunks in (SHORT, LONG) if (name := f"stream of {chunks} chunks") in totals
    ]
    if len(ends) == 2:
        print(f"{(ends[1] - ends[0]) / (LONG - SHORT):6.0f}  per chunk that is read on its own")


if __name__ == "__main__":
    main()
