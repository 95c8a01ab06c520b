"""Interfaces of the APIs whose stream events have names: the Messages and the Responses API.

A format converts a request of its API to a chat request. It converts the answer back to the objects
and events of its API. mockgpu/http/messages_format.py and mockgpu/http/responses_format.py are
these formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from mockgpu.http.choice_and_stop_reason import Choice
from mockgpu.request_parser import ApiError, ParsedRequest, RequestBody


class EventChunks(Protocol):
    """The interface of an object that builds the stream events of one answer, as HTTP chunks."""

    def begin(self) -> bytes:
        """Return the events to send before the first token has been computed."""
        ...

    def next(self, cached: int | None) -> bytes:
        """Return the stream events for the next generated token.

        `cached` is the number of prompt tokens found in the prefix cache; None: not reported.
        """
        ...

    def end(self, cached: int | None) -> bytes:
        """Return the events to send after the last token of the answer."""
        ...


class NamedEventFormat(Protocol):
    """The interface of an API whose requests are served as chats; converts in both directions."""

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
        """Return the error event that ends a failed stream, as one HTTP chunk."""
        ...


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
