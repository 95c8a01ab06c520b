"""Tests of the lines in the result files of a batch."""

from __future__ import annotations

import json

from gateway.batch.result_lines import result_line


def test_a_result_is_one_line_even_if_the_answer_has_several() -> None:
    raw = result_line(3, "batch_" + "0" * 32, "a", (200, "req_1", b'{\n "x": 1\n}\n'))
    assert raw.count(b"\n") == 1
    result = json.loads(raw)
    assert result["response"] == {"status_code": 200, "request_id": "req_1", "body": {"x": 1}}
    assert result["error"] is None


def test_an_answer_that_is_no_json_is_kept_as_a_string() -> None:
    raw = result_line(0, "batch_" + "0" * 32, "a", (502, "req_1", b"<html>\xff"))
    assert json.loads(raw)["response"]["body"] == "<html>�"


def test_a_request_without_an_answer_has_code_and_message() -> None:
    raw = result_line(0, "batch_" + "0" * 32, "a", None, ("batch_expired", "late"))
    result = json.loads(raw)
    assert (result["response"], result["error"]["code"]) == (None, "batch_expired")
