"""Tests that code named in the documentation exists."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtransfer.penstock_kv
from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_files import MemoryFileRegion
from tests.unit.docs.test_pages import ROOT, WRITTEN

WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
SOURCES = re.compile(r"\.(py|c|h|js|html|css|yaml|yml|toml|json|sh|tpl|txt|tsv|lock)$|/[A-Za-z]+$")
OF_OTHER_PROJECTS = {
    "code_interpreter",
    *("serverAuth", "clientAuth", "serverName", "starting_after", "prompt_cache_breakpoint"),
    *("NAMESPACE__NAME", "manylinux_2_28_x86_64", "LimitNOFILE", "req_6964"),
    *("ListBucket", "ListBucketMultipartUploads"),
}
BUILT_FROM_PARTS = {
    *("nixl_bytes_transferred", "mooncake_bytes_transferred", "nixl_num_failed_transfers"),
    *("nixl_xfer_time_seconds", "nixl_num_kv_expired_reqs", "status_400"),
}
DECISIONS = "docs/decisions/"  # decision records keep the names of their time
# upgrading.md lists old names; clients.md lists names of clients in other languages.
EXEMPT = {"docs/upgrading.md", "docs/clients.md"}
COUNTER = re.compile(r"^(mock:|vllm:)?\w+_total$")  # counters' names are built from parts


@cache
def words_of_the_sources() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    words: set[str] = set()
    for name in listed.split("\0"):
        if not SOURCES.search(name) or name == "tests/architecture/renamed.tsv":
            continue
        path = ROOT / name
        words.update(WORD.findall(name))
        if path.is_file():
            words.update(WORD.findall(path.read_text(errors="ignore")))
    return words


def identifiers(page: str) -> set[str]:
    # Return the words in backticks that can only be code: with an underscore, or in CamelCase.
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return {
        word
        for code in re.findall(r"`([^`\n]+)`", text)
        if not COUNTER.match(code)
        for word in WORD.findall(code)
        # `-k word` selects tests by the beginning of their names.
        if not word.endswith("_") and f"-k {word}" not in code
        if re.search(r"[a-z0-9]_[a-z0-9]|[a-z][A-Z]", word)
    }


@pytest.mark.parametrize(
    "name", [name for name in sorted(WRITTEN.keys() - EXEMPT) if not name.startswith(DECISIONS)]
)
def test_an_identifier_in_backticks_occurs_in_the_sources(name: str) -> None:
    missing = identifiers(WRITTEN[name]) - words_of_the_sources()
    assert missing <= OF_OTHER_PROJECTS | BUILT_FROM_PARTS


async def test_the_example_of_an_engine_moves_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", WRITTEN["docs/kvtransfer.md"], re.DOTALL)
    layout = KvLayout(2, 2, 16, KvDtype.BF16, 4)
    names: dict[str, Any] = {"LAYERS": layout.layers}
    # The name under which it is installed; these are the sources next to this test.
    monkeypatch.setitem(sys.modules, "penstock_kv", kvtransfer.penstock_kv)
    exec(compile(textwrap.dedent(example), "docs/kvtransfer.md", "exec"), names)
    regions = [
        MemoryFileRegion.create(4, layout.rank_block_bytes(0), name=role)
        for role in ("source", "sink")
    ]
    regions[0].bytes[:] = np.arange(regions[0].bytes.size, dtype=np.uint8)
    source, sink = (
        names["agent_of"](role, layout, [region], b"a key of this test")
        for role, region in zip(("prefill-0", "decode-0"), regions, strict=True)
    )
    handed_over: list[tuple[str, str]] = []
    await source.start()
    await sink.start()
    try:
        prefill = asyncio.create_task(
            names["prefill"](source, "r", [1, 2], 8, lambda *handoff: handed_over.append(handoff))
        )
        while not handed_over:
            await asyncio.sleep(0)
        assert await names["decode"](sink, "r", [3, 0], 8, *handed_over[0])
        await prefill
        size = layout.rank_block_bytes(0)
        for taken, given in ((3, 1), (0, 2)):
            sent = regions[0].bytes[given * size : (given + 1) * size]
            assert np.array_equal(regions[1].bytes[taken * size : (taken + 1) * size], sent)
    finally:
        await source.close()
        await sink.close()
        for region in regions:
            region.close()
