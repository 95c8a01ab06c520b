"""Tests that each API that generates text gives the same answer through the gateway as directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.real.api_pair import NAME, Call, Pair, engine_and_gateway
from tests.real.engine_requests import prompt
from tests.real.engines import MODEL
from tests.real.replies import Reply, send, unlike

TEXT = "How deep is the reservoir behind the dam?"
LONG = prompt(200, seed=1)
TURN = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "max_tokens": 12}
SAMPLED = {"temperature": 0.7, "seed": 5, "max_tokens": 12}
TOOL = {
    "name": "open_gate",
    "description": "Open a gate.",
    "parameters": {
        "type": "object",
        "properties": {"gate": {"enum": ["upper", "lower"]}},
        "required": ["gate"],
        "additionalProperties": False,
    },
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with engine_and_gateway(tmp_path_factory.mktemp("generating"), "model", *tools) as pair:
        yield pair


GENERATED: dict[str, Call] = {
    "chat": (CHAT, {"messages": TURN, **GREEDY, "logprobs": True, "top_logprobs": 2}),
    "chat of a cached prompt": (
        CHAT,
        {"messages": [{"role": "user", "content": LONG}], **GREEDY, "top_k": 1},
    ),
    "chat with two answers": (CHAT, {"messages": TURN, **SAMPLED, "n": 2, "stop": ["e"]}),
    "chat with a forced tool": (
        CHAT,
        {
            "messages": TURN,
            "max_completion_tokens": 40,
            "temperature": 0,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "open_gate"}},
        },
    ),
    "chat with a schema": (
        CHAT,
        {
            "messages": TURN,
            "max_tokens": 40,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "gate", "schema": TOOL["parameters"]},
            },
        },
    ),
    "completion": (COMPLETIONS, {"prompt": TEXT, **GREEDY, "logprobs": 2}),
    "completion of token ids": (COMPLETIONS, {"prompt": [5, 6, 7, 8], **GREEDY, "echo": True}),
    "completion of text with ids": (
        COMPLETIONS,
        {"prompt": TEXT, **GREEDY, "return_token_ids": True},
    ),
    "response": (RESPONSES, {"input": TEXT, "temperature": 0, "max_output_tokens": 12}),
    "response to a conversation": (
        RESPONSES,
        {
            "input": [*TURN, {"role": "assistant", "content": "Deep."}, *TURN],
            "instructions": "Answer in one word.",
            "temperature": 0,
            "max_output_tokens": 12,
        },
    ),
    "response with a forced tool": (
        RESPONSES,
        {
            "input": TEXT,
            "temperature": 0,
            "max_output_tokens": 40,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": {"type": "function", "name": "open_gate"},
        },
    ),
    "message": (MESSAGES, {"messages": TURN, **GREEDY}),
    "message with tools": (
        MESSAGES,
        {
            "messages": TURN,
            **GREEDY,
            "tools": [
                {
                    "name": "open_gate",
                    "description": "Open a gate.",
                    "input_schema": TOOL["parameters"],
                }
            ],
            "tool_choice": {"type": "auto"},
        },
    ),
    "message with a system prompt": (
        MESSAGES,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
            "system": "Answer in one word.",
            "stop_sequences": ["e"],
            **GREEDY,
        },
    ),
}


@pytest.mark.parametrize("name", GENERATED)
async def test_a_whole_answer_is_the_engine_s_own(generating: Pair, name: str) -> None:
    await generating.assert_equal(*GENERATED[name])


@pytest.mark.parametrize("name", [name for name in GENERATED if "two" not in name])
async def test_a_streamed_answer_is_the_engine_s_own(generating: Pair, name: str) -> None:
    path, body = GENERATED[name]
    usage = USAGE if path in (CHAT, COMPLETIONS) else {"stream": True}
    reply = await generating.assert_equal(path, body | usage)
    assert len(reply.events) > 2


async def test_answers_that_differ_are_seen_to_differ(generating: Pair) -> None:
    for streams in ({}, USAGE):
        one, other = [
            await send(generating.engine.url, CHAT, {"model": MODEL, **body, **streams})
            for body in (GENERATED["chat"][1], GENERATED["chat of a cached prompt"][1])
        ]
        assert unlike(one, other, (MODEL, MODEL))


async def test_several_prompts_of_a_completion_are_answered_as_by_the_engine(
    generating: Pair,
) -> None:
    await generating.assert_equal(COMPLETIONS, {"prompt": [TEXT, "A dam"], **GREEDY})


COUNTED: dict[str, Call] = {
    "count_tokens": (COUNT, {"messages": TURN, "system": "Be brief."}),
    "tokenize a prompt": ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", {"messages": TURN}),
    "detokenize": ("/detokenize", {"tokens": [300, 301, 302]}),
}


@pytest.mark.parametrize("name", COUNTED)
async def test_tokens_are_counted_as_by_the_engine(generating: Pair, name: str) -> None:
    await generating.assert_equal(*COUNTED[name])


REFUSED: dict[str, Call] = {
    "chat, temperature": (CHAT, {"messages": TURN, "temperature": -1}),
    "chat, top_logprobs": (CHAT, {"messages": TURN, "logprobs": True, "top_logprobs": 9999}),
    "chat, role": (CHAT, {"messages": [{"content": TEXT}]}),
    "chat, stream_options": (CHAT, {"messages": TURN, "stream_options": {"include_usage": True}}),
    "chat, context": (CHAT, {"messages": [{"role": "user", "content": "gate " * 6000}]}),
    "chat stream, top_p": (CHAT, {"messages": TURN, "top_p": 7, "stream": True}),
    "completion, top_p": (COMPLETIONS, {"prompt": TEXT, "top_p": 7}),
    "completion, token": (COMPLETIONS, {"prompt": [999999], **GREEDY}),
    "response, temperature": (RESPONSES, {"input": TEXT, "temperature": "hot"}),
    "response, previous": (RESPONSES, {"input": TEXT, "store": False, "background": True}),
    "message, role": (MESSAGES, {"messages": [{"role": "robot", "content": "a"}], **GREEDY}),
    "message, no limit": (MESSAGES, {"messages": TURN}),
    "count_tokens, role": (COUNT, {"messages": [{"role": "robot", "content": "a"}]}),
    "tokenize, type": ("/tokenize", {"prompt": 7}),
    "detokenize, token": ("/detokenize", {"tokens": ["a"]}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_keeps_the_engine_s_status_and_message(generating: Pair, name: str) -> None:
    await generating.assert_refused(*REFUSED[name])


NOT_SERVED: dict[str, Call] = {
    "moderations": ("/v1/moderations", {"input": TEXT}),
    "embeddings": ("/v1/embeddings", {"input": TEXT}),
    "rerank": ("/v1/rerank", {"query": TEXT, "documents": ["a dam"]}),
    "score": ("/v1/score", {"text_1": TEXT, "text_2": TEXT}),
    "classify": ("/classify", {"input": TEXT}),
    "pooling": ("/pooling", {"input": TEXT}),
}


@pytest.mark.parametrize("name", NOT_SERVED)
async def test_what_the_engine_does_not_serve_is_answered_so(generating: Pair, name: str) -> None:
    path, body = NOT_SERVED[name]
    reply, own = await generating.both(path, body)
    assert own.status in (404, 405, 501), own
    assert reply.status == own.status, reply


async def test_a_stored_response_is_read_continued_and_cancelled_as_at_the_engine(
    generating: Pair,
) -> None:
    asked = {"input": TEXT, "temperature": 0, "max_output_tokens": 12, "store": True}
    own, ours = [
        await _stored_responses(url, {"model": model, **asked})
        for url, model in ((generating.engine.url, MODEL), (generating.front.url, NAME))
    ]
    for reply, engine in zip(ours, own, strict=True):
        assert unlike(reply, engine, (NAME, MODEL)) == []
    assert [reply.status for reply in own] == [200, 200, 200, 200, 200]


async def _stored_responses(url: str, asked: dict[str, Any]) -> list[Reply]:
    # Create, read and continue a response; then begin one in the background and cancel it.
    first = await send(url, RESPONSES, asked)
    read = await send(url, f"{RESPONSES}/{first.body['id']}", method="GET")
    follows = {"previous_response_id": first.body["id"], "input": "And how wide?"}
    after = await send(url, RESPONSES, asked | follows)
    long = {"background": True, "max_output_tokens": 2000, "ignore_eos": True}
    begun = await send(url, RESPONSES, asked | long)
    cancelled = await send(url, f"{RESPONSES}/{begun.body['id']}/cancel")
    return [first, read, _without_previous(after), begun, cancelled]


def _without_previous(reply: Reply) -> Reply:
    assert reply.body.pop("previous_response_id", None)
    return reply


async def test_a_stored_response_is_deleted_neither_by_the_engine_nor_through_the_gateway(
    generating: Pair,
) -> None:
    for url, model in ((generating.engine.url, MODEL), (generating.front.url, NAME)):
        made = await send(url, RESPONSES, {"model": model, "input": TEXT, "max_output_tokens": 2})
        gone = await send(url, f"{RESPONSES}/{made.body['id']}", method="DELETE")
        assert gone.status in (404, 405), gone
        read = await send(url, f"{RESPONSES}/{made.body['id']}", method="GET")
        assert read.status == 200
