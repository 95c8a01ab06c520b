"""Tests of reading traces in Mooncake's format, also with invalid lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from planner.text_generator import BLOCK_TOKENS, BYTES_PER_TOKEN
from planner.traces import TraceError, mooncake, read_mooncake


def line(timestamp: int, tokens: int, *blocks: int, output: int = 10) -> bytes:
    fields = {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": blocks,
    }
    return json.dumps(fields).encode() + b"\n"


def test_equal_ids_are_equal_text_and_lengths_are_those_recorded() -> None:
    request, other = mooncake([line(0, 1200, 0, 5, 6), line(0, 1100, 0, 5, 7)])
    shared = 2 * BLOCK_TOKENS * BYTES_PER_TOKEN
    assert len(request.prompt()) == 1200 * BYTES_PER_TOKEN
    assert request.prompt()[:shared] == other.prompt()[:shared]
    assert request.prompt()[shared:][:100] != other.prompt()[shared:][:100]


def test_a_batch_of_one_timestamp_is_spread_over_its_three_seconds() -> None:
    requests = mooncake(
        [line(0, 5, 0), line(0, 5, 0), line(0, 5, 0), line(3000, 5, 0), line(9000, 5, 0)]
    )
    assert [request.arrival_s for request in requests] == [0.0, 1.0, 2.0, 3.0, 9.0]


def test_speed_and_limit_leave_the_spreading_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(line(0, 5, 0) for _ in range(6))))
    assert [request.arrival_s for request in read_mooncake(path, limit=3, speed=2.0)] == [
        0.0,
        0.25,
        0.5,
    ]


@pytest.mark.parametrize("bad", [b"{", b'{"timestamp": 0}', line(0, 513, 0), line(0, 0)])
def test_a_bad_line_is_named_by_file_and_number(bad: bytes) -> None:
    with pytest.raises(TraceError, match=r"^t\.jsonl:2: "):
        list(mooncake([line(0, 5, 0), bad], "t.jsonl"))


def test_empty_lines_are_passed_over_and_every_answer_has_a_token() -> None:
    (request,) = mooncake([b"\n", line(0, 5, 0, output=0)])
    assert request.output_tokens == 1
