"""Reads members of request bodies for translation, with errors that name the member.

A MemberHandler translates one member: it adds the equivalent member to a chat completion request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.protocol.errors import Failure, GatewayError

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

MemberHandler = Callable[[Any, str, dict[str, Any]], None]
"""A function that writes the counterpart of a member's value, given with its name, into a chat
request."""


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a request body and return its JSON object.

    Raises GatewayError (400) if it is not a JSON object.
    """
    try:
        members = _decode(body)
    except RecursionError:
        raise GatewayError(
            Failure.BAD_REQUEST, "The JSON body of the request is nested too deeply."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"Could not parse the JSON body: {error}."
        raise GatewayError(Failure.BAD_REQUEST, message) from None
    if not isinstance(members, dict):
        raise GatewayError(Failure.BAD_REQUEST, "The body of the request must be a JSON object.")
    return members


def encode(value: object) -> bytes:
    """Encode plain data (dicts, lists, strings, numbers) as JSON."""
    return _encode(value)


def untranslatable(name: str, what: str = "") -> GatewayError:
    """Return the error (400) for a member that chat completions have no equivalent of.

    `what` is the value or kind that cannot be translated, for the message.
    """
    message = (
        f"'{name}'{f' ({what})' if what else ''} cannot be translated to chat completions, the "
        "only API of this model's engines."
    )
    return GatewayError(Failure.BAD_REQUEST, message, param=name)


def mistyped(name: str, expected: str) -> GatewayError:
    """Return the error (400) for a member of the wrong type; `expected` names the right one."""
    return GatewayError(Failure.BAD_REQUEST, f"'{name}' must be {expected}.", param=name)


def text_of(value: Any, name: str) -> str:
    """Return `value` if it is a string.

    Raises GatewayError with the member's name if it is not.
    """
    if not isinstance(value, str):
        raise mistyped(name, "a string")
    return value


def list_of(value: Any, name: str) -> list[Any]:
    """Return `value` if it is a list.

    Raises GatewayError with the member's name if it is not.
    """
    if not isinstance(value, list):
        raise mistyped(name, "a list")
    return value


def mapping_of(value: Any, name: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object.

    Raises GatewayError with the member's name if it is not.
    """
    if not isinstance(value, dict):
        raise mistyped(name, "an object")
    return value


def require(members: Mapping[str, Any], *names: str) -> None:
    """Raise GatewayError for the first of these request members that is missing."""
    for name in names:
        if members.get(name) is None:
            message = f"Missing required parameter: '{name}'."
            raise GatewayError(Failure.BAD_REQUEST, message, param=name)


def check_members(
    members: Mapping[str, Any],
    known: frozenset[str],
    path: str,
    may_be_off: tuple[str, ...] = (),
) -> None:
    """Raise GatewayError for the first member that is not in `known`, unless its value is null.

    may_be_off  further members, which are permitted with the value false
    """
    for name, value in members.items():
        is_off = value is None or (value is False and name in may_be_off)
        if name not in known and not is_off:
            raise untranslatable(f"{path}.{name}")


def copy_member(value: Any, name: str, chat: dict[str, Any]) -> None:
    """Copy a member that has the same name and meaning in chat completions."""
    chat[name] = value


def skip_member(value: Any, name: str, chat: dict[str, Any]) -> None:
    """Accept a request member without translating it: the answer is correct without it."""


def refuse_member(value: Any, name: str, chat: dict[str, Any]) -> None:
    """Raise GatewayError for a member, unless its value turns it off (null, false or empty)."""
    if value not in (None, False, [], {}, ""):
        raise untranslatable(name)


def request_stream(value: Any, name: str, chat: dict[str, Any]) -> None:
    """Translate the member `stream`.

    A streamed chat completion is requested with token counts at its end, because the client's API
    reports them too.
    """
    if value is not True and value is not False:
        raise mistyped(name, "a boolean")
    if value:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}


def limit_output(value: Any, name: str, chat: dict[str, Any]) -> None:
    """Set the maximum number of the answer's tokens in the chat request.

    value  the client's limit
    name   name of the member that contains it
    chat   the chat request, which is changed

    Raises GatewayError if the limit is invalid.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise mistyped(name, "a whole number of at least 1")
    chat["max_tokens"] = value


def assistant_reasoning(text: str) -> dict[str, str]:
    """Return the members of an assistant message that contain its reasoning.

    vLLM reads only `reasoning`, other engines only `reasoning_content`.
    """
    return {"reasoning": text, "reasoning_content": text}


def settle_tool_choice(chat: dict[str, Any]) -> None:
    """Remove `tool_choice` and `parallel_tool_calls` from a chat request that offers no tools.

    Engines refuse these members without tools. Raises GatewayError if `tool_choice` names a tool.
    """
    if "tools" in chat:
        return
    chat.pop("parallel_tool_calls", None)
    if isinstance(chat.pop("tool_choice", None), dict):
        message = "'tool_choice' names a tool, but the request has no tools that can be called."
        raise GatewayError(Failure.BAD_REQUEST, message, param="tool_choice")


def translate_members(
    members: Mapping[str, Any], handlers: Mapping[str, MemberHandler]
) -> dict[str, Any]:
    """Return the chat completion request that the handlers build from all members.

    Members with the value null are left out. Raises GatewayError for a member without a handler.
    """
    chat: dict[str, Any] = {}
    for name, value in members.items():
        if value is not None:
            handlers.get(name, refuse_unknown)(value, name, chat)
    return chat


def refuse_unknown(value: Any, name: str, chat: dict[str, Any]) -> None:
    """Raise GatewayError for a request member without a translation handler."""
    raise untranslatable(name)


SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos"),
    *("chat_template", "chat_template_kwargs", "structured_outputs", "vllm_xargs", "cache_salt"),
    *("priority", "extra_key", "skip_special_tokens", "session_params", "logit_bias"),
    *("include_stop_str_in_output", "mm_processor_kwargs", "min_tokens", "bad_words"),
    *("allowed_token_ids", "thinking_token_budget"),
)
"""Members of Messages and Responses requests that are copied unchanged to the chat request.

Most control sampling. They have the same name and meaning in chat completions.
"""
