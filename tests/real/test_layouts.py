"""Tests of the table of KV layouts with caches that vLLM's own classes create, without an
engine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtransfer.layout.kv_layout import KvLayout
from tests.contract.kvtransfer.layouts.rank_memory import (
    HEAD_DIM,
    LATENT_DIM,
    LAYERS,
    Request,
    Shape,
    requests_of,
    shape_of,
)
from tests.contract.kvtransfer.layouts.test_layout_table import case_id
from tests.contract.kvtransfer.layouts.two_engines import Part, TwoEngines
from tests.real.engines import REAL, ROOT
from tools.kv_layouts import ROWS, TP_PAIRS, LayoutRow

CASES = [(row, cache_type) for row in ROWS if row.backend for cache_type in row.cache_types]


class VllmMemory:
    """The process that creates caches with vLLM's classes (vllm_memory.py)."""

    def __init__(self, log: Path) -> None:
        self.process = subprocess.Popen(
            [REAL / "venv/bin/python", "-m", "tests.real.vllm_memory"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
        )  # fmt: skip

    def call(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        reply = json.loads(self.process.stdout.readline())
        assert "error" not in reply, reply
        return reply["ok"]

    def create(self, row: LayoutRow, shape: Shape, cache_type: str, files: list[str]) -> KvLayout:
        # Create every rank's cache; return the layout that the connector's code finds.
        layouts = [
            self.call(
                "create", path=path, rank=rank, backend=row.backend, layers=LAYERS,
                cache_type=cache_type, order=shape.memory.order, tp=shape.tp,
                block_tokens=shape.memory.block_tokens, kv_heads=row.kv_heads,
                head_dim=LATENT_DIM if row.is_latent else HEAD_DIM, is_latent=row.is_latent,
                windows=list(row.windows), page_format=shape.memory.page_format,
            )
            for rank, path in enumerate(files)
        ]  # fmt: skip
        assert layouts.count(layouts[0]) == len(layouts)
        return msgspec.convert(layouts[0], KvLayout)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmMemory]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    memory = VllmMemory(tmp_path_factory.mktemp("vllm") / "log")
    yield memory
    memory.process.stdin.close()  # type: ignore[union-attr]
    memory.process.wait(30)


@pytest.fixture(scope="module")
def engines() -> Iterator[TwoEngines]:
    both = TwoEngines()
    yield both
    both.end()


def save(folder: Path, requests: list[Request], *, has_pages: bool) -> list[str]:
    paths = [str(folder / f"rows{group}.npy") for group in range(len(requests))]
    for path, request in zip(paths, requests, strict=True):
        np.save(path, request.rows[:, None] if has_pages else request.rows)
    return paths


@pytest.mark.parametrize("pair", TP_PAIRS, ids=lambda pair: f"{pair[0]}to{pair[1]}")
@pytest.mark.parametrize(("row", "cache_type"), CASES, ids=case_id)
def test_what_vllms_backend_reads_is_what_it_wrote_at_the_other_engine(
    row: LayoutRow,
    cache_type: str,
    pair: tuple[int, int],
    vllm: VllmMemory,
    engines: TwoEngines,
    tmp_path: Path,
) -> None:
    src, dst = (
        shape_of(row.kv_heads, row.is_latent, memory, cache_type, tp)
        for memory, tp in zip((row.source, row.sink), pair, strict=True)
    )
    files = tuple(
        [str(tmp_path / f"{side}{rank}") for rank in range(shape.tp)]
        for side, shape in (("p", src), ("d", dst))
    )
    layouts = tuple(
        vllm.create(row, shape, cache_type, names)
        for shape, names in zip((src, dst), files, strict=True)
    )
    requests = requests_of(row, src, np.random.default_rng(11))
    rows = save(tmp_path, requests, has_pages=row.source.content == "pages")
    for rank, path in enumerate(files[0]):
        for group, request in enumerate(requests):
            vllm.call("write", path=path, group=group, blocks=request.src_blocks,
                      heads=src.heads_of(rank), rows=rows[group])  # fmt: skip
    ends = engines.move(
        (layouts[0], layouts[1]),
        (files[0], files[1]),
        [Part(request.tokens, request.src_blocks, request.dst_blocks) for request in requests],
    )
    assert {kind for kind, _, _ in ends} == {"landed"}, ends
    differing = {
        (rank, group): vllm.call("differing", path=path, group=group, blocks=request.dst_blocks,
                                 heads=dst.heads_of(rank), rows=rows[group])
        for rank, path in enumerate(files[1])
        for group, request in enumerate(requests)
    }  # fmt: skip
    assert set(differing.values()) == {0}, differing
    vllm.call("forget")
