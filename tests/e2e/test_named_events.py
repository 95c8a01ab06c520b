"""Tests of the Messages and Responses APIs over raw sockets and SDKs, through a gateway."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai import OpenAI

from mockgpu.mock_tokenizer import expected_text
from tests.e2e.processes import gateway_process, mock_fleet

TEXT = "How deep is the reservoir behind the dam?"
CONFIG = """
models:
  - {{name: demo-8b, aliases: [claude-demo], pool: main}}
  - {{name: renamed, served_model: demo-8b, pool: main}}
pools:
  main:
    endpoints:
      - {{url: '{0}'}}
      - {{url: '{1}'}}
"""
MESSAGE: dict[str, Any] = {
    "model": "demo-8b",
    "max_tokens": 12,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
RESPONSE: dict[str, Any] = {
    "model": "demo-8b",
    "max_output_tokens": 12,
    "instructions": "Be brief.",
    "input": TEXT,
}
WORDS = expected_text({"messages": CHAT}, 12)
BODIES = {"/v1/messages": MESSAGE, "/v1/responses": RESPONSE}


class Setup(NamedTuple):
    url: str
    engines: list[str]
    sdk: OpenAI


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with (
        mock_fleet() as engines,
        gateway_process(tmp_path_factory.mktemp("named"), CONFIG.format(*engines)) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=20) as sdk,
    ):
        yield Setup(running.url, list(engines), sdk)
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def sent(url: str, body: dict[str, Any], method: str = "POST") -> tuple[int, str, str]:
    # Send a request as Claude Code does; return status, content type and body.
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.headers["content-type"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read().decode()


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    parts = [part.split("\n") for part in text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in parts]


def plain(answer: Any) -> Any:
    if isinstance(answer, list):
        return [plain(part) for part in answer]
    if not isinstance(answer, dict):
        return answer
    varying = ("id", "item_id", "call_id", "created_at", "usage")
    return {name: plain(value) for name, value in answer.items() if name not in varying}


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_whole_answer_is_the_engine_s_own(setup: Setup, path: str) -> None:
    status, _, text = sent(f"{setup.url}{path}?beta=true", BODIES[path])
    engine = json.loads(sent(setup.engines[0] + path, BODIES[path])[2])
    assert (status, plain(json.loads(text))) == (200, plain(engine))
    assert WORDS in text


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_stream_has_the_engine_s_events_in_order(setup: Setup, path: str) -> None:
    body = {**BODIES[path], "stream": True}
    status, kind, text = sent(setup.url + path, body)
    engine = events(sent(setup.engines[0] + path, body)[2])
    assert (status, kind.split(";")[0]) == (200, "text/event-stream")
    assert [(name, plain(data)) for name, data in events(text)] == [
        (name, plain(data)) for name, data in engine
    ]


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["claude-demo", "renamed"])
def test_the_answer_names_the_model_that_was_asked_for(
    setup: Setup, path: str, stream: bool, name: str
) -> None:
    _, _, text = sent(setup.url + path, {**BODIES[path], "model": name, "stream": stream})
    assert f'"model":"{name}"' in text
    assert '"model":"demo-8b"' not in text


def test_tokens_of_a_message_are_counted_without_generating(setup: Setup) -> None:
    body = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
    status, _, text = sent(setup.url + "/v1/messages/count_tokens?beta=true", body)
    usage = json.loads(sent(setup.url + "/v1/messages", MESSAGE)[2])["usage"]
    counted = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (status, json.loads(text)) == (200, {"input_tokens": counted})


def ids(url: str, body: dict[str, Any] | None, method: str) -> tuple[str | None, str | None]:
    # Return the id of an answer in Penstock's header, and that in the header of Anthropic's API.
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            found = response.headers
            response.read()
    except urllib.error.HTTPError as error:
        found = error.headers
    return found["x-request-id"], found["request-id"]


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/v1/messages", MESSAGE, "POST"),
        ("/v1/messages", {**MESSAGE, "stream": True}, "POST"),
        ("/v1/messages/count_tokens", MESSAGE, "POST"),
        ("/v1/messages", {**MESSAGE, "model": "nothing"}, "POST"),
        ("/v1/messages", {**MESSAGE, "max_tokens": 10**6}, "POST"),  # the engine refuses it
        ("/v1/messages", {}, "PUT"),
        ("/v1/models", None, "GET"),
        ("/v1/models/demo-8b", None, "GET"),
    ],
)
def test_answers_of_anthropic_s_api_have_their_id_where_its_sdk_looks(
    setup: Setup, path: str, body: dict[str, Any] | None, method: str
) -> None:
    own, theirs = ids(setup.url + path, body, method)
    assert own
    assert theirs == own


def test_answers_of_other_apis_have_their_id_in_one_header(setup: Setup) -> None:
    own, theirs = ids(setup.url + "/v1/responses", BODIES["/v1/responses"], "POST")
    assert own
    assert theirs is None


def test_refusals_on_messages_have_anthropic_s_shape(setup: Setup) -> None:
    cases = [
        ({**MESSAGE, "model": "nothing"}, "POST", 404, "not_found_error"),
        ({"model": "demo-8b"}, "POST", 400, "invalid_request_error"),
        ({**MESSAGE, "max_tokens": "x"}, "POST", 400, "invalid_request_error"),
        ({**MESSAGE, "max_tokens": 10**6}, "POST", 400, "invalid_request_error"),
        ({}, "PUT", 405, "invalid_request_error"),
    ]
    for body, method, expected, kind in cases:
        status, _, text = sent(setup.url + "/v1/messages", body, method)
        error = json.loads(text)
        assert (status, error["type"], error["error"]["type"]) == (expected, "error", kind)
        assert set(error["error"]) == {"type", "message"}


def test_a_forced_tool_is_called_with_arguments_that_parse(setup: Setup) -> None:
    schema = {"type": "object", "properties": {"words": {"type": "string"}}}
    tool = {"name": "look", "input_schema": schema}
    body = {**MESSAGE, "tools": [tool], "tool_choice": {"type": "tool", "name": "look"}}
    (block,) = json.loads(sent(setup.url + "/v1/messages", body)[2])["content"]
    assert (block["type"], block["name"], set(block["input"])) == ("tool_use", "look", {"words"})
    stream = events(sent(setup.url + "/v1/messages", {**body, "stream": True})[2])
    pieces = [data["delta"]["partial_json"] for name, data in stream if name.endswith("_delta")
              and "partial_json" in data["delta"]]  # fmt: skip
    assert json.loads("".join(pieces)) == block["input"]


def test_the_sdk_s_responses_have_text_usage_and_events(setup: Setup) -> None:
    whole = setup.sdk.responses.create(**RESPONSE)
    assert (whole.output_text, whole.status) == (WORDS, "incomplete")
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    with setup.sdk.responses.stream(**RESPONSE) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == WORDS


def test_the_sdk_s_function_call_parses(setup: Setup) -> None:
    tool: Any = {
        "type": "function", "name": "look", "strict": False,
        "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
    }  # fmt: skip
    answer = setup.sdk.responses.create(**RESPONSE, tools=[tool], tool_choice="required")
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, set(json.loads(call.arguments))) == ("look", {"words"})


SCHEMA = {"type": "object", "properties": {"depth": {"type": "string"}}, "required": ["depth"]}
FORMAT = {"type": "json_schema", "name": "depth", "schema": SCHEMA}
FORMATS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/responses": {"text": {"format": FORMAT}},
}


@pytest.mark.parametrize("path", sorted(BODIES))
def test_structured_output_fits_its_schema_streamed_or_not(setup: Setup, path: str) -> None:
    body = {**BODIES[path], **FORMATS[path]}
    answer = json.loads(sent(setup.url + path, body)[2])
    parts = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
    assert json.loads(parts[0]["text"]).keys() == {"depth"}
    stream = events(sent(setup.url + path, {**body, "stream": True})[2])
    deltas = [data["delta"] for name, data in stream if name.endswith("delta") and "delta" in data]
    pieces = [each if isinstance(each, str) else each.get("text", "") for each in deltas]
    assert "".join(pieces) == parts[0]["text"]


def test_an_engine_that_dies_after_it_announced_a_response_is_replaced(setup: Setup) -> None:
    sent(setup.engines[0] + "/mock/fault", {"spec": "cut:after=0"})
    try:
        for _ in range(4):
            stream = events(sent(setup.url + "/v1/responses", {**RESPONSE, "stream": True})[2])
            assert stream[-1][0] == "response.incomplete"
            assert [data["sequence_number"] for _, data in stream] == list(range(len(stream)))
    finally:
        sent(setup.engines[0] + "/mock/fault", {}, "DELETE")


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_stream_that_breaks_ends_with_the_api_s_error_event(setup: Setup, path: str) -> None:
    for engine in setup.engines:
        sent(engine + "/mock/fault", {"spec": "cut:after=4"})
    try:
        _, _, text = sent(setup.url + path, {**BODIES[path], "stream": True})
        assert events(text)[-1][0] == "error"
        if path == "/v1/responses":
            with pytest.raises(openai.APIError):
                list(setup.sdk.responses.create(**RESPONSE, stream=True))
    finally:
        # Later tests may find both endpoints ejected.
        for engine in setup.engines:
            sent(engine + "/mock/fault", {}, "DELETE")
