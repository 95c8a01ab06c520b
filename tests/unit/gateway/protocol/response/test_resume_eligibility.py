"""Tests of which requests can be resumed exactly, and how the rest of an answer is requested."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.protocol import api_table
from gateway.protocol.request.api_call import Call
from gateway.protocol.response.resume_eligibility import call_with_token_ids, continuation_terms
from tests.unit.gateway.protocol.request import test_request_body

CHAT = test_request_body.CHAT | {"stream": True}
TEXT = test_request_body.COMPLETION | {"stream": True}


def call(body: dict[str, Any]) -> Call:
    return test_request_body.parsed(
        body, api_table.CHAT if "messages" in body else api_table.COMPLETIONS
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "seed": 3,
            "repetition_penalty": 1.1,
        },
        {
            "n": 1,
            "logprobs": False,
            "tools": None,
            "stop": [],
            "tool_choice": "none",
            "presence_penalty": 0,
        },
        {"logprobs": None, "top_logprobs": 0, "parallel_tool_calls": False, "unheard_of": None},
        {
            "response_format": {"type": "text"},
            "stream_options": {"include_usage": True},
            "user": "ann",
        },
        {"max_completion_tokens": 9, "min_tokens": 3, "stop_token_ids": [7], "ignore_eos": True},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": 'say {"type": "image_url"}'}]}
            ]
        },
    ],
)
def test_what_depends_on_tokens_alone_can_be_continued(more: dict[str, Any]) -> None:
    assert continuation_terms(call(CHAT | more)) is not None


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"n": 2},
        {"best_of": 2},
        {"logprobs": True},
        {"stop": "\n"},
        {"stop": ["END"]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a*"}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ["x"]},
        {"return_token_ids": True},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": [1]},
        {"min_tokens": "3"},
        {"unheard_of": 1},
        {"unheard_of": False},
        {"include_reasoning": False},
        {"thinking_token_budget": 0},
        {"prompt_logprobs": 0},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
    ],
)
def test_what_depends_on_more_than_tokens_or_is_unknown_cannot_be_continued(
    more: dict[str, Any],
) -> None:
    assert continuation_terms(call(CHAT | more)) is None


@pytest.mark.parametrize(
    ("prompt", "one"), [("hi", True), ([1, 2], True), (["a", "b"], False), ([[1], [2]], False)]
)
def test_a_completion_is_continued_if_it_is_one(prompt: object, one: bool) -> None:
    assert (continuation_terms(call(TEXT | {"prompt": prompt})) is not None) == one
    assert continuation_terms(call(TEXT | {"echo": True})) is None
    assert continuation_terms(call(TEXT | {"suffix": "x"})) is None


@pytest.mark.parametrize(
    ("logprobs", "none"), [(None, True), (0, False), (False, False), (1, False)]
)
def test_a_completion_that_wants_the_drawn_tokens_log_probability_alone_wants_one(
    logprobs: object, none: bool
) -> None:
    assert (continuation_terms(call(TEXT | {"logprobs": logprobs})) is not None) == none


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (CHAT | {"max_tokens": 10}, 7),
        (CHAT | {"max_completion_tokens": 20, "max_tokens": 10}, 17),
        (CHAT | {"max_completion_tokens": None, "max_tokens": 10}, 7),
        (CHAT, None),
        (TEXT, 13),
        (TEXT | {"max_tokens": None}, None),
    ],
)
def test_the_rest_is_asked_for_with_what_is_left_of_its_bounds(
    body: dict[str, Any], left: int | None
) -> None:
    terms = continuation_terms(call(body | {"min_tokens": 5, "temperature": 0.5, "seed": 9}))
    assert terms is not None
    reply = json.loads(terms.rest_body("served", [1, 2], [3, 4, 5]))
    assert (reply["model"], reply["prompt"], reply["max_tokens"]) == (
        "served",
        [1, 2, 3, 4, 5],
        left,
    )
    assert (reply["min_tokens"], reply["temperature"], reply["seed"]) == (2, 0.5, 9)
    assert reply["stream"] is reply["return_token_ids"] is True
    assert "min_tokens" not in json.loads(terms.rest_body("served", [1, 2], range(5)))


def test_the_engine_is_asked_to_tell_ids_and_to_count_them_and_nothing_else_changes() -> None:
    body = CHAT | {"stream_options": {"include_usage": False}, "temperature": 0.5}
    sent = json.loads(call_with_token_ids(call(body), "served", "cache_salt").body)
    assert sent.pop("stream_options") == {"include_usage": True, "continuous_usage_stats": True}
    assert sent.pop("return_token_ids") is True
    assert sent == {name: value for name, value in body.items() if name != "stream_options"} | {
        "model": "served"
    }
