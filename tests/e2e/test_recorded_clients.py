"""Tests that send the recorded conversations of real clients and agents to `penstock demo`.

The recordings are in tests/data/clients/, made by `make clients` (docs/clients.md).
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import recorded_clients
from tests.demo_process import started_demo
from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import HOME
from tests.recorded_clients import RecordedClient, RecordedRequest
from tests.unit.gateway.protocol.translate.chats import message_of, response_of

ASKED = re.compile(r"call the tool ([\w.-]+) with (\{.*?\}) and report")
PREVIOUS = re.compile(r'("previous_response_id":\s?")[^"]+')
NAMES = recorded_clients.names()


class Answer(NamedTuple):
    """The answer to one recorded request: its bytes, its access log line, and whether it
    streams.
    """

    request: RecordedRequest
    status: int
    is_stream: bool
    body: bytes
    line: dict[str, Any]

    @property
    def is_turn(self) -> bool:
        # Return whether the request is part of the conversation.
        #
        # Agents also send requests without tools, for example for a title.
        return bool(self.request.json.get("tools"))

    def content(self) -> tuple[str, list[tuple[str, Any]], int]:
        # Return the text, the tool calls and the number of cached tokens.
        #
        # Asserts that the events of a stream are in a valid order.
        if self.request.path == "/v1/messages":
            return message_content(message_of(self.body) if self.is_stream else self.json())
        if self.request.path == "/v1/responses":
            return response_content(response_of(self.body) if self.is_stream else self.json())
        return chat_content(chunks_of(self.body) if self.is_stream else self.json())

    def json(self) -> Any:
        return json.loads(self.body)


def message_content(message: Any) -> tuple[str, list[tuple[str, Any]], int]:
    blocks = message["content"]
    calls = [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"]
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
    text = "".join(each["text"] for each in blocks if each["type"] == "text")
    return text, calls, message["usage"]["cache_read_input_tokens"]


def response_content(response: Any) -> tuple[str, list[tuple[str, Any]], int]:
    items = response["output"]
    calls = [
        (each["name"], json.loads(each["arguments"]))
        for each in items
        if each["type"] == "function_call"
    ]
    assert response["status"] == "completed"
    texts = [part["text"] for each in items for part in each.get("content", ())]
    return "".join(texts), calls, response["usage"]["input_tokens_details"]["cached_tokens"]


def chat_content(answer: Any) -> tuple[str, list[tuple[str, Any]], int]:
    (choice,) = answer["choices"]
    message, details = choice["message"], (answer.get("usage") or {}).get("prompt_tokens_details")
    calls = [
        (each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in message.get("tool_calls") or ()
    ]
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    return message["content"] or "", calls, details["cached_tokens"] if details else -1


def chunks_of(data: bytes) -> Any:
    # Return the chat completion that a client assembles from a stream.
    #
    # Asserts that its chunks are in a valid order.
    *events, last = data.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    text, arguments, name, reasons, usage = "", "", "", [], None
    for number, event in enumerate(events):
        chunk = json.loads(event.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert (delta.get("role") == "assistant") == (number == 0)
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                name += call["function"].get("name", "")
                arguments += call["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    calls = [{"function": {"name": name, "arguments": arguments}}] if name else []
    (reason,) = reasons
    message = {"content": text, "tool_calls": calls}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}


def send_again(url: str, client: RecordedClient) -> list[tuple[RecordedRequest, Any, bytes]]:
    # Send the requests of a recording one after another over one connection.
    #
    # Returns for each the request, the response and its body.
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    answers, last_id = [], ""
    for request in client.requests:
        body = PREVIOUS.sub(lambda match, known=last_id: match[1] + known, request.body)  # type: ignore[misc]
        connection.request("POST", request.target, body.encode(), request.headers)
        response = connection.getresponse()
        data = response.read()
        answers.append((request, response, data))
        found = re.search(rb'"id":"(resp_[^"]+)"', data)
        last_id = found[1].decode() if found else ""
    connection.close()
    return answers


def logged(folder: Path, ids: set[str]) -> dict[str, Any]:
    # Wait until these requests are in the access log; return their entries by id.
    ends = time.monotonic() + PATIENCE_S
    while True:
        text = (folder / "penstock-demo" / "access.log").read_text()
        lines = {line["id"]: line for line in map(json.loads, text.splitlines())}
        if ids <= lines.keys():
            return lines
        assert time.monotonic() < ends, f"{ids - lines.keys()} are not in the access log"
        time.sleep(0.05)


def demo_command(_: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "gateway", *arguments, "--speed", "20"]
    return ["/usr/bin/env", f"PYTHONPATH={HOME}", *command]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    # Send all recordings to a demo of four endpoints, one conversation after another.
    #
    # The choice of endpoints thus does not depend on the load.
    folder = tmp_path_factory.mktemp("demo")
    clients = [recorded_clients.load(name) for name in NAMES]
    with started_demo(demo_command, folder) as demo:
        sent = [send_again(demo.url, client) for client in clients]
        lines = logged(folder, {r.headers["x-request-id"] for one in sent for _, r, _ in one})
    return {
        client.name: [
            Answer(
                request,
                response.status,
                response.headers["content-type"].startswith("text/event-stream"),
                data,
                lines[response.headers["x-request-id"]],
            )
            for request, response, data in answers
        ]
        for client, answers in zip(clients, sent, strict=True)
    }


def test_every_wire_format_is_recorded() -> None:
    recorded = {
        (client.client.partition(",")[0], client.requests[0].path)
        for client in map(recorded_clients.load, NAMES)
    }
    assert {client for client, _ in recorded} >= {
        *("openai", "anthropic", "OpenAI Agents", "pydantic-ai", "LangChain", "LlamaIndex"),
        *("litellm", "AI SDK", "Claude Code", "Codex", "OpenCode", "OpenHands"),
    }
    paths = {path for _, path in recorded}
    assert paths == {"/v1/chat/completions", "/v1/messages", "/v1/responses"}


@pytest.mark.parametrize("name", NAMES)
def test_each_request_is_answered_with_text_or_a_call_in_the_grammar_of_its_api(
    conversations: dict[str, list[Answer]], name: str
) -> None:
    for answer in conversations[name]:
        assert answer.status == 200, answer.body
        assert answer.is_stream == bool(answer.request.json.get("stream"))
        text, calls, _ = answer.content()
        assert text.strip() or calls


@pytest.mark.parametrize("name", NAMES)
def test_the_tool_that_the_user_asks_for_is_called_once(
    conversations: dict[str, list[Answer]], name: str
) -> None:
    turns = [answer for answer in conversations[name] if answer.is_turn]
    calls = [call for answer in turns for call in answer.content()[1]]
    texts = [each for answer in turns for each in strings(answer.request.json)]
    asked = next(filter(None, map(ASKED.search, texts)))
    assert calls == [(asked[1], json.loads(asked[2]))]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


@pytest.mark.parametrize("name", NAMES)
def test_the_session_is_recognised_and_stays_where_its_prompt_is_cached(
    conversations: dict[str, list[Answer]], name: str
) -> None:
    turns = [answer for answer in conversations[name] if answer.is_turn]
    expected = recorded_clients.load(name).session
    assert len(turns) >= 3
    assert [answer.line.get("session") for answer in turns[1:]] == [expected] * (len(turns) - 1)
    assert len({answer.line["endpoint"] for answer in turns}) == 1
    cached = [answer.content()[2] for answer in turns]
    assert all(count == -1 or count > 0 for count in cached[1:])
