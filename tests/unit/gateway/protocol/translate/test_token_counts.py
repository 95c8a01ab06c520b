"""Tests of the translation of requests that count tokens to vLLM's /tokenize."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gateway.protocol.errors import GatewayError
from gateway.protocol.translate.chat_types import TranslationError
from gateway.protocol.translate.token_counts import (
    messages_count,
    messages_to_tokenize,
    responses_count,
    responses_to_tokenize,
)

PARAMETERS = {"type": "object", "properties": {}}


def test_a_messages_request_is_tokenized_with_its_system_prompt_and_tools() -> None:
    body = {
        "model": "m",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
    }
    request = json.loads(messages_to_tokenize(json.dumps(body).encode()))
    assert request.keys() == {"model", "messages", "tools"}
    assert [message["role"] for message in request["messages"]] == ["system", "user"]


def test_a_responses_request_is_tokenized_with_its_instructions_and_tools() -> None:
    tool = {"type": "function", "name": "look", "parameters": PARAMETERS}
    body = {"model": "m", "input": "x", "instructions": "Be brief.", "tools": [tool]}
    request = json.loads(responses_to_tokenize(json.dumps(body).encode()))
    assert request.keys() == {"model", "messages", "tools"}
    assert [message["role"] for message in request["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("translate", "member"), [(messages_to_tokenize, "messages"), (responses_to_tokenize, "input")]
)
def test_a_request_without_a_prompt_is_refused_with_the_name_of_the_member(
    translate: Callable[[bytes], bytes], member: str
) -> None:
    with pytest.raises(GatewayError) as caught:
        translate(b'{"model": "m"}')
    assert caught.value.param == member


def test_an_engines_count_becomes_the_answer_of_either_api() -> None:
    answer = b'{"count": 12, "tokens": [1]}'
    assert json.loads(messages_count(answer)) == {"input_tokens": 12}
    expected = {"object": "response.input_tokens", "input_tokens": 12}
    assert json.loads(responses_count(answer)) == expected


@pytest.mark.parametrize("translate", [messages_count, responses_count])
def test_an_answer_without_a_count_cannot_be_translated(
    translate: Callable[[bytes], bytes],
) -> None:
    with pytest.raises(TranslationError, match="token count"):
        translate(b'{"tokens": []}')
