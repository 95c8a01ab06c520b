"""Sends requests of the four APIs that generate text, and converts the answers to one format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from tests.real.engines import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
PATIENCE_S = 300.0


class ApiAnswer(msgspec.Struct, frozen=True):
    """An answer of any API.

    text      the generated text, and the arguments of tool calls
    end       reason of its end, or the state of a response
    prompt    number of prompt tokens by the answer's usage, including cached ones
    output    number of output tokens by the answer's usage
    cached    number of prompt tokens that were cached
    error     status and body of a refusal, or the error event of a stream
    endpoint  name of the endpoint that answered, if a gateway did
    """

    text: str = ""
    end: str = ""
    prompt: int = 0
    output: int = 0
    cached: int = 0
    error: str = ""
    endpoint: str = ""

    @property
    def comparable(self) -> tuple[str, str, int, int, str]:
        return self.text, self.end, self.prompt, self.output, self.error


def request_of(
    path: str, text: str, tokens: int, *, stream: bool, **members: Any
) -> dict[str, Any]:
    """Return the body of a request to an API, to which an engine always gives the same answer.

    It uses greedy decoding.

    path    path of the API
    text    the prompt
    tokens  maximum number of output tokens
    stream  whether the answer is streamed
    """
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": stream}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    turns = [{"role": "user", "content": text}]
    prompt = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}
    body |= {limit: tokens} | prompt.get(path, {"messages": turns})
    if stream and path in (CHAT, COMPLETIONS):
        body |= {"stream_options": {"include_usage": True}}
    return body | members


async def ask_api(
    url: str, path: str, body: dict[str, Any], heard: Callable[[str], object] | None = None
) -> ApiAnswer:
    """Send a request to a gateway or an engine, and return its complete answer.

    heard  function called for every event of a stream, with the name of the serving endpoint
    """
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    endpoint, events = "", list[dict[str, Any]]()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url + path, json=body) as answer,
        ):
            endpoint = answer.headers.get("x-penstock-endpoint", "")
            if answer.status != 200:
                return ApiAnswer(error=f"{answer.status} {await answer.text()}")
            if not body["stream"]:
                return _read_whole(path, await answer.json(), endpoint)
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                    if heard is not None:
                        heard(endpoint)
    except aiohttp.ClientError as error:
        return ApiAnswer(error=f"{type(error).__name__}: {error}", endpoint=endpoint)
    return _read_events(path, events, endpoint)


def _read_whole(path: str, body: dict[str, Any], endpoint: str) -> ApiAnswer:
    if path in (CHAT, COMPLETIONS):
        (choice,) = body["choices"]
        text = choice["text"] if path == COMPLETIONS else _message_text(choice["message"])
        return _with_usage(path, text, choice["finish_reason"], body["usage"], endpoint)
    if path == MESSAGES:
        text = "".join(_block_text(block) for block in body["content"])
        return _with_usage(path, text, body["stop_reason"], body["usage"], endpoint)
    return _read_response(body, endpoint)


def _message_text(message: dict[str, Any]) -> str:
    calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
    return (message.get("content") or "") + calls


def _block_text(block: dict[str, Any]) -> str:
    return str(block["text"] if block["type"] == "text" else json.dumps(block["input"]))


def _read_response(response: dict[str, Any], endpoint: str) -> ApiAnswer:
    parts = [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in response["output"]
    ]
    return _with_usage(RESPONSES, "".join(parts), response["status"], response["usage"], endpoint)


def _with_usage(path: str, text: str, end: str, usage: dict[str, Any], endpoint: str) -> ApiAnswer:
    if path in (CHAT, COMPLETIONS):
        details = usage.get("prompt_tokens_details") or {}
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return ApiAnswer(text, end, *counts, details.get("cached_tokens") or 0, endpoint=endpoint)
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
    prompt = usage["input_tokens"]
    if path == MESSAGES:
        cached = usage.get("cache_read_input_tokens")
        prompt += (cached or 0) + (usage.get("cache_creation_input_tokens") or 0)
    return ApiAnswer(text, end, prompt, usage["output_tokens"], cached or 0, endpoint=endpoint)


def _read_events(path: str, events: list[dict[str, Any]], endpoint: str) -> ApiAnswer:
    text, end, usage = "", "", dict[str, Any]()
    for event in events:
        if "error" in event or event.get("type") == "error":
            return ApiAnswer(text, error=json.dumps(event), endpoint=endpoint)
        if path == RESPONSES:
            if event["type"] in ("response.completed", "response.incomplete"):
                return _read_response(event["response"], endpoint)
            text += event["delta"] if event["type"].endswith(".delta") else ""
        elif path == MESSAGES:
            usage |= event.get("message", event).get("usage") or {}
            delta = event.get("delta") or {}
            text += delta.get("text") or delta.get("partial_json") or ""
            end = delta.get("stop_reason") or end
        else:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice.get("delta") or {}
                text += choice.get("text") or _message_text(delta)
                end = choice["finish_reason"] or end
    if path == RESPONSES or not usage:
        return ApiAnswer(text, error="the stream has no end", endpoint=endpoint)
    return _with_usage(path, text, end, usage, endpoint)
