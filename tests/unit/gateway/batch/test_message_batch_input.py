"""Tests of the input file of a message batch: it is written in slices, and checked on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.batch.input_lines import SLICE_BYTES
from gateway.batch.message_batch_input import MessageLines
from gateway.protocol.errors import Failure, GatewayError


def item(custom_id: str, text: str, **members: Any) -> dict[str, Any]:
    params = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "params": params | members}


def written(body: bytes, max_lines: int = 9, max_body: int = 1 << 20) -> list[bytes]:
    lines = MessageLines(body, max_lines, max_body)
    slices = list(iter(lines.next, b""))
    assert lines.count == sum(text.count(b"\n") for text in slices)
    return slices


def refusal(body: bytes, **limits: int) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        written(body, **limits)
    return caught.value


@pytest.mark.parametrize("indent", [None, 2])
def test_each_request_is_one_line_however_the_body_is_laid_out(indent: int | None) -> None:
    requests = [item("a", 'x\n"]}'), item("b", "é", stop_sequences=["\r"])]
    text = b"".join(written(json.dumps({"requests": requests}, indent=indent).encode()))
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    assert [line["body"] for line in lines] == [request["params"] for request in requests]
    assert {(line["method"], line["url"]) for line in lines} == {("POST", "/v1/messages")}


def test_a_long_body_is_decoded_in_slices() -> None:
    each = 1000
    requests = [item(str(number), "x" * each) for number in range(4000)]
    slices = written(json.dumps({"requests": requests}).encode(), 4000)
    assert all(SLICE_BYTES <= len(text) < SLICE_BYTES + each + 500 for text in slices[:-1])
    assert len(slices) > 4000 * each // (SLICE_BYTES + each + 500)


def test_what_follows_an_invalid_request_is_not_decoded() -> None:
    first, second = json.dumps(item("a", "x")), json.dumps(item("a", "y"))
    error = refusal(f'{{"requests": [{first}, {second}, no JSON'.encode())
    assert error.param == "requests[1].custom_id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"requests": []}, "requests"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0]"),
        ({"requests": [item("a", "x"), 7]}, "requests[1]"),
        ({"requests": [item("a", "x"), item("b", "x", stream=True)]}, "requests[1].params.stream"),
        ({"requests": [item("a", "x" * 2000)]}, "requests[0].params"),
        ({"requests": [item(str(number), "x") for number in range(10)]}, "requests[9].params"),
        ({"requests": "x"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_a_body_that_cannot_run_is_refused(body: object, param: str | None) -> None:
    error = refusal(json.dumps(body).encode(), max_body=1000)
    assert (error.failure, error.param) == (Failure.BAD_REQUEST, param)
