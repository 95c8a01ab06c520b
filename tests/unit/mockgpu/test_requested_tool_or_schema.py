"""Tests of which requests a mock engine answers with a tool call or JSON instead of free text."""

from __future__ import annotations

from typing import Any

import pytest

from mockgpu.requested_tool_or_schema import FREE_TEXT, RequestedForm, requested_form

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
CALL = 'Please call the tool read with {"path": "a}b.txt", "n": [1]} and wait.'


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": text}


def form(
    text: object = "hello", tools: Any = (TOOL,), choice: Any = None, **form: Any
) -> RequestedForm:
    messages = text if isinstance(text, list) else [user(text)]
    wanted = form.get("response_format"), form.get("structured_outputs")
    return requested_form(messages, tools, choice, *wanted)


def test_a_chat_with_tools_is_answered_with_text() -> None:
    assert form() == FREE_TEXT


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "read"}}])
def test_a_forced_tool_gets_arguments_of_its_schema(choice: Any) -> None:
    found = form(choice=choice)
    assert found.tool == "read"
    assert found.frame is not None
    assert (found.frame.before, found.frame.after) == ('{"path":"', '"}')
    assert found.fixed_text is None


@pytest.mark.parametrize(
    "content", [CALL, [{"type": "text", "text": "Note."}, {"type": "text", "text": CALL}]]
)
def test_a_user_can_ask_for_a_call_with_arguments(content: object) -> None:
    found = form([user("before"), {"role": "assistant", "content": "yes"}, user(content)])
    assert (found.tool, found.fixed_text) == ("read", '{"path": "a}b.txt", "n": [1]}')


@pytest.mark.parametrize(
    "messages",
    [
        [user(CALL), {"role": "assistant", "content": ""}, {"role": "tool", "content": CALL}],
        [user(CALL), {"role": "assistant", "content": CALL}, user("go on")],
        [user(CALL.replace("read", "write"))],
        [user("call the tool read with {broken")],
    ],
    ids=["answered", "earlier turn", "not offered", "malformed"],
)
def test_other_texts_call_nothing(messages: list[Any]) -> None:
    assert form(messages) == FREE_TEXT


def test_a_chat_that_forbids_tools_calls_none() -> None:
    assert form(CALL, choice="none") == FREE_TEXT


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"response_format": {"type": "json_object"}}, '{"words":""}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            '{"path":""}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '{"path":""}'),
        ({"structured_outputs": {"json": '{"const": 3}'}}, "3"),
        ({"structured_outputs": {"json_object": True}}, '{"words":""}'),
        ({"structured_outputs": {"choice": ["deep", "shallow"]}}, "deep"),
    ],
)
def test_structured_output_has_its_frame(wanted: dict[str, Any], text: str) -> None:
    found = form(**wanted).frame
    assert found is not None
    assert found.before + found.after == text


def test_free_text_stays_free() -> None:
    assert form(response_format={"type": "text"}) == FREE_TEXT


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ((), "required", "`tools` must be set"),
        ((TOOL,), {"type": "function", "function": {"name": "write"}}, "does not match any"),
    ],
)
def test_a_tool_that_is_not_offered_is_an_error(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form(tools=tools, choice=choice)
