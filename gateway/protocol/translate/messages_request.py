"""Translates Anthropic Messages requests to chat completion requests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.protocol.translate.messages_conversation import chat_messages, system_text
from gateway.protocol.translate.request_reader import (
    SAMPLING,
    MemberHandler,
    check_members,
    copy_member,
    encode,
    limit_output,
    list_of,
    mapping_of,
    read_object,
    refuse_member,
    request_stream,
    require,
    settle_tool_choice,
    skip_member,
    text_of,
    translate_members,
    untranslatable,
)

_TOOL_MEMBERS = frozenset(
    {
        *("type", "name", "description", "input_schema", "strict", "cache_control"),
        *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"),
    }
)
_CHOICES: Mapping[str, str] = MappingProxyType({"auto": "auto", "any": "required", "none": "none"})


def to_chat(body: bytes) -> bytes:
    """Translate the body of a /v1/messages request to a chat completion request.

    Members that only advise a service are left out (docs/api.md). Raises GatewayError (400) with
    the name of a member that cannot be translated.
    """
    members = read_object(body)
    require(members, "model", "messages", "max_tokens")
    return encode(chat_members(members))


def lost_member(body: bytes) -> str:
    """Return the name of a member that a translation would change or lose; "" if there is none.

    Members that engines ignore do not count. System messages within the conversation count, because
    the translation moves their text. So does the beginning of an answer, which vLLM's own Messages
    API does not continue.
    """
    members = read_object(body)
    if members.get("thinking") is not None:
        return "thinking"
    if members.get("context_management"):
        return "context_management"
    messages = list_of(members.get("messages"), "messages")
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    return "messages" if "system" in roles or roles[-1:] == ["assistant"] else ""


def chat_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the members of a Messages request to members of a chat completion request.

    Raises GatewayError (400) with the name of a member that cannot be translated.
    """
    system = system_text(members.get("system"), list_of(members["messages"], "messages"))
    chat = translate_members(members, _HANDLERS)
    if system:
        chat["messages"].insert(0, {"role": "system", "content": system})
    if _is_begun(chat["messages"]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    settle_tool_choice(chat)
    if "tools" in chat:
        chat.setdefault("tool_choice", "auto")
    return chat


def _is_begun(messages: list[dict[str, Any]]) -> bool:
    # Return whether the client has written the beginning of the answer, which the model continues.
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _messages(value: Any, name: str, chat: dict[str, Any]) -> None:
    chat["messages"] = chat_messages(value)


def _stop(value: Any, name: str, chat: dict[str, Any]) -> None:
    chat["stop"] = [text_of(item, name) for item in list_of(value, name)]


def _tools(value: Any, name: str, chat: dict[str, Any]) -> None:
    tools = [
        _tool(mapping_of(tool, f"tools[{index}]"), f"tools[{index}]")
        for index, tool in enumerate(list_of(value, name))
    ]
    if tools:
        chat["tools"] = tools


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise untranslatable(f"{path}.type", str(kind))
    check_members(tool, _TOOL_MEMBERS, path)
    function: dict[str, Any] = {"name": text_of(tool.get("name"), f"{path}.name")}
    if tool.get("description") is not None:
        function["description"] = text_of(tool["description"], f"{path}.description")
    schema = mapping_of(tool.get("input_schema"), f"{path}.input_schema")
    function["parameters"] = schema if "type" in schema else {"type": "object", **schema}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(value: Any, name: str, chat: dict[str, Any]) -> None:
    choice = mapping_of(value, name)
    kind = choice.get("type")
    if kind == "tool":
        chosen = text_of(choice.get("name"), f"{name}.name")
        chat[name] = {"type": "function", "function": {"name": chosen}}
    elif str(kind) in _CHOICES:
        chat[name] = _CHOICES[str(kind)]
    else:
        raise untranslatable(f"{name}.type", str(kind))
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _output_config(value: Any, name: str, chat: dict[str, Any]) -> None:
    config = mapping_of(value, name)
    check_members(config, frozenset({"format", "effort", "task_budget"}), name)
    if config.get("format") is not None:
        _output_format(config["format"], f"{name}.format", chat)
    if config.get("effort") is not None:
        chat["reasoning_effort"] = text_of(config["effort"], f"{name}.effort")


def _output_format(value: Any, name: str, chat: dict[str, Any]) -> None:
    output = mapping_of(value, name)
    if output.get("type") != "json_schema":
        raise untranslatable(f"{name}.type", str(output.get("type")))
    schema = output.get("schema", output.get("json_schema"))
    chat["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": mapping_of(schema, f"{name}.schema")},
    }


_HANDLERS: Mapping[str, MemberHandler] = MappingProxyType(
    {
        **dict.fromkeys(SAMPLING, copy_member),
        **dict.fromkeys(("container", "mcp_servers", "fallbacks"), refuse_member),
        **dict.fromkeys(
            (
                *("betas", "cache_control", "context_management", "diagnostics", "inference_geo"),
                *("metadata", "service_tier", "speed", "system", "thinking", "user_profile_id"),
            ),
            skip_member,
        ),
        "model": copy_member,
        "messages": _messages,
        "max_tokens": limit_output,
        "stop_sequences": _stop,
        "stream": request_stream,
        "tools": _tools,
        "tool_choice": _tool_choice,
        "output_config": _output_config,
        "output_format": _output_format,
        "prompt_cache_key": copy_member,
    }
)
