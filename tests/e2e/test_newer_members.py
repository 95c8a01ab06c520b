"""Tests of members and content parts that clients send in their newest versions.

Each request goes through a gateway before engines that have the Messages and Responses APIs, and
through one before engines that only have chat completions.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.processes import gateway_process, mock_fleet
from tests.unit.gateway.protocol.translate.chats import events

CONFIG = """
models: [{{name: demo-8b, aliases: [claude-*, gpt-*], pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}}}
"""
LACKS = {"native": (), "translated": ("--lacks", "messages", "--lacks", "responses")}
TEXT = "How deep is the reservoir behind the dam?"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTIONS = [
    {"type": "function", "name": name, "parameters": SCHEMA} for name in ("read", "write", "list")
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": tool["name"], "parameters": SCHEMA}}
    for tool in FUNCTIONS
]
CALL = 'Please call the tool {} with {{"path": "a.py"}}.'


@pytest.fixture(scope="module", params=sorted(LACKS))
def url(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    with (
        mock_fleet(*LACKS[request.param]) as engines,
        gateway_process(folder, CONFIG.format(*engines)) as running,
    ):
        yield running.url
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def raw(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = raw(url, body)
    assert status == 200, answer
    return dict(json.loads(answer))


def sdk(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


def chat(url: str, text: str, **members: Any) -> dict[str, Any]:
    body = {"model": "gpt-9", "max_tokens": 24, "messages": [{"role": "user", "content": text}]}
    return dict(post(f"{url}/v1/chat/completions", body | members)["choices"][0])


def test_a_chat_calls_only_allowed_tools(url: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": CHAT_TOOLS[1:]}}
    called = chat(url, CALL.format("write"), tools=CHAT_TOOLS, tool_choice=choice)
    assert called["message"]["tool_calls"][0]["function"]["name"] == "write"
    text = chat(url, CALL.format("read"), tools=CHAT_TOOLS, tool_choice=choice)
    assert not text["message"].get("tool_calls")
    choice["allowed_tools"]["mode"] = "required"  # type: ignore[index]
    forced = chat(url, TEXT, tools=CHAT_TOOLS, tool_choice=choice)
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "write"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_only_allowed_tools(url: str, stream: bool) -> None:
    permitted = [{"type": "function", "name": tool["name"]} for tool in FUNCTIONS[2:]]
    choice = {"type": "allowed_tools", "mode": "required", "tools": permitted}
    body = {"model": "gpt-9", "input": TEXT, "tools": FUNCTIONS, "tool_choice": choice}
    status, answer = raw(f"{url}/v1/responses", body | {"stream": stream})
    assert status == 200
    response = events(answer)[-1]["response"] if stream else json.loads(answer)
    assert [item["name"] for item in response["output"]] == ["list"]


def test_input_tokens_are_those_that_the_engine_counts(url: str) -> None:
    body: dict[str, Any] = {
        "model": "gpt-9",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}],
        "tools": FUNCTIONS,
    }
    with sdk(url) as client:
        counted = client.responses.input_tokens.count(**body)
        answered = client.responses.create(**body, max_output_tokens=1)
    assert counted.object == "response.input_tokens"
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens
    status, answer = raw(f"{url}/v1/responses/input_tokens?beta=true", {"model": "gpt-9"})
    assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("more", [{}, {"prompt": None}])
def test_a_prompt_may_be_embeddings_alone(url: str, more: dict[str, Any]) -> None:
    tensor = base64.b64encode(bytes(range(256)) * 32 * 7).decode()
    body = {"model": "gpt-9", "prompt_embeds": tensor, "max_tokens": 4, **more}
    answer = post(f"{url}/v1/completions", body)
    assert answer["usage"]["prompt_tokens"] == 7
    body["prompt_embeds"] = [tensor, tensor]
    assert len(post(f"{url}/v1/completions", body)["choices"]) == 2


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_response_without_tools_may_say_how_to_choose_them(url: str, choice: str) -> None:
    for tools in ([], [{"type": "web_search_2025_08_26"}]):
        body = {"model": "gpt-9", "input": TEXT, "tools": tools, "tool_choice": choice}
        answer = post(f"{url}/v1/responses", body | {"max_output_tokens": 4})
        assert answer["output"][0]["type"] == "message"


def test_the_input_of_a_custom_tool_comes_back_as_text(url: str) -> None:
    items = [
        {"role": "user", "content": TEXT},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    tool = {"type": "custom", "name": "patch", "description": "Patch.", "format": {"type": "text"}}
    choice = {"type": "custom", "name": "patch"}
    body: dict[str, Any] = {
        "model": "gpt-9",
        "input": items,
        "tools": [tool],
        "tool_choice": choice,
    }
    with sdk(url) as client:
        item = client.responses.create(**body).output[0]
        with client.responses.stream(**body) as stream:
            last = list(stream)[-1]
    assert item.type == last.response.output[0].type == "custom_tool_call"
    assert (item.name, item.input) == ("patch", last.response.output[0].input)


def test_log_probabilities_of_a_response_are_those_of_a_chat(url: str) -> None:
    body = {"model": "gpt-9", "input": TEXT, "max_output_tokens": 6, "top_logprobs": 2}
    body["include"] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    part = post(f"{url}/v1/responses", body)["output"][0]["content"][0]
    expected = chat(url, TEXT, max_tokens=6, logprobs=True, top_logprobs=2)
    assert part["logprobs"] == expected["logprobs"]["content"]


MESSAGE: dict[str, Any] = {
    "model": "claude-9",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": TEXT}],
}


def test_a_stream_of_a_message_begins_with_its_input_tokens(url: str) -> None:
    first, *_, last, _ = events(raw(f"{url}/v1/messages", MESSAGE | {"stream": True})[1])
    begun, ended = (
        usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        for usage in (first["message"]["usage"], last["usage"])
    )
    assert 0.5 * ended < begun < 2 * ended


def test_a_message_with_what_only_advises_a_service_is_answered_as_without(url: str) -> None:
    plain = post(f"{url}/v1/messages", MESSAGE)
    block = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    advised = MESSAGE | {
        "messages": [{"role": "user", "content": [block]}],
        "metadata": {"user_id": "u"},
        "service_tier": "standard_only",
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 20000}},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "inference_geo": "us",
        "tools": [],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    assert post(f"{url}/v1/messages?beta=true", advised)["content"] == plain["content"]


def test_results_with_references_to_tools_and_sources_are_read(url: str) -> None:
    source = {"type": "search_result", "source": "https://x", "title": "Dams", "content": []}
    result = [{"type": "tool_reference", "tool_name": "write"}, source]
    turns = [
        {"role": "user", "content": TEXT},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Search.", "signature": "s"},
                {"type": "redacted_thinking", "data": "AAAA"},
                {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": True,
                    "content": result,
                }
            ],
        },
    ]
    tools = [
        {"name": "find", "input_schema": SCHEMA, "strict": True},
        {"name": "write", "input_schema": SCHEMA, "defer_loading": True, "type": "custom"},
    ]
    answer = post(f"{url}/v1/messages", MESSAGE | {"messages": turns, "tools": tools})
    assert answer["content"][0]["type"] == "text"


def test_a_response_with_what_only_advises_a_service_is_answered_as_without(url: str) -> None:
    body = {"model": "gpt-9", "input": TEXT, "max_output_tokens": 8, "store": False}
    plain = post(f"{url}/v1/responses", body)
    advised = body | {
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "truncation": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "none", "summary": None},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "parallel_tool_calls": True,
        "max_tool_calls": 4,
        "top_logprobs": 0,
        "stream_options": None,
        "background": False,
        "user": "u",
    }
    answer = post(f"{url}/v1/responses", advised)
    assert answer["output"][0]["content"] == plain["output"][0]["content"]
    assert answer["model"] == "gpt-9"


def test_a_chat_with_what_only_advises_a_service_is_answered_as_without(url: str) -> None:
    advised = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prediction": {"type": "content", "content": TEXT},
        "modalities": ["text"],
        "verbosity": "low",
        "reasoning_effort": "minimal",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "implicit"},
        "n": None,
        "stop": None,
        "stream": None,
        "stream_options": None,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "logit_bias": {},
    }
    assert chat(url, TEXT, **advised)["message"] == chat(url, TEXT)["message"]
