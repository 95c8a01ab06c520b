"""Rewrites a `tool_choice` of type `allowed_tools` for engines, which do not know it.

OpenAI's API lets a request offer many tools and permit some of them. The permitted ones are sent as
`tools`, and the mode as `tool_choice`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.protocol.errors import GatewayError
from gateway.protocol.request.json_members import bad_request

_TYPE = b'"allowed_tools"'
TOOL_CHOICE, _TOOLS = "tool_choice", "tools"
_MODES = ("auto", "required")
_LONGEST = 64 * 1024  # bytes of a choice that is decoded here; tools have short names
MAX_TOOLS = 4096
"""Maximum number of tools of which a request may permit some. Each is decoded in the event loop."""
_MAX_OBJECTS = 256 * 1024
"""Maximum number of braces in `tools`, which bounds the time to find out how many tools it has."""


class _Named(msgspec.Struct, gc=False):
    name: str | None = None


class _Tool(_Named, gc=False):
    """The members of a tool's JSON that identify the tool.

    Chats have the tool's name in a member that is called like its type, such as `function`.
    """

    type: str | None = None
    server_label: str | None = None
    function: _Named | None = None
    custom: _Named | None = None


_decode = msgspec.json.Decoder().decode
_read_tools = msgspec.json.Decoder(list[_Tool]).decode
_read_raw_tools = msgspec.json.Decoder(list[msgspec.Raw]).decode


def names_allowed_tools(choice: msgspec.Raw) -> bool:
    """Return whether the raw value of `tool_choice` is of the type `allowed_tools`."""
    if memoryview(choice)[0] != ord("{") or len(choice) > _LONGEST:
        return False
    text = bytes(choice)
    if _TYPE not in text:
        return False
    try:
        return bool(_decode(text).get("type") == "allowed_tools")
    except (msgspec.DecodeError, RecursionError):  # such as numbers that no float can hold
        return False


def narrow_tools(members: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Reduce the `tools` of a request to those that its `tool_choice` permits.

    `tool_choice` is replaced by its own member `mode`, such as auto. Returns the changed members.
    Raises GatewayError (400) if the choice is malformed, or permits none of the tools, or if there
    are more than MAX_TOOLS tools.
    """
    choice = _decode(members[TOOL_CHOICE])
    nested = choice.get("allowed_tools")  # so in chats; in the Responses API it is flat
    permitted = choice if nested is None else nested
    mode, names = (
        (permitted.get("mode"), permitted.get(_TOOLS))
        if isinstance(permitted, dict)
        else (None, None)
    )
    if mode not in _MODES:
        raise _malformed()
    kept = _permitted(members, _identities(names))
    if not kept:
        raise bad_request("'tool_choice' permits none of the 'tools'.", TOOL_CHOICE)
    raw = msgspec.Raw(b"[" + b",".join(map(bytes, kept)) + b"]")
    return {**members, _TOOLS: raw, TOOL_CHOICE: msgspec.Raw(msgspec.json.encode(mode))}


def _identities(names: object) -> frozenset[tuple[str, str]]:
    try:
        return frozenset(map(_identity, msgspec.convert(names, list[_Tool])))
    except msgspec.ValidationError:
        raise _malformed() from None


def _permitted(
    members: Mapping[str, msgspec.Raw], permitted: frozenset[tuple[str, str]]
) -> list[msgspec.Raw]:
    # Return the tools of a request that are permitted, as raw JSON in the request's order.
    text = bytes(members.get(_TOOLS, b"null"))
    if text.count(b"{") > _MAX_OBJECTS:
        raise _too_many()
    try:
        tools = _read_tools(text)
    except (msgspec.DecodeError, RecursionError):
        raise bad_request("'tools' must be a list of objects with names.", _TOOLS) from None
    if len(tools) > MAX_TOOLS:
        raise _too_many()
    raw = _read_raw_tools(text)
    return [part for part, tool in zip(raw, tools, strict=True) if _identity(tool) in permitted]


def _malformed() -> GatewayError:
    message = "'tool_choice' of type allowed_tools must have the members 'mode' and 'tools'."
    return bad_request(message, TOOL_CHOICE)


def _too_many() -> GatewayError:
    message = (
        f"With 'tool_choice' of type allowed_tools, 'tools' may have at most {MAX_TOOLS} items."
    )
    return bad_request(message, _TOOLS)


def _identity(tool: _Tool) -> tuple[str, str]:
    # Return the type of a tool, and the name that tells it apart from others of its type.
    inner = {"function": tool.function, "custom": tool.custom}.get(tool.type or "")
    name = tool.name if inner is None else inner.name
    return tool.type or "", name or tool.server_label or ""
