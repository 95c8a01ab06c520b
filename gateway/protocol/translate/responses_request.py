"""Translates OpenAI Responses requests to chat completion requests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.protocol.translate.custom_tools import custom_function
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
from gateway.protocol.translate.responses_input import (
    flat_name,
    input_messages,
    is_unfinished,
    join_system_messages,
)

_TOOL_MEMBERS = frozenset(
    {
        *("type", "name", "description", "parameters", "strict", "defer_loading"),
        *("allowed_callers", "output_schema"),
    }
)
_NAMESPACE_MEMBERS = frozenset({"type", "name", "description", "tools"})
_LEFT_OUT = "web_search"
"""The beginning of the types of a tool that a service runs by itself, such as
`web_search_2025_08_26`. Agents offer it with every request; it is left out."""
_REASONING_MEMBERS = frozenset({"effort", "summary", "generate_summary", "context", "mode"})
_FORMAT_MEMBERS = ("name", "description", "schema", "strict")
_LOGPROBS = "message.output_text.logprobs"


def to_chat(body: bytes) -> bytes:
    """Translate the body of a /v1/responses request to a chat completion request.

    Members that only advise a service are left out (docs/api.md). Raises GatewayError (400) with
    the name of a member that cannot be translated.
    """
    return encode(chat_members(read_object(body)))


def chat_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the members of a Responses request to members of a chat completion request.

    Raises GatewayError (400) with the name of a member that cannot be translated.
    """
    require(members, "model", "input")
    chat = translate_members(members, _HANDLERS)
    if members.get("instructions"):
        instructions = text_of(members["instructions"], "instructions")
        chat["messages"].insert(0, {"role": "system", "content": instructions})
    join_system_messages(chat["messages"])
    settle_tool_choice(chat)
    if not chat.get("logprobs"):
        chat.pop("top_logprobs", None)
    return chat


def lost_member(body: bytes) -> str:
    """Return the name of a member that a translation would change or lose; "" if there is none.

    - Members that engines ignore do not count.
    - `store` counts unless it is false, because the engine of a translated request stores nothing.
    - Custom tools count, because an engine may enforce their grammar.
    - `truncation` counts unless it is off, because only vLLM has a member for it.
    - The role `developer` counts, because engines may render it differently.
    - Several system messages count, because the translation joins them.
    """
    members = read_object(body)
    tools = list_of(members.get("tools") or [], "tools")
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)]
    if "custom" in kinds or any(map(_is_left_out, kinds)):
        return "tools"
    value = members.get("input") or []
    items = [] if isinstance(value, str) else list_of(value, "input")
    roles = [item.get("role") for item in items if isinstance(item, dict)]
    if "developer" in roles or roles.count("system") + bool(members.get("instructions")) > 1:
        return "input"
    if members.get("truncation") not in (None, "disabled"):
        return "truncation"
    return "" if members.get("store") is False else "store"


def _input(value: Any, name: str, chat: dict[str, Any]) -> None:
    chat["messages"] = input_messages(value)
    if is_unfinished(value) and chat["messages"][-1]["content"]:  # an empty one cannot be continued
        chat |= {"continue_final_message": True, "add_generation_prompt": False}


def _tools(value: Any, name: str, chat: dict[str, Any]) -> None:
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(list_of(value, name)):
        path = f"{name}[{index}]"
        kind = mapping_of(tool, path).get("type")
        if kind == "namespace":
            tools += _namespace(tool, path)
        elif kind == "function":
            tools.append(_function(tool, path))
        elif kind == "custom":
            tools.append(custom_function(tool, path, text_of(tool.get("name"), f"{path}.name")))
        elif not _is_left_out(kind):
            raise untranslatable(f"{path}.type", str(kind))
    if tools:
        chat["tools"] = tools


def _is_left_out(kind: Any) -> bool:
    return str(kind).startswith(_LEFT_OUT)


def _namespace(group: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    # Return the functions of a namespace as chat functions, with the namespace in their names.
    check_members(group, _NAMESPACE_MEMBERS, path)
    namespace, functions = text_of(group.get("name"), f"{path}.name"), list[dict[str, Any]]()
    for index, tool in enumerate(list_of(group.get("tools"), f"{path}.tools")):
        where = f"{path}.tools[{index}]"
        if mapping_of(tool, where).get("type") != "function":
            raise untranslatable(f"{where}.type", str(tool.get("type")))
        functions.append(_function(tool, where, namespace))
    return functions


def _function(tool: Mapping[str, Any], path: str, namespace: str = "") -> dict[str, Any]:
    check_members(tool, _TOOL_MEMBERS, path, may_be_off=("async",))
    function = {"name": flat_name(namespace, text_of(tool.get("name"), f"{path}.name"))} | {
        key: tool[key]
        for key in ("description", "parameters", "strict")
        if tool.get(key) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(value: Any, name: str, chat: dict[str, Any]) -> None:
    if value in ("none", "auto", "required"):
        chat[name] = value
        return
    choice = mapping_of(value, name)
    if choice.get("type") not in ("function", "custom"):
        raise untranslatable(f"{name}.type", str(choice.get("type")))
    chosen = text_of(choice.get("name"), f"{name}.name")
    chat[name] = {"type": "function", "function": {"name": chosen}}


def _text(value: Any, name: str, chat: dict[str, Any]) -> None:
    config = mapping_of(value, name)
    check_members(config, frozenset({"format", "verbosity"}), name)
    output = mapping_of(config.get("format") or {"type": "text"}, f"{name}.format")
    kind = output.get("type")
    if kind == "json_schema":
        schema = {key: output[key] for key in _FORMAT_MEMBERS if output.get(key) is not None}
        chat["response_format"] = {"type": kind, "json_schema": {"name": "output", **schema}}
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}
    elif kind != "text":
        raise untranslatable(f"{name}.format.type", str(kind))
    if config.get("verbosity") is not None:
        chat["verbosity"] = text_of(config["verbosity"], f"{name}.verbosity")


def _reasoning(value: Any, name: str, chat: dict[str, Any]) -> None:
    config = mapping_of(value, name)
    check_members(config, _REASONING_MEMBERS, name)
    if config.get("effort") is not None:
        chat["reasoning_effort"] = text_of(config["effort"], f"{name}.effort")


def _include(value: Any, name: str, chat: dict[str, Any]) -> None:
    # Request log probabilities if they are included; other items need no counterpart.
    if _LOGPROBS in list_of(value, name):
        chat["logprobs"] = True


def _truncation(value: Any, name: str, chat: dict[str, Any]) -> None:
    # -1: vLLM cuts the beginning of a prompt that is too long; other engines refuse it as before.
    if value == "auto":
        chat["truncate_prompt_tokens"] = -1
    elif value != "disabled":
        raise untranslatable(name, str(value))


_HANDLERS: Mapping[str, MemberHandler] = MappingProxyType(
    {
        **dict.fromkeys(SAMPLING, copy_member),
        **dict.fromkeys(
            (
                *("background", "context_management", "conversation", "modalities"),
                *("moderation", "previous_response_id", "prompt"),
            ),
            refuse_member,
        ),
        **dict.fromkeys(
            (
                *("client_metadata", "instructions", "max_tool_calls", "metadata"),
                *("prompt_cache_retention", "safety_identifier", "service_tier", "store"),
                *("stream_options", "prompt_cache_options"),
            ),
            skip_member,
        ),
        "model": copy_member,
        "user": copy_member,
        "prompt_cache_key": copy_member,
        "input": _input,
        "include": _include,
        "max_output_tokens": limit_output,
        "parallel_tool_calls": copy_member,
        "reasoning": _reasoning,
        "stream": request_stream,
        "text": _text,
        "tool_choice": _tool_choice,
        "tools": _tools,
        "top_logprobs": copy_member,
        "truncation": _truncation,
    }
)
