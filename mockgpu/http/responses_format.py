"""OpenAI's Responses API as vLLM serves it: requests become chats, and are converted back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from mockgpu.http.background_responses import BackgroundRun
from mockgpu.http.chat_conversion import chat_body, chat_call, chat_tool, flat_text, join_calls
from mockgpu.http.choice_and_stop_reason import Choice
from mockgpu.http.named_events import named_event
from mockgpu.http.openai_format import http_chunk, token_logprobs
from mockgpu.http.responses_store import ResponsesStore, StoredResponse
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody

_PASSED = ("model", "stream", "temperature", "top_p", "cache_salt", "kv_transfer_params", "seed")
_ECHOED = ("instructions", "metadata", "tools", "tool_choice", "max_output_tokens", "temperature")
_TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
_INPUT = {"input": {"type": "string"}}
_CUSTOM_INPUT = {"type": "object", "properties": _INPUT, "required": ["input"]}
"""The arguments of a custom tool as those of a function: a model writes JSON for every tool."""


class ResponsesFormat:
    """Converts requests of the Responses API to chat requests, and generated answers back."""

    prefix = "resp_"

    def __init__(self, store: ResponsesStore) -> None:
        self._store = store

    def read(self, members: dict[str, Any]) -> RequestBody:
        chat: dict[str, Any] = {name: members[name] for name in _PASSED if name in members}
        self._store.check(members)
        system, messages = self._messages(members)
        chat["messages"] = _with_one_system_message(system + messages)
        chat["max_completion_tokens"] = members.get("max_output_tokens")
        chat["response_format"] = _response_format(members)
        if LOGPROBS in (members.get("include") or ()):
            chat |= {"logprobs": True, "top_logprobs": members.get("top_logprobs")}
        functions = functions_of(members)
        if functions:
            chat["tools"] = [chat_tool(tool, "parameters") for tool in functions]
            chat["tool_choice"] = _tool_choice(members.get("tool_choice"))
        return chat_body(chat)

    def chunks(
        self, parsed: ParsedRequest, choice: Choice, created: int, members: Mapping[str, Any]
    ) -> ResponsesChunks:
        return ResponsesChunks(parsed, choice, created, members, self.whole)

    def whole(
        self,
        parsed: ParsedRequest,
        choice: Choice,
        created: int,
        cached: int | None,
        members: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the response object of an answer that is not streamed.

        It is also stored, so that later requests can continue it.
        """
        response = finished(parsed, choice, created, cached, members)
        self.keep(members, response)
        return response

    def keep(self, members: Mapping[str, Any], response: dict[str, Any]) -> None:
        """Store a response together with its conversation, so that a later request can continue it.

        `members` are the JSON fields of the request.
        """
        _, messages = self._messages(members)
        answer = _answer(response["output"][0])
        self._store.keep(members, StoredResponse(response, [*messages, answer]))

    def begin(
        self, parsed: ParsedRequest, created: int, members: Mapping[str, Any]
    ) -> BackgroundRun:
        """Store a response that is about to be generated in the background; return its run."""
        run = BackgroundRun(_response(parsed, created, members) | {"status": "queued"})
        _, messages = self._messages(members)
        self._store.begin(members, StoredResponse(run.response, messages), run)
        return run

    def stored(self, response_id: str) -> dict[str, Any]:
        """Return the stored response with this id. Raises ApiError 404 if it is unknown."""
        return self._store.find(response_id).response

    def _messages(
        self, members: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        # Return the instructions as a message, and the conversation so far.
        #
        # Raises ApiError for invalid input or an unknown earlier response.
        before = self._store.messages_before(members)
        given = members.get("instructions")
        system = [] if given is None else [{"role": "system", "content": given}]
        return system, [*before, *chat_messages(members)]

    def error(self, error: ApiError) -> bytes:
        return error.body()

    def failure(self, error: ApiError) -> bytes:
        """Return the error event that ends a failed stream of the Responses API."""
        data = {"type": "error", "code": str(error.status), "message": error.message, "param": None}
        return http_chunk(named_event("error", data))


class ResponsesChunks:
    """Builds the stream events of one response in the Responses API.

    A response has one output item. Each token is one delta event.
    """

    __slots__ = (
        *("_choice", "_created", "_finish", "_id", "_is_custom", "_made", "_members", "_number"),
        "_parsed",
    )

    def __init__(
        self,
        parsed: ParsedRequest,
        choice: Choice,
        created: int,
        members: Mapping[str, Any],
        finish: Callable[..., dict[str, Any]],
    ) -> None:
        # Prepare a stream; `finish` builds the completed response object at its end.
        self._finish = finish
        self._parsed, self._choice, self._created, self._members = parsed, choice, created, members
        self._made = self._number = 0
        self._id, self._is_custom = item_id(parsed, members), parsed.tool in custom_names(members)

    def begin(self) -> bytes:
        """Return the events that precede the first token: the response was created and is in
        progress.
        """
        response = _response(self._parsed, self._created, self._members)
        return http_chunk(
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
        )

    def next(self, cached: int | None) -> bytes:
        """Return the events for the next token of a response.

        The first call also returns the events that start the output item.
        """
        piece = self._choice.piece(self._made)
        self._made += 1
        opening = self._opening() if self._made == 1 else b""
        return http_chunk(opening + (self._delta(piece) if piece else b""))

    def end(self, cached: int | None) -> bytes:
        """Return the last events of a stream, which end the output item and the response."""
        parsed, choice = self._parsed, self._choice
        item = output_item(parsed, choice, self._members)
        if parsed.tool is None:
            part = item["content"][0]
            text, logprobs = choice.whole_text, part["logprobs"]
            closing = self._part("response.output_text.done", text=text, logprobs=logprobs)
            closing += self._part("response.content_part.done", part=part)
        elif self._is_custom:
            name, text = "response.custom_tool_call_input", item["input"]
            closing = self._item(f"{name}.delta", delta=text)
            closing += self._item(f"{name}.done", input=text)
        else:
            name = "response.function_call_arguments"
            closing = self._item(f"{name}.done", arguments=item["arguments"], name=parsed.tool)
        response = self._finish(parsed, choice, self._created, cached, self._members)
        return http_chunk(
            closing
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response['status']}", response=response)
        )

    def _opening(self) -> bytes:
        opened = output_item(self._parsed, None, self._members)
        opening = self._event("response.output_item.added", output_index=0, item=opened)
        if self._parsed.tool is not None:
            return opening
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return opening + self._part("response.content_part.added", part=part)

    def _delta(self, piece: str) -> bytes:
        if self._is_custom:
            return b""  # the input is known when its JSON is complete
        if self._parsed.tool is not None:
            return self._item("response.function_call_arguments.delta", delta=piece)
        logprobs = token_logprobs(self._parsed, self._choice.token(self._made - 1))
        return self._part("response.output_text.delta", delta=piece, logprobs=logprobs)

    def _part(self, name: str, /, **data: Any) -> bytes:
        return self._item(name, content_index=0, **data)

    def _item(self, name: str, /, **data: Any) -> bytes:
        return self._event(name, output_index=0, item_id=self._id, **data)

    def _event(self, name: str, /, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, {**data, "sequence_number": number, "type": name})


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # Join the system and developer messages at the beginning, as vLLM does for most templates.
    texts: list[str] = []
    for message in messages:
        if message["role"] not in ("system", "developer") or not isinstance(
            message["content"], str
        ):
            break
        texts.append(message["content"])
    if len(texts) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :]]


def chat_messages(members: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the `input` field of a Responses request to chat messages.

    Raises ApiError if it is invalid.
    """
    given = members.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise ApiError(400, "1 validation error: input: field required and not empty", "input")
    return join_calls([_message(item) for item in items])


def _message(item: object) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ApiError(400, "1 validation error: input: each item must be an object", "input")
    kind = item.get("type", "message")
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id, output = item.get("call_id"), flat_text(item.get("output"), _TEXTS)
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "content": None, "tool_calls": [_call(item)]}
    if kind == "item_reference":
        raise ApiError(
            400,
            "1 validation error: input: this server stores no items, so it cannot resolve an "
            "item_reference",
            "input",
        )
    if kind != "message":
        return {"role": "assistant", "content": [item]}
    # Chat templates of open models do not know the role developer.
    role = "system" if item.get("role") == "developer" else item.get("role")
    return {"role": role, "content": flat_text(item.get("content"), _TEXTS)}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    # Return a call of a function or custom tool as a tool call of a chat.
    name = "__".join(filter(None, (item.get("namespace"), item.get("name"))))
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.get("input")}).decode()
    return chat_call(item.get("call_id"), name, arguments)


def _answer(item: Mapping[str, Any]) -> dict[str, Any]:
    return _message(item) | {"role": "assistant"}


def _response_format(members: Mapping[str, Any]) -> dict[str, Any] | None:
    text = members.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict) or form.get("type") not in ("json_schema", "json_object"):
        return None
    return {"type": form["type"], "json_schema": {"schema": form.get("schema")}}


def _tool_choice(choice: object) -> Any:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def functions_of(members: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the function definitions among a request's tools.

    A function `f` in a namespace `ns` gets the name `ns__f`. A custom tool is a function with one
    text. Other kinds of tools are skipped.
    """
    functions: list[dict[str, Any]] = []
    for tool in members.get("tools") or ():
        if tool.get("type") == "function":
            functions.append(tool)
        elif tool.get("type") == "custom":
            functions.append({"name": tool["name"], "parameters": _CUSTOM_INPUT})
        elif tool.get("type") == "namespace":
            functions += [
                inner | {"name": f"{tool['name']}__{inner['name']}"} for inner in tool["tools"]
            ]
    return functions


def custom_names(members: Mapping[str, Any]) -> list[str]:
    """Return the names of the custom tools among a request's tools."""
    return [tool["name"] for tool in members.get("tools") or () if tool.get("type") == "custom"]


def item_id(parsed: ParsedRequest, members: Mapping[str, Any]) -> str:
    """Return the id of the only output item of a response."""
    kind = "msg" if parsed.tool is None else "ctc" if parsed.tool in custom_names(members) else "fc"
    return f"{kind}_{parsed.id.removeprefix('resp_')}"


def output_item(
    parsed: ParsedRequest, choice: Choice | None, members: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the only output item of a response.

    `choice` is the finished answer; None: the item is returned as it is before the first token.
    """
    status = "in_progress" if choice is None else "completed"
    item: dict[str, Any] = {"id": item_id(parsed, members), "status": status}
    if parsed.tool is not None:
        arguments = "" if choice is None else choice.whole_text
        call_id = f"call_{parsed.id.removeprefix('resp_')}"
        if parsed.tool in custom_names(members):
            text = "" if choice is None else msgspec.json.decode(arguments)["input"]
            item |= {"type": "custom_tool_call", "call_id": call_id}
            return item | {"name": parsed.tool, "input": text}
        return item | {
            "type": "function_call",
            "call_id": call_id,
            "name": parsed.tool,
            "arguments": arguments,
        }
    part: dict[str, Any] = {"type": "output_text", "annotations": []}
    content = []
    if choice is not None:
        logprobs = token_logprobs(parsed, choice.tokens)
        content = [{**part, "text": choice.whole_text, "logprobs": logprobs}]
    return item | {"type": "message", "role": "assistant", "content": content}


def finished(
    parsed: ParsedRequest,
    choice: Choice,
    created: int,
    cached: int | None,
    members: Mapping[str, Any],
) -> dict[str, Any]:
    is_cut = choice.finish_reason == "length"
    return _response(parsed, created, members) | {
        "output": [output_item(parsed, choice, members)],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": parsed.prompt_tokens,
            "input_tokens_details": {"cached_tokens": max(0, cached or 0)},
            "output_tokens": choice.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": parsed.prompt_tokens + choice.output_tokens,
        },
    }


def _response(parsed: ParsedRequest, created: int, members: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": parsed.id,
        "created_at": created,
        "incomplete_details": None,
        **{name: members.get(name) for name in _ECHOED},
        "tools": members.get("tools") or [],
        "tool_choice": members.get("tool_choice") or "auto",
        "parallel_tool_calls": members.get("parallel_tool_calls", True),
        "background": bool(members.get("background")),
        "model": parsed.model,
        "object": "response",
        "output": [],
        "previous_response_id": members.get("previous_response_id"),
        "status": "in_progress",
        "usage": None,
    }
