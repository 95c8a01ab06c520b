"""Tests of which input files the Batch API accepts."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from io import BufferedReader, BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.input_lines import (
    MAX_PROBLEMS,
    SLICE_BYTES,
    InputChecker,
    InputLines,
)

ENDPOINT = "/v1/chat/completions"


def line(custom_id: str = "a", **members: Any) -> bytes:
    body = {"model": "m", "messages": []}
    whole = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(whole | members).encode()


def problems(*lines: bytes, max_lines: int = 10, max_body: int = 1000) -> list[str]:
    checker = InputChecker(ENDPOINT, max_lines, max_body)
    for raw in lines:
        checker.check(raw)
    return [problem.code for problem in checker.finish()]


def test_a_valid_file_has_no_problem_and_names_its_model() -> None:
    checker = InputChecker(ENDPOINT, 2, 1000)
    checker.check(line("a"))
    checker.check(line("b"))
    assert checker.finish() == ()
    assert (checker.lines, checker.model) == (2, "m")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"not json", "invalid_json_line"),
        (b"[" * 5_000, "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        (line(custom_id="x" * 513), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint"),
        (line(body=[1]), "invalid_body"),
        (line(body={"messages": []}), "missing_model"),
        (line(body={"model": 3}), "missing_model"),
        (line(body={"model": "m", "stream": True}), "invalid_body"),
        (line(body={"model": "m", "background": True}), "invalid_body"),
        (line(body={"model": "m", "x": "y" * 1000}), "body_too_large"),
        (line(body={"model": "m", "x": "y" * 9000})[:6000], "body_too_large"),
    ],
)
def test_each_kind_of_invalid_line_has_its_code(raw: bytes, code: str) -> None:
    assert problems(raw) == [code]


def test_an_empty_file_and_one_that_is_too_long_are_refused() -> None:
    assert problems() == ["empty_file"]
    assert problems(*(line(str(number)) for number in range(11))) == ["too_many_tasks"]


def test_the_number_of_reported_problems_is_bounded() -> None:
    assert len(problems(*[b"x"] * 500, max_lines=1000)) <= 500
    checker = InputChecker(ENDPOINT, 1000, 1000)
    for _ in range(MAX_PROBLEMS):
        checker.check(b"x")
    assert checker.is_full


@given(st.lists(st.sampled_from("abc"), max_size=8))
def test_a_custom_id_may_be_used_once(ids: list[str]) -> None:
    found = problems(*map(line, ids), max_lines=100) if ids else []
    assert found == ["duplicate_custom_id"] * (len(ids) - len(set(ids)))


def file_of(*parts: bytes) -> BufferedReader:
    return BufferedReader(BytesIO(b"".join(parts)))  # type: ignore[arg-type]


@pytest.mark.parametrize("mark", [b"", BOM_UTF8])
def test_lines_are_found_with_either_line_end_and_without_mark_and_blank_lines(
    mark: bytes,
) -> None:
    file = file_of(mark, line("a"), b"\n\r\n", line("b"), b"\r\n  \n", line("c"))
    lines, seen = InputLines(), list[bytes]()
    assert not lines.scan(file, 1000, seen.append)
    assert lines.count == len(seen) == 3
    assert [lines.read(file, number).custom_id for number in (2, 0, 1)] == ["c", "a", "b"]
    assert problems(*seen) == []
    offset, size = lines.span(0)
    file.seek(offset)
    assert file.read(size) == seen[0]


def test_a_blank_line_may_follow_a_byte_order_mark() -> None:
    lines, seen = InputLines(), list[bytes]()
    lines.scan(file_of(BOM_UTF8, b"\r\n", line("a"), b"\r\n"), 1000, seen.append)
    assert (lines.count, problems(*seen)) == (1, [])


def test_a_byte_order_mark_before_a_later_line_is_an_invalid_line() -> None:
    seen: list[bytes] = []
    InputLines().scan(file_of(line("a"), b"\n", BOM_UTF8, line("b")), 1000, seen.append)
    assert problems(*seen) == ["invalid_json_line"]


def test_a_large_file_is_read_in_slices() -> None:
    number = 2 * SLICE_BYTES // len(line("a"))
    file, lines, slices = file_of(*[line("a") + b"\n"] * number), InputLines(), 1
    while lines.scan(file, 1000, lambda _: None):
        slices += 1
    assert (slices, lines.count) == (3, number)


def test_a_line_that_is_too_long_ends_the_file() -> None:
    lines, seen = InputLines(), list[bytes]()
    assert not lines.scan(file_of(b"x" * 2000, b"\n", line("b")), 1000, seen.append)
    assert list(map(len, seen)) == [1001]
