"""Tests of the error table, its list in docs/api.md, and the conversion of engines' errors."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from gateway.protocol.errors import (
    Failure,
    GatewayError,
    error_body,
    error_event,
    new_request_id,
    openai_error_body,
    reason_phrase,
    retry_headers,
)
from gateway.protocol.request.api_call import ENGINE_INTERNAL

API_PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
OPENAI = {"message", "type", "param", "code"}


def parse_error(body: bytes) -> dict[str, Any]:
    decoded = json.loads(body)
    assert set(decoded) == {"error"}
    assert set(decoded["error"]) == OPENAI
    return dict(decoded["error"])


@pytest.mark.parametrize("failure", Failure)
def test_every_failure_is_an_openai_error_with_retry_advice_or_none(failure: Failure) -> None:
    row = failure.value
    error = GatewayError(failure, "why", param="n")
    assert parse_error(error_body(error)) == {
        "message": "why",
        "type": row.error_type,
        "param": "n",
        "code": row.code,
    }
    assert error.status == row.status
    assert HTTPStatus(row.status).phrase
    advice = dict(retry_headers(error)).get("x-should-retry")
    assert advice == (None if row.should_retry is None else "true" if row.should_retry else "false")
    assert error.reason == failure.name.lower()


def test_clients_may_retry_only_overload_and_engine_failures() -> None:
    assert {
        failure.value.status for failure in Failure if failure.value.should_retry is not False
    } == {
        429,
        502,
        503,
        504,
    }


@pytest.mark.parametrize(
    ("seconds", "ms", "whole"), [(0.0, "1", "1"), (0.25, "250", "1"), (12.4, "12400", "13")]
)
def test_retry_after_is_sent_in_milliseconds_and_in_whole_seconds(
    seconds: float, ms: str, whole: str
) -> None:
    headers = dict(retry_headers(GatewayError(Failure.OVERLOADED, "full", retry_after_s=seconds)))
    assert headers == {"retry-after-ms": ms, "retry-after": whole}


@pytest.mark.parametrize(("seconds", "time"), [(None, None), (200.0, "200")])
def test_a_client_that_should_not_return_soon_is_told_so(
    seconds: float | None, time: str | None
) -> None:
    error = GatewayError(
        Failure.SHED, "full", retry_after_s=seconds, may_return=seconds is not None
    )
    headers = dict(retry_headers(error))
    assert (headers["x-should-retry"], headers.get("retry-after")) == ("false", time)


def test_an_error_in_a_stream_is_one_event_with_an_error_in_it() -> None:
    event = error_event(Failure.UPSTREAM_FAILED, "gone\n\nreally")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert parse_error(event[6:])["code"] == "stream_interrupted"


MESSAGE = "This model's maximum context length is 64 tokens"
SHAPES = {
    "vLLM": {
        "error": {"message": MESSAGE, "type": "BadRequestError", "param": "prompt", "code": 400}
    },
    "SGLang": {
        "object": "error",
        "message": MESSAGE,
        "type": "BadRequestError",
        "param": "prompt",
        "code": 400,
    },
    "TensorRT-LLM": {
        "object": "error",
        "message": MESSAGE,
        "type": "invalid",
        "param": "prompt",
        "code": 400,
    },
    "OpenAI": {
        "error": {
            "message": MESSAGE,
            "type": "x",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_error_object_of_every_engine_is_converted_to_openais(shape: dict[str, Any]) -> None:
    assert parse_error(openai_error_body(400, json.dumps(shape).encode())) == {
        "message": MESSAGE,
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b'{"error": "Unauthorized"}', "Unauthorized"),
        (400, b'"a bare string"', "a bare string"),
        (404, b'{"detail": "Not Found"}', "Not Found"),
        (
            422,
            b'{"detail": [{"loc": ["body"], "msg": "field required"}]}',
            '"msg":"field required"',
        ),
        (400, b"", "Bad Request"),
        (400, b"<html>nginx</html>", "Bad Request"),
        (422, b"missing field `messages` at line 1\r\n", "missing field `messages` at line 1"),
        (400, b"a\x1b[31mb", "Bad Request"),
        (400, b"x" * 5000, "x" * 2048),
        (400, b'{"error": {"message": "cut o', "Bad Request"),
        (400, b"\xff\xfe", "Bad Request"),
        (400, b"[1, 2]", "Bad Request"),
        (400, b"null", "Bad Request"),
        (400, b'{"error": null}', "Bad Request"),
        (400, b'{"error": {"message": ""}}', "Bad Request"),
        (400, b'{"error": {"message": {"a": 1}, "param": 3, "code": 400}}', "a"),
        (400, b"[" * 100_000, "Bad Request"),
        (460, b"", "Error"),
    ],
)
def test_other_error_bodies_keep_their_message_or_get_the_reason_phrase(
    status: int, body: bytes, message: str
) -> None:
    error = parse_error(openai_error_body(status, body))
    assert message in error["message"]
    assert error["param"] is None
    assert error["code"] is None


def test_an_unknown_model_at_the_engine_has_the_code_model_not_found() -> None:
    body = {
        "error": {
            "message": "The model does not exist",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
    assert (
        parse_error(openai_error_body(404, json.dumps(body).encode()))["code"] == "model_not_found"
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (422, "invalid_request_error"),
        (500, "server_error"),
    ],
)
def test_the_error_type_depends_on_the_status(status: int, kind: str) -> None:
    assert parse_error(openai_error_body(status, b""))["type"] == kind


def test_unregistered_statuses_have_a_phrase_too() -> None:
    assert reason_phrase(404) == "Not Found"
    assert reason_phrase(499) == "Error"


def test_request_ids_have_one_form() -> None:
    assert re.fullmatch(r"req_[0-9a-f]{32}", new_request_id())
    assert new_request_id() != new_request_id()


def test_the_api_page_has_exactly_the_rows_of_the_table() -> None:
    rows = re.findall(
        r"^\| (\d{3}) \| `(\w+)` \| (?:`(\w+)`|–) \| (no|yes) \|", API_PAGE, re.MULTILINE
    )
    expected = [
        (
            str(row.status),
            row.error_type,
            row.code or "",
            "no" if row.should_retry is False else "yes",
        )
        for row in (failure.value for failure in Failure)
    ]
    assert sorted(rows) == sorted(expected)


def test_the_api_page_names_every_dropped_member() -> None:
    assert {name for name in ENGINE_INTERNAL if f"`{name}`" not in API_PAGE} == set()
