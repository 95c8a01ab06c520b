"""Tests that requests are refused if a translation to chat completions would lose a member."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.protocol.errors import GatewayError
from gateway.protocol.translate import messages_request, responses_request

TURN = {"role": "user", "content": "Hi"}
MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [TURN]}
RESPONSE: dict[str, Any] = {"model": "m", "input": "Hi", "store": False}


@pytest.mark.parametrize(
    ("members", "lost"),
    [
        ({}, ""),
        ({"system": "Be brief.", "metadata": {"user_id": "u"}, "temperature": 0}, ""),
        ({"thinking": None, "context_management": None}, ""),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"messages": [TURN, {"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [TURN, {"role": "assistant", "content": "x"}]}, "messages"),
    ],
)
def test_messages(members: dict[str, Any], lost: str) -> None:
    assert messages_request.lost_member(json.dumps(MESSAGE | members).encode()) == lost


@pytest.mark.parametrize(
    ("members", "lost"),
    [
        ({}, ""),
        ({"input": [{"role": "system", "content": "x"}]}, ""),
        ({"tools": [{"type": "function", "name": "f"}], "metadata": {"a": "b"}}, ""),
        ({"store": True}, "store"),
        ({"store": None}, "store"),
        ({"store": True, "tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools"),
        ({"input": [{"role": "developer", "content": "x"}]}, "input"),
        ({"input": [{"role": "system", "content": "x"}], "instructions": "y"}, "input"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "disabled"}, ""),
    ],
)
def test_responses(members: dict[str, Any], lost: str) -> None:
    assert responses_request.lost_member(json.dumps(RESPONSE | members).encode()) == lost


@pytest.mark.parametrize("member", [{"messages": 2}, {"messages": None}])
def test_a_malformed_message_is_an_error_of_the_request(member: dict[str, Any]) -> None:
    with pytest.raises(GatewayError):
        messages_request.lost_member(json.dumps(MESSAGE | member).encode())


@pytest.mark.parametrize("member", [{"tools": 3}, {"input": 4}, {"input": {"role": "user"}}])
def test_a_malformed_response_is_an_error_of_the_request(member: dict[str, Any]) -> None:
    with pytest.raises(GatewayError):
        responses_request.lost_member(json.dumps(RESPONSE | member).encode())


@pytest.mark.parametrize(
    "member",
    [
        {"tools": [{"type": ["x"]}]},
        {"input": [{"role": "user", "content": [{"type": {}}]}]},
        {"tool_choice": {"type": []}},
    ],
)
def test_a_type_of_a_response_that_is_no_text_is_an_error_of_the_request(
    member: dict[str, Any],
) -> None:
    body = json.dumps(RESPONSE | member).encode()
    assert responses_request.lost_member(body) == ""
    with pytest.raises(GatewayError):
        responses_request.to_chat(body)


def test_a_type_of_a_message_that_is_no_text_is_an_error_of_the_request() -> None:
    with pytest.raises(GatewayError):
        messages_request.to_chat(json.dumps(MESSAGE | {"tool_choice": {"type": []}}).encode())
