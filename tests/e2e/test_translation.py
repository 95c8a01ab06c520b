"""Tests of the Messages and Responses APIs with engines that only support chat completions."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.processes import gateway_process, mock_fleet
from tests.unit.gateway.protocol.translate.chats import events, message_of, response_of

CONFIG = """
models:
  - {{name: demo-8b, aliases: [claude-demo], pool: main}}
pools:
  main:
    endpoints:
      - {{url: '{0}'}}
      - {{url: '{1}'}}
"""
TASK = "Find the pump that leaks."
READ = {
    "name": "read_file",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    lacking = ("--lacks", "messages", "--lacks", "responses")
    with (
        mock_fleet(*lacking) as engines,
        gateway_process(tmp_path_factory.mktemp("translate"), CONFIG.format(*engines)) as running,
    ):
        yield running.url
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return bytes(response.read())


def chat(url: str, messages: list[dict[str, Any]], *, forced: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "demo-8b", "max_tokens": 24, "messages": messages}
    body["tools"] = [{"type": "function", "function": READ}]
    body["tool_choice"] = "required" if forced else "none"
    answer = json.loads(post(f"{url}/v1/chat/completions", body))
    return {"usage": answer["usage"], **answer["choices"][0]}


def turn(url: str, path: str, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    # Send a request; return its message or response object, assembled from events if streamed.
    data = post(f"{url}{path}", body | {"model": "claude-demo", "stream": stream})
    if not stream:
        return dict(json.loads(data))
    assert b"[DONE]" not in data
    return message_of(data) if path == "/v1/messages" else response_of(data)


def test_an_agents_session_of_messages_is_that_of_chat_completions(url: str) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    plain: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    tool = {"name": READ["name"], "description": READ["description"]}
    base = {
        "max_tokens": 24,
        "tools": [tool | {"input_schema": READ["parameters"]}],
        "metadata": {"user_id": "agent"},
    }
    for number in range(3):
        forced = number < 2
        choice = {"type": "any" if forced else "none"}
        request = base | {"messages": history, "tool_choice": choice}
        message = turn(url, "/v1/messages", request, stream=True)
        whole = turn(url, "/v1/messages", request, stream=False)
        expected = chat(url, plain, forced=forced)
        assert [block["type"] for block in message["content"]] == (
            ["tool_use"] if forced else ["text"]
        )
        assert message["model"] == whole["model"] == "claude-demo"
        assert message["stop_reason"] == whole["stop_reason"]
        usage, counts = expected["usage"], message["usage"]
        assert counts["output_tokens"] == usage["completion_tokens"]
        assert counts["input_tokens"] + counts["cache_read_input_tokens"] == usage["prompt_tokens"]
        if forced:
            call = expected["message"]["tool_calls"][0]["function"]
            assert message["content"][0]["input"] == json.loads(call["arguments"])
            assert message["content"][0]["input"] == whole["content"][0]["input"]
            block = message["content"][0]
            result = {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": f"line {number}",
            }
            history += [
                {"role": "assistant", "content": message["content"]},
                {"role": "user", "content": [result]},
            ]
            function = {
                "name": block["name"],
                "arguments": json.dumps(block["input"], separators=(",", ":")),
            }
            calls = [{"id": block["id"], "type": "function", "function": function}]
            plain += [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": block["id"], "content": f"line {number}"},
            ]
        else:
            assert message["content"] == whole["content"]
            assert message["content"][0]["text"] == expected["message"]["content"]


def test_an_agents_session_of_responses_is_that_of_chat_completions(url: str) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    plain: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    base = {"max_output_tokens": 24, "tools": [{"type": "function", **READ}], "store": False}
    for number in range(3):
        forced = number < 2
        request = base | {"input": history, "tool_choice": "required" if forced else "none"}
        response = turn(url, "/v1/responses", request, stream=True)
        whole = turn(url, "/v1/responses", request, stream=False)
        expected = chat(url, plain, forced=forced)
        usage = expected["usage"]
        assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
        assert response["usage"]["output_tokens"] == usage["completion_tokens"]
        assert (response["model"], response["status"]) == (whole["model"], whole["status"])
        item = response["output"][0]
        if forced:
            call = expected["message"]["tool_calls"][0]["function"]
            assert (item["type"], item["arguments"]) == ("function_call", call["arguments"])
            assert item["arguments"] == whole["output"][0]["arguments"]
            result = {"type": "function_call_output", "call_id": item["call_id"]}
            history += [item, result | {"output": f"line {number}"}]
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls = [{"id": item["call_id"], "type": "function", "function": function}]
            plain += [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": item["call_id"], "content": f"line {number}"},
            ]
        else:
            assert item["content"][0]["text"] == expected["message"]["content"]
            assert item["content"] == whole["output"][0]["content"]


def test_the_sdk_reads_a_translated_stream(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as sdk:
        with sdk.responses.stream(model="demo-8b", input=TASK, max_output_tokens=24) as stream:
            seen = list(stream)
        last = seen[-1]
        assert last.type == "response.incomplete"
        text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
        assert last.response.output_text == text != ""


def test_tokens_are_counted_without_generating(url: str) -> None:
    body = {"model": "demo-8b", "messages": [{"role": "user", "content": TASK}]}
    counted = json.loads(post(f"{url}/v1/messages/count_tokens", body))
    answer = json.loads(post(f"{url}/v1/chat/completions", body | {"max_tokens": 1}))
    assert counted == {"input_tokens": answer["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(
    ("path", "members", "param"),
    [
        ("/v1/messages", {"container": "c"}, "container"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(
    url: str, path: str, members: dict[str, Any], param: str
) -> None:
    base: dict[str, Any] = {"model": "demo-8b", "max_tokens": 5, "messages": []}
    if path == "/v1/responses":
        base = {"model": "demo-8b", "input": "x"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(url + path, base | members)
    assert refused.value.code == 400
    assert param in json.load(refused.value)["error"]["message"]


def test_events_of_a_translated_stream_have_the_name_that_was_asked_for(url: str) -> None:
    body = {"model": "claude-demo", "max_tokens": 5, "stream": True}
    body |= {"messages": [{"role": "user", "content": TASK}]}
    start = events(post(f"{url}/v1/messages", body))[0]
    assert start["message"]["model"] == "claude-demo"


TENANTS = """
tenants:
  - {{name: a, key: '${{file:{1}/a}}'}}
  - {{name: b, key: '${{file:{1}/b}}'}}
models:
  - {{name: demo-8b, pool: main}}
pools:
  main:
    endpoints:
      - {{url: '{0}'}}
"""


def test_isolated_tenants_share_no_cached_messages(tmp_path: Path) -> None:
    body = {
        "model": "demo-8b",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "the same long question " * 100}],
    }

    def cached(url: str, key: str) -> int:
        request = urllib.request.Request(
            f"{url}/v1/messages",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-api-key": key},
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            return int(json.load(response)["usage"].get("cache_read_input_tokens") or 0)

    for name in "ab":
        (tmp_path / name).write_text(f"sk-{name}")
    with (
        mock_fleet() as engines,
        gateway_process(tmp_path, TENANTS.format(engines[0], tmp_path)) as running,
    ):
        assert cached(running.url, "sk-a") == 0
        assert cached(running.url, "sk-b") == 0
        assert cached(running.url, "sk-a") > 0
        assert cached(running.url, "sk-b") > 0
