"""Tests that one agent session works with engines that support its API, and with others.

The APIs are Messages and Responses. For other engines, the gateway translates them to chats.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from tests import recorded_clients
from tests.e2e.processes import gateway_process, mock_fleet
from tests.unit.gateway.protocol.translate.chats import events, message_of, response_of

CONFIG = """
models:
  - {{name: native, served_model: demo-8b, pool: native}}
  - {{name: translated, served_model: demo-8b, pool: translated}}
pools:
  native: {{endpoints: [{{url: '{0}'}}]}}
  translated: {{endpoints: [{{url: '{1}'}}]}}
"""
TRANSLATED = [
    name
    for name in recorded_clients.names()
    if not name.endswith(("-completions", "-chat", "-compatible", "-stored"))
]
"""Recorded sessions of Messages and Responses, except those with stored responses."""
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TASK = "Find the pump that leaks, and say which it is."
FILES = ["pump-1: dry", "pump-2: dry", "pump-3: wet"]


def message_requests() -> list[dict[str, Any]]:
    tool = {"name": "read_file", "description": "Read a file.", "input_schema": SCHEMA}
    system = [{"type": "text", "text": "You look after pumps.", "cache_control": {}}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    requests = []
    for number, content in enumerate([*FILES, ""]):
        choice = {"type": "tool", "name": "read_file"} if content else {"type": "none"}
        base = {"max_tokens": 20, "system": system, "tools": [tool], "tool_choice": choice}
        requests.append(base | {"messages": list(turns)})
        call = {"type": "tool_use", "id": f"call_{number}", "name": "read_file"}
        result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": content}
        text = {"type": "text", "text": f"I read file {number}."}
        turns += [
            {"role": "assistant", "content": [text, call | {"input": {"path": f"{number}.txt"}}]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ]
    return requests


def response_requests() -> list[dict[str, Any]]:
    tool = {"type": "function", "name": "read_file", "description": "Read a file."}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]}
    ]
    requests = []
    for number, content in enumerate([*FILES, ""]):
        requests.append(
            {
                "max_output_tokens": 20,
                "instructions": "You look after pumps.",
                "tools": [tool | {"parameters": SCHEMA, "strict": False}],
                "tool_choice": "required" if content else "none",
                "input": list(items),
                "store": False,
                "include": ["reasoning.encrypted_content"],
            }
        )
        text = {"type": "output_text", "text": f"I read file {number}.", "annotations": []}
        call = {"type": "function_call", "call_id": f"call_{number}", "name": "read_file"}
        output = {"type": "function_call_output", "call_id": f"call_{number}"}
        items += [
            {"type": "message", "role": "assistant", "content": [text]},
            call | {"arguments": f'{{"path":"{number}.txt"}}'},
            output | {"output": content},
        ]
    return requests


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    caps = ("--may-end-from", "1024")  # agents allow 32,000 tokens
    lacking = ("--lacks", "messages", "--lacks", "responses")
    with (
        mock_fleet(*caps) as native,
        mock_fleet(*caps, *lacking) as other,
        gateway_process(
            tmp_path_factory.mktemp("session"), CONFIG.format(native[0], other[0])
        ) as running,
    ):
        yield running.url
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def post(url: str, path: str, body: dict[str, Any]) -> bytes:
    return post_text(url, path, json.dumps(body))


def post_text(url: str, path: str, body: str) -> bytes:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, body.encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return bytes(response.read())


def event_order(data: bytes) -> list[str]:
    # Return the names of the events in a stream; consecutive deltas count once.
    return [name for name, _ in groupby(event["type"] for event in events(data))]


def comparable_parts(answer: dict[str, Any]) -> Any:
    # Return the parts of a message or response that must agree.
    #
    # They are texts, tool calls, token counts and the reason of the end.
    usage, parts = answer["usage"], answer.get("content") or answer["output"]
    shown = [
        {key: part[key] for key in ("type", "text", "name", "input", "arguments") if key in part}
        | ({"texts": [piece["text"] for piece in part["content"]]} if "content" in part else {})
        for part in parts
    ]
    end = answer.get("stop_reason"), answer.get("status"), answer.get("incomplete_details")
    cached = usage.get("cache_read_input_tokens", usage.get("input_tokens_details"))
    cached = cached["cached_tokens"] if isinstance(cached, dict) else cached
    return shown, end, usage["input_tokens"], cached, usage["output_tokens"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_session_has_equal_texts_calls_counts_and_events(url: str, path: str) -> None:
    requests = message_requests() if path == "/v1/messages" else response_requests()
    kinds = []
    for request in requests:
        native, other = (
            post(url, path, request | {"model": model, "stream": True})
            for model in ("native", "translated")
        )
        assert event_order(native) == event_order(other)
        answers = [
            message_of(data) if path == "/v1/messages" else events(data)[-1]["response"]
            for data in (native, other)
        ]
        assert comparable_parts(answers[0]) == comparable_parts(answers[1])
        kinds.append(comparable_parts(answers[0])[0][0]["type"])
    assert len(set(kinds[:3])) == 1
    assert kinds[3] != kinds[0]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_whole_answers_of_a_session_are_equal_too(url: str, path: str) -> None:
    requests = message_requests() if path == "/v1/messages" else response_requests()
    for request in requests:
        native, other = (
            json.loads(post(url, path, request | {"model": model}))
            for model in ("native", "translated")
        )
        assert comparable_parts(native) == comparable_parts(other)
        assert (native["model"], other["model"]) == ("native", "translated")


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_recorded_session_of_a_client_is_equal_turn_by_turn(url: str, name: str) -> None:
    calls = 0
    for request in recorded_clients.load(name).requests:
        read = message_of if request.path == "/v1/messages" else response_of
        native, other = (
            post_text(url, request.target, named(request.body, model))
            for model in ("native", "translated")
        )
        assert event_order(native) == event_order(other)
        first, second = comparable_parts(read(native)), comparable_parts(read(other))
        assert first == second
        calls += any(part["type"] in ("tool_use", "function_call") for part in first[0])
    assert calls == 1


def named(body: str, model: str) -> str:
    other, count = re.subn(r'("model": ?")[^"]+', rf"\g<1>{model}", body, count=1)
    assert count == 1
    return other


def test_counted_tokens_are_equal(url: str) -> None:
    request = message_requests()[2]
    del request["max_tokens"]
    counts = [
        json.loads(post(url, "/v1/messages/count_tokens", request | {"model": model}))
        for model in ("native", "translated")
    ]
    assert counts[0] == counts[1]
