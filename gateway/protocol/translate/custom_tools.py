"""Converts custom tools of the Responses API, which take free text, to functions of a chat.

The arguments of a chat's function are a JSON object. Its member `input` has the free text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.protocol.translate.request_reader import check_members, encode, mapping_of, text_of

_MEMBERS = frozenset({"type", "name", "description", "format", "defer_loading", "allowed_callers"})
_INPUT = "input"
_CUT = re.compile(
    r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+)'
    r'(?:\\(?:u[0-9a-fA-F]{0,3})?|"\s*)?'
)
"""Arguments whose text is cut off within the input, within an escape, or before the last brace."""
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_BEFORE_INPUT = '{"input":"'


class _Arguments(msgspec.Struct, frozen=True):
    input: str


_read = msgspec.json.Decoder(_Arguments).decode
_read_text = msgspec.json.Decoder(str).decode


def custom_function(tool: Mapping[str, Any], path: str, name: str) -> dict[str, Any]:
    """Return a chat function with this name that stands for a custom tool.

    A grammar of the text becomes part of the description, because a chat cannot enforce it. Raises
    GatewayError for members that are not known.
    """
    check_members(tool, _MEMBERS, path, may_be_off=("async",))
    described = [text_of(tool.get("description") or "", f"{path}.description")]
    form = mapping_of(tool.get("format") or {"type": "text"}, f"{path}.format")
    if form.get("type") == "grammar":
        syntax = text_of(form.get("syntax"), f"{path}.format.syntax")
        definition = text_of(form.get("definition"), f"{path}.format.definition")
        described.append(f"The input must match this {syntax} grammar:\n{definition}")
    schema = {
        "type": "object",
        "properties": {_INPUT: {"type": "string", "description": "The tool's input, as text."}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    function: dict[str, Any] = {"name": name}
    if text := "\n\n".join(filter(None, described)):
        function["description"] = text
    return {"type": "function", "function": function | {"parameters": schema}}


def custom_arguments(text: str) -> str:
    """Return the arguments of the chat function, as JSON, for the input of a custom tool."""
    return encode({_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of the chat function.

    If the arguments are cut off, the result is the input so far. If a model wrote them in another
    form, the result is their whole text.
    """
    try:
        return _read(arguments).input
    except (msgspec.DecodeError, RecursionError):
        return _cut_input(arguments)


def _cut_input(arguments: str) -> str:
    cut = _CUT.fullmatch(arguments)
    if cut is None:
        beginning = "".join(arguments[:64].split())
        return "" if len(arguments) <= 64 and _BEFORE_INPUT.startswith(beginning) else arguments
    try:
        return _read_text(f'"{_HALF_PAIR.sub("", cut[1])}"')
    except msgspec.DecodeError:
        return arguments


def custom_names(tools: list[Any]) -> frozenset[str]:
    """Return the names of the custom tools among the tools of a request."""
    return frozenset(
        str(tool.get("name"))
        for tool in tools
        if isinstance(tool, dict) and tool.get("type") == "custom"
    )
