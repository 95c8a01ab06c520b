"""Tests that a translated agent session has the same answers as one with an engine's own API.

The APIs are Messages and Responses. One engine serves two pools of the gateway. In one of them, the
gateway translates both APIs to chat completions.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import recorded_clients
from tests.e2e.processes import GatewayProcess
from tests.e2e.test_translated_session import (
    TRANSLATED,
    comparable_parts,
    event_order,
    message_requests,
    response_requests,
)
from tests.real.engines import BLOCK_TOKENS, REAL, Engine, free_ports
from tests.real.gateway_process import gateway
from tests.unit.gateway.protocol.translate.chats import events, response_of

CONFIG = """
models:
  - {{name: native, served_model: tiny, pool: native}}
  - {{name: translated, served_model: tiny, pool: translated}}
pools:
  native: {{native_apis: [messages, responses], endpoints: [{{url: '{0}', max_concurrency: 8}}]}}
  translated: {{native_apis: [], endpoints: [{{url: '{1}', max_concurrency: 8}}]}}
health: {{timeout: 60s, progress: 600s, interval: 500ms}}
scrape: {{timeout: 60s, interval: 500ms}}
"""
CONTEXT_TOKENS = 65_536  # context length that the longest recorded prompt needs
TOKENS = 12
CALL_TOKENS = 60  # a random model fills calls with spaces, so some are cut off
PATIENCE_S = 600.0  # a recorded prompt of 85 KB takes minutes on busy cores
SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["0.txt", "1.txt", "2.txt"]}},
    "required": ["path"],
    "additionalProperties": False,
}


def config_of(url: str) -> str:
    # The two pools use two host names for the same engine, because a URL belongs to one pool.
    return CONFIG.format(url, url.replace("127.0.0.1", "localhost"))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with _served(tmp_path_factory.mktemp("session")) as running:
        yield running


@contextmanager
def _served(folder: Path) -> Iterator[GatewayProcess]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    options = (
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--chat-template", str(Path(__file__).parent / "agent.jinja")),
        *("--max-model-len", str(CONTEXT_TOKENS)),
        *("--num-gpu-blocks-override", str(2 * CONTEXT_TOKENS // BLOCK_TOKENS)),
    )
    # The tiny model was made for shorter prompts. Its answers are random anyway, so longer prompts
    # do no harm.
    env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    engine = Engine("session", *free_ports(2), 1, None, options=options, env=env)
    engine.start()
    try:
        asyncio.run(engine.ready())
        with gateway(folder, config_of(engine.url)) as running:
            yield running
            assert running.is_alive
    finally:
        engine.kill()


def post(url: str, path: str, body: dict[str, Any]) -> bytes:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return bytes(response.read())


def both(url: str, path: str, body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Send a request by the engine's own API and by a translated one; return both answers.

    The request was answered before, so that the engine's cache contains its prompt both times.
    """
    post(url, path, body | {"model": "native"})
    native = post(url, path, body | {"model": "native"})
    return native, post(url, path, body | {"model": "translated"})


def order_of(data: bytes) -> list[str]:
    """Return the names of a stream's events in their order of arrival.

    For an incomplete response, vLLM ends with response.completed, and OpenAI and the gateway with
    response.incomplete. The state in it is `incomplete` in both cases.
    """
    *names, last = event_order(data)
    return [*names, "response.completed" if last == "response.incomplete" else last]


def parts_of(path: str, data: bytes) -> Any:
    """Return the texts, tool calls, end and token counts of a stream.

    A tool call may be incomplete.
    """
    if path == "/v1/responses":
        return comparable_parts(response_of(data))
    blocks, end, usage = list[dict[str, Any]](), None, dict[str, Any]()
    for event in events(data):
        usage |= event.get("message", event).get("usage") or {}
        if event["type"] == "content_block_start":
            block = event["content_block"]
            blocks.append({"type": block["type"], "name": block.get("name"), "text": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["text"] += delta.get("text") or delta.get("partial_json") or ""
        elif event["type"] == "message_delta":
            end = event["delta"]
    counts = {name: count for name, count in usage.items() if name.endswith("_tokens")}
    return blocks, end, counts


def own_requests(path: str) -> list[dict[str, Any]]:
    """Return the requests of an agent session whose first answers are tool calls."""
    requests = message_requests() if path == "/v1/messages" else response_requests()
    for request in requests:
        request["temperature"] = 0
        request["max_tokens" if path == "/v1/messages" else "max_output_tokens"] = CALL_TOKENS
        for tool in request["tools"]:
            tool["input_schema" if "input_schema" in tool else "parameters"] = SCHEMA
            tool["strict"] = True
        # vLLM's Messages API rejects the answer that its own engine gives to a named tool.
        if isinstance(request["tool_choice"], dict) and "name" in request["tool_choice"]:
            request["tool_choice"] = {"type": "any"}
    return requests


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_an_agent_session_has_equal_texts_calls_counts_and_events(
    front: GatewayProcess, path: str, streams: bool
) -> None:
    calls = 0
    for request in own_requests(path):
        native, translated = both(front.url, path, request | {"stream": streams})
        if streams:
            assert order_of(native) == order_of(translated)
            parts = [parts_of(path, answer) for answer in (native, translated)]
        else:
            parts = [comparable_parts(json.loads(answer)) for answer in (native, translated)]
        assert parts[0] == parts[1]
        calls += sum(part["type"] in ("tool_use", "function_call") for part in parts[0][0])
    # An answer that is not streamed contains a tool call that was cut off as text, not as a call.
    assert calls >= 2 or not streams


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_recorded_session_of_a_client_is_equal_turn_by_turn(
    front: GatewayProcess, name: str
) -> None:
    for request in recorded_clients.load(name).requests:
        limit = "max_tokens" if request.path == "/v1/messages" else "max_output_tokens"
        body = request.json | {"temperature": 0, limit: TOKENS}
        native, translated = both(front.url, request.target, body)
        assert order_of(native) == order_of(translated)
        # System messages within a conversation are rendered elsewhere, on purpose (docs/api.md).
        if not any(turn.get("role") == "system" for turn in body.get("messages", ())[1:]):
            assert parts_of(request.path, native) == parts_of(request.path, translated)
