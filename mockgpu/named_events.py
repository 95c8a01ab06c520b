"""APIs whose streams have named events, in the engine's terms: a chat request in, events out.

A format turns the body of its API into the body of a chat and writes the response in its own words.
The formats are mockgpu/messages_format.py and mockgpu/responses_format.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from mockgpu.choice import Choice
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody, decode_body


class EventChunks(Protocol):
    """The events of one streamed answer, as HTTP chunks."""

    def begin(self) -> bytes:
        """Return the events before anything is computed."""
        ...

    def next(self, cached: int | None) -> bytes:
        """Return the events of the next token."""
        ...

    def end(self, cached: int | None) -> bytes:
        """Return the events after the last token."""
        ...


class NamedEventFormat(Protocol):
    """The words of one API for a chat."""

    prefix: str
    """What ids of its answers begin with."""

    def read(self, members: dict[str, Any]) -> RequestBody:
        """Return the chat that a body means. Raises ApiError."""
        ...

    def chunks(
        self, ask: ParsedRequest, choice: Choice, created: int, members: Mapping[str, Any]
    ) -> EventChunks:
        """Return the events of a streamed answer."""
        ...

    def whole(
        self,
        ask: ParsedRequest,
        choice: Choice,
        created: int,
        cached: int | None,
        members: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the object of a whole answer."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the JSON of an error."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream, as an HTTP chunk."""
        ...


def read_members(raw: bytes) -> dict[str, Any]:
    """Decode a body. Raises ApiError."""
    return decode_body(raw, dict[str, Any])


def chat_body(members: Mapping[str, Any]) -> RequestBody:
    """Return the members of a chat as a request. Raises ApiError."""
    try:
        return msgspec.convert(dict(members), RequestBody)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"1 validation error: {error}") from None


def chat_of(text: str, model: object, **members: Any) -> RequestBody:
    """Return a chat of one message. Raises ApiError."""
    return chat_body({"model": model, "messages": [{"role": "user", "content": text}], **members})


def flat_text(content: object, kinds: Sequence[str]) -> object:
    """Return the text of content parts; the parts themselves if one of them is no text."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") in kinds for part in content):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
