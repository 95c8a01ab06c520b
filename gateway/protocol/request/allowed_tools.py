"""Rewrites a `tool_choice` of type `allowed_tools` for engines, which do not know it.

OpenAI's API lets a request offer many tools and permit some of them. The permitted ones are sent as
`tools`, and the mode as `tool_choice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.protocol.request.json_members import bad_request

_TYPE = b'"allowed_tools"'
TOOL_CHOICE, _TOOLS = "tool_choice", "tools"
_MODES = ("auto", "required")
_LONGEST = 64 * 1024  # bytes of a choice that is decoded here; tools have short names

_decode = msgspec.json.Decoder().decode
_read_tools = msgspec.json.Decoder(list[msgspec.Raw]).decode


def names_allowed_tools(choice: msgspec.Raw) -> bool:
    """Return whether the raw value of `tool_choice` is of the type `allowed_tools`."""
    if memoryview(choice)[0] != ord("{") or len(choice) > _LONGEST:
        return False
    text = bytes(choice)
    if _TYPE not in text:
        return False
    try:
        return bool(_decode(text).get("type") == "allowed_tools")
    except RecursionError:
        return False


def narrow_tools(members: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the members of a request with only the permitted tools, and the mode as choice.

    Raises GatewayError (400) if the choice is malformed, or permits none of the tools.
    """
    choice = _decode(members[TOOL_CHOICE])
    nested = choice.get("allowed_tools")  # so in chats; in the Responses API it is flat
    permitted = choice if nested is None else nested
    mode, names = (
        (permitted.get("mode"), permitted.get(_TOOLS))
        if isinstance(permitted, dict)
        else (None, None)
    )
    if mode not in _MODES or not isinstance(names, list):
        message = "'tool_choice' of type allowed_tools must have the members 'mode' and 'tools'."
        raise bad_request(message, TOOL_CHOICE)
    kept = _permitted(members, [_identity(name) for name in names])
    if not kept:
        raise bad_request("'tool_choice' permits none of the 'tools'.", TOOL_CHOICE)
    tools = msgspec.Raw(b"[" + b",".join(map(bytes, kept)) + b"]")
    return {**members, _TOOLS: tools, TOOL_CHOICE: msgspec.Raw(msgspec.json.encode(mode))}


def _permitted(
    members: Mapping[str, msgspec.Raw], permitted: Sequence[tuple[str, str]]
) -> list[msgspec.Raw]:
    # Return the tools of a request that are permitted, as raw JSON in the request's order.
    try:
        tools = _read_tools(members.get(_TOOLS, b"null"))
        return [tool for tool in tools if _identity(_decode(tool)) in permitted]
    except (msgspec.DecodeError, RecursionError):
        raise bad_request("'tools' must be a list of objects.", _TOOLS) from None


def _identity(tool: Any) -> tuple[str, str]:
    # Return the type of a tool, and the name that tells it apart from others of its type.
    if not isinstance(tool, dict):
        return "", ""
    kind = str(tool.get("type"))
    inner = tool.get(kind)
    named = inner if isinstance(inner, dict) else tool
    return kind, str(named.get("name") or named.get("server_label") or "")
