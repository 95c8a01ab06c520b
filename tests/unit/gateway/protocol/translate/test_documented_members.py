"""Tests that each documented request member is translated, refused by name, or listed as left out.

The members are those of the SDKs' newest documented parameters. docs/api.md lists what is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from gateway.protocol.errors import GatewayError
from gateway.protocol.translate import messages_request, responses_request

PAGE = (Path(__file__).parents[5] / "docs/api.md").read_text()
TOOL = {"type": "function", "name": "run", "parameters": {"type": "object"}}
RESPONSE: dict[str, Any] = {"model": "m", "input": "x", "tools": [TOOL], "max_output_tokens": 9}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"name": "run", "input_schema": {"type": "object"}}],
}

OF_RESPONSES: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background": True,
    "background_options": {"completion_window": "2h"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "image": {"context_compression": "auto"},
    "include": ["reasoning.encrypted_content"],
    "input": "y",
    "instructions": "Be brief.",
    "max_output_tokens": 5,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "model": "n",
    "moderation": {"model": "omni"},
    "parallel_tool_calls": False,
    "previous_response_id": "resp_1",
    "prompt": {"id": "p"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": False,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"verbosity": "low"},
    "tool_choice": "required",
    "tools": [TOOL | {"name": "up"}],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "u",
}
OF_MESSAGES: dict[str, Any] = {
    "betas": ["b"],
    "billing_policy": {"type": "x"},
    "cache_control": {"type": "ephemeral"},
    "compaction": {"type": "x"},
    "container": "c",
    "context_management": {"edits": []},
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallback_credit_token": "t",
    "fallbacks": [{"model": "m"}],
    "inference_geo": "eu",
    "max_tokens": 5,
    "mcp_servers": [{"url": "https://x"}],
    "messages": [{"role": "user", "content": "y"}],
    "metadata": {"user_id": "u"},
    "model": "n",
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "service_tier": "auto",
    "speed": "fast",
    "stop_sequences": ["END"],
    "system": "Be brief.",
    "temperature": 0.5,
    "thinking": {"type": "disabled"},
    "thread": {"id": "t"},
    "tool_choice": {"type": "any"},
    "tools": [{"name": "up", "input_schema": {"type": "object"}}],
    "top_k": 5,
    "top_p": 0.5,
    "user_profile_id": "u",
}


def left_out(row: str) -> set[str]:
    # Return the names in one row of the page's table of members that are left out.
    found = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert found is not None
    return set(re.findall(r"`([^`]+)`", found[1]))


def is_lost(to_chat: Callable[[bytes], bytes], base: dict[str, Any], name: str, value: Any) -> bool:
    # Return whether a member changes nothing in the chat request. One that is refused is not lost.
    plain = to_chat(json.dumps(base).encode())
    try:
        return to_chat(json.dumps(base | {name: value}).encode()) == plain
    except GatewayError as error:
        return (error.status, error.param) != (400, name)


def test_every_documented_member_of_responses_is_tried() -> None:
    assert set(ResponseCreateParamsBase.__annotations__) <= set(OF_RESPONSES)


@pytest.mark.parametrize("name", OF_RESPONSES)
def test_a_member_of_responses_is_lost_only_if_it_is_listed(name: str) -> None:
    # Alone, the number of log probabilities has no effect in either API.
    base = RESPONSE | {"include": ["message.output_text.logprobs"]} if "logp" in name else RESPONSE
    lost = is_lost(responses_request.to_chat, base, name, OF_RESPONSES[name])
    assert lost == (name in left_out("responses"))


@pytest.mark.parametrize("name", OF_MESSAGES)
def test_a_member_of_messages_is_lost_only_if_it_is_listed(name: str) -> None:
    lost = is_lost(messages_request.to_chat, MESSAGE, name, OF_MESSAGES[name])
    assert lost == (name in left_out("messages"))


def test_unknown_members_of_reasoning_are_refused_and_known_ones_listed() -> None:
    for name in ("context", "generate_summary", "mode", "summary", "odd"):
        body = json.dumps(RESPONSE | {"reasoning": {name: "auto"}}).encode()
        if name in left_out("in `reasoning`"):
            assert responses_request.to_chat(body) == responses_request.to_chat(
                json.dumps(RESPONSE).encode()
            )
        else:
            with pytest.raises(GatewayError, match=r"reasoning\.odd"):
                responses_request.to_chat(body)


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_tool_that_runs_asynchronously_is_refused(kind: str) -> None:
    for value in (False, True):
        tool = {"type": kind, "name": "run", "async": value}
        body = json.dumps(RESPONSE | {"tools": [tool]}).encode()
        if value:
            with pytest.raises(GatewayError, match=r"tools\[0\].async"):
                responses_request.to_chat(body)
        else:
            assert "async" not in json.dumps(json.loads(responses_request.to_chat(body)))
