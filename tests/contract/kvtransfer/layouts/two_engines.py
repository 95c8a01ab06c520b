"""Runs a prefill and a decode engine as processes, with KV caches of different layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtransfer.layout.kv_layout import KvLayout

ROOT = Path(__file__).parents[4]


class EngineClient:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.kvtransfer.layouts.engine_process"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def call(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        reply = json.loads(self.process.stdout.readline())
        assert "error" not in reply, reply
        return reply["ok"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


class Part(NamedTuple):
    """The part of a request in one group of layers that a test transfers, with its blocks."""

    tokens: int
    src_blocks: list[int]
    dst_blocks: list[int]


class TwoEngines:
    """Two engine processes with different KV layouts, which transfer KV one request after another."""

    def __init__(self) -> None:
        self.source, self.sink = EngineClient(), EngineClient()

    def end(self) -> None:
        self.source.end()
        self.sink.end()

    def move(
        self,
        layouts: tuple[KvLayout, KvLayout],
        files: tuple[list[str], list[str]],
        parts: Sequence[Part],
    ) -> list[list[str]]:
        """Transfer each part of a request; return (kind, reason, detail) of every fetch."""
        encoded = [msgspec.to_builtins(layout) for layout in layouts]
        addresses = self.source.call("open", name="p", layout=encoded[0], files=files[0])
        self.sink.call("open", name="d", layout=encoded[1], files=files[1])
        try:
            ends = []
            for index, part in enumerate(parts):
                offer = {"name": f"r{index}", "tokens": part.tokens}
                tickets = self.source.call("offer", blocks=part.src_blocks, **offer)
                ends += self.sink.call(
                    "fetch", blocks=part.dst_blocks, source=encoded[0], addresses=addresses,
                    tickets=tickets, **offer,
                )  # fmt: skip
            return ends
        finally:
            self.sink.call("close")
            self.source.call("close")
