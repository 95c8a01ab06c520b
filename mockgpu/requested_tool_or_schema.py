"""Finds out which form of answer a chat requests: free text, a tool call, or JSON.

A mock engine calls a tool if the request forces it, or if the user's message contains `call the
tool NAME with {ARGUMENTS}`. So agents can be tested without a real model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mockgpu.json_for_schema import ANY_OBJECT, JsonFrame, fixed_frame, frame_of

_REQUESTED = re.compile(r"call the tool ([\w.-]{1,128}) with (?=\{)")
_MARK = "call the tool "
_decode_first = json.JSONDecoder().raw_decode


class RequestedForm(msgspec.Struct, frozen=True):
    """The form of an answer: free text, JSON, or a tool call.

    tool   name of the tool to call; None: the answer is text
    frame  JSON text around the generated words; None: only the words
    """

    tool: str | None = None
    frame: JsonFrame | None = None

    @property
    def fixed_text(self) -> str | None:
        """Return the complete answer if the user's message dictated it, otherwise None."""
        return self.frame.before if self.frame is not None and not self.frame.has_words else None


FREE_TEXT = RequestedForm()


def requested_form(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_choice: object,
    response_format: object,
    structured_outputs: object,
) -> RequestedForm:
    """Return the form of answer that a chat requests.

    Raises ValueError if the request forces a tool that it does not define.
    """
    offered = {_function_name(tool): tool for tool in tools}
    if (name := _forced_tool(list(offered), tool_choice)) is not None:
        function = offered[name].get("function")
        schema = function.get("parameters") if isinstance(function, dict) else None
        return RequestedForm(name, frame_of(schema or ANY_OBJECT))
    if offered and tool_choice != "none":
        for name, arguments in _requested_calls(messages):
            if name in offered:
                return RequestedForm(name, fixed_frame(arguments))
    return _structured(response_format, structured_outputs)


def _structured(response_format: object, structured_outputs: object) -> RequestedForm:
    # Return the form of a text answer. OpenAI's `response_format` precedes vLLM's own member.
    form = response_format if isinstance(response_format, dict) else {}
    if form.get("type") == "json_object":
        return RequestedForm(frame=frame_of(ANY_OBJECT))
    if form.get("type") == "json_schema":
        named = form.get("json_schema")
        return RequestedForm(frame=frame_of(named.get("schema") if named else ANY_OBJECT))
    wanted = structured_outputs if isinstance(structured_outputs, dict) else {}
    if choices := wanted.get("choice"):
        return RequestedForm(frame=fixed_frame(str(choices[0])))
    if wanted.get("json_object"):
        return RequestedForm(frame=frame_of(ANY_OBJECT))
    if schema := wanted.get("json"):
        return RequestedForm(frame=frame_of(_schema(schema)))
    return FREE_TEXT


def _schema(value: object) -> object:
    # Return a JSON Schema, which may be given as a string. Raises ValueError if invalid.
    return json.loads(value) if isinstance(value, str) else value


def _forced_tool(names: Sequence[str | None], choice: object) -> str | None:
    # Return the tool that must be called, or None.
    #
    # If `choice` names a tool, that one must be called; if any tool is required, the first one.
    if isinstance(choice, dict):
        name = _function_name(choice)
        if name is None or name not in names:
            raise ValueError(
                "The tool specified in `tool_choice` does not match any of the specified `tools`"
            )
        return name
    if choice == "required":
        if not names or names[0] is None:
            raise ValueError("When using `tool_choice`, `tools` must be set.")
        return names[0]
    return None


def _function_name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _requested_calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    # Yield the tool calls that the user has dictated since the last answer: name, arguments.
    for message in reversed(messages):
        if message.get("role") in ("assistant", "tool"):
            return
        if message.get("role") == "user":
            yield from _calls_in(_text(message.get("content")))


def _calls_in(text: str) -> Iterator[tuple[str, str]]:
    if _MARK not in text:
        return
    for match in _REQUESTED.finditer(text):
        try:
            _, end = _decode_first(text, match.end())
        except (ValueError, RecursionError):
            continue
        yield match[1], text[match.end() : end]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
