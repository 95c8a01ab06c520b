"""Interfaces and helpers of HTTP APIs whose stream events have names (Messages, Responses).

A format converts a request of its API to a chat, and the answer back to the API's objects and
events. The formats are mockgpu/http/messages_format.py and mockgpu/http/responses_format.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from mockgpu.http.choice import Choice
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody, decode_body


class EventChunks(Protocol):
    """Builds the events of one streamed answer, as HTTP chunks."""

    def begin(self) -> bytes:
        """Return the events to send before any token of the answer is computed."""
        ...

    def next(self, cached: int | None) -> bytes:
        """Return the events for the next token; `cached` is the number of cached prompt tokens."""
        ...

    def end(self, cached: int | None) -> bytes:
        """Return the events to send after the last token of the answer."""
        ...


class NamedEventFormat(Protocol):
    """Converts between one HTTP API and chat completions."""

    prefix: str
    """Prefix of the ids of its answers."""

    def read(self, members: dict[str, Any]) -> RequestBody:
        """Convert a request body to a chat request. Raises ApiError if it is invalid."""
        ...

    def chunks(
        self, parsed: ParsedRequest, choice: Choice, created: int, members: Mapping[str, Any]
    ) -> EventChunks: ...

    def whole(
        self,
        parsed: ParsedRequest,
        choice: Choice,
        created: int,
        cached: int | None,
        members: Mapping[str, Any],
    ) -> dict[str, Any]: ...

    def error(self, error: ApiError) -> bytes: ...

    def failure(self, error: ApiError) -> bytes:
        """Return the error event that ends a failed stream, as bytes of one HTTP chunk."""
        ...


def read_members(raw: bytes) -> dict[str, Any]:
    """Parse a JSON request body into its members. Raises ApiError if it is no JSON object."""
    return decode_body(raw, dict[str, Any])


def chat_body(members: Mapping[str, Any]) -> RequestBody:
    """Build a chat request from its JSON members. Raises ApiError if they are invalid."""
    try:
        return msgspec.convert(dict(members), RequestBody)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"1 validation error: {error}") from None


def chat_of(text: str, model: object, **members: Any) -> RequestBody:
    """Return a chat request whose only message is `text`, from the user. Raises ApiError if it is
    invalid.
    """
    return chat_body({"model": model, "messages": [{"role": "user", "content": text}], **members})


def flat_text(content: object, kinds: Sequence[str]) -> object:
    """Return the text of content parts, one part per line.

    Parts with a type in `kinds` are text. If another part is among them, `content` itself is
    returned.
    """
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") in kinds for part in content):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
