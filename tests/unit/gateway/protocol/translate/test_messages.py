"""Tests of the translation of Anthropic's Messages API to chat completions, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.errors import GatewayError
from gateway.protocol.translate import messages_answer, messages_request
from gateway.protocol.translate.messages_answer import MessagesStream
from tests.unit.gateway.protocol.translate.chats import (
    answer,
    chunk,
    events,
    feed,
    finish,
    message_of,
    stream,
)

TOOL = {"name": "run", "description": "Run it.", "input_schema": {"type": "object"}}
BASE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "x"}],
}


def chat(**members: Any) -> dict[str, Any]:
    body = json.dumps(BASE | members).encode()
    return dict(json.loads(messages_request.to_chat(body)))


def content(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return list(chat(messages=[{"role": role, "content": list(blocks)}])["messages"])


def test_a_turn_of_an_agent_becomes_chat_messages() -> None:
    turns = [
        {"role": "user", "content": "List the files."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A tool helps.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "run", "input": {"cmd": "ls"}},
                {"type": "tool_use", "id": "t2", "name": "run", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a.py"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "way"}],
                },
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    request = chat(system=[{"type": "text", "text": "Be brief."}], messages=turns, tools=[TOOL])
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List the files."},
        {
            "role": "assistant",
            "reasoning": "A tool helps.",
            "reasoning_content": "A tool helps.",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "run", "arguments": '{"cmd":"ls"}'},
                },
                {"id": "t2", "type": "function", "function": {"name": "run", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "t2", "content": "no\nway"},
        {"role": "user", "content": "Go on."},
    ]
    assert request["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert request["tool_choice"] == "auto"


def test_sampling_stops_and_streaming_keep_their_meaning() -> None:
    request = chat(
        stream=True, temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], max_tokens=77
    )
    assert request["stream_options"] == {"include_usage": True}
    assert (request["temperature"], request["top_p"], request["top_k"]) == (0.5, 0.9, 4)
    assert (request["stop"], request["max_tokens"]) == (["END"], 77)
    assert "stream" not in chat(stream=False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "run"}, {"type": "function", "function": {"name": "run"}}),
    ],
)
def test_a_choice_of_tools_is_translated(choice: dict[str, Any], expected: object) -> None:
    request = chat(tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True})
    assert request["tool_choice"] == expected
    assert request["parallel_tool_calls"] is False


def test_images_become_urls_also_those_of_tool_results() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert content({"type": "text", "text": "See"}, image) == [
        {"role": "user", "content": [{"type": "text", "text": "See"}, part]}
    ]
    assert content({"type": "tool_result", "tool_use_id": "t", "content": [image]}) == [
        {"role": "tool", "tool_call_id": "t", "content": ""},
        {"role": "user", "content": [part]},
    ]


def test_system_prompts_are_one_message_without_the_billing_line() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1f3;"},
        {"type": "text", "text": "You code. "},
    ]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    assert chat(system=system, messages=turns)["messages"] == [
        {"role": "system", "content": "You code. Be brief."},
        {"role": "user", "content": "x"},
    ]


def turns(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    conversation = [{"role": role, "content": content} for role, content in messages]
    first, *others = chat(system="Code.", messages=conversation)["messages"]
    assert first == {"role": "system", "content": "Code."}
    return others


def test_system_messages_within_a_conversation_join_the_message_beside_them() -> None:
    result = [{"type": "tool_result", "tool_use_id": "t", "content": "a.py"}]
    call = [{"type": "tool_use", "id": "t", "name": "run", "input": {}}]
    said = turns(
        *(("user", "x"), ("system", "One."), ("system", "Two."), ("assistant", "y")),
        *(("system", "Three."), ("user", "z"), ("assistant", call), ("system", "Four.")),
        *(("user", result), ("system", "Five."), ("assistant", "w"), ("system", "Six.")),
    )
    assert [message["content"] for message in said] == [
        *("x\n\nOne.\n\nTwo.", "y", "Three.\n\nz", None, "a.py\n\nFour.\n\nFive.", "w", "Six."),
    ]
    assert said[-1]["role"] == "user"


def test_texts_that_meet_are_one_part() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/i.png"}}
    words = {"type": "text", "text": "x"}
    said = turns(("user", [image, words]), ("system", [{"type": "text", "text": "One."}]))
    assert [part.get("text") for part in said[0]["content"]] == [None, "x\n\nOne."]
    said = turns(("user", [words, image]), ("system", "One."))
    assert [part.get("text") for part in said[0]["content"]] == ["x", None, "One."]


@given(st.lists(st.sampled_from(["user", "assistant", "system"]), max_size=8))
def test_each_turn_begins_with_the_messages_of_the_turn_before(roles: list[str]) -> None:
    before = [("user", "0"), *((role, str(at)) for at, role in enumerate(roles, 1))]
    ended = [*before, ("assistant", "answer")]
    assert turns(*ended, ("system", "note"), ("user", "next"))[: len(turns(*ended))] == turns(
        *ended
    )
    assert turns(*ended)[:-1] == turns(*before)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x/i.png"}}
ERROR = {"oversized_image": "error"}


def test_a_document_is_a_text_below_its_title_and_context() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The dam is deep."}
    document = {"type": "document", "source": source}
    labels = {"title": "Dams", "context": "Of 2026.", "citations": {"enabled": True}}
    said = [turns(("user", [block]))[0]["content"] for block in (document, document | labels)]
    assert said == ["The dam is deep.", "Dams\nOf 2026.\nThe dam is deep."]


def test_an_image_may_be_scaled_down() -> None:
    scaled = IMAGE | {"transformations": {"oversized_image": "downsize"}}
    assert turns(("user", [scaled, IMAGE]))[0]["content"][0]["type"] == "image_url"


def test_a_schema_and_an_effort_are_translated() -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    request = chat(output_config=config, thinking={"type": "adaptive"}, metadata={"user_id": "u"})
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert request["reasoning_effort"] == "low"
    assert not request.keys() & {"thinking", "metadata", "output_config"}


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"odd": 1}]}, "tools[0].odd"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"new_member": 1}, "new_member"),
        ({"tool_choice": {"type": "odd"}}, "tool_choice.type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "document", "source": {"type": "base64"}}],
                    }
                ]
            },
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE | {"transformations": ERROR}]}]},
            "messages[0].content[0].transformations.oversized_image",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"messages": "x"}, "messages"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(members: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as refused:
        chat(**members)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize("body", [b"[]", b"{", b"[" * 100_000, b'{"model": "\xff"}'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError):
        messages_request.to_chat(body)


@pytest.mark.parametrize(
    ("finish", "choice", "expected"),
    [
        ("stop", {}, ("end_turn", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"matched_stop": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": 128009}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
    ],
)
def test_reasons_to_stop(finish: str, choice: dict[str, Any], expected: tuple[str, object]) -> None:
    whole = json.loads(
        b"".join(messages_answer.from_chat(answer([("text", "a")], finish, **choice), "m"))
    )
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    translator = MessagesStream("m")
    streamed = message_of(feed(translator, stream([("text", "a")], finish, **choice)))
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == expected


def test_the_events_of_a_stream_come_in_order() -> None:
    pieces = [("thought", "hm"), ("text", "ok"), ("call", ("run", '{"a":1}')), ("call", ("up", ""))]
    names = [
        (event["type"], event.get("index"))
        for event in events(feed(MessagesStream("m"), stream(pieces, "tool_calls", size=99)))
    ]
    assert names == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]


def test_an_error_in_a_stream_is_an_error_event_and_its_end() -> None:
    translator = MessagesStream("m")
    failed = b'data: {"error": {"message": "gone", "type": "overloaded_error", "code": 503}}\n\n'
    out = feed(translator, chunk({"content": "a"}) + failed + b"data: [DONE]\n\n")
    assert events(out)[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone"},
    }
    assert finish(translator) == b""


def test_calls_that_are_written_at_once_are_an_error_not_a_mixture() -> None:
    def call(index: int) -> bytes:
        piece = {"index": index, "id": f"c{index}", "function": {"name": "run", "arguments": "{}"}}
        return chunk({"tool_calls": [piece]})

    out = feed(MessagesStream("m"), call(0) + call(1) + call(0))
    assert events(out)[-1]["type"] == "error"


def test_arguments_that_are_no_object_are_kept() -> None:
    whole = json.loads(b"".join(messages_answer.from_chat(answer([("call", ("run", "[1"))]), "m")))
    assert whole["content"][0]["input"] == {"INVALID_JSON": "[1"}
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_an_error_response_has_the_apis_own_shape(status: int, kind: str) -> None:
    body = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'
    assert json.loads(messages_answer.from_error(status, body)) == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
    }
    assert json.loads(messages_answer.from_error(status, b"<html>"))["error"]["type"] == kind


def test_texts_of_claude_code_itself_are_the_users() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "ctx", "msg")]
    assert [message["role"] for message in chat(messages=messages)["messages"]] == ["user"] * 3


def test_search_results_and_references_to_tools_are_texts() -> None:
    found = {
        "type": "search_result",
        "source": "https://x/dam",
        "title": "Dams",
        "content": [{"type": "text", "text": "Deep."}, {"type": "text", "text": "Wide."}],
        "citations": {"enabled": True},
    }
    text = "Dams\nhttps://x/dam\nDeep.\nWide."
    assert content(found) == [{"role": "user", "content": text}]
    results = [found, {"type": "tool_reference", "tool_name": "run"}]
    assert content({"type": "tool_result", "tool_use_id": "t", "content": results}) == [
        {"role": "tool", "tool_call_id": "t", "content": f"{text}\nrun"}
    ]


@pytest.mark.parametrize("tools", [{}, {"tools": []}])
def test_without_tools_nothing_says_how_to_call_them(tools: dict[str, Any]) -> None:
    request = chat(**tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert not request.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


def test_a_stream_begins_with_the_expected_tokens_and_ends_with_the_counted_ones() -> None:
    first, *_, last, _ = events(feed(MessagesStream("m", 77), stream([("text", "a")])))
    assert first["message"]["usage"]["input_tokens"] == 77
    counted = {"input_tokens": 20, "cache_read_input_tokens": 100, "output_tokens": 30}
    assert counted.items() <= last["usage"].items()


def test_a_stream_begins_with_the_counted_tokens_where_the_engine_reports_them_at_once() -> None:
    usage = {"prompt_tokens": 120, "completion_tokens": 1}
    counted = b'data: {"id": "chatcmpl-7", "choices": [], "usage": %b}\n\n'
    data = counted % json.dumps(usage).encode() + stream([("text", "a")])
    first = events(feed(MessagesStream("m", 77), data))[0]
    assert first["message"]["usage"]["input_tokens"] == 120


def test_an_answer_that_the_client_has_begun_is_continued() -> None:
    user = {"role": "user", "content": "x"}
    begun = chat(messages=[user, {"role": "assistant", "content": "The dam is"}])
    assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)
    call = {"type": "tool_use", "id": "t", "name": "run", "input": {}}
    for said in ("", [call]):
        request = chat(messages=[user, {"role": "assistant", "content": said}])
        assert "continue_final_message" not in request
