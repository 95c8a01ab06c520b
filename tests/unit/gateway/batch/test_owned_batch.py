"""Tests of how the lines of a batch's input file are found."""

from __future__ import annotations

from io import BufferedReader, BytesIO
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.batch.file_and_batch_objects import BatchRecord
from gateway.batch.input_lines import InputChecker
from gateway.batch.owned_batch import OwnedBatch
from gateway.batch.storage_threads import StorageThreads

MARK = b"\xef\xbb\xbf"
RECORD = BatchRecord("batch_1", "", "", "/v1/completions", "file-1", "24h", 0, 1)


def line(name: str) -> bytes:
    return (
        b'{"custom_id": "%b", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}'
        % name.encode()
    )


def claimed(content: bytes) -> Any:
    # Return a claimed batch that has no more than an input file.
    return SimpleNamespace(
        record=RECORD,
        open_input=lambda: BufferedReader(cast("Any", BytesIO(content))),
        read_input=lambda offset, size: content[offset : offset + size],
    )


@pytest.mark.parametrize(
    "content",
    [
        MARK + line("a") + b"\n" + line("b"),
        MARK + line("a") + b"\r\n" + line("b") + b"\r\n\r\n",
        MARK + b"\r\n" + line("a") + b"\r\n" + line("b") + b"\r\n",
        line("a") + b"\n\n" + line("b") + b"\n \n",
    ],
)
async def test_a_byte_order_mark_and_blank_lines_are_skipped(content: bytes) -> None:
    threads = StorageThreads(1)
    try:
        batch = OwnedBatch(cast("Any", None), claimed(content), threads)
        checker = InputChecker("/v1/completions", 10, 1000)
        await batch.check(checker, 5000)
        assert checker.finish() == ()
        assert batch.total == checker.lines == 2
        assert [(await batch.read(number)).custom_id for number in range(2)] == ["a", "b"]
    finally:
        threads.close()


async def test_a_byte_order_mark_before_a_later_line_is_an_invalid_line() -> None:
    threads = StorageThreads(1)
    try:
        content = line("a") + b"\n" + MARK + line("b")
        batch = OwnedBatch(cast("Any", None), claimed(content), threads)
        checker = InputChecker("/v1/completions", 10, 1000)
        await batch.check(checker, 5000)
        assert [(each.code, each.line) for each in checker.finish()] == [("invalid_json_line", 2)]
    finally:
        threads.close()
