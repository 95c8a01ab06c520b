"""Tests of the total number of tokens that a batch used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.batch.token_usage import TokenUsage, UsageSum


def summed(*usages: Any) -> TokenUsage:
    result = UsageSum()
    for usage in usages:
        result.add(json.dumps({"response": {"body": {"usage": usage}}}))
    return result.total


def test_tokens_of_chat_embeddings_and_messages_are_added() -> None:
    chat = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    embeddings = {"prompt_tokens": 7, "total_tokens": 7}
    messages = {"input_tokens": 20, "output_tokens": 2}
    total = summed(chat, embeddings, messages)
    assert total.as_object() == {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 44,
    }


def test_cached_and_reasoning_tokens_of_responses_are_added() -> None:
    usage = {
        "input_tokens": 20,
        "output_tokens": 9,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens_details": {"reasoning_tokens": 4},
    }
    assert summed(usage, usage) == TokenUsage(40, 18, 32, 8)


@pytest.mark.parametrize("line", ['{"response": {"body": "text"}}', '{"response": null}', "["])
def test_an_answer_without_usage_counts_nothing(line: str) -> None:
    total = UsageSum()
    total.add(line)
    assert total.total == TokenUsage()


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, {"prompt_tokens": "many"}])
def test_odd_usage_counts_nothing(usage: Any) -> None:
    assert summed(usage, {"prompt_tokens": 3}) == TokenUsage(3)
