"""Tests of the translation of OpenAI's Responses API to chat completions, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.protocol.errors import GatewayError
from gateway.protocol.translate import responses_answer, responses_request
from gateway.protocol.translate.custom_tools import custom_input
from gateway.protocol.translate.responses_stream import ResponsesStream
from tests.unit.gateway.protocol.translate.chats import (
    Piece,
    answer,
    chunk,
    events,
    feed,
    finish,
    response_of,
    stream,
)

TOOL = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}
REQUEST: dict[str, Any] = {"model": "m", "input": "x", "tools": [TOOL], "max_output_tokens": 50}
PIECES: list[Piece] = [
    ("thought", "hm"),
    ("text", "ok"),
    ("call", ("run", '{"a":1}')),
    ("call", ("up", "{}")),
]


CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Patch a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}


def chat(**members: Any) -> dict[str, Any]:
    body = json.dumps({"model": "m", "input": "x"} | members).encode()
    return dict(json.loads(responses_request.to_chat(body)))


def echoed() -> dict[str, Any]:
    return responses_answer.echo(json.dumps(REQUEST).encode())


def test_a_turn_of_an_agent_becomes_chat_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"cmd": "ls"}'},
        {"type": "function_call", "call_id": "c2", "name": "run", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "b.py"}],
        },
        {"type": "function_call", "call_id": "c3", "name": "run", "arguments": "{}"},
    ]
    request = chat(instructions="You code.", input=items, tools=[TOOL])

    def call(number: int, arguments: str) -> dict[str, Any]:
        function = {"name": "run", "arguments": arguments}
        return {"id": f"c{number}", "type": "function", "function": function}

    assert request["messages"] == [
        {"role": "system", "content": "You code.\n\nBe brief."},
        {"role": "user", "content": "List the files."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [call(1, '{"cmd": "ls"}'), call(2, "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c2", "content": "b.py"},
        {"role": "assistant", "content": None, "tool_calls": [call(3, "{}")]},
    ]
    assert request["tools"] == [
        {
            "type": "function",
            "function": {"name": "run", "parameters": {"type": "object"}, "strict": False},
        }
    ]


def test_system_messages_before_all_others_become_one() -> None:
    parts = [
        {"type": "input_text", "text": "Be brief."},
        {"type": "input_text", "text": "Be kind."},
    ]
    items = [
        {"role": "system", "content": "You code."},
        {"role": "developer", "content": parts},
        {"role": "user", "content": "List the files."},
        {"role": "developer", "content": "All of them."},
    ]
    assert chat(input=items)["messages"] == [
        {"role": "system", "content": "You code.\n\nBe brief.\nBe kind."},
        {"role": "user", "content": "List the files."},
        {"role": "system", "content": "All of them."},
    ]


def test_functions_of_a_namespace_have_it_in_their_names_and_get_it_back() -> None:
    group = {"type": "namespace", "name": "team", "description": "Agents.", "tools": [TOOL]}
    items = [
        {"type": "function_call", "call_id": "c1", "name": "run", "namespace": "team",
         "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    ]  # fmt: skip
    request = chat(tools=[group, TOOL, {"type": "web_search"}], input=items)
    assert [tool["function"]["name"] for tool in request["tools"]] == ["team__run", "run"]
    assert request["messages"][0]["tool_calls"][0]["function"]["name"] == "team__run"

    known = responses_answer.echo(json.dumps(REQUEST | {"tools": [group, TOOL]}).encode())
    pieces: list[Piece] = [("call", ("team__run", '{"a":1}')), ("call", ("run", "{}"))]
    whole = json.loads(
        b"".join(responses_answer.from_chat(answer(pieces, "tool_calls"), "m", known))
    )
    translator = ResponsesStream("m", known)
    streamed = feed(translator, stream(pieces, "tool_calls")) + finish(translator)
    for response in (whole, response_of(streamed)):
        calls = [(item["name"], item.get("namespace")) for item in response["output"]]
        assert calls == [("run", "team"), ("run", None)]
    names = [e["name"] for e in events(streamed) if e["type"].endswith("arguments.done")]
    assert names == ["run", "run"]


def test_members_keep_their_meaning() -> None:
    request = chat(
        stream=True,
        max_output_tokens=5,
        temperature=0,
        parallel_tool_calls=False,
        reasoning={"effort": "high", "summary": "auto"},
        text={
            "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}},
            "verbosity": "low",
        },
        tools=[TOOL],
        tool_choice={"type": "function", "name": "run"},
        include=["reasoning.encrypted_content"],
        store=True,
        prompt_cache_key="session-1",
        metadata={"a": "b"},
    )
    assert request["stream_options"] == {"include_usage": True}
    assert (request["max_tokens"], request["reasoning_effort"]) == (5, "high")
    assert request["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}}
    assert request["tool_choice"] == {"type": "function", "function": {"name": "run"}}
    assert request["prompt_cache_key"] == "session-1"
    assert not request.keys() & {"store", "include", "metadata", "text", "reasoning", "input"}


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "odd"}, "truncation"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "odd": 1}]}, "tools[0].odd"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 1}]}, "tools[0].tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "run"}}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "run", "odd": 1}]}, "tools[0].odd"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"new_member": 1}, "new_member"),
        ({"text": {"format": {"type": "odd"}}}, "text.format.type"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(members: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as refused:
        chat(**members)
    assert refused.value.status == 400
    assert refused.value.param == param


def test_nothing_asked_for_is_nothing_refused() -> None:
    chat(previous_response_id=None, background=False, truncation="disabled", top_logprobs=0)


def test_a_whole_answer_is_what_the_sdk_expects() -> None:
    whole = b"".join(responses_answer.from_chat(answer(PIECES, "tool_calls"), "m", echoed()))
    response = Response.model_validate_json(whole)
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert (response.output_text, response.status) == ("ok", "completed")
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 100
    assert response.tools[0].type == "function"
    assert response.max_output_tokens == 50


def test_the_events_of_a_stream_are_what_the_sdk_expects_in_order() -> None:
    out = feed(ResponsesStream("m", echoed()), stream(PIECES, "tool_calls", size=99))
    adapter = TypeAdapter[Any](ResponseStreamEvent)
    for event in events(out):
        assert adapter.validate_python(event).type == event["type"]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = [f"function_call_arguments.{end}" for end in ("delta", "done")]
    expected = ["created", "in_progress"]
    for body in (
        [name.format("reasoning_text") for name in part],
        [name.format("output_text") for name in part],
        call,
        call,
    ):
        expected += ["output_item.added", *body, "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events(out)] == [
        *expected,
        "completed",
    ]


@pytest.mark.parametrize(
    "last",
    [
        ("text", "a"),
        ("thought", "a"),
        ("call", ("run", '{"a')),
        ("call", ("patch", '{"input": "a')),
    ],
)
def test_an_answer_that_is_cut_off_is_incomplete(last: Piece) -> None:
    known = responses_answer.echo(json.dumps(REQUEST | {"tools": [CUSTOM, TOOL]}).encode())
    pieces: list[Piece] = [("call", ("run", "{}")), last] if last[0] == "call" else [last]
    out = feed(ResponsesStream("m", known), stream(pieces, "length"))
    assert events(out)[-1]["type"] == "response.incomplete"
    response = response_of(out)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    whole = json.loads(b"".join(responses_answer.from_chat(answer(pieces, "length"), "m", known)))
    assert response == whole
    done = [e["item"] for e in events(out) if e["type"] == "response.output_item.done"]
    assert done == response["output"]
    assert [item["status"] for item in done[:-1]] == ["completed"] * (len(pieces) - 1)
    assert done[-1]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ('{"inp', ""),
        ('{ "input" : ', ""),
        ('{"input": "', ""),
        ('{"input": "add \\"a\\"', 'add "a"'),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\u00e9', "aé"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\ud83d\\ude', "a"),
        ('{"input": "a\\ud83d\\ude00', "a\U0001f600"),
        ('{"input": "a"', "a"),
        ('{"input": "a", "x', '{"input": "a", "x'),
        ('{"input": 7', '{"input": 7'),
    ],
)
def test_a_custom_tool_whose_input_is_cut_off_gets_the_input_so_far(
    arguments: str, text: str
) -> None:
    assert custom_input(arguments) == text


def test_an_error_in_a_stream_fails_the_response() -> None:
    translator = ResponsesStream("m", echoed())
    failed = b'data: {"error": {"message": "gone", "code": "overloaded"}}\n\n'
    last = events(feed(translator, chunk({"content": "a"}) + failed))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "overloaded", "message": "gone"}
    assert finish(translator) == b""


def test_an_error_before_anything_else_has_a_response_too() -> None:
    out = feed(ResponsesStream("m", echoed()), b'data: {"error": "gone"}\n\n')
    assert [event["type"] for event in events(out)] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_without_tools_nothing_says_how_to_call_them(choice: str) -> None:
    for tools in ([], [{"type": "web_search_2025_08_26"}]):
        request = chat(tools=tools, tool_choice=choice, parallel_tool_calls=True)
        assert not request.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


PATCH = 'add "a"\nand é'


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    choice = {"type": "custom", "name": "patch"}
    request = chat(tools=[CUSTOM, TOOL], tool_choice=choice, input=items)
    function = request["tools"][0]["function"]
    assert function["name"] == "patch"
    assert function["description"].startswith("Patch a file.\n\n")
    assert function["description"].endswith("lark grammar:\nstart: WORD")
    assert function["parameters"]["required"] == ["input"]
    assert request["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    called, result = request["messages"]
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"input": PATCH}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "done"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(json.dumps({"input": PATCH}), PATCH), ("no JSON", "no JSON"), ('{"x": 1}', '{"x": 1}')],
)
def test_a_call_of_a_custom_tool_gets_its_input_back(arguments: str, text: str) -> None:
    known = responses_answer.echo(json.dumps(REQUEST | {"tools": [CUSTOM, TOOL]}).encode())
    pieces: list[Piece] = [("text", "I"), ("call", ("patch", arguments)), ("call", ("run", "{}"))]
    whole = b"".join(responses_answer.from_chat(answer(pieces, "tool_calls"), "m", known))
    streamed = feed(ResponsesStream("m", known), stream(pieces, "tool_calls"))
    assert response_of(streamed)["output"] == json.loads(whole)["output"]
    item = Response.model_validate_json(whole).output[1]
    assert item.type == "custom_tool_call"
    assert (item.name, item.input, item.call_id) == ("patch", text, "call_0")
    adapter = TypeAdapter[Any](ResponseStreamEvent)
    custom = [event for event in events(streamed) if "custom_tool_call_input" in event["type"]]
    assert [adapter.validate_python(event).type.rpartition(".")[2] for event in custom] == [
        "delta",
        "done",
    ]
    assert [event.get("delta", event.get("input")) for event in custom] == [text, text]


def logprob(token: str) -> dict[str, Any]:
    alternative = {"token": token, "bytes": [97], "logprob": -0.5}
    return {**alternative, "top_logprobs": [alternative]}


def test_log_probabilities_are_requested_and_come_back() -> None:
    include = ["message.output_text.logprobs"]
    request = chat(include=include, top_logprobs=2)
    assert (request["logprobs"], request["top_logprobs"]) == (True, 2)
    assert not chat(top_logprobs=2).keys() & {"logprobs", "top_logprobs"}
    listed = [logprob("a"), logprob("b")]
    body = answer([("text", "ab")], logprobs={"content": listed})
    whole = json.loads(b"".join(responses_answer.from_chat(body, "m", echoed())))
    assert whole["output"][0]["content"][0]["logprobs"] == listed
    data = b"".join(chunk({"content": p["token"]}, logprobs={"content": [p]}) for p in listed)
    translator = ResponsesStream("m", echoed())
    streamed = feed(translator, data + chunk({}, finish_reason="stop")) + finish(translator)
    assert response_of(streamed)["output"][0]["content"] == whole["output"][0]["content"]
    deltas = [e["logprobs"] for e in events(streamed) if e["type"].endswith("text.delta")]
    assert deltas == [[listed[0]], [listed[1]]]


def test_log_probabilities_of_tokens_without_text_come_with_the_next_text() -> None:
    listed = [logprob(token) for token in ("a", "b", "c", "d")]
    texts = ("", "ab", "c", "")  # as of a character of two tokens, and a token that ends an answer
    data = b"".join(
        chunk({"content": text}, logprobs={"content": [shown]})
        for text, shown in zip(texts, listed, strict=True)
    )
    translator = ResponsesStream("m", echoed())
    streamed = feed(translator, data + chunk({}, finish_reason="stop")) + finish(translator)
    deltas = [e["logprobs"] for e in events(streamed) if e["type"].endswith("text.delta")]
    assert deltas == [listed[:2], listed[2:3]]
    assert response_of(streamed)["output"][0]["content"][0]["logprobs"] == listed


def test_a_prompt_that_is_too_long_may_be_cut() -> None:
    assert chat(truncation="auto")["truncate_prompt_tokens"] == -1
    assert "truncate_prompt_tokens" not in chat(truncation="disabled")


@pytest.mark.parametrize(("status", "continues"), [("incomplete", True), ("completed", False)])
def test_an_incomplete_answer_at_the_end_is_continued(status: str, continues: bool) -> None:
    part = {"type": "output_text", "text": "The dam is", "annotations": []}
    answered = {"type": "message", "role": "assistant", "status": status, "content": [part]}
    request = chat(input=[{"role": "user", "content": "x"}, answered])
    assert request.get("continue_final_message", False) is continues
    assert request.get("add_generation_prompt", True) is not continues


@pytest.mark.parametrize("content", [[], "", [{"type": "output_text", "text": ""}]])
def test_an_incomplete_answer_without_text_is_not_continued(content: object) -> None:
    answered = {"role": "assistant", "status": "incomplete", "content": content}
    request = chat(input=[{"role": "user", "content": "x"}, answered])
    assert not request.keys() & {"continue_final_message", "add_generation_prompt"}
    assert request["messages"][-1] == {"role": "assistant", "content": ""}


def test_searches_that_a_service_made_are_left_out_of_the_conversation() -> None:
    items = [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]
    assert len(chat(input=[{"role": "user", "content": "x"}, *items])["messages"]) == 1
